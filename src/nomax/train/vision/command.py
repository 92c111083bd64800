"""`nomax train vit`: train a vision transformer with any φ, or several side by side."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nomax.data import Source
from nomax.data.images.transforms import Augment
from nomax.data.storage import Patience
from nomax.models import ViTConfig
from nomax.train import cli, run_folder
from nomax.train.config import settle
from nomax.train.console import slug
from nomax.train.jobs import Job
from nomax.train.vision.config import AUGMENTATIONS, RECIPES, VisionConfig, for_images
from nomax.train.vision.task import load_images

TITLE = "train vit"
MODEL = {
    "qk_norm": "Apply LayerNorm to queries and keys.",
    "gate": "Multiply the heads by a projection of the block's input.",
    "learned_gain": "Learn φ's gain, one per layer or head.",
    "learned_alpha": "Learn the exponent of L, one per layer or head.",
    "learned_shift": "Learn a shift of the scores, one per layer or head. It starts at φ's: at -1 for relu(x-1)/L.",
    "dropout": "Dropout of the embedded patches and of what each block adds.",
}
SMOKE: dict[str, Any] = {
    "steps": 6,
    "epochs": 0.0,
    "batch_size": 16,
    "checkpoint_every": 2,
    "evaluate_every": 3,
    "test_images": 48,
}


@dataclass(frozen=True)
class TrainVit(cli.Command):
    """Train a vision transformer, with one φ or with several side by side, and evaluate it.

    Without any option it trains relu/L on the bundled Fashion-MNIST subset. Stop it whenever you like (Ctrl-C, SIGTERM,
    even kill -9) and give the same command again: it resumes from the last checkpoint, with bitwise the same result.
    On several GPUs or machines: torchrun --nproc-per-node 8 -m nomax.cli train vit ...

    The run folder gets config.json, run.json (command, versions, machine), metrics.jsonl (a line per step),
    checkpoints/, result.json and model/ (config.json, model.safetensors, README.md). Exit codes: 0 finished, 1 failed
    (a non-finite loss, a full disk), 2 wrong options, 130 stopped by Ctrl-C and 143 by SIGTERM, both with a checkpoint.
    """

    model: str | None = None
    """Size and patch, such as S/16 or Ti/4."""
    data: str = "fashion-mnist-small"
    """A name (`nomax data list`), a folder of images, shards (also a URL, such as s3://…), "torchvision:NAME" or
    "hf:NAME"."""
    recipe: Literal["small", "i1k", "i21k"] = "small"
    """small: an hour on one CPU core, for small images. i1k, i21k: the paper's ImageNet runs. The recipe sets the
    defaults of the other options: --recipe i1k --help shows those of i1k."""
    image_size: int | None = None
    """Image width and height in pixels; small keeps the images' own size if they are square and all of one size."""
    augmentation: str | None = None
    """big_vision's settings of mixup and RandAugment: none, light1, light2, medium1, medium2, strong1, strong2.
    i1k and i21k choose by --model."""
    crop: Literal["inception", "resize", "pad", "none"] | None = None
    """inception: a random crop, resized; resize: the whole image, resized; pad: shifted by up to an eighth; none: as it
    is. For the last two, images must have the right size. small pads such images and crops others."""
    min_crop_area: float | None = None
    """Smallest share of the image's area that an inception crop may take; 1 takes the whole image."""
    flip: bool | None = None
    """Mirror half of the images, at random, left to right: wrong for digits and text. small flips folders, shards and
    photographs, not digits or icons."""


Options = cli.options(TrainVit, VisionConfig, ViTConfig, MODEL)


def defaults(arguments: list[str]) -> Any:
    """Return the options with the values of the recipe that a command line names, except those set by the data."""
    config = cli.named_recipe(arguments, RECIPES)()
    setting = (config.mixup, config.augment.randaug)
    name = next(name for name, each in AUGMENTATIONS.items() if each == setting)
    shown = cli.with_defaults(Options(), config, model=config.model.variant, augmentation=name)
    if config.recipe == "small":
        return replace(shown, image_size=None)
    return replace(shown, crop=config.augment.crop, flip=config.augment.flip, min_crop_area=config.augment.area[0])


def run(options: Any) -> int:
    """Train. See TrainVit for the exit codes."""
    return cli.run(options, TITLE, lambda command: _jobs(options, command))


def configure(options: Any, phi: str, images: Source) -> VisionConfig:
    """Return the recipe for these images with the options' changes."""
    given = cli.given(options)
    model = {name: given[name] for name in ("image_size", *MODEL) if name in given}
    config = for_images(
        options.recipe,
        images,
        data=options.data,
        variant=options.model,
        augmentation=options.augmentation,
        phi=phi,
        **model,
    )
    changes = {name: given[name] for name in vars(config) if name in given and name not in ("model", "recipe")}
    config = replace(config, augment=_augment(config.augment, given, images), **changes)
    if options.smoke:
        config = _shrink(config, given)
    return settle(config, lambda: len(images) / config.batch_size, given)


def _jobs(options: Any, command: str) -> list[Job]:
    places = cli.places(options, _named(options))
    usual = VisionConfig()
    patience = Patience(
        usual.read_retries if options.read_retries is None else options.read_retries,
        usual.read_timeout if options.read_timeout is None else options.read_timeout,
    )
    images = load_images(options.data, options.on_error or "raise", options.held_out or 0.0, patience)
    wanted = [
        Job(configure(options, phi, images[0]), folder, command, options.tensorboard, images) for phi, folder in places
    ]
    for job in wanted:
        run_folder.check(job.folder, job.config, classes=images[0].classes)
    return wanted


def _augment(augment: Augment, given: dict[str, Any], images: Source) -> Augment:
    """Return the crops and flips of the recipe, or those that the options ask for."""
    augment = replace(augment, **{name: given[name] for name in ("crop", "flip") if name in given})
    if "min_crop_area" in given:
        least = given["min_crop_area"]
        if augment.crop != "inception":
            raise ValueError(f"--min-crop-area is for --crop inception; these images have --crop {augment.crop}.")
        if not 0 < least <= 1:
            raise ValueError(f"--min-crop-area {least:g} must be above 0 and at most 1.")
        augment = replace(augment, area=(least, 1.0))
    if "crop" in given and augment.as_is:
        width, height = images.image(0).size
        if (width, height) != (augment.size, augment.size):
            raise ValueError(
                f"--crop {augment.crop} takes images as they are, but {images.name(0)} is {width}×{height}, and the "
                f"model takes {augment.size}×{augment.size}: give --crop resize or inception, or --image-size."
            )
    return augment


def _shrink(config: VisionConfig, given: dict[str, Any]) -> VisionConfig:
    """Return a tiny version: a µ model on images of few patches, for a few steps."""
    patch = config.model.patch
    size = config.augment.size if config.recipe == "small" else 2 * patch
    model = replace(config.model, variant=f"mu/{patch}", image_size=size)
    changes = {name: value for name, value in SMOKE.items() if name not in given}
    return replace(config, model=model, augment=replace(config.augment, size=size), **changes)


def _named(options: Any) -> Path:
    """Return the default folder of a run."""
    variant = options.model or RECIPES[options.recipe]().model.variant
    data = options.data.rstrip("/").rpartition("/")[2]
    words = [data, options.recipe, variant, *(["smoke"] if options.smoke else [])]
    return Path("runs", "-".join(map(slug, words)))
