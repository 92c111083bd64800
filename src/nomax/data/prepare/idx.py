"""MNIST and its kin: the idx format, a header of big-endian sizes and then the bytes."""

import math
import re
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax.data.prepare.job import Job
from nomax.data.prepare.packages import members, unpack

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}
_FILE = re.compile(r".*/(train|t10k)-(images|labels)[.-]idx[13]-ubyte(\.gz)?")


def parse(data: bytes, title: str) -> npt.NDArray[np.uint8]:
    """Return the array in an idx file."""
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{title} is not an idx file of bytes: it begins with {data[:4].hex()}.")
    dimensions = data[3]
    offset = 4 + 4 * dimensions
    if len(data) < offset:
        raise ValueError(f"{title} is cut off: it has {len(data)} bytes, its header alone {offset}.")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    array = np.frombuffer(data, np.uint8, offset=offset)
    if array.size != math.prod(shape):
        raise ValueError(
            f"{title} is cut off: its header says {'×'.join(map(str, shape))}, but {array.size} bytes follow."
        )
    return array.reshape(shape)


def _read(job: Job) -> dict[str, npt.NDArray[np.uint8]]:
    """Read the four arrays of the package, by "train-images" … "t10k-labels"."""
    arrays = {}
    (file,) = job.packages.values()
    for name, data in members(file, lambda name: _FILE.fullmatch(name) is not None):
        match = _FILE.fullmatch(name)
        assert match is not None
        title = f"{file.name}: {name}"
        arrays[f"{match[1]}-{match[2]}"] = parse(unpack(data, match[3] or "", title), title)
    missing = {"train-images", "train-labels", "t10k-images", "t10k-labels"} - set(arrays)
    if missing:
        raise ValueError(f"{file.name} lacks {', '.join(sorted(missing))}.")
    return arrays


def prepare(job: Job) -> dict[str, Any]:
    """Write the arrays of a package in MNIST's four files."""
    arrays = _read(job)
    train = len(arrays["train-images"])
    images = np.concatenate([arrays["train-images"], arrays["t10k-images"]])
    job.report("reading images", len(images), len(images), "images")
    job.write_images(images, np.concatenate([arrays["train-labels"], arrays["t10k-labels"]]))
    return {"classes": CLASSES[job.name], "splits": {"train": (0, train), "test": (train, len(images))}}
