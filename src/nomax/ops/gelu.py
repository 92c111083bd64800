"""GELU on the CPU kernels: the same function as F.gelu, several times faster."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from nomax.ops import build, operators

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = 4096  # numbers; below, the way to the kernel takes longer than the work

_without_kernels = False


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """F.gelu, computed by our kernels wherever they serve: on the CPU, eagerly, to the first derivative."""
    global _without_kernels
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate={approximate!r} must be "none" or "tanh".')
    if _without_kernels or not _serves(x):
        return F.gelu(x, approximate=approximate)
    try:
        operators.load()
    except build.BuildError:  # attention says what is wrong; this is only slower
        _without_kernels = True
        return F.gelu(x, approximate=approximate)
    tanh = approximate == "tanh"
    if torch.is_grad_enabled() and x.requires_grad:
        return _Gelu.apply(x, tanh)
    return torch.ops.nomax.gelu(x.contiguous(), tanh)


def _serves(x: Tensor) -> bool:
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.dtype in DTYPES
        and x.numel() >= SMALL
        and not torch.compiler.is_compiling()  # a compiler fuses F.gelu with its neighbours
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, tanh: bool) -> Tensor:
        x = x.contiguous()
        context.save_for_backward(x)
        context.tanh = tanh
        return torch.ops.nomax.gelu(x, tanh)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = context.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the second derivative
            return torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if context.tanh else "none"), None
        return torch.ops.nomax.gelu_backward(grad.contiguous(), x, context.tanh), None
