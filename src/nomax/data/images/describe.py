"""A description of a source of images: numbers about it, and a contact sheet of small pictures."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nomax._files import atomic
from nomax.data.source import ArraySource, Source

if TYPE_CHECKING:
    from PIL import Image

MOST_DECODED = 500  # images that are decoded to learn sizes and pixel statistics, where they are not in one array


@dataclass(frozen=True)
class Description:
    """Numbers about one split."""

    images: int
    classes: int
    fewest: int
    median: float
    most: int
    """Images in the smallest, the middle and the largest class."""
    sizes: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and standard deviation of the pixels, 0 to 1, per channel."""
    decoded: int
    """The number of images that the sizes and the pixel statistics were taken from."""


def describe_images(source: Source, on_error: str = "raise") -> Description:
    """Count, and measure the pixels: of all images that lie in an array, else of a sample taken evenly over them.

    With on_error="skip", images that cannot be read are left out of the sample.
    """
    if not len(source):
        raise ValueError("there are no images to describe.")
    per_class = np.bincount(source.labels, minlength=len(source.classes))
    chosen = range(len(source)) if isinstance(source, ArraySource) else _evenly(len(source), MOST_DECODED)
    sizes: set[tuple[int, int]] = set()
    modes: set[str] = set()
    # Exact whole-number sums: pixels, values and squares of values of every channel.
    count, total, squares = 0, np.zeros(3), np.zeros(3)
    decoded = 0
    for pixels in _pixels(source, np.asarray(chosen), on_error):
        decoded += len(pixels)
        sizes.add((pixels.shape[2], pixels.shape[1]))
        modes.add("grey" if pixels.ndim == 3 else "RGB")
        values = pixels.reshape(-1, 3 if pixels.ndim == 4 else 1)
        count += len(values)
        for channel in range(3):
            frequencies = np.bincount(values[:, channel % values.shape[1]], minlength=256).astype(np.float64)
            total[channel] += frequencies @ np.arange(256)
            squares[channel] += frequencies @ np.arange(256) ** 2
    if not decoded:
        raise ValueError(f"none of {len(chosen)} images could be read.")
    mean = total / count / 255
    std = np.sqrt(np.maximum(squares / count / 255**2 - mean**2, 0))
    channels = 1 if modes == {"grey"} else 3
    return Description(
        len(source),
        len(source.classes),
        int(per_class.min()),
        float(np.median(per_class)),
        int(per_class.max()),
        f"{_sizes(sizes)} {' and '.join(sorted(modes))}",
        tuple(float(value) for value in mean[:channels]),
        tuple(float(value) for value in std[:channels]),
        decoded,
    )


def write_sheet(
    source: Source, file: Path, *, rows: int = 16, columns: int = 16, side: int = 48, on_error: str = "raise"
) -> None:
    """Write a PNG with some classes, evenly spread over all, one in each row with its name and its first images."""
    from PIL import Image, ImageDraw

    there = np.unique(source.labels)
    labels = there[_evenly(len(there), rows)]
    margin = 160
    picture = Image.new("RGB", (margin + columns * side, len(labels) * side), "white")
    draw = ImageDraw.Draw(picture)
    for row, label in enumerate(labels):
        draw.text((4, row * side + side // 3), str(source.classes[label])[:25], fill="black")
        members = np.flatnonzero(source.labels == label)
        for column, index in enumerate(members[_evenly(len(members), columns)]):
            image = _image(source, int(index), on_error)
            if image is not None:
                small = image.convert("RGB")
                small.thumbnail((side - 2, side - 2))
                picture.paste(small, (margin + column * side, row * side))
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic(file) as written:
        picture.save(written, "PNG")


def _evenly(total: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most `most` different numbers from 0 … total − 1, evenly spread."""
    return np.unique(np.linspace(0, total - 1, min(total, most)).astype(np.int64))


def _pixels(source: Source, chosen: npt.NDArray[np.int64], on_error: str) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the chosen images as uint8 arrays, [n, H, W] or [n, H, W, 3]."""
    if isinstance(source, ArraySource):
        for start in range(0, len(chosen), 2048):
            yield source.images[start : start + 2048]
        return
    for index in chosen:
        image = _image(source, int(index), on_error)
        if image is not None:
            yield np.asarray(image if image.mode == "L" else image.convert("RGB"))[None]


def _image(source: Source, index: int, on_error: str) -> "Image.Image | None":
    try:
        return source.image(index)
    except (ValueError, OSError):
        if on_error == "skip":
            return None
        raise


def _sizes(sizes: set[tuple[int, int]]) -> str:
    (width, height), (widest, highest) = (tuple(map(pick, zip(*sizes, strict=True))) for pick in (min, max))
    if len(sizes) == 1:
        return f"{width}×{height}"
    return f"{width}×{height} to {widest}×{highest}"
