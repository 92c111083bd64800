"""Which keys a query may see, and how many they are: the L of "relu/L"."""

import torch
from torch import Tensor


def hidden(mask: Tensor) -> Tensor:
    """True where a mask forbids to look: False in a boolean mask, -inf or the dtype's minimum in a float mask."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


def count(query: Tensor, key: Tensor, mask: Tensor | None, diagonal: int | None) -> int | Tensor:
    """How many keys each query may see: one integer, or a tensor with dimensions 1 or those of [B, H, Lq].

    The mask is counted at its own size: one of [B, 1, 1, Lk] gives counts of [B, 1, 1]. Tensors of counts are
    floating-point, for the powers of L that follow; float32 holds them exactly as far as 2^24.
    """
    keys: int = key.shape[2]
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else ~hidden(mask)
        if diagonal is not None:
            seen = seen & below(diagonal, query.shape[2], keys, query.device)
        counts = seen.sum(-1, dtype=wide(query))
        return counts if seen.shape[3] == keys else counts * keys
    if diagonal is not None:
        counts = torch.arange(diagonal + 1, diagonal + 1 + query.shape[2], dtype=wide(query), device=query.device)
        return counts.clamp_(0, keys).view(1, 1, -1)
    return keys


def count_packed(query: Tensor, query_offsets: Tensor, key_offsets: Tensor, diagonal: int | None) -> Tensor:
    """How many keys each query of packed sequences may see, as a floating-point tensor [1, 1, Lq]."""
    position = torch.arange(query.shape[2], device=query.device)
    sequence = torch.bucketize(position, query_offsets[1:].to(position), right=True)
    seen = key_offsets.diff()[sequence]
    if diagonal is not None:
        seen = torch.minimum(seen, (position - query_offsets[sequence] + diagonal + 1).clamp_min(0))
    return seen.to(wide(query)).view(1, 1, -1)


def wide(query: Tensor) -> torch.dtype:
    """The dtype of what is computed once per query: at least float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def below(diagonal: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """True where query i may see key j: j <= i + diagonal."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal)
