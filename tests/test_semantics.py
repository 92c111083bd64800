"""What the operation means, on every backend: masks, L, gain and shift, rows, dropout, packing, broadcasting."""

import math
import shutil

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import nomax
from nomax import Phi
from nomax.ops import backends
from nomax.phi import ACTIVATIONS

no_compiler = not any(map(shutil.which, ("c++", "g++", "clang++")))
BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(no_compiler, reason="no C++ compiler"))]
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
NONNEGATIVE = [name for name, activation in ACTIVATIONS.items() if activation.nonnegative]

B, HEADS, QUERIES, KEYS, D, DV = 2, 4, 5, 7, 8, 6


def tensors(queries=QUERIES, keys=KEYS, key_heads=HEADS, dtype=torch.float32):
    query = torch.randn(B, HEADS, queries, D, dtype=dtype)
    key = torch.randn(B, key_heads, keys, D, dtype=dtype)
    value = torch.randn(B, key_heads, keys, DV, dtype=dtype)
    return query, key, value


def close(actual, expected, rtol=2e-5, atol=2e-6):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


def tril(queries, keys, diagonal=0):
    return torch.tensor([[j <= i + diagonal for j in range(keys)] for i in range(queries)])


# Each kind of mask: the arguments of the call, and which keys that should show (with which bias).
def float_mask(hidden_value):
    bias = torch.randn(B, 1, QUERIES, KEYS)
    seen = torch.rand(B, 1, QUERIES, KEYS) > 0.4
    return {"attn_mask": bias.masked_fill(~seen, hidden_value)}, seen, bias


def boolean_mask(*shape):
    mask = torch.rand(shape) > 0.4
    return {"attn_mask": mask}, mask, None


MASKS = {
    "none": lambda: ({}, None, None),
    "whole": lambda: boolean_mask(B, HEADS, QUERIES, KEYS),
    "padding": lambda: boolean_mask(B, 1, 1, KEYS),
    "queries and keys": lambda: boolean_mask(QUERIES, KEYS),
    "queries": lambda: boolean_mask(B, 1, QUERIES, 1),
    "heads": lambda: boolean_mask(HEADS, 1, KEYS),
    "-inf": lambda: float_mask(-math.inf),
    "minimum": lambda: float_mask(torch.finfo(torch.float32).min),
    "causal": lambda: ({"is_causal": True}, tril(QUERIES, KEYS), None),
    "upper left": lambda: ({"attn_mask": causal_upper_left(QUERIES, KEYS)}, tril(QUERIES, KEYS), None),
    "lower right": lambda: ({"attn_mask": causal_lower_right(QUERIES, KEYS)}, tril(QUERIES, KEYS, 2), None),
}


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
@settings(max_examples=30, deadline=None)
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


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.skipif(no_compiler, reason="no C++ compiler")
def test_the_kernels_gradients_are_the_references(activation, kind):
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

    for actual, expected in zip(gradients("cpu", torch.float32), gradients("reference", torch.float64), strict=True):
        close(actual, expected, rtol=1e-4, atol=1e-5)


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


# Shapes.


@on_every_backend
def test_gqa_is_attention_with_repeated_heads(backend):
    query, key, value = tensors(key_heads=2)
    repeated = (x.repeat_interleave(2, dim=1) for x in (key, value))
    out = nomax.attention(query, key, value, enable_gqa=True, backend=backend)
    close(out, nomax.attention(query, *repeated, backend=backend))
    close(out, oracle.attention(query, key, value)[0])


