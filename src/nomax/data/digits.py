"""Handwritten digits of 8×8 pixels, which scikit-learn carries."""

from importlib import import_module

import numpy as np

from nomax.data.source import ArraySource

TRAIN = 1_297  # of 1,797: scikit-learn has no split, so the last 500 are the test images
SPLITS = {"train": slice(0, TRAIN), "test": slice(TRAIN, None)}


def load(split: str) -> ArraySource:
    """One split of the digits."""
    try:
        digits = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ImportError("digits come with scikit-learn: pip install scikit-learn") from error
    part = SPLITS[split]
    images = np.rint(digits.images[part] * (255 / 16)).astype(np.uint8)  # scikit-learn has 0 … 16
    return ArraySource(images, digits.target[part], tuple("0123456789"), f"digits ({split})")
