"""The specification of the operation, in plain PyTorch. Every other backend computes this, faster.

Half precision is computed in float32, as the kernels do, and rounded once at the end: a sum over keys would overflow
float16 before the factor 1/L reaches it.

B batches, H query heads, Hk key heads (H is a multiple of Hk), Lq queries, Lk keys, D and Dv dimensions of a head.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nomax.ops.dropout import kept
from nomax.ops.inputs import as_it_is
from nomax.ops.visible import hidden, wide
from nomax.phi import ACTIVATIONS


def attend(
    query: Tensor,  # [B, H, Lq, D]
    key: Tensor,  # [B, Hk, Lk, D]
    value: Tensor,  # [B, Hk, Lk, Dv]
    mask: Tensor | None,  # boolean or float, each dimension 1 or that of [B, H, Lq, Lk]
    row_gain: Tensor | None,  # each dimension 1 or that of [B, H, Lq]; takes the place of gain
    row_shift: Tensor | None,  # likewise, of shift
    seed: Tensor | None,  # one int64, where there is dropout
    query_offsets: Tensor | None,  # [n + 1], the bounds of n packed sequences: then B = 1 and there is no mask
    key_offsets: Tensor | None,
    *,
    activation: str,
    scale: float,
    gain: float,
    shift: float,
    diagonal: int | None,  # query i sees key j only if j <= i + diagonal
    dropout: float,
    rows: bool,
    first_batch: int = 0,  # how many batches came before, for dropout's coin
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gain_i · Σ_j h(q_i·k_j·scale + mask_ij + shift_i)·v_j and, if rows, Σ_j h_ij and Σ_j h_ij·log h_ij."""
    batches, heads, queries, _ = query.shape
    key_heads, keys = key.shape[1:3]

    # One packed sequence (or none) is an ordinary batch.
    if query_offsets is not None and key_offsets is not None and len(query_offsets) > 2:
        parts = []
        bounds = zip(pairwise(query_offsets.tolist()), pairwise(key_offsets.tolist()), strict=True)
        for sequence, ((q0, q1), (k0, k1)) in enumerate(bounds):
            part = attend(
                query[:, :, q0:q1],
                key[:, :, k0:k1],
                value[:, :, k0:k1],
                None,
                None if row_gain is None else row_gain.expand(-1, -1, queries)[:, :, q0:q1],
                None if row_shift is None else row_shift.expand(-1, -1, queries)[:, :, q0:q1],
                seed,
                None,
                None,
                activation=activation,
                scale=scale,
                gain=gain,
                shift=shift,
                diagonal=diagonal,
                dropout=dropout,
                rows=rows,
                first_batch=sequence,
            )
            parts.append(part)
        outs, sums, logs = zip(*parts, strict=True)
        along = 2 if rows else 0  # without rows there are only empty tensors
        return torch.cat(outs, dim=2), torch.cat(sums, along), torch.cat(logs, along)

    # Before the heads are repeated, so that gradients of a shared head are added up in the wider dtype too.
    dtype, computed = query.dtype, wide(query)
    query, key, value = query.to(computed), key.to(computed), value.to(computed)
    if heads != key_heads:
        key = key.repeat_interleave(heads // key_heads, dim=1)
        value = value.repeat_interleave(heads // key_heads, dim=1)
    with as_it_is(query):
        scores = query @ key.transpose(-2, -1) * scale + (shift if row_shift is None else row_shift[..., None])
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.masked_fill(hidden(mask), 0)

    # Hidden keys are zeroed after h: an -inf before it would be NaN in gelu and -inf in identity.
    weights = ACTIVATIONS[activation].value(scores)
    if mask is not None:
        weights = weights.masked_fill(hidden(mask), 0)
    if diagonal is not None:
        weights = weights.tril(diagonal)

    row_sum = row_log = query.new_empty(0)
    if rows:
        row_sum = weights.sum(-1, dtype=computed)
        # A weight of zero adds nothing to h·log h and, unlike in the limit, nothing to its gradient.
        positive = torch.where(weights > 0, weights, 1).to(computed)
        row_log = (positive * positive.log()).sum(-1)

    if seed is not None:
        coins = kept(seed.to(query.device), dropout, batches, heads, queries, keys, first_batch)
        weights = weights.masked_fill(~coins, 0) * (1 / (1 - dropout) if dropout < 1 else 0)
    with as_it_is(query):
        out = weights.to(computed) @ value
    # The row's factor comes last, as in the kernels, where no weight is ever as small as 1/L.
    return (out * (gain if row_gain is None else row_gain[..., None])).to(dtype), row_sum, row_log
