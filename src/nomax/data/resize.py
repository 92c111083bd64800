"""TensorFlow's two ways to resize for the paper, `area` and `bilinear` without antialiasing, to the bit.

Truncation to bytes makes every rounding before it visible: where an image has one colour all over, TensorFlow's area
gives 199 instead of 200 for up to every second pixel, as its weights, of float32 places, do not quite sum to one. So
places, weights and sums are computed in the same precision and order here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ROWS = 32  # of the result at a time: larger buffers are new pages of memory each time, which takes longer than the sums

_LAYOUTS = {"L": ("L", np.uint8), "RGB": ("RGBX", np.uint32)}  # how Pillow writes a pixel as one number


@dataclass(frozen=True)
class _Axis:
    """Which places of a line each pixel of the result is made of, both [pixels, places]."""

    places: npt.NDArray[np.int64]
    weights: Floats


def area(image: Image.Image, grid: tuple[int, int], corner: tuple[int, int], size: int) -> Bytes:
    """The mean over the box, with fractions of pixels, that each pixel of the result covers: [channels, size, size].

    `grid` is the width and height to which the whole image is resized, `corner` the left and top of the part wanted.
    """
    columns, rows = (_boxes(*line, size) for line in zip(image.size, grid, corner, strict=True))
    width, height = (np.float32(old) / np.float32(new) for old, new in zip(image.size, grid, strict=True))
    return _resized(image, columns, rows, size, _sum, np.float32(1) / (height * width))


def bilinear(image: Image.Image, grid: tuple[int, int], corner: tuple[int, int], size: int) -> Bytes:
    """Between the four pixels around each place, however much the image shrinks; arguments as of `area`."""
    columns, rows = (_pairs(*line, size) for line in zip(image.size, grid, corner, strict=True))
    return _resized(image, columns, rows, size, _between, np.float32(1))


def _boxes(old: int, new: int, first: int, count: int) -> _Axis:
    scale = np.float32(old) / np.float32(new)
    edges = np.arange(first, first + count + 1, dtype=np.float32) * scale
    low, high = edges[:-1, None], edges[1:, None]
    start, stop = np.floor(low).astype(np.int64), np.ceil(high).astype(np.int64)
    places = start + np.arange((stop - start).max())
    left = places.astype(np.float32)
    right = left + 1
    whole = np.where(right > high, high - left, np.float32(1))
    weights = np.where(left < low, np.where(right > high, scale, right - low), whole)
    weights[places >= stop] = 0
    return _Axis(np.minimum(places, old - 1), weights)


def _pairs(old: int, new: int, first: int, count: int) -> _Axis:
    half = np.float32(0.5)
    centres = (np.arange(first, first + count, dtype=np.float32) + half) * (np.float32(old) / np.float32(new)) - half
    low = np.floor(centres)
    places = np.stack([np.maximum(low, 0), np.minimum(np.ceil(centres), old - 1)], 1)
    return _Axis(places.astype(np.int64), (centres - low)[:, None])


def _sum(values: Iterable[Bytes | Floats], weights: Sequence[Floats]) -> Floats:
    total: Floats = np.zeros(1, np.float32)
    for value, weight in zip(values, weights, strict=True):
        total = total + value * weight
    return total


def _between(values: Iterable[Bytes | Floats], weights: Sequence[Floats]) -> Floats:
    low, high = (value.astype(np.float32, copy=False) for value in values)
    return low + (high - low) * weights[0]


def _resized(
    image: Image.Image,
    columns: _Axis,
    rows: _Axis,
    size: int,
    combine: Callable[[Iterable[Bytes | Floats], Sequence[Floats]], Floats],
    scale: np.float32,
) -> Bytes:
    layout, kind = _LAYOUTS[image.mode]
    left, top = int(columns.places.min()), int(rows.places.min())
    part = image.crop((left, top, int(columns.places.max()) + 1, int(rows.places.max()) + 1))
    pixels = np.frombuffer(part.tobytes("raw", layout), kind).reshape(part.height, part.width)
    bands, channels = pixels.itemsize, len(part.getbands())
    across = [np.repeat(weight, bands) for weight in columns.weights.T]
    result = np.empty((channels, size, size), np.uint8)
    for start in range(0, size, ROWS):
        chunk = slice(start, start + ROWS)
        needed, places = np.unique(rows.places[chunk] - top, return_inverse=True)
        taken = pixels[needed]
        lines = combine((taken.take(column, 1).view(np.uint8) for column in columns.places.T - left), across)
        down = [weight[:, None] for weight in rows.weights[chunk].T]
        made = combine((lines.take(row, 0) for row in places.reshape(rows.places[chunk].shape).T), down) * scale
        result[:, chunk] = made.astype(np.uint8).reshape(len(made), size, bands)[..., :channels].transpose(2, 0, 1)
    return result
