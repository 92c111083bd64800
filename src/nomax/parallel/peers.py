"""Ways to attend to a split sequence, with softmax and with relu/L, that `measure` compares.

    keys travel      a ring: torch's context_parallel for softmax, ours for relu/L
    keys gathered    one gather of keys and values, whose gradient is a reduce-scatter: the same for both
    keys stay        queries gathered, partial outputs reduce-scattered; softmax must gather its rows' logarithms, too

torch's context_parallel enters through kernels of GPUs only, so we call the ring inside it with the kernel for CPUs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from nomax.ops.api import attention as attention_of_one
from nomax.parallel.api import ScheduleName, attention, gather
from nomax.parallel.layout import Layout
from nomax.parallel.ranks import Ranks

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


class _SoftmaxKeysStay(torch.autograd.Function):
    """Softmax in our reduce schedule: before partial outputs can be added, all ranks must know each row's whole sum."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> Tensor:
        ranks = Ranks(mesh)
        sizes = [query.shape[2]] * ranks.size
        queries = ranks.gather(query, sizes, 2).wait()
        partial = [flash(each, key, value) for each in queries]
        own = torch.stack([logarithm for _, logarithm in partial])
        logarithms = torch.stack(ranks.gather(own, [ranks.size] * ranks.size, 0).wait()).logsumexp(0)
        parts = [
            out.float() * (mine - whole).exp().unsqueeze(-1)
            for (out, mine), whole in zip(partial, logarithms, strict=True)
        ]
        out = ranks.reduce_scatter(parts, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logarithms)
        ctx.ranks = ranks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logarithms = ctx.saved_tensors
        ranks, width = ctx.ranks, query.shape[3]
        packed = torch.cat([query, out, grad], dim=3)
        gathered = ranks.gather(packed, [query.shape[2]] * ranks.size, 2).wait()
        grads = []
        for each, logarithm in zip(gathered, logarithms, strict=True):
            other, result, grad_out = (x.contiguous() for x in each.split([width, *[value.shape[3]] * 2], dim=3))
            grads.append(_flash_backward(grad_out, other, key, value, result, logarithm))
        queries, keys, values = zip(*grads, strict=True)
        total = [torch.stack([x.float() for x in each]).sum(0).to(key.dtype) for each in (keys, values)]
        own = ranks.reduce_scatter([x.float() for x in queries], 2)
        return own.to(query.dtype), *total, None


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
    ("softmax", "keys travel"): lambda q, k, v, mesh: _TorchRing.apply(q, k, v, mesh, "ALL_TO_ALL"),
    ("softmax", "keys travel, gathered first"): lambda q, k, v, mesh: _TorchRing.apply(q, k, v, mesh, "ALL_GATHER"),
    ("softmax", "keys gathered"): _keys_gathered(F.scaled_dot_product_attention),
    ("softmax", "keys stay"): lambda q, k, v, mesh: _SoftmaxKeysStay.apply(q, k, v, mesh),
    (PHI, "keys travel"): _ours("ring"),
    (PHI, "keys gathered"): _keys_gathered(lambda q, k, v: attention_of_one(q, k, v, phi=PHI)),
    (PHI, "keys stay"): _ours("reduce"),
}
"""By φ and schedule. "gathered first" is context_parallel's default: its backward pass still sends gradients round."""
