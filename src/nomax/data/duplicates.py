"""Drawings that occur more than once: in a class, or in the training images and again in the test images."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt


def distinct(images: npt.NDArray[Any], names: npt.NDArray[Any], testing: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which images to keep: no blank ones, none twice in a class, no test image that is a training image of any class.

    Training images come first.
    """
    seen: set[tuple[bytes, str]] = set()
    trained: set[bytes] = set()
    keep = np.zeros(len(images), np.bool_)
    for index, image in enumerate(images):
        bitmap, name = hashlib.sha256(image.tobytes()).digest(), str(names[index])
        keep[index] = image.min() < 255 and (bitmap, name) not in seen and not (testing[index] and bitmap in trained)
        seen.add((bitmap, name))
        if not testing[index]:
            trained.add(bitmap)
    return keep
