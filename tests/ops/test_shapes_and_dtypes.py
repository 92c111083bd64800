"""Shapes, softmax as the degenerate case, and dtypes, on every backend."""

import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from semantics import (
    HEADS,
    KEYS,
    MASKS,
    QUERIES,
    B,
    D,
    close,
    on_every_backend,
    on_gpu,
    tensors,
)
from torch.nn.attention.bias import causal_lower_right

import nomax
from nomax.ops import backends

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

    def spy(problem):
        received[:] = problem.query, problem.key, problem.value, problem.mask
        return attend(problem)

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
    close(out, expected, roundings=1)
    close(rows.sum, sums)


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
    if backend == "triton" and not on_gpu and (phi != "relu/L" or dtype != torch.float16):
        pytest.skip("takes a minute in Triton's interpreter")
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
        close(actual, wanted)


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
        converted = [x.bfloat16() for x in (query, key, value)]
        close(out, oracle.attention(*converted, seen, bias.bfloat16())[0], roundings=1)
