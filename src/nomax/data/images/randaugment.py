"""RandAugment as big_vision runs it on TensorFlow, quirks included: its 16 operations at its levels, to the pixel.

Level m is the m of `randaug(n, m)`: 10 is the full scale of AutoAugment, and the paper uses 0, 10, 15 and 20.

    operation                                  at level m
    AutoContrast, Equalize, Invert             –
    Rotate                                     ± 3 m degrees around the centre
    ShearX, ShearY                             ± 0.03 m, from the first row or column on
    TranslateX, TranslateY                     ± 10 m pixels of 224
    Brightness, Color, Contrast, Sharpness     factor 0.1 + 0.18 m
    Posterize                                  to int(0.4 m) bits, but 1 for 0 bits and for more than 8
    Solarize                                   from int(25.6 m) modulo 256 on, so that 10, 20 and 30 invert
    SolarizeAdd                                11 m to values below 128
    Cutout                                     a square of 8 m pixels of 224 around a random pixel

Lengths are in proportion where images are not 224 pixels wide; big_vision would move one of 32 out of sight. Areas that
an operation leaves empty become grey (128), and pixels are taken from the nearest place. Contrast pulls towards the
number of pixels / 256, at most 255 (196 at 224 × 224), where the mean of the image was meant.
"""

import math

import numpy as np
import numpy.typing as npt

from nomax.data.order import RANDAUGMENT, bits

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Matrix = tuple[tuple[float | np.float32, ...], ...]

OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
)
GREY = 128
_VALUES = np.arange(256)
_LUMA = np.array([0.2989, 0.5870, 0.1140], np.float32)  # TensorFlow's


def randaugment(pixels: Bytes, count: int, level: int, seed: int, positions: npt.NDArray[np.int64]) -> Bytes:
    """Apply `count` operations, chosen by (seed, position), to each image of a batch [n, 1 or 3, H, W]."""
    height, width = pixels.shape[2:]
    layers, numbers = np.arange(count)[:, None], np.arange(4)
    chances = bits(seed, RANDAUGMENT, positions[:, None, None], layers, numbers)
    result = np.empty_like(pixels)
    for number, of_image in enumerate(chances.tolist()):
        image = pixels[number]
        for which, sign, down, across in of_image:
            name = OPERATIONS[which % len(OPERATIONS)]
            image = operation(image, name, level, (-1, 1)[sign % 2], (down % height, across % width))
        result[number] = image
    return result


