"""Read, decode, crop and augment images, in this process or in workers: from requests to bytes."""

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

from nomax.data.images import files
from nomax.data.images.transforms import MODES, Bytes, Transform, planes
from nomax.data.order import Integers
from nomax.data.source import ArraySource, DataError, Source

CHUNK = 256  # images that are made at a time: bounds the memory of workers, and the wait for the first large batch
PREFETCH = 2  # chunks that each worker may be ahead
LONGEST_GAP = 1000  # broken images in a row; with more than that, it is the data set that is broken

log = logging.getLogger("nomax.data")


@dataclass(frozen=True)
class Request:
    """Images to make: their positions in the run, which address their randomness, and their indices in the source."""

    step: int
    positions: Integers
    indices: Integers
    last: bool = True  # of this step

    def parts(self) -> Iterator["Request"]:
        """Cut the request into pieces of at most CHUNK images."""
        for start in range(0, len(self.indices), CHUNK):
            piece = slice(start, start + CHUNK)
            yield Request(self.step, self.positions[piece], self.indices[piece], start + CHUNK >= len(self.indices))


@dataclass(frozen=True)
class Made:
    """Images that are ready, except that they are still bytes."""

    step: int
    pixels: Tensor  # uint8 [n, 1 or 3, size, size]
    labels: Tensor  # int64 [n]
    last: bool = True
    skipped: dict[str, str] = field(default_factory=dict)


def made_by(maker: "Maker", requests: Iterator[Request], workers: int) -> Generator[Made | DataError, None, None]:
    """Make the requested images, in order. Closing the generator ends the workers."""
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be 0 (this process does the work) or more.")
    return _made_by(maker, requests, workers)


def _made_by(maker: "Maker", requests: Iterator[Request], workers: int) -> Generator[Made | DataError, None, None]:
    parts = (part for request in requests for part in request.parts())
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
    batches = iter(loader)
    try:
        yield from batches
    finally:
        # Dropping the iterator would do the same, but an exception on its way up keeps a reference to it.
        batches._shutdown_workers()


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
        """Make the images of a request, or return the error: torch would bury it in the worker's traceback."""
        skipped: dict[str, str] = {}
        positions, numbers = request.positions, request.indices
        if self._array is not None:
            pixels = planes(self._array[numbers], self.transform.channels)
        else:
            size = self.transform.size
            pixels = np.empty((len(numbers), self.transform.channels, size, size), np.uint8)
            kept: list[tuple[int, int]] = []  # positions in the run, numbers in the source
            for index, position in zip(numbers.tolist(), positions.tolist(), strict=True):
                try:
                    number, image = self._readable(index, position, skipped)
                except DataError as error:
                    return error
                if image is not None:
                    pixels[len(kept)] = image
                    kept.append((position, number))
            pixels = pixels[: len(kept)]
            positions, numbers = np.array(kept, np.int64).reshape(-1, 2).T
        pixels = self.transform.finish(pixels, self.seed, positions)
        labels = torch.from_numpy(self.source.labels[numbers])
        return Made(request.step, torch.from_numpy(pixels), labels, request.last, skipped)

    def _readable(self, index: int, position: int, skipped: dict[str, str]) -> tuple[int, Bytes | None]:
        """Return the number and the pixels of the image, or of the one that stands in for it if it is broken."""
        reason = ""
        for ahead in range(min(len(self.source), LONGEST_GAP)):
            number = (index + ahead) % len(self.source)
            try:
                return number, self._transformed(number, position)
            except DataError as error:
                if not self._skips:
                    raise
                reason = skipped[self.source.name(number)] = str(error)
                if not self.replace:
                    return number, None
        raise DataError(f"from {self.source.name(index)} on, {len(skipped):,} images in a row are broken: {reason}")

    def _transformed(self, index: int, position: int) -> Bytes:
        transform, name = self.transform, files.LazyName(self.source.name, index)
        read = getattr(self.source, "read", None)
        image = files.open_header(read(index), name) if read else self.source.image(index)
        if transform.as_is:
            if image.size != (transform.size, transform.size):
                raise DataError(self._wrong_size(str(name), *image.size))
            return planes(np.asarray(self._in_mode(files.decoded(image, name)))[None])[0]
        box = transform.box(*image.size, self.seed, position)
        if transform.draft:
            box = files.decode_smaller(image, box, transform.size)
        return transform.resized(self._in_mode(files.decoded(image, name)), box)

    def _in_mode(self, image: Image.Image) -> Image.Image:
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
    """Report an error, unless it is that a parent, stopped by Ctrl-C, hung up while it received a batch."""
    if not issubclass(kind, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _leave_signals_to_parent() -> None:
    """Ignore Ctrl-C and a cluster's SIGTERM, which reach every process: the parent may want one more batch.

    The parent ends its workers, if need be by a SIGTERM of its own, and they end when it is gone.
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