@on_every_backend
@pytest.mark.parametrize(
    ("query", "key", "value", "mask"),
    [
        ((5, 8), (7, 8), (7, 6), (5, 7)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6), (3, 1, 7)),
        ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6), (1, 3, 5, 7)),
        ((2, 1, 5, 8), (2, 3, 7, 8), (2, 1, 7, 6), (5, 1)),
        ((1, 3, 5, 8), (2, 3, 7, 8), (1, 3, 7, 6), (2, 1, 1, 7)),
        ((2, 3, 5, 8), (3, 7, 8), (7, 6), (7,)),
        ((5, 8), (2, 3, 7, 8), (3, 7, 6), (2, 3, 5, 7)),
        ((4, 2, 3, 5, 8), (4, 2, 3, 7, 8), (4, 2, 3, 7, 6), (1, 1, 3, 5, 7)),
        ((4, 1, 3, 5, 8), (2, 3, 7, 8), (1, 1, 7, 6), (4, 1, 1, 5, 7)),
        ((4, 1, 3, 5, 8), (2, 1, 7, 8), (1, 1, 7, 6), (4, 2, 1, 1, 7)),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast_as_in_sdpa(query, key, value, mask, backend):
    query, key, value = (torch.randn(shape) for shape in (query, key, value))
    mask = torch.rand(mask) > 0.4
    out, rows = nomax.attention(query, key, value, mask, backend=backend, return_rows=True)

    whole = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    four = (math.prod(whole[:-1]), whole[-1] if whole else 1)
    q, k, v = (x.expand(*whole, *x.shape[-2:]).reshape(*four, *x.shape[-2:]) for x in (query, key, value))
    seen = mask.expand(*whole, 5, 7).reshape(*four, 5, 7)
    expected, sums, entropies = oracle.attention(q, k, v, seen)
    close(out, expected.reshape(*whole, 5, 6))
    close(rows.sum, sums.reshape(*whole, 5))
    close(rows.entropy, entropies.reshape(*whole, 5))
    sdpa_mask = mask if mask.dim() > 1 else mask[None]
    assert out.shape == F.scaled_dot_product_attention(query, key, value, sdpa_mask).shape
    assert out.shape == nomax.attention(query, key, value, sdpa_mask, phi="softmax").shape


@on_every_backend
def test_the_usual_views_and_masks_reach_the_backend_as_they_are(backend, monkeypatch, no_short_way):
    received = []
    attend = backends.BACKENDS[backend].attend

    def spy(*arguments, **settings):
        received[:] = arguments
        return attend(*arguments, **settings)

    monkeypatch.setattr(backends.BACKENDS[backend], "attend", spy)
    qkv = torch.randn(B, QUERIES, 3, HEADS, D)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    for mask in (None, torch.ones(B, 1, 1, QUERIES, dtype=torch.bool), torch.zeros(QUERIES, QUERIES)):
        out = nomax.attention(query, key, value, mask, backend=backend)
        close(out, oracle.attention(query, key, value)[0])
        assert [x.data_ptr() for x in received[:3]] == [x.data_ptr() for x in (query, key, value)]
        assert mask is None or received[3].numel() == mask.numel()
    nomax.attention(query[0], key[0, :1], value[0, :1], backend=backend)
    assert [x.data_ptr() for x in received[:3]] == [x.data_ptr() for x in (query, key, value)]
    assert received[1].shape == (1, 1, QUERIES, D)


# Softmax, the degenerate oracle.


@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "queries"])
def test_softmax_is_sdpa(kind):
    query, key, value = tensors(key_heads=2)
    arguments, *_ = MASKS[kind]()
    out = nomax.attention(query, key, value, **arguments, enable_gqa=True, phi="softmax", scale=0.4)
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, value, **arguments, enable_gqa=True, scale=0.4))


@pytest.mark.parametrize("kind", MASKS)
def test_softmax_rows_sum_to_one_and_have_shannon_entropy(kind):
    query, key, value = (x.requires_grad_() for x in tensors())
    arguments, seen, bias = MASKS[kind]()
    out, rows = nomax.attention(query, key, value, **arguments, phi="softmax", return_rows=True)
    close(out, F.scaled_dot_product_attention(query, key, value, **arguments))
    seen = torch.ones(1, dtype=torch.bool) if seen is None else seen
    scores = query @ key.transpose(-2, -1) / math.sqrt(D) + (0 if bias is None else bias)
    for b in range(B):
        for h in range(HEADS):
            for i in range(QUERIES):
                visible = scores[b, h, i][seen.expand_as(scores)[b, h, i]]
                close(rows.sum[b, h, i], torch.tensor(1.0 if len(visible) else 0.0))
                entropy = torch.special.entr(visible.softmax(0)).sum()
                close(rows.entropy[b, h, i], entropy)
    (rows.entropy + rows.sum).sum().backward()
    assert query.grad.isfinite().all()


# Rows.


@on_every_backend
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("activation", NONNEGATIVE)
def test_rows_are_the_sum_and_entropy_of_the_weights(activation, kind, backend):
    query, key, value = tensors(key_heads=2)
    arguments, seen, bias = MASKS[kind]()
    phi = Phi(activation, alpha=0.5, gain=math.sqrt(2))
    out, rows = nomax.attention(
        query, key, value, **arguments, enable_gqa=True, phi=phi, backend=backend, return_rows=True
    )
    fields = {"activation": activation, "alpha": 0.5, "gain": math.sqrt(2)}
    expected, sums, entropies = oracle.attention(query, key, value, seen, bias, **fields)
    assert rows.sum.dtype == rows.entropy.dtype == torch.float32
    close(out, expected)
    close(rows.sum, sums)
    close(rows.entropy, entropies, rtol=1e-4, atol=1e-5)


