"""Layers that attention and the models share: linear layers, norms, dropout, and rotary positions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax.ops.rowwise import dropout, layer_norm


def _without_products() -> frozenset[torch.dtype]:
    """Return the half-precision dtypes whose products this CPU computes five to ten times slower than float32."""
    asked = {
        torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None),
        torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None),
    }
    slow = {dtype for dtype, ask in asked.items() if ask is not None and not ask()}
    # oneDNN supports bfloat16 on every CPU with AVX-512, but emulates its products where there is no instruction.
    if torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported():
        slow.add(torch.bfloat16)
    return frozenset(slow)


# Half-precision dtypes in which linear layers compute in float32, and stay fast.
SLOW = _without_products()
BASE = 10_000.0  # of the angles of rotary positions


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear, internally in float32 where the CPU is slow in half precision."""
    if SLOW and x.is_cpu:
        autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
        if dtype in SLOW:
            with torch.autocast("cpu", enabled=False):
                return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear with `linear`: the same parameters and dtypes, only faster."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last dimension: the same parameters, only faster.

    Under autocast on the CPU the result is in half precision already: what follows is a product, which would copy it.
    """

    def __init__(self, dim: int, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__(dim, eps=eps, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        halves = x.is_cpu and x.dtype == torch.float32 and torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if halves else None
        return layer_norm(x, self.weight, self.bias, self.eps, dtype)


class Dropout(nn.Dropout):
    """nn.Dropout, faster, and with `onto` the residual sum onto + dropout(x) in one pass."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if self.training and self.p:
            return dropout(x, self.p, onto)
        return x if onto is None else onto + x


class GatedRMSNorm(nn.Module):
    """scale · x / rms(x) · sigmoid(gate · x), with a learned scale and gate for every dimension (Zhang et al. 2021).

    ReLA's norm, for attention without a length factor. The scale starts at 1, and the gate uniform in ±√(3/dim),
    Xavier's bound for a vector. rms(x) is √(mean(x²) + eps), with the eps of the authors' code.
    """

    def __init__(self, dim: int, eps: float = 1e-8) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.scale = nn.Parameter(torch.empty(dim))
        self.gate = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        bound = math.sqrt(3 / self.dim)
        nn.init.uniform_(self.gate, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dimension, in at least float32."""
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        per_rms = torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.scale * y * per_rms * torch.sigmoid(self.gate * y)).to(x.dtype)


def angles(first: int, positions: int, dimension: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, dimension / 2] of the angles from position `first` on, at least float32.

    Queries and keys rotated by angles proportional to their positions have scores that depend on distances.
    """
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
