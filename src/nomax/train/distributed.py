"""One process or many: find our rank under torchrun, and spread a model over the ranks."""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

MEETING = 1800.0  # seconds that a rank waits for rank 0, as long as torch would


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Return whether this process is the one that writes files and prints."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Add up numbers over the ranks, in float64."""
        tensors = [torch.as_tensor(value, device=self.device).detach().double() for value in values.values()]
        total = torch.stack(tensors)
        if self.size > 1:
            dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def from_leader(self, value: Any) -> Any:
        """Return the leading rank's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank, in the order of the ranks."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value)
        return box


def resolve_device(device: str) -> str:
    """Return the device itself, or for "auto" a GPU if there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def check_device(device: str, here: bool = True) -> None:
    """Raise a ValueError unless torch knows the device and, if it should be here, can make a tensor on it."""
    try:
        known = torch.device(resolve_device(device))
        if here:
            torch.zeros(1, device=known).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition(". ")[0].partition("\n")[0]
        raise ValueError(f"--device {device} cannot be used here: {reason}. Give cpu, or leave it out.") from error


@contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """Join the processes that torchrun started, if any; "auto" takes a GPU if there is one."""
    kind = resolve_device(device)
    if "RANK" not in os.environ:
        yield World(torch.device(kind))
        return
    if kind == "cuda":
        kind = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(kind)
    started = not dist.is_initialized()
    if started:
        shared, rank, size = next(rendezvous("env://"))
        backend = "nccl" if kind.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=new_round(shared, rank, size), rank=rank, world_size=size)
    try:
        yield World(torch.device(kind), dist.get_rank(), dist.get_world_size())
    finally:
        if started:
            dist.destroy_process_group()


def new_round(store: Store, rank: int, size: int) -> Store:
    """Return the processes' shared store, under a prefix that this round of theirs has for itself.

    When torchrun restarts processes, their store still has the addresses of those before, and who reads them waits for
    somebody who is gone. torchrun's own count of restarts differs between machines. So rank 0 counts the rounds, and
    the others wait until it has answered with a word that only they know: a rank 0 that is gone answers nobody.
    """
    if rank == 0:
        number = store.add("nomax/rounds", 1)
        for other in range(1, size):
            store.set(f"nomax/{number}/answer/{other}", store.get(f"nomax/{number}/hello/{other}").decode())
        return PrefixStore(f"nomax/{number}", store)
    word, deadline = secrets.token_hex(8), time.monotonic() + MEETING
    while time.monotonic() < deadline:
        number = store.add("nomax/rounds", 0)
        store.set(f"nomax/{number}/hello/{rank}", word)
        answer = f"nomax/{number}/answer/{rank}"
        if store.check([answer]) and store.get(answer).decode() == word:
            return PrefixStore(f"nomax/{number}", store)
        time.sleep(0.05)
    raise TimeoutError(f"rank {rank} of {size} waited {MEETING:.0f} seconds for rank 0, which did not come.")


def layers(model: nn.Module) -> list[nn.Module]:
    """List the repeated layers of a model, the members of its module lists: the blocks of a transformer."""
    return [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]


def compile_layers(model: nn.Module, backend: Any = "inductor") -> None:
    """Compile a model layer by layer, in place; layers of the same shape share their code."""
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward, backend=backend)


def checkpoint_activations(model: nn.Module) -> None:
    """Let every layer keep its inputs only, and run again in the backward pass, with the same random numbers."""
    for layer in layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def shard(model: nn.Module) -> None:
    """Spread the parameters over the ranks, layer by layer, in place."""
    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)


def replicate(model: nn.Module, world: World) -> nn.Module:
    """Wrap a model that every rank holds in full, so that training averages the gradients."""
    return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)


def synchronised(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Exchange gradients only in the last backward pass of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def resharded(model: nn.Module) -> None:
    """Reshard the parameters that a forward pass without a backward pass has left gathered."""
    if isinstance(model, FSDPModule):
        model.reshard()
