"""The CPU backend: fused C++ kernels that never hold more than a tile of the weights, and their operators in torch.

The operators come into being when the compiled library is loaded, which happens at the first use and not at import.
"""

from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from nomax.ops import length, registration
from nomax.ops.build import BuildError, library
from nomax.ops.problem import Problem
from nomax.ops.registration import CODES, NO_TENSORS, gradients_of, inputs_of, output, save
from nomax.phi import Phi

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of Type in csrc/problem.h
SMALL = 4096  # numbers; below, the way to a kernel takes longer than the work of a layer

# Operators without an autograd formula, once they are loaded: a tiny call would notice the time to look them up.
attend_forward: Any = None
attend_gradients: Any = None
attend_plain_call: Any = None
gradients_of_plain_call: Any = None
attend_one_part: Any = None
gradients_of_one_part: Any = None
_loaded = False
_without_kernels = False  # where loading them failed
_lock = Lock()


def unsupported(problem: Problem) -> list[str]:
    """Return the reasons why this problem cannot be served here; none means it can."""
    reasons = []
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        kinds = {str(level.key()) for level in torch._C._functorch.get_interpreter_stack() or ()}
        if kinds - {"TransformType.Vmap", "TransformType.Functionalize"}:
            reasons.append("torch.func.grad and its kin work on the reference backend only (vmap works here)")
    if forward_ad._current_level >= 0:
        reasons.append("forward-mode derivatives work on the reference backend only")
    for name, x in (("query", problem.query), ("attn_mask", problem.mask)):
        if x is not None and not x.is_cpu:
            reasons.append(f"{name} is on {x.device}, but the kernels run on the CPU")
        if x is not None and x.dtype not in DTYPES and x.dtype != torch.bool:
            reasons.append(f"{name} is {str(x.dtype)[6:]}, but the kernels take float32, bfloat16 and float16")
    if problem.dropout > 0 and problem.origin != (0, 0, 0):
        reasons.append("dropout in a part of a larger problem has gradients on the reference backend only")
    return reasons


def attend(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the reference returns: the outputs and, if problem.rows, each row's Σh and Σ h·log h."""
    load()
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    if _is_linear(problem):
        # Without a mask all rows have one factor, also where it is a tensor because a length is kept open.
        factor = problem.scale * problem.gain if problem.row_gain is None else problem.scale
        eager = torch.is_grad_enabled() and _is_eager(query, key, value)
        operator = _AttendLinear.apply if eager else torch.ops.nomax.attend_linear
        out = operator(query, key, value, factor, problem.row_gain)
        return out, out, out
    differentiable = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (mask is not None and mask.requires_grad)
    )
    operator = attend_forward
    if differentiable:
        operator = _attend_eagerly if _is_eager(query, key, value, mask) else torch.ops.nomax.attend
    out, statistics = operator(*inputs_of(problem), problem.rows)
    return (out, *statistics.unbind(0)) if problem.rows else (out, statistics, statistics)


def serves_parts(problem: Problem) -> bool:
    """Return whether `attend_part` and `part_gradients` serve this problem: not where it is packed, nor linear."""
    return problem.query_offsets is None and not _is_linear(problem) and _can_load()


