"""Drawings to pixels: SVG rendered on white by resvg."""

import io
import platform
from importlib import import_module
from importlib.metadata import version

import numpy as np
import numpy.typing as npt


def made_with() -> str:
    """The renderer and the kind of machine: with the same ones, the same drawing gives the same pixels."""
    return f"resvg-py {version('resvg-py')}, {platform.machine()}"


def render(svg: str, side: int) -> npt.NDArray[np.uint8] | None:
    """A drawing as [side, side, 3] pixels, fitted into the square; None if it cannot be rendered."""
    try:
        # Without the machine's fonts, so that the pixels do not depend on which it has.
        png = import_module("resvg_py").svg_to_bytes(svg_string=svg, width=side, height=side, skip_system_fonts=True)
    except ValueError:  # not well formed, or of no size
        return None
    return on_white(pixels(png), side)


def on_white(picture: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """An RGBA picture in the middle of a white square; a row or column too many (of 32×33, say) is cut off."""
    picture = picture[:side, :side]
    height, width = picture.shape[:2]
    alpha = picture[:, :, 3:].astype(np.uint16)
    blended = (picture[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255
    top, left = (side - height) // 2, (side - width) // 2
    square = np.full((side, side, 3), 255, np.uint8)
    square[top : top + height, left : left + width] = blended
    return square


def pixels(png: bytes) -> npt.NDArray[np.uint8]:
    """A PNG file as RGBA pixels, [H, W, 4]."""
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=["PNG"]) as picture:
        return np.asarray(picture.convert("RGBA"))
