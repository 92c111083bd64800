"""Softmax attention, the peer: PyTorch's own operation, with row statistics beside it."""

from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nomax.ops.inputs import autocasts
from nomax.ops.rows import Rows
from nomax.ops.scaling import default_scale
from nomax.ops.visible import below, wide


def attend_packed(
    query: Tensor,  # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    diagonal: int | None,
    dropout_p: float,
    scale: float | None,
    return_rows: bool,
) -> tuple[Tensor, Rows | None]:
    """Run PyTorch's operation on one packed sequence after the other."""
    # An empty part first, so that no sequences at all are as good as several.
    outs = [query.new_zeros(*query.shape[:2], 0, value.shape[3])]
    statistics = [rows(query[:, :, :0], key[:, :, :0], None, None, scale)]
    for (q0, q1), (k0, k1) in zip(pairwise(query_offsets.tolist()), pairwise(key_offsets.tolist()), strict=True):
        q, k, v = query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1]
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, None, dropout_p, is_causal=diagonal is not None, scale=scale, enable_gqa=True
            )
        )
        if return_rows:
            statistics.append(rows(q, k, None, diagonal, scale))
    joined = Rows(*(torch.cat(parts, dim=2) for parts in zip(*statistics, strict=True)))
    return torch.cat(outs, dim=2), joined if return_rows else None


def rows(query: Tensor, key: Tensor, mask: Tensor | None, diagonal: int | None, scale: float | None) -> Rows:
    """Return the rows of the softmax weights, from the whole matrix of them."""
    key = key.repeat_interleave(query.shape[1] // max(key.shape[1], 1), dim=1)
    scale = default_scale(query) if scale is None else scale
    device = query.device.type
    with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
        scores = query.to(wide(query)) @ key.to(wide(query)).transpose(-2, -1) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if diagonal is not None:
        scores = scores.masked_fill(~below(diagonal, scores.shape[-2], scores.shape[-1], scores.device), -torch.inf)
    # PyTorch's operation returns zero, not NaN, for a query that sees no key; so do the statistics.
    sees_none = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(sees_none, 0).softmax(-1).masked_fill(sees_none, 0)
    positive = torch.where(weights > 0, weights, 1)
    return Rows(weights.sum(-1), -(positive * positive.log()).sum(-1))
