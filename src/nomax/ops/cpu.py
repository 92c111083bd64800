"""The CPU backend: the operation on fused C++ kernels that never hold more than a tile of the weights."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nomax.ops import operators
from nomax.phi import ACTIVATIONS, Phi

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = {name: code for code, name in enumerate(ACTIVATIONS)}


def unsupported(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> list[str]:
    """The reasons why these inputs cannot be served here; none means they can."""
    reasons = []
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        kinds = {str(level.key()) for level in torch._C._functorch.get_interpreter_stack() or ()}
        if kinds - {"TransformType.Vmap", "TransformType.Functionalize"}:
            reasons.append("torch.func.grad and its kin work on the reference backend only (vmap works here)")
    if forward_ad._current_level >= 0:
        reasons.append("forward-mode derivatives work on the reference backend only")
    for name, x in (("query", query), ("attn_mask", mask)):
        if x is not None and not x.is_cpu:
            reasons.append(f"{name} is on {x.device}, but the kernels run on the CPU")
        if x is not None and x.dtype not in DTYPES and x.dtype != torch.bool:
            reasons.append(f"{name} is {str(x.dtype)[6:]}, but the kernels take float32, bfloat16 and float16")
    return reasons


def instruction_set() -> str:
    """The instruction set that the kernels use on this machine; the environment variable NOMAX_ISA forces one."""
    operators.load()
    return str(torch.ops.nomax.isa())


def instruction_sets() -> list[str]:
    """All instruction sets that the kernels can use on this machine, best first."""
    operators.load()
    return str(torch.ops.nomax.isas()).split(",")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    row_gain: Tensor | None,
    row_shift: Tensor | None,
    seed: Tensor | None,
    query_offsets: Tensor | None,
    key_offsets: Tensor | None,
    *,
    activation: str,
    scale: float,
    gain: float,
    shift: float,
    diagonal: int | None,
    dropout: float,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gain_i · Σ_j h(q_i·k_j·scale + bias_ij + shift_i)·v_j and, if asked for, each row's Σh and Σ h·log h."""
    operators.load()
    if (
        activation == "identity"
        and (mask is None and diagonal is None and query_offsets is None and row_shift is None)
        and (shift == 0 and dropout == 0 and not rows)
    ):
        # Without a mask all rows have one factor, also where it is a tensor because a length is kept open.
        out = torch.ops.nomax.attend_linear(query, key, value, scale * gain if row_gain is None else scale, row_gain)
        return out, out, out
    if query_offsets is not None and key_offsets is not None:
        query_offsets, key_offsets = query_offsets.long().contiguous(), key_offsets.long().contiguous()
    differentiable = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (mask is not None and mask.requires_grad)
    )
    operator = torch.ops.nomax.attend if differentiable else torch.ops.nomax.attend_forward
    out, statistics = operator(
        query, key, value, mask, row_gain, row_shift, seed, query_offsets, key_offsets,
        CODES[activation], scale, gain, shift, diagonal, dropout, rows,
    )  # fmt: skip
    return (out, *statistics.unbind(0)) if rows else (out, statistics, statistics)


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, phi: str | Phi) -> Tensor | None:
    """The plainest call by the shortest way; None if there is anything special about it, or wrong with it.

    A tiny call takes a few microseconds, and the general way would spend more on questions than on the answer.
    """
    if (
        not (type(query) is type(key) is type(value) is Tensor and isinstance(phi, str | Phi))
        or torch.compiler.is_compiling()
        or operators.attend_forward is None
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or not (query.dim() == key.dim() == value.dim() == 4)
    ):
        return None
    activation, alpha, gain, shift, fixed_length = _constants(phi)
    try:
        shape, key_shape = query.shape, key.shape
        if activation is None or not (shape[1] == key_shape[1] and shape[3] and key_shape[2]):
            return None
        factor = gain * (fixed_length or key_shape[2]) ** -alpha
        return operators.attend_forward(
            query, key, value, None, None, None, None, None, None,
            activation, shape[3] ** -0.5, factor, shift, None, 0.0, False,
        )[0]  # fmt: skip
    except (RuntimeError, OverflowError):
        return None  # the general way finds out what is wrong, and says it in words


@lru_cache(maxsize=1024)
def _constants(phi: str | Phi) -> tuple[int | None, float, float, float, int]:
    """The code of the activation (None: not a plain one), α, the gain, the shift, and L if it is fixed, else 0."""
    phi = Phi.parse(phi)
    if phi.activation not in CODES or phi.activation == "identity" or isinstance(phi.shift, str):
        return None, 0, 0, 0, 0
    return CODES[phi.activation], phi.alpha, phi.gain, phi.shift, phi.length if isinstance(phi.length, int) else 0
