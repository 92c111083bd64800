"""GELU on the CPU kernels: F.gelu, several times faster, with the bias of the preceding product added."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from nomax.ops import build, cpu

SMALL = 4096  # numbers; below this, calling the kernel takes longer than the work

_without_kernels = False


def gelu(
    x: Tensor, bias: Tensor | None = None, approximate: Literal["none", "tanh"] = "none", *, spent: bool = False
) -> Tensor:
    """Compute F.gelu(x + bias), with our kernels where possible: on the CPU, eagerly, up to the first derivative.

    bias: [x's last dimension], that of a linear layer: adding it here saves the layer a pass over its result.
    spent: x is not needed afterwards, so the result may overwrite it. (It does if no gradient is needed.)
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate={approximate!r} must be "none" or "tanh".')
    if not _serves(x):
        return F.gelu(x if bias is None else (x + bias).to(x.dtype), approximate=approximate)
    tanh = approximate == "tanh"
    rows, bias = x.contiguous().reshape(-1, x.shape[-1]), None if bias is None else bias.float()
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        out: Tensor = _Gelu.apply(rows, bias, tanh)
    elif spent:
        torch.ops.nomax.gelu_(rows, bias, tanh)
        out = rows
    else:
        out = torch.ops.nomax.gelu(rows, bias, tanh)
    return out.view(x.shape)


def _serves(x: Tensor) -> bool:
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.dtype in cpu.DTYPES
        and x.numel() >= SMALL
        and not torch.compiler.is_compiling()  # a compiler fuses F.gelu with its neighbours
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _loaded()
    )


def _loaded() -> bool:
    global _without_kernels
    if not _without_kernels:
        try:
            cpu.load()
        except build.BuildError:  # attention says what is wrong; this is only slower
            _without_kernels = True
    return not _without_kernels


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        context.save_for_backward(x, bias)
        context.tanh = tanh
        return torch.ops.nomax.gelu(x, bias, tanh)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = context.saved_tensors
        bias_wanted = bias is not None and context.needs_input_grad[1]
        if torch.is_grad_enabled():  # somebody wants the second derivative
            inner = x if bias is None else (x + bias).to(x.dtype)
            slope = torch.ops.aten.gelu_backward(grad, inner, approximate="tanh" if context.tanh else "none")
            return slope, slope.sum(0, dtype=bias.dtype) if bias_wanted else None, None
        slope, total = torch.ops.nomax.gelu_backward(grad.contiguous(), x, bias, context.tanh, bias_wanted)
        return slope, total if bias_wanted else None, None
