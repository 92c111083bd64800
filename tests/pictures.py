"""Small image files and folders for the tests of the data pipeline."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(number: int, width: int = 40, height: int = 30) -> Image.Image:
    """A smooth picture with its own colours."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **settings: Any) -> bytes:
    """The image as a file in memory."""
    data = io.BytesIO()
    image.save(data, kind, **settings)
    return data.getvalue()


def fill(folder: Path, classes: dict[str, int], width: int = 40, height: int = 30) -> Path:
    """Write FOLDER/CLASS/N.jpg, so many of each class."""
    number = 0
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for place in range(count):
            (folder / name / f"{place:03d}.jpg").write_bytes(encoded(picture(number, width, height)))
            number += 1
    return folder


def pattern(width: int, height: int) -> Image.Image:
    """Slopes, stripes and areas of one colour, by whole numbers alone: the same wherever it is drawn."""
    x, y = np.arange(width)[None, :, None], np.arange(height)[:, None, None]
    band = np.arange(3)
    slopes = (x * x * (3 + band) // (width + 1) + y * y * (5 - band) // (height + 1) + 40 * band) % 256
    stripes = ((x + 2 * y) // 3 * 37 + 91 * band) % 256
    plain = (x // 7 * 29 + y // 5 * 53 + 17 * band) % 256
    pixels = np.where(y < height // 3, slopes, np.where(x < width // 2, stripes, plain))
    return Image.fromarray((20 + pixels * 220 // 255).astype(np.uint8))


def broken_folder(tmp_path: Path) -> Path:
    """Seven images, of which the third and the last are broken."""
    fill(tmp_path, {"a": 4, "b": 3})
    (tmp_path / "a" / "002.jpg").write_bytes(encoded(picture(0, 200, 200))[:999])
    (tmp_path / "b" / "002.jpg").write_bytes(b"hello")
    return tmp_path
