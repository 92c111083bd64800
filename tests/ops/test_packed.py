"""Packed sequences and jagged tensors, on every backend: the same as padded ones, and as each alone."""

import warnings

import pytest
import torch
from semantics import DV, HEADS, D, close, on_every_backend, tril

import nomax

THRESHOLD = "relu2(x-0.5*sqrt(2 log L))"


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
@pytest.mark.parametrize("phi", ["relu/L", "sigmoid(x-log L)/L^0.5", "softplus/L, L=9", "relu", THRESHOLD])
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
@pytest.mark.parametrize("phi", ["relu/L, L=keys", f"{THRESHOLD}, L=keys", "softmax"])
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


# Jagged nested tensors.


def jagged(lengths, *sizes):
    """[n, *, ...] with a gradient, and its parts."""
    parts = [torch.randn(length, *sizes) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True), parts


def like(x, y):
    """Numbers of their own in the jagged shape of x."""
    return torch.nested.nested_tensor_from_jagged(torch.randn(*x.values().shape[:-1], y), x.offsets()).requires_grad_()


@on_every_backend
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", ["relu/L", "sigmoid(x-log L)", "identity/L", THRESHOLD, "softmax", "sparsemax"])
@pytest.mark.parametrize("lengths", [((3, 5, 1), (3, 5, 1)), ((4, 2, 3), (6, 1, 3)), ((2, 0, 3), (4, 2, 5))], ids=str)
def test_jagged_tensors_are_served_sequence_by_sequence(lengths, phi, is_causal, backend):
    backend = None if phi in ("softmax", "sparsemax") else backend
    query, key = (jagged(each, heads, D)[0] for each, heads in zip(lengths, (HEADS, 2), strict=True))
    value = like(key, DV)
    arguments = {"is_causal": is_causal, "enable_gqa": True, "phi": phi, "backend": backend}
    out = nomax.attention(*(x.transpose(1, 2) for x in (query, key, value)), **arguments)
    assert out.shape[2] == query.shape[1]  # the very same ragged size, so that the two can be added
    (out * out).sum().backward()
    leaves = [[part.detach().requires_grad_() for part in x.unbind()] for x in (query, key, value)]
    for i, part in enumerate(out.unbind()):
        alone = nomax.attention(*(x[i].transpose(0, 1) for x in leaves), **arguments)
        close(part, alone)
        alone.square().sum().backward()
    for x, parts in zip((query, key, value), leaves, strict=True):
        for gradient, part in zip(x.grad.unbind(), parts, strict=True):
            close(gradient, torch.zeros_like(part) if part.grad is None else part.grad)


@on_every_backend
def test_jagged_tensors_without_heads_and_their_rows(backend):
    x, parts = jagged((3, 5), D)
    out, rows = nomax.attention(x, x, x, backend=backend, return_rows=True)
    assert out.shape == x.shape
    assert rows.sum.shape == x.shape[:2]
    for part, alone, sums, entropies in zip(parts, *(y.unbind() for y in (out, *rows)), strict=True):
        expected, expected_rows = nomax.attention(part, part, part, backend=backend, return_rows=True)
        close(alone, expected)
        close(sums, expected_rows.sum)
        close(entropies, expected_rows.entropy)
    heads, _ = jagged((3, 5), HEADS, D)
    view = heads.transpose(1, 2)
    assert nomax.attention(view, view, view, backend=backend, return_rows=True)[1].sum.shape == view.shape[:3]


@on_every_backend
def test_narrowed_jagged_tensors_leave_out_what_lies_between(backend):
    whole = torch.randn(2, 9, HEADS, D)
    x = torch.nested.narrow(whole, 1, torch.tensor([1, 2]), torch.tensor([3, 5]), layout=torch.jagged).transpose(1, 2)
    out = nomax.attention(x, x, x, backend=backend)
    for part, alone in zip((whole[0, 1:4], whole[1, 2:7]), out.unbind(), strict=True):
        part = part.transpose(0, 1)
        close(alone, nomax.attention(part, part, part, backend=backend))


def test_what_jagged_tensors_cannot_have_is_said():
    x, _ = jagged((3, 5), HEADS, D)
    view, dense = x.transpose(1, 2), torch.randn(2, HEADS, 3, D)
    other = jagged((3, 4), HEADS, D)[0].transpose(1, 2)
    shorter = jagged((3,), HEADS, D)[0].transpose(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the old layout
        old = torch.nested.nested_tensor([torch.randn(HEADS, 3, D)])
    for arguments, message in (
        ((view, view, view, torch.ones(5, 5, dtype=torch.bool)), "take no attn_mask.*to_padded_tensor"),
        ((view, view, dense), "value is a dense tensor"),
        ((x, x, x), r"got \[2, \*, 4, 8\].*transpose\(1, 2\)"),
        ((view, other, view), "key and value must have sequences of the same lengths"),
        ((view, shorter, shorter), "key has 1 sequences, but query has 2"),
        ((old, old, old), "layout=torch.jagged"),
    ):
        with pytest.raises(ValueError, match=message):
            nomax.attention(*arguments)
    bounds = torch.tensor([0, 3, 8])
    for call in (
        lambda: nomax.explain(view, view, view),
        lambda: nomax.visible_keys(view, view),
        lambda: nomax.varlen_attention(view, view, view, bounds, bounds),
    ):
        with pytest.raises(ValueError, match=r"nested tensor.*values\(\).*offsets\(\)"):
            call()
