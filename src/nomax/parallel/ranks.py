"""What ranks tell each other: messages round a ring, and collectives of unequal parts, with errors that name the cause.

Parts of unequal size are padded to the largest in collectives, and sent as they are in messages.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed these two, and warns of the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Ranks:
    """The processes among which a sequence is split: one dimension of a DeviceMesh."""

    mesh: DeviceMesh = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise TypeError(
                f"mesh must be a torch.distributed DeviceMesh, got a {type(self.mesh).__name__}. Make one with "
                'torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("sequence",)).'
            )
        if self.mesh.ndim != 1:
            names = self.mesh.mesh_dim_names
            raise ValueError(
                f"mesh has {self.mesh.ndim} dimensions{f', {names}' if names else ''}: give the one along which the "
                "sequence is split, such as mesh['sequence']."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # a copy of a model belongs to the same processes

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """Return the process group of this dimension of the mesh."""
        return self.mesh.get_group()

    @cached_property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.mesh.size()

    @cached_property
    def rank(self) -> int:
        """Return the place of this process among them."""
        return self.mesh.get_local_rank()

    def pass_on(self, sent: Tensor, size: int, tag: int = 0) -> "Arrival":
        """Send a flat tensor to the next rank, and receive one of another size from the rank before; do not wait."""
        received = sent.new_empty(size)
        operations = []
        if sent.numel():
            operations.append(self._operation(dist.isend, sent, self.rank + 1, tag))
        if size:
            operations.append(self._operation(dist.irecv, received, self.rank - 1, tag))
        with self.in_contact("passing keys and values round the ring"):
            return Arrival(self, received, dist.batch_isend_irecv(operations) if operations else [], sent)

    def gather(self, part: Tensor, sizes: Sequence[int], dim: int) -> "Gathering":
        """Gather the parts of all ranks, of these sizes in one dimension; do not wait."""
        padded = _padded(part, max(sizes), dim).contiguous()
        gathered = padded.new_empty(self.size * padded.numel())
        with self.in_contact("gathering"):
            work = _all_gather(gathered, padded.flatten(), group=self.group, async_op=True)
        return Gathering(self, gathered.view(self.size, *padded.shape), work, tuple(sizes), dim)

    def reduce_scatter(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Add up what all ranks have for each rank, and return the sum for this one."""
        if self.size == 1:
            return parts[0]
        largest = max(part.shape[dim] for part in parts)
        stacked = torch.stack([_padded(part, largest, dim) for part in parts])
        own = stacked.new_empty(stacked[0].numel())
        with self.in_contact("adding up partial sums"):
            _reduce_scatter(own, stacked.flatten(), group=self.group)
        return own.view(stacked.shape[1:]).narrow(dim, 0, parts[self.rank].shape[dim])

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        total = x.clone()
        if self.size > 1:
            with self.in_contact("adding up"):
                dist.all_reduce(total, group=self.group)
        return total

    def from_first(self, x: Tensor) -> Tensor:
        """Return the first rank's tensor on every rank."""
        if self.size > 1:
            with self.in_contact("broadcasting"):
                dist.broadcast(x, group=self.group, group_src=0)
        return x

    def sizes(self, *own: int) -> list[list[int]]:
        """Return some sizes of every rank."""
        if self.size == 1:
            return [list(own)]
        part = torch.tensor(own, device=self.mesh.device_type)
        return torch.stack(self.gather(part, [len(own)] * self.size, 0).wait()).tolist()

    @contextmanager
    def in_contact(self, doing: str) -> Iterator[None]:
        """Turn the error of a rank that no longer answers into one that says so."""
        try:
            yield
        except RuntimeError as error:
            name = (self.mesh.mesh_dim_names or ("sequence",))[0]
            raise RuntimeError(
                f"rank {dist.get_rank()} lost contact while {doing} among ranks {self.mesh.mesh.tolist()} of mesh "
                f"dimension {name!r}: one of them has probably died, failed, or called with other arguments, and its "
                f"own output says why. torch reports: {str(error).splitlines()[0]}"
            ) from error

    def _operation(self, kind: Callable[..., Any], x: Tensor, peer: int, tag: int) -> dist.P2POp:
        return dist.P2POp(kind, x, group=self.group, tag=tag, group_peer=peer % self.size)


@dataclass(frozen=True)
class Arrival:
    """A message that is under way, and the one that was sent at the same time."""

    ranks: Ranks
    received: Tensor
    work: list[Any]
    sent: Tensor  # kept until it has been sent

    def wait(self) -> Tensor:
        """Return the message, once it is here."""
        with self.ranks.in_contact("waiting for keys and values of the rank before"):
            for work in self.work:
                work.wait()
        return self.received


@dataclass(frozen=True)
class Gathering:
    """Parts of all ranks that are being gathered."""

    ranks: Ranks
    gathered: Tensor  # [ranks, ...], padded
    work: Any
    sizes: tuple[int, ...]
    dim: int

    def wait(self) -> list[Tensor]:
        """Return the parts, once they are here."""
        with self.ranks.in_contact("waiting for what is gathered"):
            self.work.wait()
        return [part.narrow(self.dim, 0, size) for part, size in zip(self.gathered, self.sizes, strict=True)]


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
