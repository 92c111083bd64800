"""Rotary positions: queries and keys turned by angles that grow with their position, so that scores see distances."""

import torch
from torch import Tensor

BASE = 10_000.0


def angles(first: int, positions: int, dimension: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, dimension / 2] of the angles from position `first` on, at least float32."""
    # In half precision, positions from 257 on would share their angles with others.
    dtype = torch.promote_types(like.dtype, torch.float32)
    position = torch.arange(first, first + positions, dtype=dtype, device=like.device)
    power = torch.arange(0, dimension, 2, dtype=dtype, device=like.device) / dimension
    angle = position.unsqueeze(1) * BASE**-power
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn x [..., positions, dimension]; dimension i of its first half makes a pair with that of its second half."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cosine - other * sine, other * cosine + one * sine], dim=-1).to(x.dtype)
