"""JPEG files that are about as hard to decode as photographs, made from noise and shapes: not photographs."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

WIDTH, HEIGHT, QUALITY = 500, 375, 90  # the most common size in ImageNet


def photo(number: int) -> bytes:
    """Smooth noise of several sizes, as clouds and foliage have it, with edges and some grain; the same every time."""
    random = np.random.default_rng(number)
    canvas = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for cells in (2, 4, 8, 16, 32, 64, 128, 256):
        coarse = random.standard_normal((cells * 3 // 4 + 1, cells, 3)).astype(np.float32)
        layers = [Image.fromarray(coarse[:, :, c]).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for c in range(3)]
        canvas += 60 / cells**0.5 * np.stack([np.asarray(layer) for layer in layers], axis=2)
    canvas += 128 + random.normal(0, 11, (HEIGHT, WIDTH, 1))
    image = Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(8):
        x, y = int(random.integers(WIDTH)), int(random.integers(HEIGHT))
        w, h = (int(length) for length in random.integers(10, 120, 2))
        colour = tuple(int(value) for value in random.integers(0, 256, 3))
        shape = draw.ellipse if random.random() < 0.5 else draw.rectangle
        shape((x, y, x + w, y + h), outline=colour, fill=colour if random.random() < 0.3 else None, width=2)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def write(folder: Path, count: int, classes: int = 4) -> float:
    """Write photos into FOLDER/train/CLASS/…; return their mean size in bytes."""
    total = 0
    for number in range(count):
        place = folder / "train" / f"class{number % classes}"
        place.mkdir(parents=True, exist_ok=True)
        total += (place / f"{number:06d}.jpg").write_bytes(photo(number))
    return total / count
