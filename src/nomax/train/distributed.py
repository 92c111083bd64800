"""One process or many: who we are under torchrun, and how a model is spread over the ranks."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Say whether this is the process that writes files and talks."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Add up numbers over the ranks, in float64."""
        tensors = [torch.as_tensor(value, device=self.device).detach().double() for value in values.values()]
        total = torch.stack(tensors)
        if self.size > 1:
            dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def from_leader(self, value: Any) -> Any:
        """Return, on every rank, what the leading rank has here."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return, on every rank, what each rank has here, in the order of the ranks."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value)
        return box


def resolve_device(device: str) -> str:
    """Return the device itself, or for "auto" a GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def check_device(device: str, here: bool = True) -> None:
    """Raise a ValueError unless torch knows such a device and, if it is to be here, can make a tensor there."""
    try:
        known = torch.device(resolve_device(device))
        if here:
            torch.zeros(1, device=known).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).partition(". ")[0].partition("\n")[0]
        raise ValueError(f"--device {device} cannot be used here: {said}. Give cpu, or leave it out.") from error


@contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """Join the processes that torchrun started, if it did; "auto" takes a GPU where there is one."""
    kind = resolve_device(device)
    if "RANK" not in os.environ:
        yield World(torch.device(kind))
        return
    if kind == "cuda":
        kind = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(kind)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if kind.startswith("cuda") else "gloo")
    try:
        yield World(torch.device(kind), dist.get_rank(), dist.get_world_size())
    finally:
        if started:
            dist.destroy_process_group()


def layers(model: nn.Module) -> list[nn.Module]:
    """List the repeated layers of a model, the members of its module lists, which are sharded one by one."""
    return [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]


def shard(model: nn.Module) -> None:
    """Spread the parameters over the ranks, layer by layer, in place."""
    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)


def replicate(model: nn.Module, world: World) -> nn.Module:
    """Wrap a model that every rank holds as a whole, to be called in training: it averages the gradients."""
    return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)


def synchronised(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Exchange gradients in the last backward pass of a step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def resharded(model: nn.Module) -> None:
    """Give back the parameters that a forward pass without a backward pass has left whole."""
    if isinstance(model, FSDPModule):
        model.reshard()
