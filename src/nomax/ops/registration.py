"""What torch is told of a backend's operator `attend`: its arguments, shapes, gradients, vmap rule and operations."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nomax.ops.problem import Problem
from nomax.phi import ACTIVATIONS


class Arguments(NamedTuple):
    """The arguments of `attend`, in the order of the schema in csrc/binding.cpp. torch hands them over as a tuple.

    `attend_backward` has the gradients of the output and of the statistics before them, and `last` says whether the
    gradient of the bias is wanted.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    row_gain: Tensor | None
    row_shift: Tensor | None
    seed: Tensor | None
    query_offsets: Tensor | None
    key_offsets: Tensor | None
    activation: int
    scale: float
    gain: float
    shift: float
    diagonal: int | None
    dropout: float
    last: bool  # rows, if forward


CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
TENSORS = Arguments._fields.index("activation")  # as many of them are tensors
MASK = Arguments._fields.index("mask")
NO_TENSORS = (None,) * (TENSORS - MASK)  # neither mask nor whatever else only some calls have
WITHOUT_GRADIENT = (None,) * (len(Arguments._fields) - MASK - 1)
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? row_gain, Tensor? row_shift, Tensor? seed, "
    "Tensor? query_offsets, Tensor? key_offsets, int activation, float scale, float gain, float shift, "
    "SymInt? diagonal, float dropout, bool last"
)


def inputs_of(problem: Problem) -> tuple[Any, ...]:
    """Return the arguments of `attend` but for the last."""
    query_offsets, key_offsets = problem.query_offsets, problem.key_offsets
    if query_offsets is not None and key_offsets is not None:
        query_offsets, key_offsets = query_offsets.long().contiguous(), key_offsets.long().contiguous()
    return (
        problem.query, problem.key, problem.value, problem.mask, problem.row_gain, problem.row_shift, problem.seed,
        query_offsets, key_offsets, CODES[problem.activation], problem.scale, problem.gain, problem.shift,
        problem.diagonal, problem.dropout,
    )  # fmt: skip


def register(namespace: str, kernels: str) -> None:
    """Tell torch of attend and attend_backward, which are defined already, all but how to compute them.

    kernels: what they are called in an error.
    """
    operators, name = getattr(torch.ops, namespace), f"{namespace}::attend"
    describe(f"{name}", forward=True)
    describe(f"{name}_backward", forward=False)

    def gradients(ctx: Any, grad: Tensor, grad_statistics: Tensor) -> tuple[Tensor | None, ...]:
        return gradients_of(ctx, operators.attend_backward, grad, grad_statistics if ctx.rows else None)

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            f'the {kernels} have no second derivative. Call attention(..., backend="reference"), which has.'
        )

    torch.library.register_autograd(name, gradients, setup_context=save)
    torch.library.register_autograd(f"{name}_backward", refuse, setup_context=lambda ctx, inputs, output: None)


def describe(name: str, *, forward: bool) -> None:
    """Register shapes, vmap rule and operations of an operator that has the arguments of attend, or its gradient's."""
    namespace, _, short = name.partition("::")
    operator = getattr(getattr(torch.ops, namespace), short)
    torch.library.register_fake(name, shapes if forward else shapes_backward)
    torch.library.register_vmap(name, _vmap(operator, (0, 1) if forward else (0,) * 4, before=0 if forward else 2))
    register_flop_formula(operator, get_raw=False)(_flops if forward else _flops_backward)


def describe_plain(name: str) -> None:
    """Register shapes and operations of an operator with the arguments of the plainest call, and of its gradient."""
    namespace, _, short = name.partition("::")
    operators = getattr(torch.ops, namespace)
    torch.library.register_fake(name, lambda query, key, value, *settings: output(query, value))
    torch.library.register_fake(f"{name}_gradients", lambda grad, *inputs: tuple(map(torch.empty_like, inputs[:3])))
    register_flop_formula(getattr(operators, short), get_raw=False)(_flops)
    gradients = getattr(operators, f"{short}_gradients")
    register_flop_formula(gradients, get_raw=False)(lambda grad, *inputs, **rest: _flops_backward(grad, None, *inputs))


