"""From requests to bytes, in this process or in workers: reading, decoding, cropping and augmenting images."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from nomax.data import images
from nomax.data.images import DataError
from nomax.data.order import Integers
from nomax.data.source import ArraySource, Source
from nomax.data.transforms import MODES, Bytes, Transform, planes

CHUNK = 256  # images that are made at a time: bounds the memory of workers, and the wait for the first large batch
PREFETCH = 2  # chunks that each worker may be ahead
LONGEST_GAP = 1000  # broken images in a row; with more than that, it is the data set that is broken

log = logging.getLogger("nomax.data")


@dataclass(frozen=True)
class Request:
    """Images to make: their positions in the run, on which their randomness depends, and numbers in the source."""

    step: int
    positions: Integers
    indices: Integers
    last: bool = True  # of this step

    def parts(self) -> Iterator["Request"]:
        """The same in pieces of at most CHUNK images."""
        for start in range(0, len(self.indices), CHUNK):
            piece = slice(start, start + CHUNK)
            yield Request(self.step, self.positions[piece], self.indices[piece], start + CHUNK >= len(self.indices))


@dataclass(frozen=True)
class Made:
    """Images that are ready but for becoming floats."""

    step: int
    pixels: Tensor  # uint8 [n, 1 or 3, size, size]
    labels: Tensor  # int64 [n]
    last: bool = True
    skipped: dict[str, str] = field(default_factory=dict)


def made_by(maker: "Maker", requests: Iterator[Request], workers: int) -> Generator[Made | DataError, None, None]:
    """What becomes of the requests, in their order. Closing it ends the workers."""
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be 0 (this process does the work) or more.")
    return _made_by(maker, (part for request in requests for part in request.parts()), workers)


def _made_by(maker: "Maker", parts: Iterator[Request], workers: int) -> Generator[Made | DataError, None, None]:
    if workers == 0:
        yield from map(maker.__getitem__, parts)
        return
    loader: Any = DataLoader(
        maker,  # type: ignore[arg-type]
        sampler=parts,
        batch_size=None,
        num_workers=workers,
        collate_fn=_same,
        prefetch_factor=PREFETCH,
        worker_init_fn=_in_worker,
    )
    running = iter(loader)
    try:
        yield from running
    finally:
        # Forgetting it would do the same, but an exception on its way up keeps it in mind.
        running._shutdown_workers()


class Maker:
    """Makes requested images; each is a pure function of the source, the transform, the seed and the position.

    A broken image is an error, unless the source says on_error="skip". Then the next good one of the source stands
    in for it, or, without `replace`, it is left out.
    """

    def __init__(self, source: Source, transform: Transform, seed: int, *, replace: bool):
        self.source = source
        self.transform = transform
        self.seed = seed
        self.replace = replace
        self._skips = getattr(source, "on_error", "raise") == "skip"
        self._array = source.images if isinstance(source, ArraySource) and transform.as_is else None
        if self._array is not None and self._array.shape[1:3] != (transform.size, transform.size):
            raise ValueError(self._wrong_size(f"{source!r}", *self._array.shape[2:0:-1]))

    def __getitem__(self, request: Request) -> Made | DataError:
        # An error is handed over rather than raised: torch would bury its message in the worker's traceback.
        try:
            return self._make(request)
        except DataError as error:
            return error

    def _make(self, request: Request) -> Made:
        positions, numbers = request.positions, request.indices
        skipped: dict[str, str] = {}
        if self._array is not None:
            pixels = planes(self._array[numbers], self.transform.channels)
        else:
            pixels, kept, numbers = self._one_by_one(request, skipped)
            positions = positions[kept]
        pixels = self.transform.finish(pixels, self.seed, positions)
        labels = torch.from_numpy(self.source.labels[numbers])
        return Made(request.step, torch.from_numpy(pixels), labels, request.last, skipped)

    def _one_by_one(self, request: Request, skipped: dict[str, str]) -> tuple[Bytes, Integers, Integers]:
        """The images, which of the request's they are, and their numbers."""
        size = self.transform.size
        pixels = np.empty((len(request.indices), self.transform.channels, size, size), np.uint8)
        kept: list[int] = []
        numbers: list[int] = []
        for place, index in enumerate(request.indices.tolist()):
            number, image = self._good(index, int(request.positions[place]), skipped)
            if image is not None:
                pixels[len(kept)] = image
                kept.append(place)
                numbers.append(number)
        return pixels[: len(kept)], np.array(kept, np.int64), np.array(numbers, np.int64)

    def _good(self, index: int, position: int, skipped: dict[str, str]) -> tuple[int, Bytes | None]:
        """The image, or what stands in for it if it is broken, and its number."""
        reason = ""
        for ahead in range(min(len(self.source), LONGEST_GAP)):
            number = (index + ahead) % len(self.source)
            try:
                return number, self._one(number, position)
            except DataError as error:
                if not self._skips:
                    raise
                reason = skipped[self.source.name(number)] = str(error)
                if not self.replace:
                    return number, None
        raise DataError(f"from {self.source.name(index)} on, {len(skipped):,} images in a row are broken: {reason}")

    def _one(self, index: int, position: int) -> Bytes:
        transform, name = self.transform, images.Name(self.source.name, index)
        read = getattr(self.source, "read", None)
        image = images.opened(read(index), name) if read else self.source.image(index)
        if transform.as_is:
            if image.size != (transform.size, transform.size):
                raise DataError(self._wrong_size(str(name), *image.size))
            return planes(np.asarray(self._coloured(images.load(image, name)))[None])[0]
        box = transform.box(*image.size, self.seed, position)
        if transform.draft:
            box = images.reduced(image, box, transform.size)
        return transform.resized(self._coloured(images.load(image, name)), box)

    def _coloured(self, image: Image.Image) -> Image.Image:
        mode = MODES[self.transform.channels]
        return image if image.mode == mode else image.convert(mode)

    def _wrong_size(self, name: str, width: int, height: int) -> str:
        size = self.transform.size
        return (
            f"{name} is {width}×{height}, but size is {size}, and crop={self.transform.crop!r} takes images as they "
            f'are. Choose size={width} or crop="resize".'
        )


def _same(made: Any) -> Any:
    return made


def _in_worker(worker: int) -> None:
    _leave_signals_to_parent()
    sys.excepthook = _unless_parent_hung_up


def _unless_parent_hung_up(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an error, but not that a parent stopped by Ctrl-C left in the middle of taking over a batch."""
    if not issubclass(kind, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _leave_signals_to_parent() -> None:
    """Ctrl-C and a cluster's SIGTERM reach every process, but the parent may want a batch more before it stops.

    It ends its workers by itself, if need be by a SIGTERM of its own, and they end when it is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_for_parent_only, args=(os.getppid(),), daemon=True).start()


def _end_for_parent_only(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo({signal.SIGTERM})
        if received is not None and received.si_pid == parent:
            os._exit(0)
