"""LayerNorm on the CPU kernels, and ReLA's norm, for attention without a length factor."""

import math

import torch
from torch import Tensor, nn

from nomax.ops.rowwise import layer_norm


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last dimension: the same parameters and dtypes, only faster."""

    def __init__(self, dim: int, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__(dim, eps=eps, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class GatedRMSNorm(nn.Module):
    """scale · x / rms(x) · sigmoid(gate · x), with a learned scale and gate for every dimension (Zhang et al. 2021).

    The scale starts at 1, and the gate uniform in ±√(3/dim), Xavier's bound for a vector. rms(x) is
    √(mean(x²) + eps), with the eps of the authors' code.
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
