"""What the operation means, on every backend: masks, gain and shift, L, gradients, shapes, softmax, dtypes."""

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
    KEYS,
    MASKS,
    QUERIES,
    B,
    D,
    close,
    no_compiler,
    on_every_backend,
    tensors,
    tril,
)
from torch.nn.attention.bias import causal_lower_right

import nomax
from nomax import Phi
from nomax.ops import backends
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


LONG = {
    "plain": {},
    "causal": {"attn_mask": causal_lower_right(30, 4096)},
    "dropout": {"dropout_p": 0.25},
    "boolean mask": {"attn_mask": torch.arange(4096) % 3 > 0},
    "bias": {"attn_mask": torch.full((30, 4096), 0.5)},
    "groups": {"enable_gqa": True},
}


@on_every_backend
@pytest.mark.parametrize("phi", ["relu/L", "identity/L", "relu2(x-1)/L", "softplus/L"])
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_neither_overflows_nor_loses_before_the_factor_1_over_l(dtype, kind, phi, backend):
    """Sums of 4,096 weights of about 8 with moderate exact results; all terms are positive, so nothing cancels."""
    rows = kind == "plain" and phi != "identity/L"
    query = torch.rand(1, 2, 30, 64).add(0.5).to(dtype)
    key = torch.rand(1, 1 if kind == "groups" else 2, 4096, 64).add(0.5).to(dtype)
    value, grad = torch.full_like(key[..., :4], 4.0), torch.rand(1, 2, 30, 4).to(dtype)

    def results(backend, dtype):
        torch.manual_seed(3)
        leaves = [x.to(dtype).detach().requires_grad_() for x in (query, key, value)]
        out = nomax.attention(*leaves, **LONG[kind], phi=phi, backend=backend, return_rows=rows)
        out, *statistics = (out[0], *out[1]) if rows else (out,)
        return [out, *statistics, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    for actual, exact in zip(results(backend, dtype), results("reference", torch.float64), strict=True):
        assert exact.abs().max() < 3e4
        precision = torch.finfo(dtype)
        assert ((actual - exact).abs() <= 2 * precision.eps * exact.abs() + precision.tiny).all()


@on_every_backend
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_half_precision_does_not_overflow_either(is_causal, backend):
    query, key = torch.ones(30, 1, 64).half(), torch.ones(4099, 1, 64).half()
    query_bounds, bounds = torch.tensor([0, 1, 30]), torch.tensor([0, 3, 4099])
    arguments = {"is_causal": is_causal, "phi": "relu/L", "backend": backend}
    out = nomax.varlen_attention(query, key, torch.full((4099, 1, 4), 4.0).half(), query_bounds, bounds, **arguments)
    assert (out == 32).all()


@pytest.mark.parametrize("phi", ["relu/L", "gelu/L", "sparsemax", "entmax15"])
def test_autocast_does_not_reach_into_the_plain_pytorch_of_a_backend(phi):
    leaves = [x.bfloat16() for x in tensors()]
    backend = None if phi in ("sparsemax", "entmax15") else "reference"
    expected = nomax.attention(*leaves, phi=phi, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(nomax.attention(*leaves, phi=phi, backend=backend), expected)


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
