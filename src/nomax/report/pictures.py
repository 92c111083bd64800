"""Figures and maps as images inside the page.

They become data: URIs of <img>, not part of the document: the SVGs of matplotlib share ids, which must be unique in a
document, and a script in an image never runs.
"""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

LARGE_SVG = 400_000  # bytes; from here on a PNG beside it, if that is smaller, is shown instead
PIXELS = {"pt": 4 / 3, "px": 1.0, "": 1.0, "in": 96.0, "cm": 96 / 2.54, "mm": 96 / 25.4}


@dataclass(frozen=True)
class Picture:
    """An image as the page shows it."""

    uri: str
    width: int
    height: int
    photograph: bool
    """Made of pixels: its colours are the message, and stay as they are in the dark."""
    description: str
    """What the file itself says it shows."""


def picture(folder: Path, name: str) -> Picture | None:
    """The picture in a folder, or None if it is not there; a ValueError says if it is damaged."""
    if Path(name).name != name or Path(name).suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"{folder / 'study.json'}: a figure must be a name.svg or name.png beside it: {name!r}.")
    path = folder / name
    if path.suffix.lower() == ".svg" and path.is_file() and path.stat().st_size > LARGE_SVG:
        pixels = path.with_suffix(".png")
        path = pixels if pixels.is_file() and pixels.stat().st_size < path.stat().st_size else path
    if not path.is_file():
        return None
    return _svg(path) if path.suffix.lower() == ".svg" else _png(path)


def _svg(path: Path) -> Picture:
    content = path.read_bytes()
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} is damaged ({error}). Restore it, or run the study again.") from None
    if root.tag.rpartition("}")[2] != "svg":
        raise ValueError(f"{path} is no SVG image but <{root.tag}>.")
    view = [float(part) for part in re.findall(r"-?[\d.]+", root.get("viewBox", ""))]
    natural = view[2:] if len(view) == 4 else [800.0, 500.0]
    width, height = (_pixels(root.get(name), value) for name, value in zip(("width", "height"), natural, strict=True))
    words = next((part.text for part in root.iter() if part.tag.rpartition("}")[2] == "desc" and part.text), "")
    return Picture(_uri("svg+xml", content), width, height, False, words or "")


def _pixels(length: str | None, otherwise: float) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", (length or "").strip())
    if not match or match[2] not in PIXELS:
        return round(otherwise)
    return round(float(match[1]) * PIXELS[match[2]])


def _png(path: Path) -> Picture:
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            width, height = image.size
            words = str(image.info.get("Description", ""))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is damaged ({error}). Restore it, or run the study again.") from None
    return Picture(_uri("png", path.read_bytes()), width, height, True, words)


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
