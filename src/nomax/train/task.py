"""What the loop needs to know about the thing it trains."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from nomax.train.distributed import World

Batch = TypeVar("Batch")


class Task(Protocol[Batch]):
    """A model, its data and its loss. Everything here is a pure function of the step, so the step is all the state."""

    model: nn.Module
    """The model to train, not yet wrapped, on any device."""
    unit: str
    """What is counted, in the plural: "images", "tokens"."""

    def batches(self, start: int, world: World) -> Iterator[Batch]:
        """This rank's part of the batch of step `start`, of the step after it, and so on without end."""
        ...

    def size(self, batch: Batch) -> int:
        """How many units a batch holds: the loss is the mean over the units of all ranks."""
        ...

    def split(self, batch: Batch, parts: int) -> Iterable[Batch]:
        """The same batch in at most so many smaller ones, for gradient accumulation."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the batch's units: "loss", with its gradient, and whatever else is worth watching."""
        ...

    def evaluation(self, world: World) -> Iterator[Batch]:
        """This rank's part of the test data, once; as many batches (perhaps empty ones) on every rank."""
        ...

    def describe(self, step: int) -> dict[str, Any]:
        """Which data the batch of this step holds, as JSON, for the report when something went wrong with it."""
        ...
