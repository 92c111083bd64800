"""Batches for training and evaluation: the same for any number of workers and ranks, from any step.

The parent process knows the order. A worker gets a list of positions and images, makes them into bytes and sends those;
the parent puts a batch together, turns it into float32 and mixes it, as a whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from nomax.data.images.transforms import Augment, Evaluation
from nomax.data.images.workers import Made, Maker, Request, log, made_by
from nomax.data.order import Order
from nomax.data.source import DataError, Source

Result = TypeVar("Result")


@dataclass(frozen=True)
class Batch:
    """One rank's share of the images of a step."""

    step: int
    images: Tensor  # float32 [b, channels, size, size] in [-1, 1]
    targets: Tensor  # int64 [b]; with mixup float32 [b, num_classes]


def batches(
    source: Source,
    order: Order,
    augment: Augment,
    *,
    num_classes: int | None = None,
    mixup: float = 0.0,
    start: int = 0,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> "Batches[Batch]":
    """Make the batches of a training run from step `start` on, without end.

    With mixup=p, images and targets are mixed with those of the previous image of the whole batch, whichever rank has
    it. If the source was loaded with on_error="skip", the next good image of the source stands in for a broken one.
    """
    if order.size != len(source):
        raise ValueError(f"the order is for {order.size:,} images, but the source has {len(source):,}.")
    if mixup < 0:
        raise ValueError(f"mixup is {mixup}; it must be 0 (none) or the p of Beta(p, p).")
    classes = len(source.classes) if num_classes is None else num_classes
    _check_labels(source, classes)
    order.positions(start, rank, world)  # raises now if they are wrong

    def requests() -> Iterator[Request]:
        for step in count(start):
            positions = order.positions(step, rank, world)
            if mixup:
                # Mixing needs the image before this share; before the first image comes the last of the whole batch.
                first = step * order.batch_size
                before = first + (positions[0] - 1 - first) % order.batch_size
                positions = np.concatenate([[before], positions])
            yield Request(step, positions, order.indices(positions))

    def finish(made: Made) -> Batch:
        images, labels = floats(made.pixels.to(device), augment.channels), made.labels.to(device)
        if not mixup:
            return Batch(made.step, images, labels)
        kept = mixup_weight(mixup, order.seed, made.step)
        return Batch(made.step, mix(images, kept), mix(one_hot(labels, classes), kept))

    return Batches(Maker(source, augment, order.seed, replace=True), requests(), finish, workers)


def evaluation_batches(
    source: Source,
    transform: Evaluation | int,
    batch_size: int,
    *,
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> "Batches[tuple[Tensor, Tensor]]":
    """Make batches of images and labels, once over the source, in its order; the last batch may be smaller.

    An integer stands for Evaluation(size). If the source was loaded with on_error="skip", broken images are left out.
    """
    chosen = Evaluation(transform) if isinstance(transform, int) else transform
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")

    def requests() -> Iterator[Request]:
        for step, start in enumerate(range(0, len(source), batch_size)):
            numbers = np.arange(start, min(start + batch_size, len(source)))
            yield Request(step, numbers, numbers)

    def finish(made: Made) -> tuple[Tensor, Tensor]:
        return floats(made.pixels.to(device), chosen.channels), made.labels.to(device)

    return Batches(Maker(source, chosen, 0, replace=False), requests(), finish, workers)


class Batches(Iterator[Result], Generic[Result]):
    """An iterator over batches. Its workers end when it is closed (as by `with`), exhausted or dropped."""

    def __init__(self, maker: Maker, requests: Iterator[Request], finish: Callable[[Made], Result], workers: int):
        self.skipped: dict[str, str] = {}
        """Broken images that were left out or replaced, and the error of each."""
        self._finish = finish
        self._parts = made_by(maker, requests, workers)

    def __next__(self) -> Result:
        try:
            while True:
                parts: list[Made] = []
                while not parts or not parts[-1].last:
                    part = next(self._parts)
                    if isinstance(part, DataError):
                        raise part
                    for name in part.skipped.keys() - self.skipped.keys():
                        log.warning("broken: %s", part.skipped[name])
                    self.skipped |= part.skipped
                    parts.append(part)
                whole = parts[0]
                if len(parts) > 1:
                    pixels = torch.cat([part.pixels for part in parts])
                    whole = Made(whole.step, pixels, torch.cat([part.labels for part in parts]))
                if len(whole.labels):  # all images of an evaluation's batch may be broken
                    return self._finish(whole)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers, and report broken images."""
        self._parts.close()
        if self.skipped:
            names = list(self.skipped)
            more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
            log.warning("%s broken images were skipped: %s%s", f"{len(names):,}", ", ".join(names[:10]), more)

    def __enter__(self) -> "Batches[Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def floats(pixels: Tensor, channels: int) -> Tensor:
    """Convert bytes [n, c, H, W] to float32 [n, channels, H, W] in [-1, 1]."""
    pixels = pixels.expand(-1, channels, -1, -1)
    if pixels.device.type == "cpu":
        # numpy asks for huge pages, torch does not; getting small ones would take longer than all the rest here.
        floats = torch.from_numpy(np.empty(pixels.shape, np.float32)).copy_(pixels)
    else:
        floats = pixels.to(torch.float32, memory_format=torch.contiguous_format)
    return floats.div_(127.5).sub_(1)


def _check_labels(source: Source, num_classes: int) -> None:
    wrong = np.flatnonzero((source.labels < 0) | (source.labels >= num_classes))
    if len(wrong):
        raise ValueError(
            f"{source.name(int(wrong[0]))} has the label {source.labels[wrong[0]]}, but there are num_classes = "
            f"{num_classes:,} ({len(wrong):,} of {len(source):,} images have such labels)."
        )


# Mixup as in the paper's configurations: one λ for a whole step, and the previous image of the batch as partner.


def mixup_weight(p: float, seed: int, step: int) -> float:
    """Return the share of an image that stays: max(λ, 1 - λ) with λ ~ Beta(p, p), a pure function of seed and step."""
    drawn = float(np.random.default_rng((seed, step)).beta(p, p))
    return max(drawn, 1 - drawn)


def mix(values: Tensor, kept: float) -> Tensor:
    """Mix each of values[1:] with the one before it: images, or targets as rows over the classes."""
    # Two products and a sum, each rounded by itself: a fused form would round differently from one layout to another.
    return values[1:].mul(kept).add_(values[:-1].mul(1 - kept))


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return a row for each label, 1 at its class and 0 elsewhere, in float32."""
    rows = torch.zeros(len(labels), num_classes, device=labels.device)
    return rows.scatter_(1, labels[:, None], 1.0)