@on_every_backend
@pytest.mark.parametrize("phi", ["relu/L", "relu2(x-0.5)", "sigmoid(x-log L)", "relu6/L^0.5", "0*softplus"])
def test_rows_have_gradients_and_none_where_nothing_is_visible(phi, backend):
    query, key, value = tensors()
    mask = torch.rand(B, 1, QUERIES, KEYS) > 0.4
    mask[:, :, 1] = False

    def gradients(backend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (query, key)]
        _, rows = nomax.attention(*leaves, value.to(dtype), mask, phi=phi, backend=backend, return_rows=True)
        assert (torch.stack([*rows, rows.normalized_entropy])[..., 1] == 0).all()
        of_normalized = torch.autograd.grad(rows.normalized_entropy.sum(), leaves, retain_graph=True)
        assert all(gradient.isfinite().all() for gradient in of_normalized)
        return torch.autograd.grad((rows.sum.square() + 2 * rows.entropy).sum(), leaves)

    of_query, of_key = gradients(backend, torch.float32)
    expected = gradients("reference", torch.float64)
    assert (of_query[:, :, 1] == 0).all()
    close(of_query, expected[0], rtol=1e-4, atol=1e-4)
    close(of_key, expected[1], rtol=1e-4, atol=1e-4)


def test_normalized_entropy_is_that_of_the_normalized_weights():
    query, key, value = tensors()
    _, rows = nomax.attention(query, key, value, phi="relu", return_rows=True)
    weights = torch.relu(query @ key.transpose(-2, -1) / math.sqrt(D)).double()
    entropy = torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1)
    close(rows.normalized_entropy, torch.where(weights.sum(-1) > 0, entropy, 0), atol=1e-5)


@on_every_backend
def test_rows_do_not_see_dropout(backend):
    query, key, value = tensors()
    _, rows = nomax.attention(query, key, value, backend=backend, return_rows=True)
    _, dropped = nomax.attention(query, key, value, dropout_p=0.5, backend=backend, return_rows=True)
    assert all(torch.equal(a, b) for a, b in zip(rows, dropped, strict=True))


@pytest.mark.parametrize("phi", [*(name for name in ACTIVATIONS if name not in NONNEGATIVE), "-1*relu"])
def test_rows_of_weights_that_can_be_negative_are_refused(phi):
    with pytest.raises(ValueError, match=r"return_rows=True.*relu, relu2, softplus, relu6, sigmoid"):
        nomax.attention(*tensors(), phi=phi, return_rows=True)


# Dropout.


