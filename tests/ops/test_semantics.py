"""What the operation means, on every backend: masks, gain and shift, L, gradients."""

import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from semantics import (
    DV,
    HEADS,
    KERNELS,
    KEYS,
    MASKS,
    QUERIES,
    B,
    D,
    close,
    on_every_backend,
    tensors,
    tril,
)
from torch.nn.attention.bias import causal_lower_right

import nomax
from nomax import Phi
from nomax.phi import ACTIVATIONS


@on_every_backend
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_oracle(activation, kind, backend):
    query, key, value = tensors()
    arguments, seen, bias = MASKS[kind]()
    out = nomax.attention(query, key, value, **arguments, phi=f"{activation}/L", backend=backend)
    expected, *_ = oracle.attention(query, key, value, seen, bias, activation=activation)
    close(out, expected)


@on_every_backend
@pytest.mark.parametrize("kind", ["none", "padding", "causal"])
@pytest.mark.parametrize(
    "fields",
    [
        {"alpha": 0.5},
        {"alpha": 2.0, "gain": -3.0},
        {"alpha": -0.25},
        {"gain": 0.0},
        {"shift": 0.75},
        {"shift": "-log L"},
        {"alpha": 0.5, "gain": math.sqrt(2), "shift": "-log L", "length": "keys"},
        {"alpha": 1.0, "length": "keys"},
        {"alpha": 1.0, "length": 196, "shift": "-log L"},
        {"threshold": 1.0},
        {"alpha": 0.5, "shift": 0.75, "threshold": 0.5, "length": "keys"},
        {"shift": "-log L", "threshold": -0.25, "length": 196},
    ],
    ids=str,
)
def test_every_field_of_phi(fields, kind, backend):
    query, key, value = tensors()
    arguments, seen, _ = MASKS[kind]()
    phi = Phi("softplus", **fields)
    out = nomax.attention(query, key, value, **arguments, phi=phi, backend=backend)
    expected, *_ = oracle.attention(query, key, value, seen, activation="softplus", **{"alpha": 0.0, **fields})
    close(out, expected)
    assert torch.equal(out, nomax.attention(query, key, value, **arguments, phi=str(phi), backend=backend))


@on_every_backend
def test_scale_multiplies_the_scores(backend):
    query, key, value = tensors()
    out = nomax.attention(query, key, value, scale=-0.3, phi="gelu", backend=backend)
    close(out, oracle.attention(query, key, value, activation="gelu", alpha=0, scale=-0.3)[0])


@on_every_backend
@pytest.mark.parametrize("diagonal", [-9, -3, 0, 4])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_lower_right_shows_each_query_the_keys_up_to_its_own(diagonal, backend):
    query, key, value = tensors(queries=12, keys=12 + diagonal)
    out = nomax.attention(query, key, value, causal_lower_right(12, 12 + diagonal), phi="sigmoid/L", backend=backend)
    seen = tril(12, 12 + diagonal, diagonal)
    close(out, oracle.attention(query, key, value, seen, activation="sigmoid")[0])
    close(out, nomax.attention(query, key, value, seen, phi="sigmoid/L", backend=backend))


@on_every_backend
@settings(max_examples=30)
@given(data=st.data())
def test_any_shape_and_mask(backend, data):
    size = st.integers(0, 3)
    batch, groups, queries, keys = data.draw(size), data.draw(size), data.draw(size), data.draw(size)
    key_heads, dimension, value_dimension = (data.draw(st.integers(1, 3)) for _ in range(3))
    shape = [batch, groups * key_heads, queries, keys]
    mask_shape = [data.draw(st.sampled_from([1, whole])) for whole in shape]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    query = torch.randn(*shape[:3], dimension, generator=generator)
    key = torch.randn(batch, key_heads, keys, dimension, generator=generator)
    value = torch.randn(batch, key_heads, keys, value_dimension, generator=generator)
    mask = torch.rand(mask_shape, generator=generator) > 0.5
    arguments = {"enable_gqa": True, "phi": "sigmoid/L", "backend": backend}
    close(
        nomax.attention(query, key, value, mask, **arguments),
        oracle.attention(query, key, value, mask, activation="sigmoid")[0],
    )


# Queries that see nothing.


