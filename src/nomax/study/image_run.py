"""One run of a study of images: a ViT is trained, and probed if wanted."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from nomax.models import ViT, ViTConfig
from nomax.study.row import ImageRow
from nomax.study.run import Run
from nomax.train import VisionConfig


@dataclass(frozen=True)
class ImageRun(Run):
    """A configuration of a vision transformer, and the measurements that follow the training."""

    config: VisionConfig
    probes: tuple[str, ...] = ()
    """Data sets of the ten-shot probe, as `nomax probe --on` takes them."""
    subset: str | None = None
    """Measure accuracy among some labels, too: imagenet1k, icons, or a file."""
    probe_images: int = 0
    """How many test images of each probe's data set to look at, spread evenly; 0: all of them."""

    @property
    def row(self) -> type[ImageRow]:
        """What its results are written into."""
        return ImageRow

    @cached_property
    def macs(self) -> int:
        """Multiply-adds of the encoder per image."""
        return macs(self.config.model)

    @property
    def particulars(self) -> dict[str, Any]:
        """What rows of images have beyond the common columns."""
        model = self.config.model
        return {
            "variant": model.variant,
            "size": model.variant.partition("/")[0],
            "patch": model.patch,
            "tokens": model.tokens,
            "qk_norm": model.qk_norm,
            "gate": model.gate,
            "classes": model.num_classes,
        }


def macs(config: ViTConfig) -> int:
    """Multiply-adds of a model that is not made: only its shapes are."""
    return _macs(replace(config, phi="softmax"))  # whatever φ is, it is not counted


@lru_cache(maxsize=256)
def _macs(config: ViTConfig) -> int:
    with torch.device("meta"):
        return ViT.from_config(config).macs()
