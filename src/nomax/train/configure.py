"""From the options of `nomax train vit` to the configuration of a run."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nomax.data import ArraySource, Source
from nomax.data.transforms import Augment
from nomax.train.config import VisionConfig
from nomax.train.loop_config import check_amount, steps_of, warmed_up
from nomax.train.phis import slug
from nomax.train.recipes import RECIPES

if TYPE_CHECKING:
    from nomax.train.vit import Options

# Data of which a mirrored image keeps its class: not digits, nor icons, among which are arrows.
FLIPPABLE = ("cifar10", "fashion-mnist", "fashion-mnist-small")
MODEL_OPTIONS = ("image_size", "qk_norm", "gate", "learned_gain", "learned_alpha", "dropout")
SMOKE: dict[str, Any] = {
    "steps": 6,
    "epochs": 0.0,
    "batch_size": 16,
    "checkpoint_every": 2,
    "evaluate_every": 3,
    "test_images": 48,
}


def configure(options: "Options", phi: str, train: Source) -> VisionConfig:
    """The recipe, fitted to the data, with whatever the options change."""
    recipe = RECIPES[options.recipe]
    given = {name: value for name, value in vars(options).items() if value is not None}
    check_amount(given)
    model: dict[str, Any] = {"phi": phi, "channels": _channels(train)}
    if options.recipe == "small" and _size(train):
        model["image_size"] = _size(train)
    model |= {name: given[name] for name in MODEL_OPTIONS if name in given}
    variant = {"variant": options.model} if options.model else {}
    config = recipe(**variant, classes=len(train.classes), augmentation=options.augmentation, **model)
    config = replace(config, data=options.data)
    if options.recipe == "small":
        flip = options.data in FLIPPABLE or not isinstance(train, ArraySource)
        config = replace(config, augment=replace(config.augment, flip=flip))
        if _size(train) != config.augment.size:
            config = replace(config, augment=replace(config.augment, crop="inception"))
    config = replace(config, augment=_augment(config.augment, given, train))
    known = {field.name for field in dataclasses.fields(VisionConfig)} - {"model", "data", "recipe"}
    config = replace(config, **{name: value for name, value in given.items() if name in known})
    if options.smoke:
        config = _shrunk(config, given)
    if "steps" in given:
        config = replace(config, epochs=0.0)
    elif config.epochs:
        config = replace(config, steps=steps_of(config.epochs, len(train) / config.batch_size))
    config = warmed_up(config, given)
    config.check()
    return config


def _augment(augment: Augment, given: dict[str, Any], train: Source) -> Augment:
    """The crops and flips of the recipe, or those that the options ask for."""
    augment = replace(augment, **{name: given[name] for name in ("crop", "flip") if name in given})
    if "min_crop_area" in given:
        least = given["min_crop_area"]
        if augment.crop != "inception":
            raise ValueError(f"--min-crop-area is for --crop inception; these images have --crop {augment.crop}.")
        if not 0 < least <= 1:
            raise ValueError(f"--min-crop-area {least:g} must be above 0 and at most 1.")
        augment = replace(augment, area=(least, 1.0))
    if "crop" in given and augment.as_is:
        width, height = train.image(0).size
        if (width, height) != (augment.size, augment.size):
            raise ValueError(
                f"--crop {augment.crop} takes images as they are, but {train.name(0)} is {width}×{height}, and the "
                f"model takes {augment.size}×{augment.size}: give --crop resize or inception, or --image-size."
            )
    return augment


def _shrunk(config: VisionConfig, given: dict[str, Any]) -> VisionConfig:
    """The same in tiny: a µ model on images of few patches, for a few steps."""
    patch = config.model.patch
    size = config.augment.size if config.recipe == "small" else 2 * patch
    model = replace(config.model, variant=f"mu/{patch}", image_size=size)
    changes = {name: value for name, value in SMOKE.items() if name not in given}
    return replace(config, model=model, augment=replace(config.augment, size=size), **changes)


def run_name(options: "Options") -> Path:
    """Where a run goes that was given no folder."""
    variant = options.model or RECIPES[options.recipe]().model.variant
    words = [
        options.data.rstrip("/").rpartition("/")[2],
        options.recipe,
        variant,
        *(["smoke"] if options.smoke else []),
    ]
    return Path("runs", "-".join(map(slug, words)))


def _channels(source: Source) -> int:
    return 1 if isinstance(source, ArraySource) and source.images.ndim == 3 else 3


def _size(source: Source) -> int:
    """The side of images that are square and all of one size; 0 for others."""
    if isinstance(source, ArraySource) and source.images.shape[1] == source.images.shape[2]:
        return int(source.images.shape[1])
    return 0
