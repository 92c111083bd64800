"""The config of a vision run, its recipes, and the fitting of a recipe to the images at hand.

Recipes are plain functions that start from `base` and change a few fields; every number can be changed afterwards. A
run is recipe → `for_images` → dataclasses.replace → nomax.train.config.settle, from the command line and in Python.
Augmentation has the names of big_vision: a setting is a probability of mixup and a strength of RandAugment.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nomax.data import ArraySource, Source
from nomax.data.images.transforms import Augment
from nomax.models import ViTConfig
from nomax.train.config import LoopConfig

if TYPE_CHECKING:
    from nomax.train.jobs import RunTask


@dataclass(frozen=True)
class VisionConfig(LoopConfig):
    """The training of a ViT: the model, its data, and all the numbers."""

    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *LoopConfig.NOT_NEGATIVE,
        *("mixup", "test_images", "diagnose", "workers", "read_retries", "read_timeout"),
    )

    recipe: str = "base"
    model: ViTConfig = field(default_factory=ViTConfig)
    data: str = "fashion-mnist-small"
    held_out: float = 0.0
    """Share of the training images to hold out and evaluate on, such as 0.1: for data without a test split, or to
    choose settings without using it. File names decide which, so `nomax evaluate RUN` uses the same images."""
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    """Binary cross-entropy summed over the classes, or cross-entropy. (Nothing to do with φ.)"""
    mixup: float = 0.0
    """Mix pairs of images with a share from Beta(p, p); 0 turns it off. --augmentation sets it, too."""
    augment: Augment = field(default_factory=lambda: Augment(224))
    test_images: int = 0
    """Images of the test split to evaluate on; 0 takes all of them."""
    on_error: Literal["raise", "skip"] = "raise"
    """Stop at a broken image, or count it and use another in its place."""
    diagnose: int = 0
    """Inspect attention at about this many steps (row sums, zeros, gradients, learned scales), and write it to
    diagnostics.jsonl; 0 turns it off. Can change on resume."""
    workers: int = 0
    """Processes that prepare images; 0 prepares them in the training process. Can change on resume."""
    read_retries: int = 4
    """Attempts after a failed read of a shard, with pauses of 0.5, 1, 2, … seconds; then it is an error that names the
    shard and the offset. Can change on resume."""
    read_timeout: float = 60.0
    """Seconds after which a read of a shard behind a URL counts as failed. Can change on resume."""

    command: ClassVar[str] = "train vit"

    def check(self) -> None:
        """Raise a ValueError that names the field, unless these values make sense together."""
        super().check()
        self.check_l1(self.model.phi)

    @staticmethod
    def task_type() -> "type[RunTask[Any]]":
        """Return the task that trains such a config."""
        from nomax.train.vision.task import VisionTask

        return VisionTask


# name: mixup's Beta(p, p), RandAugment's (operations per image, magnitude)
AUGMENTATIONS: Mapping[str, tuple[float, tuple[int, int] | None]] = {
    "none": (0.0, None),
    "light1": (0.0, (2, 0)),
    "light2": (0.2, (2, 10)),
    "medium1": (0.2, (2, 15)),
    "medium2": (0.5, (2, 15)),
    "strong1": (0.5, (2, 20)),
    "strong2": (0.8, (2, 20)),
}
# The paper's settings by model.
I1K = {
    "Ti/16": "light1",
    "S/32": "medium1",
    "S/16": "medium2",
    "B/32": "medium2",
    "B/16": "medium2",
    "L/16": "medium2",
}
I21K = {"Ti/16": "none", "S/32": "none", "S/16": "light1", "B/32": "light2", "B/16": "light2", "L/16": "medium2"}
ASSUMED = {"S/8": "S/16"}  # the paper trains S/8 but its configuration has no row for it


def base(variant: str = "S/16", **model: Any) -> VisionConfig:
    """Return the settings all the paper's runs share: AdamW at 1e-3, 10k warm-up steps, cosine to 0, batches of 4,096.

    Attention has qk-norm. Weight decay is 0.1 in AdamW's terms, on kernels only; gradients are clipped to a norm of 1;
    the loss is the sum of binary cross-entropies over the classes. Augmentation is an inception crop and a flip.
    """
    settings = ViTConfig(variant, **{"qk_norm": True, **model})
    return VisionConfig(model=settings, augment=Augment(settings.image[0], channels=settings.channels))


def i1k(variant: str = "S/16", classes: int = 1000, augmentation: str | None = None, **model: Any) -> VisionConfig:
    """ImageNet-1k as in Wortsman et al. (2023): big_vision's vit_i1k.py, 300 epochs, with qk-norm.

    nomax train vit --recipe i1k --data PATH --model S/16 --phi softmax relu/L --precision bf16 --distribute fsdp
    (under torchrun, one process per GPU). 92,900 steps; S/16 costs 5.2e18 multiply-adds: about 4 hours on eight GPUs
    that reach 100 TFLOP/s each, years on a CPU. S/8 uses the augmentation of S/16: our assumption.
    """
    settings = {"pool": "tok", "rep_size": True, "head_bias": -6.9, "num_classes": classes, **model}
    config = replace(base(variant, **settings), recipe="i1k", epochs=300.0)
    return augmented(_to_the_letter(config), augmentation or _row(variant, I1K, "i1k"))


def i21k(variant: str = "S/16", classes: int = 21_843, augmentation: str | None = None, **model: Any) -> VisionConfig:
    """ImageNet-21k as in Wortsman et al. (2023): big_vision's vit_i21k.py for 30 epochs, with qk-norm.

    nomax train vit --recipe i21k --data 'PATH/train-{000000..002047}.tar' --model S/16 --phi softmax relu/L
    --precision bf16 --distribute fsdp (under torchrun). 103,600 steps; S/16 costs 5.8e18 multiply-adds: about 4 hours
    on eight GPUs that reach 100 TFLOP/s each. S/8 uses the augmentation of S/16: our assumption, the paper is silent.
    """
    settings = {"pool": "gap", "head_bias": -10.0, "num_classes": classes, **model}
    config = replace(base(variant, **settings), recipe="i21k", epochs=30.0)
    return augmented(_to_the_letter(config), augmentation or _row(variant, I21K, "i21k"))


def small(variant: str = "nano/4", classes: int = 10, augmentation: str | None = None, **model: Any) -> VisionConfig:
    """Small images (28 or 32 pixels) in about an hour on one CPU core, with the paper's loss, optimiser and qk-norm.

    nomax train vit --data cifar10 --phi softmax relu/L --parallel. 600,000 images at about 160 a second (AVX2,
    float32): 12 epochs of CIFAR-10. Images of one size are shifted by up to an eighth, and flipped if the mirror image
    has the same class; others get the inception crop.
    """
    settings = {"image_size": 32, "posemb": "sincos2d", "head_bias": round(-math.log(classes), 2)}
    config = base(variant, **{**settings, "num_classes": classes, **model})
    config = replace(
        config,
        recipe="small",
        batch_size=128,
        steps=4700,
        warmup=500,
        checkpoint_every=200,
        evaluate_every=400,
        augment=replace(config.augment, crop="pad"),
    )
    return augmented(config, augmentation or "none")


RECIPES = {"small": small, "i1k": i1k, "i21k": i21k}


# Data of which a mirrored image keeps its class: not digits, nor icons, among which are arrows.
FLIPPABLE = ("cifar10", "fashion-mnist", "fashion-mnist-small")


def for_images(
    recipe: str,
    images: Source,
    *,
    data: str,
    variant: str | None = None,
    augmentation: str | None = None,
    **model: Any,
) -> VisionConfig:
    """Return a recipe for the training images of a data set, with their classes and channels.

    `small` also adopts their size, if they are square and all of one size, and chooses crops and flips to suit them.
    `model` has fields of ViTConfig, φ among them.
    """
    side = image_side(images)
    known: dict[str, Any] = {"channels": 1 if isinstance(images, ArraySource) and images.images.ndim == 3 else 3}
    if recipe == "small" and side:
        known["image_size"] = side
    chosen = {} if variant is None else {"variant": variant}
    config = RECIPES[recipe](**chosen, classes=len(images.classes), augmentation=augmentation, **{**known, **model})
    config = replace(config, data=data)
    if recipe == "small":
        flip = data in FLIPPABLE or not isinstance(images, ArraySource)
        crop = config.augment.crop if side == config.augment.size else "inception"
        config = replace(config, augment=replace(config.augment, flip=flip, crop=crop))
    return config


def image_side(images: Source) -> int:
    """Return the side in pixels of images that are square and all of one size; 0 for others."""
    if isinstance(images, ArraySource) and images.images.shape[1] == images.images.shape[2]:
        return int(images.images.shape[1])
    return 0


def augmented(config: VisionConfig, name: str) -> VisionConfig:
    """Return the config with one of the settings of AUGMENTATIONS."""
    if name not in AUGMENTATIONS:
        raise ValueError(f"augmentation={name!r} must be one of {', '.join(AUGMENTATIONS)}.")
    mixup, randaug = AUGMENTATIONS[name]
    return replace(config, mixup=mixup, augment=replace(config.augment, randaug=randaug))


def _to_the_letter(config: VisionConfig) -> VisionConfig:
    """Resize as the paper's pipeline did: TensorFlow's bilinear without antialiasing, of images decoded in full."""
    return replace(config, augment=replace(config.augment, antialias=False, draft=False))


def _row(variant: str, table: Mapping[str, str], recipe: str) -> str:
    row = ASSUMED.get(variant, variant)
    if row not in table:
        raise ValueError(
            f"the recipe {recipe} knows the augmentation of {', '.join([*table, *ASSUMED])}, not of {variant!r}: "
            f"pass --augmentation, one of {', '.join(AUGMENTATIONS)}."
        )
    return table[row]
