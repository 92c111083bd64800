"""`attention` over sequences that are split over ranks, `split` and `gather`, and `total`."""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from nomax.ops import backends
from nomax.ops.arguments import canonical, canonical_mask
from nomax.ops.problem import Rows, from_sums, hidden, wide
from nomax.parallel.layout import Layout
from nomax.parallel.ranks import Ranks
from nomax.parallel.schedules import Reduce, Ring, Schedule
from nomax.parallel.split_problem import GradientsOfSums, SplitProblem
from nomax.phi import ROW_MAPS, Phi

ScheduleName = Literal["auto", "ring", "reduce"]
SCHEDULES: dict[str, type[Schedule]] = {"ring": Ring, "reduce": Reduce}


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    mesh: DeviceMesh,
    schedule: ScheduleName = "auto",
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    backend: str | None = None,
    return_rows: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    mesh: DeviceMesh,
    schedule: ScheduleName = "auto",
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    backend: str | None = None,
    return_rows: Literal[True],
) -> tuple[Tensor, Rows]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    mesh: DeviceMesh,
    schedule: ScheduleName = "auto",
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    backend: str | None = None,
    return_rows: bool = False,
) -> Tensor | tuple[Tensor, Rows]:
    """Attend to sequences that are split over the ranks of a DeviceMesh: `nomax.attention` of the whole, in parts.

    Every rank calls it with the queries, keys and values of its own positions, and gets the outputs of its own queries.
    L counts the keys of all ranks, and dropout's coins are those of one process.

    attn_mask: as in `nomax.attention`, for this rank's queries and the keys of all ranks, in the order of the sequence:
        each dimension is 1 or that of [..., heads, queries of this rank, keys of all ranks].
    mesh: one dimension of a DeviceMesh, such as mesh["sequence"].
    schedule: "ring" passes keys and values from rank to rank; "reduce" gathers queries once, and adds up partial
        outputs; "auto" takes the one that sends less.
    layout, key_layout: which positions each rank holds, of the queries and of the keys (None: as of the queries). If
        both are None, ranks hold consecutive positions, and tell each other how many, at the cost of one exchange.
    """
    phi, ranks = Phi.parse(phi), Ranks(mesh)
    _check(phi, backend, return_rows, schedule)
    own, leading = canonical(
        query, key, value, None, is_causal, enable_gqa, activation=phi.activation, scale=scale, dropout=dropout_p
    )
    queries, keys = _layouts(ranks, layout, key_layout, own.query.shape[2], own.key.shape[2])
    mask = None if attn_mask is None else _mask(attn_mask, is_causal, own.query, keys.length, leading)
    seed = None
    if dropout_p > 0:  # every rank draws, so that generators that were alike stay so
        seed = torch.randint(2**63 - 1, (), device="cpu")
        seed = ranks.from_first(seed.to(ranks.mesh.device_type)).cpu()
    problem = SplitProblem(
        phi=phi,
        queries=queries,
        keys=keys,
        scale=own.scale,
        causal=is_causal,
        mask=mask if mask is None else mask.detach(),
        dropout=dropout_p,
        seed=seed,
        rows=return_rows,
        backend=backend,
    )
    chosen = _choose(schedule, problem, own.query, own.key, own.value)
    out, *sums = _Attend.apply(own.query, own.key, own.value, mask, SCHEDULES[chosen](ranks, problem))
    if leading is not None:
        out = out.reshape(*leading, *out.shape[-2:])
    if not return_rows:
        return out
    factors = problem.factors(ranks.rank, own.query)
    rows = from_sums(sums[0], sums[1], factors.gain if factors.row_gain is None else factors.row_gain)
    if leading is not None:
        rows = Rows(*(row.reshape(*leading, row.shape[-1]) for row in rows))
    return out, rows


def split(x: Tensor, mesh: DeviceMesh, dim: int, layout: Layout | None = None) -> Tensor:
    """Return this rank's part of a tensor that every rank has: consecutive positions, unless a layout says otherwise.

    Nothing is sent. Each rank's gradient of x is that of its own part, zero elsewhere.
    """
    ranks = Ranks(mesh)
    return (layout or Layout.contiguous(x.shape[dim], ranks.size)).local(x, ranks.rank, dim)


def gather(x: Tensor, mesh: DeviceMesh, dim: int, layout: Layout | None = None) -> Tensor:
    """Return the whole of a tensor that is split over the ranks, on every rank.

    The gradient of each part is the sum of what the ranks have for it, so that the mean over ranks that data
    parallelism takes of gradients is right, whether ranks compute the same of the whole, or each of its own part.
    """
    ranks = Ranks(mesh)
    if layout is None:
        layout = Layout.sized([size for (size,) in ranks.sizes(x.shape[dim])])
    _check_layout("layout", layout, ranks, x.shape[dim])
    return _Gather.apply(x, ranks, dim % x.dim(), layout)


