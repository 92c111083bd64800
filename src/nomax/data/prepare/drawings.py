"""Drawings, which icons and emoji share: SVG rendered on white by resvg, and duplicates left out."""

import hashlib
import io
import platform
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt


def made_with() -> str:
    """Return the renderer and the kind of machine: with the same ones, the same drawing gives the same pixels."""
    return f"resvg-py {version('resvg-py')}, {platform.machine()}"


def render(svg: str, side: int) -> npt.NDArray[np.uint8] | None:
    """Render a drawing as [side, side, 3] pixels, fitted into the square; None if it cannot be rendered."""
    try:
        # Without the machine's fonts, so that the pixels do not depend on which it has.
        png = import_module("resvg_py").svg_to_bytes(svg_string=svg, width=side, height=side, skip_system_fonts=True)
    except ValueError:  # not well formed, or of no size
        return None
    return on_white(pixels(png), side)


def on_white(picture: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """Put an RGBA picture into the middle of a white square; a row or column too many (of 32×33, say) is cut off."""
    picture = picture[:side, :side]
    height, width = picture.shape[:2]
    alpha = picture[:, :, 3:].astype(np.uint16)
    blended = (picture[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255
    top, left = (side - height) // 2, (side - width) // 2
    square = np.full((side, side, 3), 255, np.uint8)
    square[top : top + height, left : left + width] = blended
    return square


def pixels(png: bytes) -> npt.NDArray[np.uint8]:
    """Decode a PNG file into RGBA pixels, [H, W, 4]."""
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=["PNG"]) as picture:
        return np.asarray(picture.convert("RGBA"))


def distinct(images: npt.NDArray[Any], names: npt.NDArray[Any], testing: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Choose the images to keep: none blank, none twice in a class, no test image that is a training image anywhere.

    Training images come first.
    """
    seen: set[tuple[bytes, str]] = set()
    trained: set[bytes] = set()
    keep = np.zeros(len(images), np.bool_)
    for index, image in enumerate(images):
        bitmap, name = hashlib.sha256(image.tobytes()).digest(), str(names[index])
        keep[index] = image.min() < 255 and (bitmap, name) not in seen and not (testing[index] and bitmap in trained)
        seen.add((bitmap, name))
        if not testing[index]:
            trained.add(bitmap)
    return keep
