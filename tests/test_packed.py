"""Packed sequences, on every backend: the same as padded ones, and as each alone."""

import pytest
import torch
from semantics import DV, HEADS, D, close, on_every_backend, tril

import nomax


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
