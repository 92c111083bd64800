"""The images that come with nomax: a part of Fashion-MNIST (tools/bundle_fashion_mnist.py made it)."""

import lzma
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from nomax.data.idx import CLASSES
from nomax.data.source import ArraySource

FILE = "fashion-mnist-small.npy.xz"
TRAIN = 10_000
SPLITS = {"train": slice(0, TRAIN), "test": slice(TRAIN, None)}


def load(split: str) -> ArraySource:
    """One split of the bundled images."""
    images, labels = _arrays()
    part = SPLITS[split]
    return ArraySource(images[part].copy(), labels[part], CLASSES["fashion-mnist"], f"fashion-mnist-small ({split})")


@cache
def _arrays() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    with (files(__package__) / FILE).open("rb") as packed, lzma.open(packed) as file:
        images = np.lib.format.read_array(file, allow_pickle=False)
        return images, np.lib.format.read_array(file, allow_pickle=False)