def attend_part(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `attend` returns, in float32 and without gradients: the summands of a larger problem."""
    out, statistics = attend_one_part(*inputs_of(problem), *problem.origin, problem.rows)
    return (out, *statistics.unbind(0)) if problem.rows else (out, statistics, statistics)


def part_gradients(
    problem: Problem, grad: Tensor, grad_sums: tuple[Tensor, Tensor] | None, bias_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and, if wanted, a float mask, in float32."""
    statistics = None if grad_sums is None else torch.stack(grad_sums)
    query, key, value, bias = gradients_of_one_part(grad, statistics, *inputs_of(problem), *problem.origin, bias_wanted)
    return query, key, value, bias if bias_wanted else None


def _is_linear(problem: Problem) -> bool:
    """Return whether the weights are the scores themselves, so that q(kᵀv) spares all of them."""
    return (
        problem.activation == "identity"
        and (problem.mask is None and problem.diagonal is None and problem.query_offsets is None)
        and (problem.row_shift is None and problem.shift == 0 and problem.dropout == 0 and not problem.rows)
    )


def _is_eager(*tensors: Tensor | None) -> bool:
    """Return whether these are plain tensors that nothing traces or transforms: `_Attend` serves those only."""
    return (
        all(x is None or type(x) is Tensor or type(x) is Parameter for x in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, phi: str | Phi) -> Tensor | None:
    """Answer the plainest call by the shortest way; return None if anything is special about it, or wrong with it.

    A tiny call takes a few microseconds, and the general way would spend more on questions than on the answer. So no
    `Problem` is made here.
    """
    if (
        not (type(query) is type(key) is type(value) is Tensor and isinstance(phi, str | Phi))
        or torch.compiler.is_compiling()
        or attend_plain_call is None
        or (torch.is_autocast_enabled("cpu") and not _are_cast(query, key, value))
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
    ):
        return None
    try:
        settings = _settings(phi, query.shape[3], key.shape[2])
        if settings is None:
            return None
        out: Tensor
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            out = _AttendPlainly.apply(query, key, value, settings)
        else:
            out = attend_plain_call(query, key, value, *settings)
        return out
    except (RuntimeError, ValueError, IndexError):
        return None  # the general way finds out what is wrong, and says it in words


def _are_cast(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether autocast, which is on, has nothing to convert."""
    return query.dtype is key.dtype is value.dtype is torch.get_autocast_dtype("cpu")


@lru_cache(maxsize=2**14)  # decoding asks for one length after the other
def _settings(phi: str | Phi, head_dim: int, keys: int) -> tuple[int, float, float, float] | None:
    """Return the code of the activation, the scale, gain · L^-alpha and the shift; None if it is no plain call."""
    phi = Phi.parse(phi)
    if phi.activation not in CODES or phi.activation == "identity" or not (head_dim and keys):
        return None
    return CODES[phi.activation], head_dim**-0.5, *length.constants(phi, keys)


def serves(x: Tensor) -> bool:
    """Return whether the kernels of other layers (GELU, LayerNorm, …) serve this call and pay off."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.dtype in DTYPES
        and x.numel() >= SMALL
        and not torch.compiler.is_compiling()  # a compiler fuses PyTorch's own with their neighbours
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _can_load()
    )


def _can_load() -> bool:
    global _without_kernels
    if not _loaded and not _without_kernels:
        try:
            load()
        except BuildError:  # attention says what is wrong; this is only slower
            _without_kernels = True
    return not _without_kernels


def instruction_set() -> str:
    """Return the instruction set that the kernels use here; the environment variable NOMAX_ISA forces one."""
    load()
    return str(torch.ops.nomax.isa())


def instruction_sets() -> list[str]:
    """Return all instruction sets that the kernels can use on this machine, best first."""
    load()
    return str(torch.ops.nomax.isas()).split(",")


def load() -> None:
    """Load the compiled library and tell torch all about its operators, which from then on are torch.ops.nomax."""
    global _loaded, attend_forward, attend_gradients, attend_one_part, gradients_of_one_part
    global attend_plain_call, gradients_of_plain_call
    if _loaded:
        return
    with _lock:
        if not _loaded:
            _register()
            attend_forward = torch.ops.nomax.attend_forward.default
            attend_gradients = torch.ops.nomax.attend_gradients.default
            # Past the Python wrapper of an operator, which adds nothing here but its time.
            attend_plain_call = torch.ops.nomax.attend_plainly.default._op
            gradients_of_plain_call = torch.ops.nomax.attend_plainly_gradients.default._op
            attend_one_part = torch.ops.nomax.attend_part.default
            gradients_of_one_part = torch.ops.nomax.attend_part_gradients.default
            _loaded = True


# Under torch.compile: run it while tracing, do not trace it. (What torch.compiler.assume_constant_result does, without
# the second that importing torch._dynamo takes.)
load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _register() -> None:
    path = library()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(
            f"nomax cannot load its compiled CPU kernels, {path}: {error.__cause__ or error}. "
            f"Delete {path.parent} to have them compiled again on this machine."
        ) from error
    vars(torch.ops).pop("nomax", None)  # what stood there to call us, see nomax/__init__.py
    operators = torch.ops.nomax
    registration.register("nomax", "fused CPU kernels")
    registration.describe("nomax::attend_forward", forward=True)
    registration.describe("nomax::attend_gradients", forward=False)
    registration.describe_plain("nomax::attend_plainly")
    torch.library.register_fake("nomax::attend_linear", lambda query, key, value, *factors: output(query, value))
    torch.library.register_autograd("nomax::attend_linear", _backward_linear, setup_context=_save_linear)
    torch.library.register_vmap("nomax::attend_linear", _vmap_linear)
    register_flop_formula(operators.attend_linear, get_raw=False)(_flops_linear)
    torch.library.register_fake("nomax::look_up", lambda x, *rest: torch.empty_like(x, dtype=torch.float32))
    torch.library.register_fake("nomax::gelu", lambda x, bias, tanh: torch.empty_like(x))
    torch.library.register_fake("nomax::gelu_", lambda x, bias, tanh: None)
    torch.library.register_fake("nomax::gelu_backward", _shapes_gelu_backward)
    torch.library.register_fake(
        "nomax::dropout", lambda x, onto, share, seed, dtype: torch.empty_like(x, dtype=DTYPES[dtype])
    )
    torch.library.register_fake("nomax::layer_norm", _shapes_norm)
    torch.library.register_fake(
        "nomax::add_layer_norm_",
        lambda x, added, added_bias, weight, bias, eps, dtype: x.new_empty(x.shape, dtype=DTYPES[dtype]),
    )
    torch.library.register_fake("nomax::layer_norm_backward", _shapes_norm_backward)
    torch.library.register_fake(
        "nomax::cross_entropy", lambda x, labels, s: x.new_empty(4, len(x), dtype=torch.float32)
    )
    torch.library.register_fake("nomax::cross_entropy_backward", lambda grad, x, *rest: torch.empty_like(x))


def _shapes_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, bias_wanted: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1] if bias_wanted else 0, dtype=torch.float32)


