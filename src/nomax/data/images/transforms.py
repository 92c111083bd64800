"""The paper's preprocessing of images, for training and for evaluation.

Randomness is addressed by (seed, position): the same image at the same position of a run gets the same crop, flip and
augmentation in every worker, on every rank and after every resume. Pixels are bytes here; a batch becomes float32 in
[-1, 1] as a whole.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn.functional import interpolate

from nomax.data.images.files import Box
from nomax.data.images.randaugment import randaugment
from nomax.data.order import CROP, FLIP, bits, uniform

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ASPECT = (0.75, 1.33)  # width / height of inception crops
ATTEMPTS = 10  # at a crop that fits; very long or high images allow few aspects
BORDER = 256 / 224  # how much larger than the central crop evaluation resizes to
MODES = {1: "L", 3: "RGB"}
ROWS = 32  # of the result at a time: larger buffers are new pages of memory each time, which takes longer than the sums

_LAYOUTS = {"L": ("L", np.uint8), "RGB": ("RGBX", np.uint32)}  # how Pillow writes a pixel as one number


@dataclass(frozen=True)
class Augment:
    """The transform of training: crop, flip, RandAugment."""

    size: int
    """Height and width of the result."""
    crop: Literal["inception", "resize", "pad", "none"] = "inception"
    """inception: a random part of the image, resized; resize: the whole image, its aspect not kept; pad: moved by up to
    an eighth, mirrored at the borders; none: as it is. For the last two, images must have the right size."""
    flip: bool = True
    """Mirror half of the images, at random, left to right."""
    randaug: tuple[int, int] | None = None
    """RandAugment: how many operations, and their level from 0 to 30 on the scale of big_vision."""
    channels: int = 3
    """3: RGB, grey images are repeated; 1: grey."""
    area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest share of the image that an inception crop takes."""
    antialias: bool = True
    """Average over all pixels when shrinking, and round, as Pillow and torchvision do. False: interpolate between four
    and cut off fractions, as TensorFlow did for the paper."""
    draft: bool = True
    """Decode JPEGs that are to be shrunk to half or less at a fraction of their size, which is faster."""

    def __post_init__(self) -> None:
        _check(self, ("inception", "resize", "pad", "none"))
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"area is {self.area}; it must hold two shares with 0 < least <= largest <= 1.")
        if self.randaug is not None and not (self.randaug[0] >= 0 and 0 <= self.randaug[1] <= 30):
            raise ValueError(
                f"randaug is {self.randaug}; it must hold a number of operations and a level from 0 to 30."
            )

    @property
    def as_is(self) -> bool:
        """True if images are taken pixel by pixel, so that a whole batch can be handled at once."""
        return self.crop in ("pad", "none")

    def evaluation(self) -> "Evaluation":
        """Return the evaluation that goes with this training."""
        crop: Any = {"inception": "small", "pad": "none"}.get(self.crop, self.crop)
        return Evaluation(self.size, crop, self.channels, self.antialias)

    def box(self, width: int, height: int, seed: int, position: int) -> Box:
        """Return the part of an image of this size that is resized to the result."""
        if self.crop == "resize":
            return 0, 0, width, height
        return inception_box(width, height, self.area, seed, position)

    def resized(self, image: Image.Image, box: Box) -> Bytes:
        """Return that part of the image at the size of the result, [channels, size, size]."""
        left, top, right, bottom = (round(place) for place in box)
        cropped = image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
        size = (self.size, self.size)
        if not self.antialias:
            return resize_bilinear(cropped, size, (0, 0), self.size)
        part = np.array(cropped)
        # torch resizes bytes about three times as fast as Pillow does, and to the same values but for one step.
        tensor = torch.from_numpy(part).reshape(1, *part.shape[:2], -1).permute(0, 3, 1, 2)
        result = interpolate(tensor, size, mode="bilinear", align_corners=False, antialias=True)
        return result[0].numpy()

    def finish(self, pixels: Bytes, seed: int, positions: npt.NDArray[np.int64]) -> Bytes:
        """Apply what comes after decoding and resizing to a batch [n, channels, size, size]."""
        if self.crop == "pad":
            pixels = _moved(pixels, uniform(seed, CROP, positions[:, None], np.arange(2)))
        if self.flip:
            flips = bits(seed, FLIP, positions) % np.uint64(2) == 1
            pixels[flips] = pixels[flips, :, :, ::-1]
        if self.randaug is not None:
            pixels = randaugment(pixels, *self.randaug, seed, positions)
        return pixels


