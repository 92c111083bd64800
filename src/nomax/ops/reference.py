"""The specification of the operation, in plain PyTorch. Every other backend computes this, faster.

Half precision is computed in float32, as the kernels do, and rounded once at the end: a sum over keys would overflow
float16 before the factor 1/L reaches it.
"""

import torch
from torch import Tensor

from nomax.ops.problem import Problem, as_it_is, hidden, wide
from nomax.phi import ACTIVATIONS

_LOW_32 = 0xFFFFFFFF


def attend(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return gain_i · Σ_j h(q_i·k_j·scale + mask_ij + shift_i)·v_j, Σ_j h_ij and Σ_j h_ij·log h_ij.

    The two sums are there if problem.rows; what stands in their place otherwise means nothing.
    """
    if parts := problem.sequences():
        outs, sums, logs = zip(*map(attend, parts), strict=True)
        along = 2 if problem.rows else 0  # without rows there are only empty tensors
        return torch.cat(outs, dim=2), torch.cat(sums, along), torch.cat(logs, along)

    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    row_gain, row_shift = problem.row_gain, problem.row_shift
    # Before the heads are repeated, so that gradients of a shared head are added up in the wider dtype too.
    dtype, computed = query.dtype, wide(query)
    query, key, value = query.to(computed), key.to(computed), value.to(computed)
    if query.shape[1] != key.shape[1]:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    shift = problem.shift if row_shift is None else row_shift[..., None]
    with as_it_is(query):
        scores = query @ key.transpose(-2, -1) * problem.scale + shift
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.masked_fill(hidden(mask), 0)

    # Hidden keys are zeroed after h: an -inf before it would be NaN in gelu and -inf in identity.
    weights = ACTIVATIONS[problem.activation].value(scores)
    if mask is not None:
        weights = weights.masked_fill(hidden(mask), 0)
    if problem.diagonal is not None:
        weights = weights.tril(problem.diagonal)

    row_sum = row_log = query.new_empty(0)
    if problem.rows:
        row_sum = weights.sum(-1, dtype=computed)
        # A weight of zero adds nothing to h·log h and, unlike in the limit, nothing to its gradient.
        positive = torch.where(weights > 0, weights, 1).to(computed)
        row_log = (positive * positive.log()).sum(-1)

    if problem.seed is not None:
        kept_share = 1 - problem.dropout
        weights = weights.masked_fill(~kept(problem, problem.seed), 0) * (1 / kept_share if kept_share > 0 else 0)
    with as_it_is(query):
        out = weights.to(computed) @ value
    # The row's factor comes last, as in the kernels, where no weight is ever as small as 1/L.
    return (out * (problem.gain if row_gain is None else row_gain[..., None])).to(dtype), row_sum, row_log


def kept(problem: Problem, seed: Tensor) -> Tensor:
    """Toss dropout's coins for the matrix of weights [B, H, Lq, Lk]: True keeps the weight.

    A coin is a hash of (seed, batch, head, query, key), so that every backend and thread count tosses the same. All
    arithmetic is modulo 2^32. Torch has no full set of uint32 operations, hence int64 with the low 32 bits kept.
    """
    (batches, heads, queries, _), keys = problem.query.shape, problem.key.shape[2]
    first_batch, first_query, first_key = problem.origin
    device = problem.query.device
    seed = seed.to(device)
    lane = torch.arange(first_batch * heads, (first_batch + batches) * heads, device=device)
    query = torch.arange(first_query, first_query + queries, device=device)[:, None]
    key = torch.arange(first_key, first_key + keys, device=device)
    row = _mix(_mix(_mix(seed & _LOW_32) ^ ((seed >> 32) & _LOW_32)) ^ lane.view(batches, heads, 1, 1))
    row = _mix(row ^ query)
    second = _mix(row ^ 0x9E3779B9)
    bits = _mix((_mix(key ^ row) + second) & _LOW_32)
    return bits >= min(2**32 - 1, round(problem.dropout * 2**32))


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit integers so that every input bit reaches every output bit."""
    # An int64 product wraps, which leaves its low 32 bits exact.
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)