def total(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of a tensor over the ranks, on every rank: of losses and counts of each rank's own tokens, say.

    The gradient of each summand is the sum of what the ranks have for the total, as in `gather`.
    """
    return _Total.apply(x, Ranks(mesh))


class _Attend(torch.autograd.Function):
    """Run a schedule, forwards and backwards."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, schedule: Schedule
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(query, key, value)
        ctx.schedule, ctx.mask_shape = schedule, None if mask is None else mask.shape
        ctx.set_materialize_grads(False)
        return schedule.forward(query, key, value).results(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor | None, *sums: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value = tensors = ctx.saved_tensors
        if out is None:
            out = query.new_zeros(*query.shape[:3], value.shape[3])
        if all(each is None for each in sums):
            sums = ()
        whole = tuple(query.new_zeros(query.shape[:3], dtype=wide(query)) if x is None else x for x in sums)
        bias = torch.zeros(ctx.mask_shape, dtype=wide(query), device=query.device) if ctx.needs_input_grad[3] else None
        grads = ctx.schedule.backward(query, key, value, GradientsOfSums(out, *whole), bias)
        return *(grad.to(x.dtype) for grad, x in zip(grads, tensors, strict=True)), bias, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int, layout: Layout) -> Tensor:
        ctx.ranks, ctx.dim, ctx.layout = ranks, dim, layout
        return layout.whole(ranks.gather(x, layout.sizes, dim).wait(), dim) if ranks.size > 1 else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = grad.to(wide(grad))  # many small numbers may be added up
        parts = [ctx.layout.local(whole, rank, ctx.dim) for rank in range(ctx.ranks.size)]
        return ctx.ranks.reduce_scatter(parts, ctx.dim).to(grad.dtype), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.all_reduce(grad), None


def _check(phi: Phi, backend: str | None, return_rows: bool, schedule: str) -> None:
    if phi.activation in ROW_MAPS:
        raise ValueError(
            f"phi={str(phi)!r} normalises whole rows, so its parts do not add up. Use a pointwise φ such as "
            '"relu/L"; for softmax, torch.distributed.tensor.experimental has context_parallel.'
        )
    backends.check(phi, backend, return_rows)
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule={schedule!r} is unknown; choose one of auto, {', '.join(SCHEDULES)}.")


def _layouts(
    ranks: Ranks, layout: Layout | None, key_layout: Layout | None, queries: int, keys: int
) -> tuple[Layout, Layout]:
    if layout is None and key_layout is None:
        of_queries, of_keys = zip(*ranks.sizes(queries, keys), strict=True)
        return Layout.sized(of_queries), Layout.sized(of_keys)
    if layout is None:
        raise ValueError("key_layout was given without layout, that of the queries.")
    key_layout = layout if key_layout is None else key_layout
    _check_layout("layout", layout, ranks, queries)
    _check_layout("key_layout", key_layout, ranks, keys)
    return layout, key_layout


def _check_layout(name: str, layout: Layout, ranks: Ranks, size: int) -> None:
    if layout.ranks != ranks.size:
        raise ValueError(f"{name} is for {layout.ranks} ranks, but the mesh has {ranks.size}.")
    if layout.sizes[ranks.rank] != size:
        raise ValueError(
            f"{name} gives rank {ranks.rank} of {ranks.size} {layout.sizes[ranks.rank]} of {layout.length} positions, "
            f"but it has {size}. nomax.parallel.split cuts a tensor as a layout says."
        )


def _mask(attn_mask: Tensor, is_causal: bool, query: Tensor, keys: int, leading: tuple[int, ...] | None) -> Tensor:
    """Return the mask in canonical form, floats in at least float32."""
    mask, _ = canonical_mask(attn_mask, is_causal, query, query.new_empty(()).expand(1, 1, keys, 1), leading)
    if mask is None:
        raise ValueError(
            "attn_mask is a causal bias, which does not know which positions this rank holds. Pass is_causal=True, or "
            "a boolean mask [queries of this rank, keys of all ranks]."
        )
    if mask.dtype in (torch.float16, torch.bfloat16):  # whose minimum is not that of float32, but -inf is
        return mask.to(wide(query)).masked_fill(hidden(mask), -torch.inf)
    return mask


def _choose(schedule: str, problem: SplitProblem, query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return the name of the schedule: the same on all ranks, from what all of them know."""
    mask = problem.mask
    if schedule == "reduce" and mask is not None and mask.shape[2] != 1:
        raise ValueError(
            f"schedule='reduce' gathers the queries, but not their masks: attn_mask has {mask.shape[2]} rows. Use "
            "schedule='ring', or a mask that is the same for all queries."
        )
    if schedule != "auto":
        return schedule
    if mask is not None and (mask.shape[2] != 1 or 1 in problem.queries.sizes):  # a rank's one row may be one of many
        return "ring"
    ring, reduce = sent(problem, query, key, value, backwards=torch.is_grad_enabled())
    return "ring" if ring <= reduce else "reduce"


def sent(problem: SplitProblem, query: Tensor, key: Tensor, value: Tensor, backwards: bool) -> tuple[float, float]:
    """Return how many bytes a rank sends in a ring and in the reduce schedule, on average."""
    size, wide_size = query.element_size(), wide(query).itemsize
    (batch, heads, _, dim), key_heads, value_dim = query.shape, key.shape[1], value.shape[3]
    keys = batch * key_heads * problem.keys.length
    queries = batch * heads * problem.queries.length
    ring = keys * (dim + value_dim) * size
    reduce = queries * (dim * size + value_dim * wide_size)
    if backwards:
        ring += keys * (dim + value_dim) * (size + wide_size)
        reduce += queries * ((dim + value_dim) * size + dim * wide_size)
    ranks = problem.keys.ranks
    return ring * (ranks - 1) / ranks, reduce * (ranks - 1) / ranks
