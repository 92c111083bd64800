"""What a vision run is told; config.json in the run folder holds it."""

from dataclasses import dataclass, field
from typing import Literal

from nomax.data.transforms import Augment
from nomax.models import ViTConfig
from nomax.train.loop_config import LoopConfig


@dataclass(frozen=True)
class VisionConfig(LoopConfig):
    """How a ViT is trained: the model, its data, and all the numbers."""

    recipe: str = "base"
    model: ViTConfig = field(default_factory=ViTConfig)
    data: str = "fashion-mnist-small"
    held_out: float = 0.0  # share of the training images that is the test split; 0: the data have one
    epochs: float = 0.0  # where the number of steps came from; 0 if it was given itself
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    mixup: float = 0.0
    augment: Augment = field(default_factory=lambda: Augment(224))
    test_images: int = 0  # 0: evaluate on all of them
    on_error: Literal["raise", "skip"] = "raise"  # what to do about broken images
    workers: int = 0
