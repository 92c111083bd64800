"""Ways to attend to a split sequence, with softmax and with relu/L, that `measure` compares.

    keys travel      a ring: ours for both, and the one of torch's context_parallel for softmax
    keys gathered    one gather of keys and values, whose gradient is a reduce-scatter: the same for both
    keys stay        queries gathered; partial outputs are reduce-scattered, or, softmax's, exchanged and merged

torch's context_parallel enters through kernels of GPUs only, so we call the ring inside it with the kernel for CPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from nomax.ops.api import attention as attention_of_one
from nomax.parallel.api import ScheduleName, attention, gather
from nomax.parallel.layout import Layout
from nomax.parallel.ranks import Ranks
from nomax.parallel.schedules import Ring
from nomax.parallel.split_problem import GradientsOfSums
from nomax.phi import SOFTMAX

Way = Callable[[Tensor, Tensor, Tensor, DeviceMesh], Tensor]
PHI = "relu/L"


def flash(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Return softmax attention, and the logarithm of each row's sum."""
    out, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False)
    return out, logarithm


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, False
    )
    return grads[0], grads[1], grads[2]


class _TorchRing(torch.autograd.Function):
    """The ring of torch.distributed.tensor.experimental.context_parallel, with its own merging of partial results."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh, rotate: str) -> Tensor:
        ring = _torch_ring(rotate)
        out, logarithm = ring._templated_ring_attention(mesh.get_group(), 2, flash, query, key, value)
        ctx.save_for_backward(query, key, value, out, logarithm)
        ctx.mesh, ctx.rotate = mesh, rotate
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring = _torch_ring(ctx.rotate)
        query, key, value, out, logarithm = ctx.saved_tensors
        grads = ring._templated_ring_attention_backward(
            ctx.mesh.get_group(), 2, _flash_backward, grad.contiguous(), "grad_out", query, key, value, out, logarithm,
            False,
        )  # fmt: skip
        return *grads[:3], None, None


def _torch_ring(rotate: str) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = False  # which is for causal attention only
    ring._cp_options.rotate_method = ring._RotateMethod[rotate]
    return ring


class Merged:
    """Softmax's partial results of some queries, merged as they come: outputs in float32, and logarithms of sums."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self.out = torch.zeros(*query.shape[:3], value.shape[3], device=query.device)
        self.logarithm = torch.full(query.shape[:3], -torch.inf, device=query.device)

    def merge(self, out: Tensor, logarithm: Tensor) -> None:
        """Add the result over some more keys."""
        whole = torch.logaddexp(self.logarithm, logarithm)
        kept, share = (self.logarithm - whole).exp(), (logarithm - whole).exp()
        self.out = self.out * kept.unsqueeze(-1) + out * share.unsqueeze(-1)
        self.logarithm = whole


@dataclass(frozen=True)
class _SoftmaxParts:
    """What a ring asks of `SplitProblem`, for softmax: `out` and `logarithm` are those of the finished rows."""

    keys: Layout
    out: Tensor | None = None
    logarithm: Tensor | None = None

    def sums(self, query: Tensor, value: Tensor) -> Merged:
        return Merged(query, value)

    def forward(self, sums: Merged, query: Tensor, key: Tensor, value: Tensor, ranks: tuple[int, int]) -> None:
        sums.merge(*flash(query, key, value))

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, ranks: Any, grads: GradientsOfSums, mask: None
    ) -> tuple[Tensor, ...]:
        assert self.out is not None
        assert self.logarithm is not None
        results = _flash_backward(grads.out, query, key, value, self.out, self.logarithm)
        return tuple(x.float() for x in results)