def coin(seed, lane, i, j):
    """The bits of one coin, in Python's integers."""

    def mix(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    row = mix(mix(mix(mix(seed % 2**32) ^ (seed >> 32)) ^ lane) ^ i)
    return mix((mix(j ^ row) + mix(row ^ 0x9E3779B9)) % 2**32)


def dropped_weights(p, batches=B, heads=HEADS, queries=QUERIES, keys=KEYS, backend="reference"):
    """The factors that dropout puts on weights of one: 0, or 1 / (1 - p)."""
    query = torch.zeros(batches, heads, queries, 8)
    key = torch.zeros(batches, heads, keys, 8)
    value = torch.eye(keys).expand(batches, heads, keys, keys)
    return nomax.attention(query, key, value, dropout_p=p, phi="relu(x+1)", backend=backend)


@on_every_backend
@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
def test_dropout_tosses_the_specified_coins(p, backend):
    torch.manual_seed(11)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(11)
    weights = dropped_weights(p, backend=backend)
    for b in range(B):
        for h in range(HEADS):
            for i in range(QUERIES):
                for j in range(KEYS):
                    keep = coin(seed, b * HEADS + h, i, j) >= round(p * 2**32)
                    assert float(weights[b, h, i, j]) == pytest.approx(keep / (1 - p), rel=1e-6)


@on_every_backend
def test_dropout_follows_the_seed(backend):
    def run(seed):
        torch.manual_seed(seed)
        return dropped_weights(0.5, backend=backend)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert not torch.equal(dropped_weights(0.5, backend=backend), dropped_weights(0.5, backend=backend))


@on_every_backend
def test_no_dropout_leaves_the_generator_alone(backend):
    before = torch.get_rng_state()
    dropped_weights(0.0, backend=backend)
    assert torch.equal(before, torch.get_rng_state())


@on_every_backend
def test_dropping_everything_gives_zeros(backend):
    query, key, value = (x.requires_grad_() for x in tensors())
    out = nomax.attention(query, key, value, dropout_p=1.0, backend=backend)
    assert (out == 0).all()
    out.sum().backward()
    assert all((x.grad == 0).all() for x in (query, key, value))


@on_every_backend
def test_dropout_in_the_backward_pass_is_that_of_the_forward_pass(backend):
    value = torch.randn(B, HEADS, KEYS, KEYS, requires_grad=True)
    query = torch.zeros(B, HEADS, QUERIES, D)
    key = torch.zeros(B, HEADS, KEYS, D)
    torch.manual_seed(5)
    out = nomax.attention(query, key, value, dropout_p=0.4, phi="relu(x+1)", backend=backend)
    out[..., 0].sum().backward()
    torch.manual_seed(5)
    close(value.grad[..., 0], dropped_weights(0.4, backend=backend).sum(2))


def test_the_coins_are_fair_and_independent():
    torch.manual_seed(0)
    p, size = 0.3, (6, 4, 128, 128)
    kept = dropped_weights(p, *size) > 0
    centred = kept.double() - (1 - p)
    # Five standard deviations of a mean of n independent coins.
    bound = 5 * math.sqrt(p * (1 - p))
    assert abs(float(centred.mean())) < bound / math.sqrt(centred.numel())
    for dimension in range(4):
        means = centred.mean([d for d in range(4) if d != dimension])
        assert float(means.abs().max()) < bound / math.sqrt(centred.numel() / size[dimension])
    for dimension in range(4):
        for distance in (1, 2, 3):
            product = centred.narrow(dimension, 0, size[dimension] - distance) * centred.narrow(
                dimension, distance, size[dimension] - distance
            )
            assert abs(float(product.mean())) < 5 * p * (1 - p) / math.sqrt(product.numel())
    # Each row keeps a binomial number of keys: their spread tells chance from any pattern.
    per_row = kept.sum(-1).double().flatten()
    expected = size[3] * p * (1 - p)
    assert float(per_row.var()) == pytest.approx(expected, rel=5 * math.sqrt(2 / len(per_row)))
    assert len(torch.unique(kept.flatten(0, 2), dim=0)) == len(per_row)


# Packed sequences.


def packed(query_lengths, key_lengths, key_heads=HEADS):
    query = torch.randn(sum(query_lengths), HEADS, D)
    key = torch.randn(sum(key_lengths), key_heads, D)
    value = torch.randn(sum(key_lengths), key_heads, DV)
    offsets = [torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0) for lengths in (query_lengths, key_lengths)]
    return query, key, value, *offsets


def padded(x, lengths):
    """[T, H, D] as a batch [n, H, longest, D], with noise in the padding."""
    batch = torch.randn(len(lengths), x.shape[1], max(lengths), x.shape[2])
    for sequence, part in zip(batch, x.split(lengths), strict=True):
        sequence[:, : len(part)] = part.transpose(0, 1)
    return batch


LENGTHS = [((3, 5, 1), (3, 5, 1)), ((4, 2, 3), (6, 1, 3)), ((2, 0, 3, 1), (4, 2, 0, 5)), ((4,), (6,))]


@on_every_backend
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", ["relu/L", "sigmoid(x-log L)/L^0.5", "softplus/L, L=9", "relu"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_equals_padded(lengths, phi, is_causal, dropout_p, backend):
    query, key, value, query_offsets, key_offsets = packed(*lengths, key_heads=2)
    arguments = {"dropout_p": dropout_p, "enable_gqa": True, "phi": phi, "backend": backend, "return_rows": True}
    torch.manual_seed(7)
    out, rows = nomax.varlen_attention(query, key, value, query_offsets, key_offsets, is_causal=is_causal, **arguments)
    mask = (torch.arange(max(lengths[1])) < torch.tensor(lengths[1])[:, None]).view(-1, 1, 1, max(lengths[1]))
    mask = mask & tril(max(lengths[0]), max(lengths[1])) if is_causal else mask
    batch = (padded(query, lengths[0]), padded(key, lengths[1]), padded(value, lengths[1]))
    torch.manual_seed(7)
    expected, expected_rows = nomax.attention(*batch, mask, **arguments)

    def pack(x):
        return torch.cat([part[:, :length].transpose(0, 1) for part, length in zip(x, lengths[0], strict=True)])

    close(out, pack(expected))
    close(rows.sum, pack(expected_rows.sum))
    close(rows.entropy, pack(expected_rows.entropy))