@on_every_backend
@pytest.mark.parametrize("kind", ["boolean", "float", "no keys"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_query_that_sees_no_key_is_exactly_zero_with_zero_gradients(activation, kind, backend):
    query, key, value = (x.requires_grad_() for x in tensors(keys=0 if kind == "no keys" else KEYS))
    mask = torch.rand(QUERIES, key.shape[2]) > 0.3
    mask[2] = False
    if kind == "float":
        mask = torch.randn(mask.shape).masked_fill(~mask, -math.inf).requires_grad_()
    out = nomax.attention(query, key, value, mask, phi=f"{activation}(x-log L)/L", backend=backend)
    assert (out[:, :, 2] == 0).all()
    out[:, :, 2].sum().backward()
    for x in (query, key, value, *([mask] if kind == "float" else [])):
        assert (x.grad == 0).all()


@on_every_backend
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_keys_even_a_query_that_is_not_finite_gets_zero(activation, backend):
    query, key, value = tensors(keys=0)
    query[:, :, 1], query[:, :, 2] = math.nan, math.inf
    query.requires_grad_()
    out = nomax.attention(query, key, value, phi=f"{activation}/L", backend=backend)
    assert (out == 0).all()
    out.sum().backward()
    assert (query.grad == 0).all()


@on_every_backend
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_hidden_keys_get_no_gradient_and_do_no_harm(activation, backend):
    query, key, value = tensors()
    key[:, :, 3], value[:, :, 3] = 1e4, 1e4
    mask = torch.zeros(KEYS)
    mask[3] = -math.inf
    query, key, value, mask = (x.requires_grad_() for x in (query, key, value, mask.expand(QUERIES, KEYS).clone()))
    out = nomax.attention(query, key, value, mask, phi=f"{activation}/L", backend=backend)
    assert out.abs().max() < 1e3
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value, mask))
    assert (key.grad[:, :, 3] == 0).all()
    assert (value.grad[:, :, 3] == 0).all()
    assert (mask.grad[:, 3] == 0).all()
    assert (mask.grad[:, :3] != 0).any()


@on_every_backend
@pytest.mark.parametrize("lengths", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0, 0)], ids=str)
def test_zero_lengths_give_what_sdpa_gives(lengths, backend):
    batch, queries, keys = lengths
    query = torch.randn(batch, 3, queries, D, requires_grad=True)
    key = torch.randn(batch, 3, keys, D, requires_grad=True)
    value = torch.randn(batch, 3, keys, DV, requires_grad=True)
    out = nomax.attention(query, key, value, backend=backend)
    expected = F.scaled_dot_product_attention(query, key, value)
    assert out.shape == expected.shape
    if keys == 0:
        assert (out == 0).all()
    out.sum().backward()
    assert [x.grad.shape for x in (query, key, value)] == [x.shape for x in (query, key, value)]
    assert all((x.grad == 0).all() for x in (query, key) if 0 in lengths)


# Gradients.


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_has_exact_first_and_second_derivatives(activation):
    torch.manual_seed(3)
    query, key, value = (
        torch.randn(1, heads, length, 2, dtype=torch.float64, requires_grad=True)
        for heads, length in ((2, 3), (1, 4), (1, 4))
    )
    seen = torch.rand(3, 4) > 0.3
    seen[1] = False
    bias = torch.randn(3, 4, dtype=torch.float64).masked_fill(~seen, -math.inf)
    phi = Phi(activation, alpha=0.5, gain=1.5, shift="-log L")
    rows = ACTIVATIONS[activation].nonnegative

    def function(query, key, value, visible):
        mask = bias.masked_scatter(seen, visible)
        result = nomax.attention(
            query, key, value, mask, enable_gqa=True, phi=phi, backend="reference", return_rows=rows
        )
        return (result[0], *result[1], result[1].normalized_entropy) if rows else result

    inputs = (query, key, value, bias[seen].clone().requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_gradients_are_the_references(activation, kind, backend):
    query, key, value = tensors(key_heads=2)
    arguments, *_ = MASKS[kind]()
    arguments |= {"enable_gqa": True, "phi": Phi(activation, alpha=0.5, shift="-log L")}
    weight = torch.randn(B, HEADS, QUERIES, DV)

    def gradients(backend, dtype):
        mask = arguments.get("attn_mask")
        is_bias = mask is not None and type(mask) is torch.Tensor and mask.dtype.is_floating_point
        if is_bias:
            mask = mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min, -math.inf).requires_grad_()
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (query, key, value)] + [mask] * is_bias
        out = nomax.attention(*leaves[:3], **{**arguments, "attn_mask": mask}, backend=backend)
        return torch.autograd.grad((out * weight).sum(), leaves)

    for actual, expected in zip(gradients(backend, torch.float32), gradients("reference", torch.float64), strict=True):
        close(actual, expected)


