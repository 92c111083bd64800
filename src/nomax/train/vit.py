"""`nomax train vit`: train a vision transformer with any φ, or several side by side."""

import os
import shlex
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from nomax.train import distributed
from nomax.train import run as run_folder
from nomax.train.compare import compare
from nomax.train.config import VisionConfig
from nomax.train.configure import check_phis, configure, run_name, slug
from nomax.train.one import explained, load_and_train
from nomax.train.parallel import train_in_parallel
from nomax.train.stop import Stop
from nomax.train.vision import load


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
    """Size and patch, such as S/16 or Ti/4; the recipe's own if not given."""
    data: str = "fashion-mnist-small"
    """A name (`nomax data list`), a folder of images, shards, "torchvision:NAME" or "hf:NAME"."""
    recipe: Literal["small", "i1k", "i21k"] = "small"
    """small: an hour of one CPU core on small images. i1k, i21k: the paper's ImageNet runs."""
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
    """Steps of linear warm-up."""
    weight_decay: float | None = None
    """AdamW's, of kernels only."""
    clip: float | None = None
    """Largest norm of the gradient; 0 never clips."""
    loss: Literal["sigmoid", "softmax"] | None = None
    """Binary cross-entropy summed over the classes, or cross-entropy. (Nothing to do with φ.)"""
    augmentation: str | None = None
    """big_vision's settings of mixup and RandAugment: none, light1, light2, medium1, medium2, strong1, strong2."""
    image_size: int | None = None
    """Pixels on a side."""
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


def run(options: Options) -> int:
    """Train. See Options for the exit codes."""
    console = Console(highlight=False)
    try:
        jobs = _jobs(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax train vit: {error}", file=sys.stderr)
        return 2
    command = spelled(options)
    with distributed.world(options.device) as world, Stop() as stop:
        if options.parallel and len(jobs) > 1:
            code = train_in_parallel(jobs, command, stop, console, options.tensorboard)
        else:
            code = 0
            for config, folder in jobs:
                if config.threads:
                    torch.set_num_threads(config.threads)
                work = partial(load_and_train, config, folder, command, world, stop, console, options.tensorboard)
                code = max(code, explained(work))
                if code > 1:  # asked to stop; after the failure of one φ the others are still worth training
                    break
        if world.leads and code <= 1:
            _tell_what_came_out([folder for _, folder in jobs], command, console)
    return code


def _jobs(options: Options) -> list[tuple[VisionConfig, Path]]:
    """The configuration and the folder of each φ; an error says what is wrong with the options before anything runs."""
    phis = check_phis(options.phi)
    if options.parallel and "RANK" in os.environ:
        raise ValueError("--parallel and torchrun do not go together: leave out one of them.")
    train, _ = load(options.data, options.on_error)
    configs = [configure(options, phi, train) for phi in phis]
    out = options.out or run_name(options)
    folders = [out] if options.out and len(phis) == 1 else [out / slug(phi) for phi in phis]
    for config, folder in zip(configs, folders, strict=True):
        run_folder.check(folder, config)
    return list(zip(configs, folders, strict=True))


def spelled(options: Options) -> str:
    """The command line that gives these options."""
    words = ["nomax", "train", "vit"]
    if "RANK" in os.environ:
        words = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "nomax.cli", "train", "vit"]
    for field in fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(field.default, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return shlex.join(words)


def _tell_what_came_out(folders: list[Path], command: str, console: Console) -> None:
    done = [folder for folder in folders if run_folder.result(folder)]
    if len(folders) > 1 and done:
        compare(folders[0].parent, done, command, console)
    if not done:
        return
    names = " ".join(map(str, done))
    console.print(
        f"Next: nomax probe {names} (few-shot accuracy), or nomax.train.load_run({str(done[0])!r}).", soft_wrap=True
    )