@dataclass(frozen=True)
class Evaluation:
    """The transform of evaluation, without randomness."""

    size: int
    """Height and width of the result."""
    crop: Literal["small", "square", "resize", "none"] = "small"
    """small: the shorter side to 256/224 of the size, the aspect kept, then the centre, as the paper evaluates; square:
    both sides to 256/224 of the size, then the centre, as its probes do; resize: the whole image, its aspect not kept;
    none: as it is, and it must have the right size."""
    channels: int = 3
    """3: RGB, grey images are repeated; 1: grey."""
    antialias: bool = True
    """As in Augment, but for "small", which always averages and cuts off fractions: the paper's "area"."""
    draft: bool = False
    """As in Augment."""

    def __post_init__(self) -> None:
        _check(self, ("small", "square", "resize", "none"))

    @property
    def as_is(self) -> bool:
        """True if images are taken pixel by pixel."""
        return self.crop == "none"

    def box(self, width: int, height: int, seed: int, position: int) -> Box:
        """Return the part of an image of this size that becomes the result, although it is resized as a whole first."""
        if self.crop == "resize":
            return 0, 0, width, height
        (across, down), (left, top) = self._grid(width, height)
        x, y = width / across, height / down
        return left * x, top * y, min((left + self.size) * x, width), min((top + self.size) * y, height)

    def resized(self, image: Image.Image, box: Box) -> Bytes:
        """Return that part of the image at the size of the result, [channels, size, size]."""
        if self.crop == "small":
            return resize_area(image, *self._grid(*image.size), self.size)
        if not self.antialias:
            return resize_bilinear(image, *self._grid(*image.size), self.size)
        result = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        return planes(np.asarray(result)[None])[0]

    def _grid(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the width and height to which an image is resized, and the left and top of the result in that."""
        larger = self.size if self.crop == "resize" else round(self.size * BORDER)
        across = down = larger
        if self.crop == "small":
            factor = np.float32(larger) / np.float32(min(width, height))  # as TensorFlow computes it
            across, down = (max(int(np.rint(np.float32(length) * factor)), self.size) for length in (width, height))
        return (across, down), ((across - self.size) // 2, (down - self.size) // 2)

    def finish(self, pixels: Bytes, seed: int, positions: npt.NDArray[np.int64]) -> Bytes:
        """Do nothing more."""
        return pixels


Transform = Augment | Evaluation


def inception_box(width: int, height: int, area: tuple[float, float], seed: int, position: int) -> Box:
    """Draw a random part of an image: TensorFlow's sample_distorted_bounding_box, as the paper's pipeline calls it.

    The aspect is uniform in [0.75, 1.33]; then the height is uniform among those that this aspect and the bounds of the
    area allow; then the place. (torchvision's RandomResizedCrop draws the area uniformly instead, which gives larger
    crops.) An image that allows no such part is taken whole.
    """
    for attempt in range(ATTEMPTS):
        a, b, c, d = uniform(seed, CROP, position, attempt, np.arange(4)).tolist()
        aspect = ASPECT[0] + a * (ASPECT[1] - ASPECT[0])
        least = math.ceil(math.sqrt(area[0] * width * height / aspect))
        most = math.floor(min(math.sqrt(area[1] * width * height / aspect), height, width / aspect))
        if least <= most:
            tall = least + int(b * (most - least + 1))
            wide = min(max(round(tall * aspect), 1), width)
            left, top = int(c * (width - wide + 1)), int(d * (height - tall + 1))
            return left, top, left + wide, top + tall
    return 0, 0, width, height


def planes(pixels: Bytes, channels: int = 3) -> Bytes:
    """Turn a batch [n, H, W] or [n, H, W, 3] into [n, 1 or 3, H, W]; grey stays one plane, which stands for three."""
    if pixels.ndim == 3:
        return pixels[:, None]
    if channels == 3:
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    weights = np.array([19595, 38470, 7471], np.uint32)  # ITU-R 601-2 luma in 16 bits, as Pillow computes it
    return ((pixels @ weights + 0x8000) >> 16).astype(np.uint8)[:, None]


def _moved(pixels: Bytes, chances: npt.NDArray[np.float64]) -> Bytes:
    """Move every image by up to an eighth of its size, mirrored at its borders."""
    size = pixels.shape[2]
    most = size // 8
    padded = np.pad(pixels, ((0, 0), (0, 0), (most, most), (most, most)), "reflect")
    moved = np.empty_like(pixels)
    for number, (top, left) in enumerate((chances * (2 * most + 1)).astype(int).tolist()):
        moved[number] = padded[number, :, top : top + size, left : left + size]
    return moved


def _check(transform: Transform, crops: tuple[str, ...]) -> None:
    if transform.size < 1:
        raise ValueError(f"size is {transform.size}; it must be at least 1.")
    if transform.crop not in crops:
        raise ValueError(f"crop is {transform.crop!r}; it must be one of {', '.join(crops)}.")
    if transform.channels not in MODES:
        raise ValueError(f"channels is {transform.channels}; it must be 1 (grey) or 3 (RGB).")


# TensorFlow's two ways to resize for the paper, `area` and `bilinear` without antialiasing, to the bit. Truncation to
# bytes makes every rounding before it visible: where an image has one colour all over, TensorFlow's area gives 199
# instead of 200 for up to every second pixel, as its weights, of float32 places, do not quite sum to one. So places,
# weights and sums are computed in the same precision and order here.


@dataclass(frozen=True)
class _Axis:
    """The places in a line that make up each pixel of the result, and their weights, both [pixels, places]."""

    places: npt.NDArray[np.int64]
    weights: Floats


def resize_area(image: Image.Image, grid: tuple[int, int], corner: tuple[int, int], size: int) -> Bytes:
    """Average over the box, with fractions of pixels, that each pixel of the result covers: [channels, size, size].

    `grid` is the width and height to which the whole image is resized, `corner` the left and top of the part wanted.
    """
    columns, rows = (_boxes(*line, size) for line in zip(image.size, grid, corner, strict=True))
    width, height = (np.float32(old) / np.float32(new) for old, new in zip(image.size, grid, strict=True))
    return _resize(image, columns, rows, size, _weighted_sum, np.float32(1) / (height * width))


def resize_bilinear(image: Image.Image, grid: tuple[int, int], corner: tuple[int, int], size: int) -> Bytes:
    """Interpolate between four pixels, however much the image shrinks; arguments as in `resize_area`."""
    columns, rows = (_pairs(*line, size) for line in zip(image.size, grid, corner, strict=True))
    return _resize(image, columns, rows, size, _interpolated, np.float32(1))


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


def _weighted_sum(values: Iterable[Bytes | Floats], weights: Sequence[Floats]) -> Floats:
    total: Floats = np.zeros(1, np.float32)
    for value, weight in zip(values, weights, strict=True):
        total = total + value * weight
    return total


def _interpolated(values: Iterable[Bytes | Floats], weights: Sequence[Floats]) -> Floats:
    low, high = (value.astype(np.float32, copy=False) for value in values)
    return low + (high - low) * weights[0]


def _resize(
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
