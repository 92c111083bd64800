"""What the commands of `nomax train` share: one φ after the other, or side by side, and what came out."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from nomax.console import Console
from nomax.train import distributed
from nomax.train import run as run_folder
from nomax.train.compare import compare
from nomax.train.kinds import RunConfig, kind_of
from nomax.train.one import explained, load_and_train
from nomax.train.parallel import train_in_parallel
from nomax.train.phis import check_phis, slug
from nomax.train.stop import Stop

Job = tuple[RunConfig, Path]


class Options(Protocol):
    """The options that every command of `nomax train` has."""

    @property
    def phi(self) -> tuple[str, ...]: ...
    @property
    def out(self) -> Path | None: ...
    @property
    def device(self) -> str: ...
    @property
    def tensorboard(self) -> bool: ...
    @property
    def parallel(self) -> bool: ...


def train(options: Options, title: str, jobs_of: Callable[[], Sequence[Job]]) -> int:
    """Train what the options ask for. Exit codes: 0 finished, 1 failed, 2 wrong options, 130 and 143 stopped."""
    console = Console()
    try:
        distributed.check_device(options.device)
        jobs = jobs_of()
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax {title}: {error}", file=sys.stderr)
        return 2
    command = spelled(options, title)
    with distributed.world(options.device) as world, Stop() as stop:
        if options.parallel and len(jobs) > 1:
            code = explained(partial(train_in_parallel, jobs, command, stop, console, options.tensorboard), title)
        else:
            code = 0
            for config, folder in jobs:
                if config.threads:
                    torch.set_num_threads(config.threads)
                work = partial(load_and_train, config, folder, command, world, stop, console, options.tensorboard)
                code = max(code, explained(work, title))
                if code > 1:  # asked to stop; after the failure of one φ the others are still worth training
                    break
        if world.leads and code <= 1:
            _tell_what_came_out(jobs, command, console)
    return code


def places(options: Options, named: Path, name: Callable[[str], str] = str) -> list[tuple[str, Path]]:
    """Each φ, and the folder of its run: --out itself for a single one, else one below it, or below `named`."""
    phis = check_phis(options.phi)
    if options.parallel and "RANK" in os.environ:
        raise ValueError("--parallel and torchrun do not go together: leave out one of them.")
    if options.out and len(phis) == 1:
        return [(phis[0], options.out)]
    return [(phi, (options.out or named) / slug(name(phi))) for phi in phis]


def spelled(options: Any, title: str) -> str:
    """The command line that gives these options."""
    words = ["nomax", *title.split()]
    if "RANK" in os.environ:
        words = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "nomax.cli", *title.split()]
    for field in fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return shlex.join(words)


def _tell_what_came_out(jobs: Sequence[Job], command: str, console: Console) -> None:
    config, first = jobs[0]
    done = [folder for _, folder in jobs if run_folder.result(folder)]
    if len(jobs) > 1 and done:
        compare(kind_of(config), first.parent, done, command, console)
    if done:
        console.print(f"Next: {kind_of(config).advice(config, done)}.")
