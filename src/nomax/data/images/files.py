"""Image files, decoded safely: limits are checked before memory is taken, and every error names the file."""

import io
import os
from collections.abc import Callable
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from nomax.data.source import DataError

EXTENSIONS = frozenset({"bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # no others are tried, whatever the file claims to be
MOST_BYTES = 1 << 28
MOST_PIXELS = 1 << 26  # 8192 × 8192; a small file can claim to hold far more than fits into memory

_GREY_16_BIT = ("I;16", "I;16B", "I;16L", "I;16N")

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


class LazyName:
    """An image's name, looked up when an error is written: looking up every one could take longer than decoding."""

    def __init__(self, name: Callable[[int], str], index: int):
        self.name, self.index = name, index

    def __str__(self) -> str:
        return self.name(self.index)


def decode(data: bytes, name: object) -> Image.Image:
    """Decode an image file that is in memory: to mode L if it is grey, else to RGB.

    Transparent areas become white. Of an animation the first frame is taken, and the orientation that a camera noted
    is not applied, as in big_vision and torchvision. Errors call the image by its `name`, or by what str() makes of it.
    """
    return decoded(open_header(data, name), name)


def read_file(path: Path, name: object) -> bytes:
    """Read an image file, unless it is far too large."""
    try:
        with path.open("rb", buffering=0) as file:
            _check_size(os.fstat(file.fileno()).st_size, name)
            return file.read()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error


def open_header(data: bytes, name: object) -> Image.Image:
    """Open an image by its header alone: its size is known, its pixels are not decoded yet."""
    if not data:
        raise DataError(f"{name} is empty.")
    _check_size(len(data), name)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise DataError(f"{name} is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image.") from None
    except Exception as error:  # a decoder given garbage may raise anything
        raise DataError(f"{name} is a broken image: {_reason(error)}.") from error
    if image.width * image.height > MOST_PIXELS:
        raise DataError(
            f"{name} has {image.width}×{image.height} pixels, more than the limit of {MOST_PIXELS:,}. "
            "It may be made to exhaust the memory; if it is genuine, make it smaller."
        )
    return image


def decode_smaller(image: Image.Image, box: Box, size: int) -> Box:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8 of its size if the box keeps `size` pixels; return the box in that.

    This is faster, as the smaller image comes straight out of the cosine transform, but it is not quite the same
    as decoding and then shrinking. On an image in another format, or one decoded already, it does nothing.
    """
    factor = min(box[2] - box[0], box[3] - box[1]) / size
    scale = next((scale for scale in (8, 4, 2) if scale <= factor), 1)
    if scale == 1:
        return box
    width, height = image.size
    drafted = image.draft(image.mode, (width // scale, height // scale))
    if drafted is None:
        return box
    x, y = drafted[1][2] / width, drafted[1][3] / height
    return box[0] * x, box[1] * y, min(box[2] * x, image.width), min(box[3] * y, image.height)


def decoded(image: Image.Image, name: object) -> Image.Image:
    """Decode the pixels of an opened image, to mode L or RGB."""
    try:
        image.load()
        if image.mode in ("L", "RGB") and not image.has_transparency_data:
            return image
        if image.mode == "1":
            return image.convert("L")
        if image.mode in _GREY_16_BIT:
            return image.convert("I").point(lambda value: value / 256).convert("L")
        if image.mode in ("I", "F"):
            raise DataError(
                f"{name} has pixels of kind {image.mode}, of unknown range; 8 or 16 bits a colour can be used."
            )
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
        return image.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # a decoder given garbage may raise anything
        raise DataError(f"{name} is a broken image: {_reason(error)}.") from error


def _check_size(size: int, name: object) -> None:
    if size > MOST_BYTES:
        raise DataError(f"{name} is larger than the limit of {MOST_BYTES >> 20} MiB.")


def _reason(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__
