"""A source of labelled images: the interface between data sets and training or evaluation."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from nomax._files import read_json

if TYPE_CHECKING:
    from PIL import Image


class DataError(ValueError):
    """Something is wrong with the data; the message names the file."""


class Source(Protocol):
    """One split of a data set: images with labels, by number."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes: label i is classes[i]."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The label of every image."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image(self, index: int) -> "Image.Image":
        """Return the image with this number, decoded."""

    def name(self, index: int) -> str:
        """Return the name of this image in errors: a file, or a place in an archive or array."""


class ArraySource:
    """Images of one size, held in an array (in memory, or mapped from a file): [N, H, W] grey or [N, H, W, 3] RGB."""

    def __init__(self, images: npt.NDArray[np.uint8], labels: npt.ArrayLike, classes: Sequence[str], title: str):
        labels = np.asarray(labels)
        if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
            raise ValueError(
                f"{title}: images is {images.dtype} {list(images.shape)}; it must be uint8, [N, H, W] or [N, H, W, 3]."
            )
        if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"{title}: labels is {labels.dtype} {list(labels.shape)}; "
                f"it must hold one integer for each of the {len(images)} images."
            )
        if len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
            raise ValueError(
                f"{title}: labels go from {labels.min()} to {labels.max()}, but there are {len(classes)} classes."
            )
        self.images = images
        self.labels: npt.NDArray[np.int64] = labels.astype(np.int64)
        self.classes: Sequence[str] = tuple(classes)
        self.title = title

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> "Image.Image":
        """Return the image with this number, in mode L (grey) or RGB."""
        from PIL import Image

        pixels: Any = np.asarray(self.images[index])
        return Image.fromarray(pixels)

    def name(self, index: int) -> str:
        """Return the name of this image in errors."""
        return f"{self.title}, image {index} ({self.classes[self.labels[index]]})"

    def __repr__(self) -> str:
        height, width = self.images.shape[1:3]
        kind = "RGB" if self.images.ndim == 4 else "grey"
        return (
            f"ArraySource({self.title}: {len(self):,} images, {height}×{width} {kind}, {len(self.classes):,} classes)"
        )


class Part:
    """Some images of a source, in a given order. Broken images are treated as in the source."""

    def __init__(self, source: Source, indices: npt.NDArray[np.int64]) -> None:
        self.source, self.indices = source, indices
        self.classes: Sequence[str] = source.classes
        self.labels: npt.NDArray[np.int64] = source.labels[indices]
        self.on_error: str = getattr(source, "on_error", "raise")

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> "Image.Image":
        """Return the image with this number."""
        return self.source.image(int(self.indices[index]))

    def name(self, index: int) -> str:
        """Return the name of this image in errors."""
        return self.source.name(int(self.indices[index]))

    @property
    def read(self) -> Callable[[int], bytes] | None:
        """A function that returns the bytes of the file with this number, or None if the source has no files."""
        read = getattr(self.source, "read", None)
        return (lambda index: read(int(self.indices[index]))) if read else None


def part(source: Source, indices: npt.NDArray[np.int64]) -> Source:
    """Return some images of a source, in a given order, as a source. Part of an array is a copy, again an array."""
    if np.array_equal(indices, np.arange(len(source))):
        return source
    if isinstance(source, ArraySource):
        return ArraySource(source.images[indices], source.labels[indices], source.classes, source.title)
    return Part(source, indices)


def listed(classes: Sequence[str], most: int = 3) -> str:
    """Return the first few classes for a message, which stays short however many there are and whatever their names."""
    shown = ", ".join(repr(name if len(name) <= 40 else f"{name[:39]}…") for name in classes[:most])
    return f"{shown} and {len(classes) - most:,} more" if len(classes) > most else shown


# The prepared form of a named data set is a folder with images.npy, labels.npy and meta.json.


def is_prepared(folder: Path) -> bool:
    """Return whether a folder holds a prepared data set."""
    return (folder / "meta.json").is_file() and (folder / "images.npy").is_file()


def open_prepared(folder: Path, split: str) -> ArraySource:
    """Open one split of the data set in `folder`, its images mapped from the file."""
    meta = read_meta(folder)
    title = f"{meta['name']} ({split})"
    again = f"Remove that folder, then fetch it again: nomax data get {meta['name']}."
    splits = meta.get("splits")
    if not isinstance(splits, dict) or not isinstance(meta.get("classes"), list):
        raise ValueError(f"the data set in {folder} is damaged: its meta.json lacks splits or classes. {again}")
    if split not in splits:
        raise ValueError(f"split {split!r}: {meta['name']} has the splits {', '.join(splits)}.")
    try:
        start, stop = map(int, splits[split])
        images, labels = _mapped(folder / "images.npy"), _mapped(folder / "labels.npy")
        if not len(images) == len(labels) == max(end for _, end in splits.values()):
            raise ValueError(f"images.npy has {len(images)} images, labels.npy {len(labels)} labels")
        return ArraySource(images[start:stop].view(np.ndarray), np.array(labels[start:stop]), meta["classes"], title)
    except (OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"the data set in {folder} is damaged: {error}. {again}") from error


def read_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json: name, classes, splits, licence, packages, checksums and the set's own particulars."""
    advice = f"Remove {folder} and fetch it again."
    meta = read_json(folder / "meta.json", advice)
    if not isinstance(meta, dict) or "name" not in meta:
        raise ValueError(f"{folder / 'meta.json'} is damaged: it lacks a name. {advice}")
    return meta


def npy_header(file: IO[bytes], size: int, title: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of an .npy file of so many bytes: the array's shape and type, which must fit the size."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"{title} is not in the format that numpy writes")
    shape, _, kind = np.lib.format.read_array_header_1_0(file)
    if math.prod(shape) * kind.itemsize != size - file.tell():
        raise ValueError(f"{title} holds another number of bytes than its header says")
    return shape, kind


def _mapped(path: Path) -> npt.NDArray[Any]:
    """Map the array in a file. (numpy would allocate what the header claims, however long the file is.)"""
    with path.open("rb") as file:
        npy_header(file, os.fstat(file.fileno()).st_size, path.name)
    # Copy on write: torch wants writable arrays, and the file must not change.
    mapped: npt.NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    return mapped