def shapes(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return results of attend without their numbers."""
    call = Arguments(*inputs)
    batch, heads, queries, _ = call.query.shape
    statistics = call.query.new_empty(2 if call.last else 0, batch, heads, queries, dtype=torch.float32)
    return output(call.query, call.value), statistics


def output(query: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty output: heads next to each other, as F.scaled_dot_product_attention has it, to join as a view."""
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[-1], dtype=dtype or query.dtype).transpose(1, 2)


def shapes_backward(grad: Tensor, grad_statistics: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    """Return results of attend_backward without their numbers."""
    call = Arguments(*inputs)
    shape = call.mask.shape if call.last and call.mask is not None else (0,)
    bias = call.query.new_empty(shape, dtype=torch.float32)
    return torch.empty_like(call.query), torch.empty_like(call.key), torch.empty_like(call.value), bias


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient needs: the inputs."""
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.settings, ctx.rows = inputs[TENSORS:-1], inputs[-1]


def gradients_of(ctx: Any, operator: Any, grad: Tensor, grad_statistics: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs, by attend_backward or an operator like it."""
    tensors, bias_wanted = ctx.saved_tensors, ctx.needs_input_grad[MASK]
    if grad_statistics is not None:
        grad_statistics = grad_statistics.contiguous()
    query, key, value, bias = operator(grad, grad_statistics, *tensors, *ctx.settings, bias_wanted)
    return query, key, value, bias.to(tensors[MASK].dtype) if bias_wanted else None, *WITHOUT_GRADIENT


def _vmap(operator: Any, out_dims: tuple[int, ...], before: int) -> Any:
    """Return a vmap rule: the mapped dimension joins the batch; where that would change the meaning, call one by one.

    before: how many arguments stand before `query`.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        size, call = info.batch_size, Arguments(*inputs[before:])
        bias_wanted = bool(before) and call.last
        if call.dropout > 0 or call.key_offsets is not None or bias_wanted:
            results = [
                operator(*(x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims, strict=True)))
                for i in range(size)
            ]
            return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(out_dims)
        query_dim = in_dims[before]
        batch = call.query.shape[0] if query_dim is None else call.query.movedim(query_dim, 0).shape[1]
        folded = []
        for place, (x, dim) in enumerate(zip(inputs, in_dims, strict=True)):
            if not isinstance(x, Tensor) or (dim is None and place >= before + MASK and x.shape[0] == 1):
                folded.append(x)  # not a tensor, or one that is the same for the whole batch anyway
                continue
            x = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
            if before and place == 1:  # the gradients of the statistics, whose batch is their second dimension
                folded.append(x.movedim(0, 1).flatten(1, 2).contiguous())
            else:
                folded.append(x.expand(size, batch, *x.shape[2:]).flatten(0, 1))
        results = operator(*folded)
        return tuple(
            x if x.dim() == 1 else x.unflatten(dim, (size, batch)) for x, dim in zip(results, out_dims, strict=True)
        ), tuple(None if x.dim() == 1 else dim for x, dim in zip(results, out_dims, strict=True))

    return rule


# The counter's convention: a multiply and an add are two, and what a mask would spare is not taken off.
def _flops(query: Any, key: Any, value: Any, *rest: Any, **unused: Any) -> int:
    batch, heads, queries, dim = query
    return int(2 * batch * heads * queries * key[2] * (dim + value[3]))


def _flops_backward(grad: Any, grad_statistics: Any, *inputs: Any, **unused: Any) -> int:
    query, key, value = inputs[:3]
    batch, heads, queries, dim = query
    return int(2 * batch * heads * queries * key[2] * (3 * dim + 2 * value[3]))