class _SoftmaxRing(torch.autograd.Function):
    """Softmax in our own ring, which sends gradients one step less far than torch's."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.ranks, ctx.keys = Ranks(mesh), Layout.sized([key.shape[2]] * mesh.size())
        merged: Any = _ring(ctx.ranks, _SoftmaxParts(ctx.keys)).forward(query, key, value)
        out: Tensor = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.logarithm)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logarithm = ctx.saved_tensors
        ring = _ring(ctx.ranks, _SoftmaxParts(ctx.keys, out, logarithm))
        grads = ring.backward(query, key, value, GradientsOfSums(grad.contiguous()), None)
        return *(x.to(query.dtype) for x in grads), None


def _ring(ranks: Ranks, parts: Any) -> Ring:
    return Ring(ranks, parts)


class _SoftmaxKeysStay(torch.autograd.Function):
    """Softmax where keys stay: partial outputs do not add up until all know each row's whole sum.

    Either each rank gets the partial outputs of its rows, with their sums, in one all-to-all, and merges them; or the
    sums are gathered first, and then partial outputs can be reduce-scattered. Both send the same partial outputs.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh, sums_first: bool) -> Tensor:
        ranks = ctx.ranks = Ranks(mesh)
        queries = ranks.gather(query, [query.shape[2]] * ranks.size, 2).wait()
        partial = [flash(each, key, value) for each in queries]
        if sums_first:
            own = torch.stack([logarithm for _, logarithm in partial])
            logarithms = torch.stack(ranks.gather(own, [ranks.size] * ranks.size, 0).wait()).logsumexp(0)
            parts = [
                out.float() * (mine - whole).exp().unsqueeze(-1)
                for (out, mine), whole in zip(partial, logarithms, strict=True)
            ]
            out, logarithm = ranks.reduce_scatter(parts, 2), logarithms[ranks.rank]
        else:
            sent = torch.stack([torch.cat([out.float(), row.unsqueeze(-1)], 3) for out, row in partial])
            merged = Merged(query, value)
            for each in _all_to_all(ranks, sent):
                merged.merge(each[..., :-1], each[..., -1])
            out, logarithm = merged.out, merged.logarithm
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logarithm)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logarithm = ctx.saved_tensors
        ranks, sizes = ctx.ranks, [query.shape[3], value.shape[3]]
        # Two numbers of each row travel with queries and gradients, as bytes of their dtype.
        product = (out.float() * grad.float()).sum(-1)
        numbers = torch.stack([logarithm, product], -1).view(query.dtype)
        packed = torch.cat([query, grad, numbers], dim=3)
        gathered = ranks.gather(packed, [query.shape[2]] * ranks.size, 2).wait()
        grads = []
        for each in gathered:
            other, grad_out, rest = (x.contiguous() for x in each.split([*sizes, numbers.shape[3]], dim=3))
            row, product = rest.view(torch.float32).unbind(-1)
            # The kernel needs outputs only for Σ out·grad, so any that have this sum will do.
            square = grad_out.float().square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
            stand_in = (grad_out * (product / square).unsqueeze(-1)).to(query.dtype)
            grads.append(_flash_backward(grad_out, other, key, value, stand_in, row.contiguous()))
        queries, keys, values = zip(*grads, strict=True)
        total = [torch.stack([x.float() for x in each]).sum(0).to(key.dtype) for each in (keys, values)]
        own = ranks.reduce_scatter([x.float() for x in queries], 2)
        return own.to(query.dtype), *total, None, None


def _all_to_all(ranks: Ranks, sent: Tensor) -> Tensor:
    """Send sent[i] to rank i, and return what each rank has sent to this one."""
    if ranks.size == 1:
        return sent
    received = torch.empty_like(sent)
    with ranks.in_contact("exchanging partial outputs"):
        dist.all_to_all_single(received, sent, group=ranks.group)
    return received


def _keys_gathered(operation: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Way:
    def way(query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> Tensor:
        both = gather(torch.cat([key, value], dim=3), mesh, 2, Layout.sized([key.shape[2]] * mesh.size()))
        return operation(query, *both.split([key.shape[3], value.shape[3]], dim=3))

    return way


def _ours(schedule: ScheduleName) -> Way:
    def way(query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> Tensor:
        layout = Layout.sized([query.shape[2]] * mesh.size())
        return attention(query, key, value, phi=PHI, mesh=mesh, schedule=schedule, layout=layout)

    return way


WAYS: dict[tuple[str, str], Way] = {
    (SOFTMAX, "keys travel"): lambda q, k, v, mesh: _SoftmaxRing.apply(q, k, v, mesh),
    (SOFTMAX, "keys travel, torch"): lambda q, k, v, mesh: _TorchRing.apply(q, k, v, mesh, "ALL_TO_ALL"),
    (SOFTMAX, "keys gathered, torch"): lambda q, k, v, mesh: _TorchRing.apply(q, k, v, mesh, "ALL_GATHER"),
    (SOFTMAX, "keys gathered"): _keys_gathered(F.scaled_dot_product_attention),
    (SOFTMAX, "keys stay"): lambda q, k, v, mesh: _SoftmaxKeysStay.apply(q, k, v, mesh, False),
    (SOFTMAX, "keys stay, sums first"): lambda q, k, v, mesh: _SoftmaxKeysStay.apply(q, k, v, mesh, True),
    (PHI, "keys travel"): _ours("ring"),
    (PHI, "keys gathered"): _keys_gathered(lambda q, k, v: attention_of_one(q, k, v, phi=PHI)),
    (PHI, "keys stay"): _ours("reduce"),
}
"""By φ and schedule. "keys gathered, torch" is context_parallel's default: its backward pass sends gradients round."""

HELD = {"keys travel": "keys of two ranks", "keys gathered": "all keys", "keys stay": "all queries"}
"""What a rank holds of the others' at a time, by the first words of a schedule: those of one memory are compared."""
