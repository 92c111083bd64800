"""The compiled operators as torch knows them: their shapes, gradients, vmap rules and flop counts.

They come into being when the compiled library is loaded, which happens at the first use and not at import.
"""

from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nomax.ops.build import BuildError, library

# attend(query, key, value, mask, row_gain, row_shift, seed, query_offsets, key_offsets,
#        activation, scale, gain, shift, diagonal, dropout, rows) -> out, statistics [2, B, H, Lq]
TENSORS = 9
MASK, DROPOUT = 3, 14


# torch.ops.nomax.attend_forward once it is loaded: a tiny call would notice the time it takes to look it up.
attend_forward: Any = None
_loaded = False
_lock = Lock()


def load() -> None:
    """Load the compiled library and tell torch all about its operators, which from then on are torch.ops.nomax."""
    global _loaded, attend_forward
    if _loaded:
        return
    with _lock:
        if not _loaded:
            _register()
            attend_forward = torch.ops.nomax.attend_forward.default
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
    for name in ("attend", "attend_forward"):
        torch.library.register_fake(f"nomax::{name}", _shapes)
        torch.library.register_vmap(f"nomax::{name}", _vmap(getattr(operators, name), (0, 1)))
        register_flop_formula(getattr(operators, name), get_raw=False)(_flops)
    torch.library.register_autograd("nomax::attend", _backward, setup_context=_save)
    torch.library.register_fake("nomax::attend_backward", _shapes_backward)
    torch.library.register_autograd("nomax::attend_backward", _refuse, setup_context=_save_nothing)
    torch.library.register_vmap("nomax::attend_backward", _vmap(operators.attend_backward, (0, 0, 0, 0), before=2))
    register_flop_formula(operators.attend_backward, get_raw=False)(_flops_backward)
    torch.library.register_fake("nomax::attend_linear", _shapes_linear)
    torch.library.register_autograd("nomax::attend_linear", _backward_linear, setup_context=_save_linear)
    torch.library.register_vmap("nomax::attend_linear", _vmap_linear)
    register_flop_formula(operators.attend_linear, get_raw=False)(_flops_linear)
    torch.library.register_fake("nomax::gelu", lambda x, bias, tanh: torch.empty_like(x))
    torch.library.register_fake("nomax::gelu_", lambda x, bias, tanh: None)
    torch.library.register_fake("nomax::gelu_backward", lambda grad, x, bias, tanh: torch.empty_like(x))


def _shapes(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    statistics = query.new_empty(2 if rest[-1] else 0, batch, heads, queries, dtype=torch.float32)
    return _shapes_linear(query, key, value), statistics


def _shapes_backward(
    grad: Tensor, statistics: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask, bias_wanted = rest[0], rest[-1]
    bias = query.new_empty(mask.shape if bias_wanted else (0,), dtype=torch.float32)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), bias


def _shapes_linear(query: Tensor, key: Tensor, value: Tensor, *factors: Any) -> Tensor:
    # Heads next to each other, as F.scaled_dot_product_attention has it: what joins them afterwards is a view.
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.settings, ctx.rows = inputs[TENSORS:-1], inputs[-1]


def _backward(ctx: Any, grad: Tensor, grad_statistics: Tensor) -> tuple[Tensor | None, ...]:
    tensors, bias_wanted = ctx.saved_tensors, ctx.needs_input_grad[MASK]
    query, key, value, bias = torch.ops.nomax.attend_backward(
        grad, grad_statistics.contiguous() if ctx.rows else None, *tensors, *ctx.settings, bias_wanted
    )
    unused = len(ctx.needs_input_grad) - MASK - 1
    return query, key, value, bias.to(tensors[MASK].dtype) if bias_wanted else None, *(None,) * unused


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        'the fused CPU kernels have no second derivative. Call attention(..., backend="reference"), which has.'
    )


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], inputs[4])
    ctx.factor = inputs[3]


def _backward_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of q(kᵀv) are the same product with its parts in other places."""
    query, key, value, gain = ctx.saved_tensors
    linear, factors = torch.ops.nomax.attend_linear, (ctx.factor, gain)
    group = (key.shape[1], query.shape[1] // max(key.shape[1], 1))
    # Seen from a key, the rows of all the heads of its group are one long sequence.
    queries, grads = (x.unflatten(1, group).flatten(2, 3) for x in (query, grad))
    grad_key = linear(value, grads, queries, *factors)
    grad_value = linear(key, queries, grads, *factors)
    return linear(grad, value, key, *factors), grad_key, grad_value, None, None


def _vmap(operator: Any, out_dims: tuple[int, ...], before: int = 0) -> Any:
    """A vmap rule: the mapped dimension joins the batch; where that would change the meaning, one call after another.

    before: how many arguments stand before `query`.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        size, first_setting = info.batch_size, before + TENSORS
        dropout, packed = arguments[before + DROPOUT], arguments[first_setting - 1] is not None
        bias_wanted = bool(before) and arguments[-1]
        if dropout > 0 or packed or bias_wanted:
            results = [
                operator(*(x if d is None else x.select(d, i) for x, d in zip(arguments, in_dims, strict=True)))
                for i in range(size)
            ]
            return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(out_dims)
        query, query_dim = arguments[before], in_dims[before]
        batch = query.shape[0] if query_dim is None else query.movedim(query_dim, 0).shape[1]
        folded = []
        for place, (x, dim) in enumerate(zip(arguments, in_dims, strict=True)):
            if not isinstance(x, Tensor) or (dim is None and place > before + 2 and x.shape[0] == 1):
                folded.append(x)  # not a tensor, or one that is the same for the whole batch anyway
                continue
            statistics = place == 1 and before > 1
            x = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
            if statistics:
                folded.append(x.movedim(0, 1).flatten(1, 2).contiguous())
            else:
                folded.append(x.expand(size, batch, *x.shape[2:]).flatten(0, 1))
        results = operator(*folded)
        return tuple(
            x if x.dim() == 1 else x.unflatten(dim, (size, batch)) for x, dim in zip(results, out_dims, strict=True)
        ), tuple(None if x.dim() == 1 else dim for x, dim in zip(results, out_dims, strict=True))

    return rule


def _vmap_linear(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    query, key, value = (
        (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(arguments[:3], in_dims[:3], strict=True)
    )
    out = torch.ops.nomax.attend_linear(query, key, value, *arguments[3:])
    return out.unflatten(0, (info.batch_size, -1)), 0


# The counter's convention: a multiply and an add are two, and what a mask would spare is not taken off.
def _flops(query: Any, key: Any, value: Any, *rest: Any, **unused: Any) -> int:
    batch, heads, queries, dim = query
    return int(2 * batch * heads * queries * key[2] * (dim + value[3]))


def _flops_backward(grad: Any, statistics: Any, query: Any, key: Any, value: Any, *rest: Any, **unused: Any) -> int:
    batch, heads, queries, dim = query
    return int(2 * batch * heads * queries * key[2] * (3 * dim + 2 * value[3]))


def _flops_linear(query: Any, key: Any, value: Any, *rest: Any, **unused: Any) -> int:
    batch, heads, queries, dim = query
    return int(2 * batch * dim * value[3] * (heads * queries + key[1] * key[2]))
