"""The peers, which map a whole row of scores: softmax, by PyTorch's own operation, and the entmax package's maps."""

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nomax.ops.inputs import as_it_is
from nomax.ops.rows import Rows
from nomax.ops.scaling import default_scale
from nomax.ops.visible import below, hidden, wide
from nomax.phi import SOFTMAX


def attend(
    name: str,
    query: Tensor,  # [B, H, Lq, D]
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    diagonal: int | None,
    query_offsets: Tensor | None,
    key_offsets: Tensor | None,
    dropout_p: float,
    scale: float | None,
    return_rows: bool,
) -> tuple[Tensor, Rows | None]:
    """Attend with a row map; packed sequences one after the other."""
    if query_offsets is None or key_offsets is None:
        if name == SOFTMAX:
            causal = diagonal is not None
            out = F.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, is_causal=causal, scale=scale, enable_gqa=True
            )
            return out, rows(weights(name, query, key, mask, diagonal, scale)) if return_rows else None
        found = weights(name, query, key, mask, diagonal, scale)
        # The matrix is there anyway, and so is float32, which costs less than half precision does on most CPUs.
        with as_it_is(query):
            wider = value.to(found.dtype).repeat_interleave(query.shape[1] // max(value.shape[1], 1), dim=1)
            out = F.dropout(found, dropout_p) @ wider
        return out.to(query.dtype), rows(found) if return_rows else None

    # An empty part first, so that no sequences at all are as good as several.
    none = (query[:, :, :0], key[:, :, :0], value[:, :, :0])
    parts = [none] + [
        (query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1])
        for (q0, q1), (k0, k1) in zip(pairwise(query_offsets.tolist()), pairwise(key_offsets.tolist()), strict=True)
    ]
    found_parts = [attend(name, *part, None, diagonal, None, None, dropout_p, scale, return_rows) for part in parts]
    outs, statistics = zip(*found_parts, strict=True)
    joined = Rows(*(torch.cat(each, dim=2) for each in zip(*statistics, strict=True))) if return_rows else None
    return torch.cat(outs, dim=2), joined


def weights(
    name: str, query: Tensor, key: Tensor, mask: Tensor | None, diagonal: int | None, scale: float | None
) -> Tensor:
    """The whole matrix of weights [B, H, Lq, Lk], in at least float32; zero where a query sees no key."""
    key = key.repeat_interleave(query.shape[1] // max(key.shape[1], 1), dim=1)
    scale = default_scale(query) if scale is None else scale
    with as_it_is(query):
        scores = query.to(wide(query)) @ key.to(wide(query)).transpose(-2, -1) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            # PyTorch's softmax hides a key with -inf alone; ours, as everywhere, with the dtype's minimum too.
            scores = scores + (mask if name == SOFTMAX else mask.masked_fill(hidden(mask), -torch.inf))
    if diagonal is not None:
        scores = scores.masked_fill(~below(diagonal, scores.shape[-2], scores.shape[-1], scores.device), -torch.inf)
    # PyTorch's operation returns zero, not NaN, for a query that sees no key; so do the others and the statistics.
    sees_none = scores.isneginf().all(-1, keepdim=True)
    if not scores.numel():
        return scores
    return row_map(name)(scores.masked_fill(sees_none, 0)).masked_fill(sees_none, 0)


def rows(weights: Tensor) -> Rows:
    """The sum and the entropy of each row of weights."""
    positive = torch.where(weights > 0, weights, 1)
    return Rows(weights.sum(-1), -(positive * positive.log()).sum(-1))


def row_map(name: str) -> Callable[[Tensor], Tensor]:
    """The map from rows of scores, -inf where a key is hidden, to rows of weights."""
    if name == SOFTMAX:
        return lambda scores: scores.softmax(-1)
    try:
        # The package calls its functions as φ does: sparsemax, entmax15.
        return getattr(import_module("entmax"), name)
    except ImportError as error:
        raise ImportError(f"phi={name!r} needs the entmax package: pip install entmax") from error


def runs_on(name: str) -> str:
    """What computes the map, in words."""
    return "PyTorch's scaled_dot_product_attention" if name == SOFTMAX else f"the entmax package's {name}"
