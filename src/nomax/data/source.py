"""A source of labelled images: what every data set looks like to training and evaluation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image


class DataError(ValueError):
    """Something is wrong with the data; the message names the file."""


class Source(Protocol):
    """One split of a data set: images with labels, by number."""

    @property
    def classes(self) -> Sequence[str]:
        """What the labels stand for: label i is classes[i]."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The label of every image."""

    def __len__(self) -> int:
        """How many images there are."""

    def image(self, index: int) -> "Image.Image":
        """The image with this number, decoded."""

    def name(self, index: int) -> str:
        """What an error calls this image: a file, or a place in an archive or array."""


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
        """The image with this number: mode L (grey) or RGB."""
        from PIL import Image

        pixels: Any = np.asarray(self.images[index])
        return Image.fromarray(pixels)

    def name(self, index: int) -> str:
        """What an error calls this image."""
        return f"{self.title}, image {index} ({self.classes[self.labels[index]]})"

    def __repr__(self) -> str:
        height, width = self.images.shape[1:3]
        kind = "RGB" if self.images.ndim == 4 else "grey"
        return (
            f"ArraySource({self.title}: {len(self):,} images, {height}×{width} {kind}, {len(self.classes):,} classes)"
        )


class Part:
    """Some images of a source, in a given order. It does about broken images what its source was told to do."""

    def __init__(self, source: Source, indices: npt.NDArray[np.int64]) -> None:
        self.source, self.indices = source, indices
        self.classes: Sequence[str] = source.classes
        self.labels: npt.NDArray[np.int64] = source.labels[indices]
        self.on_error: str = getattr(source, "on_error", "raise")

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> "Image.Image":
        """The image with this number."""
        return self.source.image(int(self.indices[index]))

    def name(self, index: int) -> str:
        """What an error calls this image."""
        return self.source.name(int(self.indices[index]))


class FilePart(Part):
    """Some images of a source of image files, which are decoded where they are needed."""

    source: Any

    def read(self, index: int) -> bytes:
        """The file with this number, as it is stored."""
        content: bytes = self.source.read(int(self.indices[index]))
        return content


def part(source: Source, indices: npt.NDArray[np.int64]) -> Source:
    """Some images of a source, in a given order, as a source. Of an array it is a copy, served as an array is."""
    if np.array_equal(indices, np.arange(len(source))):
        return source
    if isinstance(source, ArraySource):
        return ArraySource(source.images[indices], source.labels[indices], source.classes, source.title)
    return FilePart(source, indices) if hasattr(source, "read") else Part(source, indices)


def listed(classes: Sequence[str], most: int = 3) -> str:
    """The first of some classes, for a message: however many there are and whatever they are called, it stays short."""
    shown = ", ".join(repr(name if len(name) <= 40 else f"{name[:39]}…") for name in classes[:most])
    return f"{shown} and {len(classes) - most:,} more" if len(classes) > most else shown