@on_every_backend
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
def test_with_normalised_queries_and_keys_a_threshold_is_one_of_their_cosines(kind, power, backend):
    """relu(cos - β·√(2 log n / D))^p, times √D^p: where |q| = |k| = √D, the threshold of the scores has no D."""
    query, key, value = tensors(key_heads=2)
    arguments, seen, _ = MASKS[kind]()
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool) if seen is None else seen
    weight = torch.randn(B, HEADS, QUERIES, DV)

    def leaves(dtype):
        return [x.to(dtype, copy=True).requires_grad_() for x in (query, key, value)]

    def on_spheres(query, key):
        return [math.sqrt(D) * F.normalize(x, dim=-1) for x in (query, key)]

    ours = leaves(torch.float32)
    phi = f"{'relu' if power == 1 else 'relu2'}(x-0.5*sqrt(2 log L))"
    arguments |= {"enable_gqa": True, "phi": phi, "backend": backend}
    out = nomax.attention(*on_spheres(*ours[:2]), ours[2], **arguments)

    exact = leaves(torch.float64)
    unit_query, unit_key = (F.normalize(x, dim=-1) for x in exact[:2])
    cosines = unit_query @ unit_key.repeat_interleave(HEADS // 2, 1).mT
    counts = seen.expand(B, HEADS, QUERIES, KEYS).sum(-1, keepdim=True).clamp(min=1)
    weights = (cosines - 0.5 * torch.sqrt(2 * torch.log(counts) / D)).clamp(min=0) ** power * seen
    expected = math.sqrt(D) ** power * weights @ exact[2].repeat_interleave(HEADS // 2, 1)
    close(out, expected)
    gradients = (torch.autograd.grad((x * weight).sum(), y) for x, y in ((out, ours), (expected, exact)))
    for actual, exactly in zip(*gradients, strict=True):
        close(actual, exactly)


# L: what it counts makes the result independent of padding, of the batch, and of how the keys are split.


@on_every_backend
def test_padding_does_not_change_the_result(backend):
    query, key, value = tensors()
    padded_key, padded_value = (torch.cat([x, torch.randn_like(x[:, :, :4])], dim=2) for x in (key, value))
    mask = (torch.arange(KEYS + 4) < KEYS).view(1, 1, 1, -1)
    out = nomax.attention(query, padded_key, padded_value, mask, phi="sigmoid(x-log L)/L^0.5", backend=backend)
    close(out, nomax.attention(query, key, value, phi="sigmoid(x-log L)/L^0.5", backend=backend))
    of_all = nomax.attention(query, padded_key, padded_value, mask, phi="sigmoid/L, L=keys", backend=backend)
    close(of_all * (KEYS + 4), nomax.attention(query, key, value, phi="sigmoid", backend=backend))


@on_every_backend
def test_causal_rows_are_those_of_decoding_one_by_one(backend):
    query, key, value = tensors(queries=6, keys=6)
    whole = nomax.attention(query, key, value, is_causal=True, backend=backend)
    for i in range(6):
        step = nomax.attention(query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1], backend=backend)
        close(whole[:, :, i : i + 1], step)


@on_every_backend
def test_parts_of_the_keys_add_up_in_any_order(backend):
    query, key, value = tensors()
    phi = Phi("gelu", alpha=1, length=KEYS)
    order = torch.randperm(KEYS)
    whole = nomax.attention(query, key, value, phi=phi, backend=backend)
    parts = [nomax.attention(query, key[:, :, p], value[:, :, p], phi=phi, backend=backend) for p in order.split(3)]
    close(sum(parts), whole)


def test_visible_keys_counts_at_the_masks_own_size():
    query, key, value = tensors()
    padding = torch.rand(B, 1, 1, KEYS) > 0.4
    counts = nomax.visible_keys(query, key, padding)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, padding.sum(-1))
    assert nomax.visible_keys(query, key).tolist() == [[[KEYS]]]
    assert nomax.visible_keys(query, key, is_causal=True).tolist() == [[[1, 2, 3, 4, 5]]]
    assert nomax.visible_keys(query, key, causal_lower_right(QUERIES, KEYS)).tolist() == [[[3, 4, 5, 6, 7]]]
    assert nomax.visible_keys(query, key[:, :, :2], is_causal=True).tolist() == [[[1, 2, 2, 2, 2]]]
    assert nomax.visible_keys(query[0, 0], key[0, 0], is_causal=True).tolist() == [1, 2, 3, 4, 5]
    assert nomax.visible_keys(query[0], key[0], torch.ones(QUERIES, 1, dtype=torch.bool)).tolist() == [[KEYS] * QUERIES]
    assert nomax.visible_keys(query[None], key[None], padding[None]).shape == (1, B, 1, 1)

    learned = nomax.attention(query, key, value, padding, phi="relu") * counts.unsqueeze(-1) ** -0.7
    close(learned, nomax.attention(query, key, value, padding, phi="relu/L^0.7"))
