"""Images that need no download: a part of Fashion-MNIST, which comes with nomax, and scikit-learn's digits.

tools/bundle_fashion_mnist.py made the part of Fashion-MNIST.
"""

import lzma
from functools import cache
from importlib import import_module
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from nomax.data.prepare.mnist_cifar import CLASSES
from nomax.data.source import ArraySource

FILE = "fashion-mnist-small.npy.xz"
TRAIN = 10_000
DIGITS_TRAIN = 1_297  # of 1,797: scikit-learn has no split, so the last 500 are the test images


def fashion_mnist_small(split: str) -> ArraySource:
    """Load one split of the bundled part of Fashion-MNIST."""
    images, labels = _arrays()
    chosen = _split(TRAIN)[split]
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
    with (files(__package__) / FILE).open("rb") as packed, lzma.open(packed) as file:
        images = np.lib.format.read_array(file, allow_pickle=False)
        return images, np.lib.format.read_array(file, allow_pickle=False)