def _shapes_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=DTYPES[dtype]), x.new_empty(x.shape[0] * x.shape[1], 2, dtype=torch.float32)


def _shapes_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), weight.new_empty(0 if bias is None else len(bias))


class _Attend(torch.autograd.Function):
    """The formula of `attend` for eager calls: the same kernels, without what torch.library does around a formula.

    The statistics are a result only where they were asked for: autograd takes its time for each.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor | tuple[Tensor, Tensor]:
        save(ctx, inputs, None)
        out: Tensor
        out, statistics = attend_forward(*inputs)
        if not ctx.rows:
            return out
        ctx.set_materialize_grads(False)  # either of them may have no gradient
        return out, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_statistics: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if grad is None:
            query, value = ctx.saved_tensors[0], ctx.saved_tensors[2]
            grad = query.new_zeros(*query.shape[:3], value.shape[3])
        # With create_graph=True the gradient needs a formula, too: the one that refuses.
        operator = torch.ops.nomax.attend_backward if torch.is_grad_enabled() else attend_gradients
        return gradients_of(ctx, operator, grad, grad_statistics)


class _AttendPlainly(torch.autograd.Function):
    """The same for the plainest call: autograd asks about each input, and here are four."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.settings = settings
        out: Tensor = attend_plain_call(query, key, value, *settings)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A second derivative is refused by a formula, and vmap has a rule: these operators have them.
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            operator = torch.ops.nomax.attend_backward if torch.is_grad_enabled() else attend_gradients
            inputs = (*ctx.saved_tensors, *NO_TENSORS, *ctx.settings, None, 0.0)
            return *operator(grad, None, *inputs, False)[:3], None
        return *gradients_of_plain_call(grad, *ctx.saved_tensors, *ctx.settings), None


def _attend_eagerly(*inputs: Any) -> Any:
    """Return what `attend` returns; without rows the statistics are None."""
    results = _Attend.apply(*inputs)
    return results if inputs[-1] else (results, None)


class _AttendLinear(torch.autograd.Function):
    """The formula of `attend_linear` for eager calls."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_linear(ctx, inputs, None)
        out: Tensor = _linear_below_autograd(*inputs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True the gradient is the registered operator, which has a gradient itself.
        operator = torch.ops.nomax.attend_linear if torch.is_grad_enabled() else _linear_below_autograd
        return _gradients_linear(ctx, operator, grad)


def _linear_below_autograd(*inputs: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        out: Tensor = torch.ops.nomax.attend_linear.default(*inputs)
        return out


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, ctx.factor, gain = inputs
    ctx.save_for_backward(query, key, value, gain)


def _backward_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients_linear(ctx, torch.ops.nomax.attend_linear, grad)


def _gradients_linear(ctx: Any, linear: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of q(kᵀv), which are the same product with its parts in other places."""
    query, key, value, gain = ctx.saved_tensors
    factors = (ctx.factor, gain)
    group = (key.shape[1], query.shape[1] // max(key.shape[1], 1))
    # Seen from a key, the rows of all the heads of its group are one long sequence.
    queries, grads = (x.unflatten(1, group).flatten(2, 3) for x in (query, grad))
    grad_key = linear(value, grads, queries, *factors)
    grad_value = linear(key, queries, grads, *factors)
    return linear(grad, value, key, *factors), grad_key, grad_value, None, None


def _vmap_linear(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
    query, key, value = (
        (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(inputs[:3], in_dims[:3], strict=True)
    )
    out = torch.ops.nomax.attend_linear(query, key, value, *inputs[3:])
    return out.unflatten(0, (info.batch_size, -1)), 0


def _flops_linear(query: Any, key: Any, value: Any, *rest: Any, **unused: Any) -> int:
    batch, heads, queries, dim = query
    return int(2 * batch * dim * value[3] * (heads * queries + key[1] * key[2]))
