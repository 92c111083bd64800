"""GELU on the CPU kernels: the same function as F.gelu, several times faster, of a product whose bias it adds."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nomax.ops import cpu


def gelu(
    x: Tensor, bias: Tensor | None = None, approximate: Literal["none", "tanh"] = "none", *, spent: bool = False
) -> Tensor:
    """Compute F.gelu(x + bias), by our kernels wherever they serve: on the CPU, eagerly, to the first derivative.

    bias: [x's last dimension], as a linear layer has it: adding it here saves that layer a pass over its result.
    spent: nobody needs x afterwards, so the result may take its place. (It does if no gradient is wanted.)
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate={approximate!r} must be "none" or "tanh".')
    if not cpu.serves(x):
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
