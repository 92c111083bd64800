"""`nomax train vit`: train a vision transformer with any φ, or several side by side."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nomax.train import command
from nomax.train import run as run_folder
from nomax.train.configure import configure, run_name
from nomax.train.recipes import AUGMENTATIONS, RECIPES
from nomax.train.vision import load

TITLE = "train vit"


@dataclass(frozen=True)
class Options:
    """Train a vision transformer, with one φ or with several side by side, and evaluate it.

    Without any option it trains relu/L on the bundled Fashion-MNIST subset. Stop it whenever you like (Ctrl-C, SIGTERM,
    even kill -9) and give the same command again: it goes on from the last checkpoint, to the same result to the bit.
    On several GPUs or machines: torchrun --nproc-per-node 8 -m nomax.cli train vit ...

    The run folder gets config.json, run.json (command, versions, machine), metrics.jsonl (a line per step),
    checkpoints/, result.json and model/ (config.json, model.safetensors, README.md). Exit codes: 0 finished, 1 failed
    (a loss that is not finite, a full disk), 2 wrong options, 130 stopped by Ctrl-C and 143 by SIGTERM, both of them
    with a checkpoint.
    """

    phi: tuple[str, ...] = ("relu/L",)
    """How scores become weights: "relu/L", "softmax", … Several train one after the other and are compared."""
    model: str | None = None
    """Size and patch, such as S/16 or Ti/4."""
    data: str = "fashion-mnist-small"
    """A name (`nomax data list`), a folder of images, shards, "torchvision:NAME" or "hf:NAME"."""
    held_out: float | None = None
    """Share of the training images that is held out as test split, such as 0.1, for data that have none. The names of
    the files decide which, so `nomax evaluate RUN` looks at the same."""
    recipe: Literal["small", "i1k", "i21k"] = "small"
    """small: an hour of one CPU core on small images. i1k, i21k: the paper's ImageNet runs. The defaults below are
    the recipe's: --recipe i1k --help shows those of i1k."""
    out: Path | None = None
    """Folder of the run; if not given, one below runs/ with the data, recipe, model and φ in its name."""

    steps: int | None = None
    """Number of steps, instead of epochs. The options from here to --seed change the recipe."""
    epochs: float | None = None
    """How often each image is seen, instead of steps."""
    batch_size: int | None = None
    """Images per step, over all ranks and accumulated parts."""
    lr: float | None = None
    """Largest learning rate."""
    warmup: int | None = None
    """Steps of linear warm-up; if not given, at most a fifth of the steps."""
    weight_decay: float | None = None
    """AdamW's, of kernels only."""
    clip: float | None = None
    """Largest norm of the gradient; 0 never clips."""
    loss: Literal["sigmoid", "softmax"] | None = None
    """Binary cross-entropy summed over the classes, or cross-entropy. (Nothing to do with φ.)"""
    augmentation: str | None = None
    """big_vision's settings of mixup and RandAugment: none, light1, light2, medium1, medium2, strong1, strong2.
    i1k and i21k choose by --model."""
    crop: Literal["inception", "resize", "pad", "none"] | None = None
    """inception: a random part of the image, resized; resize: the whole image; pad: moved by up to an eighth; none: as
    it is. For the last two, images must have the right size. small pads such images and crops others."""
    min_crop_area: float | None = None
    """Least share of the image's area that an inception crop takes; 1 takes the whole."""
    flip: bool | None = None
    """Mirror every second image, by chance, left to right: wrong for digits and text. small flips folders, shards and
    photographs, not digits or icons."""
    image_size: int | None = None
    """Pixels on a side; small takes images as they are, if they are square and all of one size."""
    on_error: Literal["raise", "skip"] = "raise"
    """Stop at a broken image, or count it and take another in its place."""
    qk_norm: bool | None = None
    """LayerNorm of queries and keys."""
    gate: Literal["silu", "sigmoid", "identity"] | None = None
    """Multiply the heads by a projection of the block's input."""
    learned_gain: Literal["layer", "head"] | None = None
    """Learn φ's gain, one for each layer or head."""
    learned_alpha: Literal["layer", "head"] | None = None
    """Learn the exponent of L, one for each layer or head."""
    dropout: float | None = None
    """Of the embedded patches and of what each block adds."""
    ema: float | None = None
    """Keep an exponential moving average of the weights with this decay, evaluate and save it; 0 does not."""
    precision: Literal["fp32", "bf16"] | None = None
    """bf16: autocast, with float32 weights."""
    evaluate_every: int | None = None
    """Steps between evaluations on the test split; 0 evaluates at the end only."""
    seed: int | None = None
    """Of the first weights, the order of the images and their augmentation."""

    accumulate: int | None = None
    """Compute each batch in so many parts, to save memory. This and what follows may change when a run goes on."""
    checkpoint_every: int | None = None
    """Steps between checkpoints."""
    keep: int | None = None
    """How many checkpoints to keep."""
    compile: bool | None = None
    """torch.compile the model."""
    distribute: Literal["ddp", "fsdp"] | None = None
    """Under torchrun: every rank holds the model, or a share of it."""
    device: str = "auto"
    """cpu, cuda, or whichever there is."""
    threads: int | None = None
    """CPU threads; torch's own choice if not given."""
    workers: int | None = None
    """Processes that prepare images; 0 prepares them in the training process."""
    tensorboard: bool = True
    """Write TensorBoard files too, if it is installed."""
    parallel: bool = False
    """Train several φ at the same time, each in a process with one thread: faster than one after the other."""
    smoke: bool = False
    """Shrink everything to seconds: shows only that it works."""


def defaults(arguments: list[str]) -> Options:
    """The options with the values of the recipe that a command line names, but for those that follow from the data."""
    config = command.recipe(arguments, RECIPES)()
    setting = (config.mixup, config.augment.randaug)
    name = next(name for name, each in AUGMENTATIONS.items() if each == setting)
    shown: Options = command.with_defaults(Options(), config, model=config.model.variant, augmentation=name)
    if config.recipe == "small":
        return replace(shown, image_size=None)
    return replace(shown, crop=config.augment.crop, flip=config.augment.flip, min_crop_area=config.augment.area[0])


def run(options: Options) -> int:
    """Train. See Options for the exit codes."""
    return command.train(options, TITLE, lambda: _jobs(options))


def spelled(options: Options) -> str:
    """The command line that gives these options."""
    return command.spelled(options, TITLE)


def _jobs(options: Options) -> list[command.Job]:
    """The configuration and the folder of each φ; an error says what is wrong with the options before anything runs."""
    places = command.places(options, run_name(options))
    train, _ = load(options.data, options.on_error, options.held_out or 0.0)
    jobs: list[command.Job] = [(configure(options, phi, train), folder) for phi, folder in places]
    for config, folder in jobs:
        run_folder.check(folder, config, classes=train.classes)
    return jobs
