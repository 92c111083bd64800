"""RandAugment: torchvision's operations (transforms.v2) at big_vision's levels.

A level m means what it means in big_vision's `randaug(n, m)`, and so in the paper, where m = 10 is the full scale of
AutoAugment and configurations use 0, 10, 15 and 20. torchvision's own RandAugment counts 31 steps up to that full
scale, cannot go beyond it, and means "nothing" by 0, where big_vision turns almost black or grey, or inverts. So its
table of magnitudes is replaced, for levels 0 to 30:

    operation                                  at level m                         torchvision at step s of 30
    ShearX, ShearY                             ± 0.03 m                           ± 0.01 s
    TranslateX, TranslateY                     ± 10 m pixels of 224               ± 3.4 s pixels of 224
    Rotate                                     ± 3 m degrees                      ± s degrees
    Brightness, Color, Contrast, Sharpness     factor 0.1 + 0.18 m                factor 1 ± 0.03 s
    Posterize                                  to int(0.4 m) bits, 1 at least     to 8 - 0.13 s bits
    Solarize                                   from int(25.6 m) on                from 255 - 8.5 s on
    AutoContrast, Equalize, Invert             –                                  the same, without Invert

Of big_vision's 16 operations two are left out, as torchvision has no counterpart: Cutout and SolarizeAdd. Areas that an
operation leaves empty become grey (128), and pixels are taken from the nearest place, as there.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nomax import _compat

LEVELS = 31


def randaugment(
    pixels: npt.NDArray[np.uint8], count: int, level: int, seeds: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint8]:
    """Each image of a batch [n, 1 or 3, H, W] after `count` random operations, which its own seed chooses."""
    from PIL import Image

    transform = _transform(count, level)
    result = np.empty_like(pixels)
    # torchvision draws from torch's global generator, which is the caller's: borrow it, and give it back as it was.
    with torch.random.fork_rng(devices=()):
        for number, seed in enumerate(seeds.tolist()):
            torch.default_generator.manual_seed(seed >> 1)  # it takes 63 bits
            image = pixels[number].transpose(1, 2, 0)
            changed = np.asarray(transform(Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)))
            result[number] = changed.reshape(image.shape).transpose(2, 0, 1)
    return result


@cache
def _transform(count: int, level: int) -> Any:
    _compat.torchvision()
    from torchvision.transforms import v2

    def line(per_level: float, start: float = 0.0) -> Any:
        values = start + per_level * torch.arange(LEVELS)
        return lambda bins, height, width: values

    def pixels(per_level: float, of: str) -> Any:
        steps = per_level / 224 * torch.arange(LEVELS)
        return lambda bins, height, width: steps * (height if of == "height" else width)

    def nothing(bins: int, height: int, width: int) -> None:
        return None

    bits = (0.4 * torch.arange(LEVELS) + 1e-6).int().clamp(1, 8)  # TensorFlow shifts a byte by 7 at most
    thresholds = (25.6 * torch.arange(LEVELS) + 1e-4).int().clamp(max=256)
    enhance = (line(0.18, -0.9), False)  # torchvision adds 1

    class RandAugment(v2.RandAugment):  # type: ignore[misc, unused-ignore]
        _AUGMENTATION_SPACE = {  # noqa: RUF012
            "AutoContrast": (nothing, False),
            "Equalize": (nothing, False),
            "Invert": (nothing, False),
            "Rotate": (line(3.0), True),
            "Posterize": (lambda bins, height, width: bits, False),
            # torchvision compares bytes with 255 times this; the half keeps rounding from mattering.
            "Solarize": (lambda bins, height, width: (thresholds - 0.5) / 255, False),
            "Color": enhance,
            "Contrast": enhance,
            "Brightness": enhance,
            "Sharpness": enhance,
            "ShearX": (line(0.03), True),
            "ShearY": (line(0.03), True),
            "TranslateX": (pixels(10.0, "width"), True),
            "TranslateY": (pixels(10.0, "height"), True),
        }

    return RandAugment(count, level, LEVELS, fill=128)