@on_every_backend
@pytest.mark.parametrize("phi", ["relu/L, L=keys", "softmax"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_equals_each_sequence_alone(lengths, is_causal, phi, backend):
    query, key, value, query_offsets, key_offsets = packed(*lengths)
    arguments = {"is_causal": is_causal, "scale": 0.3, "phi": phi, "return_rows": True}
    arguments["backend"] = None if phi == "softmax" else backend
    out, rows = nomax.varlen_attention(query, key, value, query_offsets, key_offsets, **arguments)
    parts = (query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]))
    for q, k, v, o, s, e in zip(
        *parts, out.split(lengths[0]), rows.sum.split(lengths[0]), rows.entropy.split(lengths[0]), strict=True
    ):
        expected, expected_rows = nomax.attention(*(x.transpose(0, 1) for x in (q, k, v)), **arguments)
        close(o, expected.transpose(0, 1))
        close(s, expected_rows.sum.T)
        close(e, expected_rows.entropy.T)


@on_every_backend
def test_packed_gradients_are_those_of_the_reference(backend):
    *tensors_, query_offsets, key_offsets = packed((2, 0, 3, 1), (4, 2, 0, 5), key_heads=2)
    weight = torch.randn(6, HEADS, DV)

    def gradients(backend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors_]
        arguments = {"is_causal": True, "enable_gqa": True, "phi": "silu/L", "backend": backend}
        out = nomax.varlen_attention(*leaves, query_offsets, key_offsets, **arguments)
        return torch.autograd.grad((out * weight).sum(), leaves)

    for actual, expected in zip(gradients(backend, torch.float32), gradients("reference", torch.float64), strict=True):
        close(actual, expected)


@on_every_backend
@pytest.mark.parametrize("phi", ["relu/L", "softmax"])
def test_no_sequences_at_all(phi, backend):
    offsets = torch.zeros(1, dtype=torch.int64)
    query = torch.randn(0, HEADS, D)
    backend = None if phi == "softmax" else backend
    out, rows = nomax.varlen_attention(
        query, query, query, offsets, offsets, phi=phi, backend=backend, return_rows=True
    )
    assert out.shape == (0, HEADS, D)
    assert rows.sum.shape == rows.entropy.shape == (0, HEADS)


# Dtypes.


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_half_precision_out(dtype, backend):
    query, key, value = tensors(dtype=dtype)
    bias = torch.randn(QUERIES, KEYS)
    out, rows = nomax.attention(query, key, value, bias, phi="relu/L", backend=backend, return_rows=True)
    expected, sums, _ = oracle.attention(query, key, value, None, bias)
    assert out.dtype == dtype
    assert rows.sum.dtype == rows.entropy.dtype == torch.float32
    close(out, expected, rtol=2e-2, atol=2e-2)
    close(rows.sum, sums, rtol=2e-2, atol=2e-2)


def test_float64_stays_float64():
    query, key, value = tensors(dtype=torch.float64)
    out, rows = nomax.attention(query, key, value, phi="softplus/L", return_rows=True)
    expected, sums, entropies = oracle.attention(query, key, value, activation="softplus")
    for actual, wanted in ((out, expected), (rows.sum, sums), (rows.entropy, entropies)):
        torch.testing.assert_close(actual, wanted, rtol=1e-13, atol=1e-13)


@on_every_backend
@pytest.mark.parametrize("phi", ["relu/L", "softmax"])
def test_autocast_converts_as_for_sdpa(phi, backend):
    query, key, value = tensors()
    bias = torch.randn(QUERIES, KEYS).half()
    bias[1, 2] = torch.finfo(torch.float16).min
    backend = None if phi == "softmax" else backend
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = nomax.attention(query, key, value, bias, phi=phi, backend=backend)
        assert out.dtype == F.scaled_dot_product_attention(query, key, value).dtype == torch.bfloat16
        mixed = nomax.attention(query.bfloat16(), key, value, phi=phi, backend=backend)
        assert mixed.dtype == torch.bfloat16
        doubles = [x.double() for x in (query, key, value)]
        assert nomax.attention(*doubles, phi=phi).dtype == torch.float64
    if phi != "softmax":
        seen = bias > torch.finfo(torch.float16).min
        close(out, oracle.attention(query, key, value, seen, bias)[0], rtol=3e-2, atol=3e-2)
