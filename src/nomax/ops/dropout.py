"""Dropout's coin: a hash of (seed, batch, head, query, key), so that every backend and thread count tosses the same.

All arithmetic is modulo 2^32. Torch has no full set of uint32 operations, hence int64 with the low 32 bits kept.
"""

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Scramble 32-bit integers so that every input bit reaches every output bit."""
    # An int64 product wraps, which leaves its low 32 bits exact.
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)


def threshold(probability: float) -> int:
    """The 32-bit number below which a coin drops its weight."""
    return min(2**32 - 1, round(probability * 2**32))


def kept(
    seed: Tensor, probability: float, batches: int, heads: int, queries: int, keys: int, first_batch: int = 0
) -> Tensor:
    """Toss the coins of a [batches, heads, queries, keys] matrix of weights: True keeps the weight."""
    device = seed.device
    lane = torch.arange(first_batch * heads, (first_batch + batches) * heads, device=device)
    query = torch.arange(queries, device=device)[:, None]
    key = torch.arange(keys, device=device)
    row = mix(mix(mix(seed & _LOW_32) ^ ((seed >> 32) & _LOW_32)) ^ lane.view(batches, heads, 1, 1))
    row = mix(row ^ query)
    second = mix(row ^ 0x9E3779B9)
    bits = mix((mix(key ^ row) + second) & _LOW_32)
    return bits >= threshold(probability)
