"""A few tokens in a memory of slots on the CPU kernels, which read only the rows that are needed."""

import torch
from torch import Tensor

from nomax.ops import cpu
from nomax.ops.registration import CODES

FEW = 6  # tokens: MOST_TOKENS in csrc/problem.h
WITH_ZEROS = ("relu", "relu2", "relu6")  # what the others would read is everything, as any product does


def serves(x: Tensor, matrices: tuple[Tensor, ...], dtype: torch.dtype, activation: str) -> bool:
    """Return whether `look_up` serves these tokens, [tokens, dim], and pays off: a few, in inference, with zeros."""
    if torch.compiler.is_compiling():  # which must not learn that there are few
        return False
    learns = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *matrices))
    fits = activation in WITH_ZEROS and 1 <= x.shape[0] <= FEW and dtype in (torch.float32, torch.bfloat16)
    usable = all(each.is_contiguous() and cpu.serves(each.detach()) for each in matrices)
    return fits and not learns and x.is_cpu and usable


def look_up(
    x: Tensor, keys: Tensor, values: Tensor, gates: Tensor | None = None, *, activation: str, shift: float
) -> Tensor:
    """Return h(x·Kᵀ + shift)·V, or (h(x·Gᵀ + shift) ∘ x·Kᵀ)·V, in float32: all of one type, without gradients.

    The matrix inside h is read once. Rows of the others are read where h is not zero for some token, and used for those
    tokens alone: a NaN in a row changes no token for which h is zero.
    """
    out: Tensor = torch.ops.nomax.look_up(x.contiguous(), gates, keys, values, CODES[activation], shift)
    return out
