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


def usable(
    images: npt.NDArray[Any], names: npt.NDArray[Any], testing: npt.NDArray[Any], *, least: int, train: int, test: int
) -> npt.NDArray[np.int64]:
    """Return which images to keep: no blank ones, none twice in a class, no test image that is a training image.

    A class needs `least` images, of which so many are to train on and so many to test with. Training images come first.
    """
    seen: set[tuple[bytes, str]] = set()
    trained: set[bytes] = set()
    keep = []
    for index, image in enumerate(images):
        bitmap, name = hashlib.sha256(image.tobytes()).digest(), str(names[index])
        if image.min() < 255 and (bitmap, name) not in seen and not (testing[index] and bitmap in trained):
            keep.append(index)
        seen.add((bitmap, name))
        if not testing[index]:
            trained.add(bitmap)
    kept = np.array(keep, np.int64)
    _, labels = np.unique(names[kept], return_inverse=True)
    total, tests = np.bincount(labels), np.bincount(labels, testing[kept])
    enough = (total >= least) & (total - tests >= train) & (tests >= test)
    return kept[enough[labels]]
