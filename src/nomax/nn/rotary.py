"""Rotary positions: rotate queries and keys by angles proportional to position, so that scores depend on distance."""

import torch
from torch import Tensor

BASE = 10_000.0


def angles(first: int, positions: int, dimension: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, dimension / 2] of the angles from position `first` on, at least float32."""
    # In half precision, positions from 257 on would not all have different angles.
    dtype = torch.promote_types(like.dtype, torch.float32)
    position = torch.arange(first, first + positions, dtype=dtype, device=like.device)
    power = torch.arange(0, dimension, 2, dtype=dtype, device=like.device) / dimension
    angle = position.unsqueeze(1) * BASE**-power
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x [..., positions, dimension], pairing dimension i of its first half with dimension i of its second."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)