def operation(image: Bytes, name: str, level: int, sign: int, centre: tuple[int, int]) -> Bytes:
    """Apply one operation to an image [1 or 3, H, W]; one plane stands for three that are equal.

    `sign` is the direction of those that have one, `centre` the row and column around which Cutout cuts.
    """
    share = level / 10
    factor = share * 1.8 + 0.1
    _, height, width = image.shape
    match name:
        case "AutoContrast":
            return np.stack([_stretched(plane) for plane in image])
        case "Equalize":
            return np.stack([_equalized(plane) for plane in image])
        case "Invert":
            return 255 - image
        case "Posterize":
            # As a byte, -1 is 255, and TensorFlow shifts bytes by 7 at most.
            shift = min((8 - int(share * 4)) % 256, 7)
            return _table(_VALUES >> shift << shift)[image]
        case "Solarize":
            threshold = int(share * 256) % 256
            return _table(np.where(threshold > _VALUES, _VALUES, 255 - _VALUES))[image]
        case "SolarizeAdd":
            return _table(np.where(_VALUES < 128, np.minimum(_VALUES + int(share * 110), 255), _VALUES))[image]
        case "Brightness":
            return _blend(np.zeros(256, np.uint8), _table(_VALUES), factor)[image]
        case "Contrast":
            grey = min(height * width // 256, 255)
            return _blend(np.full(256, grey, np.uint8), _table(_VALUES), factor)[image]
        case "Color":
            return _blend(_grey(image), image, factor) if len(image) == 3 else image
        case "Sharpness":
            return _blend(_smooth(image), image, factor)
        case "ShearX":
            return _moved(image, ((1, sign * (share * 0.3), 0), (0, 1, 0)))
        case "ShearY":
            return _moved(image, ((1, 0, 0), (sign * (share * 0.3), 1, 0)))
        case "TranslateX":
            return _moved(image, ((1, 0, sign * int(share * 100 * width / 224)), (0, 1, 0)))
        case "TranslateY":
            return _moved(image, ((1, 0, 0), (0, 1, sign * int(share * 100 * height / 224))))
        case "Rotate":
            return _moved(image, _rotation(sign * (share * 30), height, width))
        case "Cutout":
            row, column = centre
            reach = int(share * 40 * min(height, width) / 224)
            image = image.copy()
            image[:, max(row - reach, 0) : row + reach, max(column - reach, 0) : column + reach] = GREY
            return image
    raise ValueError(f"operation is {name!r}; it must be one of {', '.join(OPERATIONS)}.")


def _table(values: npt.NDArray[np.int64]) -> Bytes:
    return values.astype(np.uint8)


def _blend(start: Bytes, end: Bytes, factor: float) -> Bytes:
    """Go from `start` (factor 0) to `end` (factor 1) and beyond; fractions are cut off, not rounded."""
    if factor == 1:
        return end
    low = start.astype(np.float32)
    mixed = end.astype(np.float32)
    mixed -= low
    mixed *= np.float32(factor)
    mixed += low
    return np.clip(mixed, 0, 255, out=mixed).astype(np.uint8)


def _stretched(plane: Bytes) -> Bytes:
    low, high = np.float32(plane.min()), np.float32(plane.max())
    if low == high:
        return plane
    scale = np.float32(255) / (high - low)
    values = _VALUES.astype(np.float32) * scale + -low * scale
    return np.clip(values, 0, 255).astype(np.uint8)[plane]


def _equalized(plane: Bytes) -> Bytes:
    counts = np.bincount(plane.ravel(), minlength=256)
    step = int(plane.size - counts[plane.max()]) // 255
    if step == 0:
        return plane
    below = np.cumsum(counts) - counts
    table = np.minimum((below + step // 2) // step, 255)
    table[0] = 0
    return _table(table)[plane]


def _grey(image: Bytes) -> Bytes:
    """Return the image without its colours, [1, H, W], in the steps of TensorFlow's rgb_to_grayscale."""
    red, green, blue = image.astype(np.float32) * np.float32(1 / 255)
    luma = red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]
    return (luma * np.float32(255.5)).astype(np.uint8)[None]


def _smooth(image: Bytes) -> Bytes:
    """Average each pixel, counted five times, with its eight neighbours; pixels at the border stay.

    Thirteenths are inexact, and even of equal values some sums come out below a whole number: they are added in
    TensorFlow's order (without oneDNN, which fuses additions and so differs by a level in 0.4 % of random pixels).
    """
    _, height, width = image.shape
    result = image.copy()
    if height < 3 or width < 3:
        return result
    once = image * (np.float32(1) / np.float32(13))
    five = image[:, 1:-1, 1:-1] * (np.float32(5) / np.float32(13))
    total = np.zeros_like(five)
    for row in range(3):
        for column in range(3):
            part = once[:, row : height - 2 + row, column : width - 2 + column]
            total += five if row == column == 1 else part
    result[:, 1:-1, 1:-1] = np.clip(total, 0, 255, out=total).astype(np.uint8)
    return result


def _rotation(degrees: float, height: int, width: int) -> Matrix:
    """Return the affine map of a rotation around the middle between the first and the last pixel, in float32."""
    radians = float(np.float32(degrees) * np.float32(math.pi / 180))
    cosine, sine = np.float32(math.cos(radians)), np.float32(math.sin(radians))  # numpy's may be off in the last bit
    across, down = np.float32(width - 1), np.float32(height - 1)
    left = (across - (cosine * across - sine * down)) / np.float32(2)
    top = (down - (sine * across + cosine * down)) / np.float32(2)
    return (cosine, -sine, left), (sine, cosine, top)


def _moved(image: Bytes, matrix: Matrix) -> Bytes:
    """Take each pixel from the place to which an affine map sends its column and row: the nearest there, or grey."""
    _, height, width = image.shape
    columns, rows = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]
    x, y = (_nearest(np.float32(a) * columns + np.float32(b) * rows + np.float32(c)) for a, b, c in matrix)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    places = np.where(inside, y * width + x, 0)
    result = image.reshape(len(image), -1)[:, places]
    result[:, ~inside] = GREY
    return result


def _nearest(places: Floats) -> npt.NDArray[np.int32]:
    """Round to the nearest whole numbers, halves away from zero."""
    return np.trunc(places + np.copysign(np.float32(0.5), places)).astype(np.int32)
