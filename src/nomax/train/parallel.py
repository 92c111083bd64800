"""Several runs at the same time, each in a process of its own with one thread."""

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from nomax.console import Console, Progress, TextColumn
from nomax.train import metrics, progress
from nomax.train.distributed import World, chosen
from nomax.train.kinds import RunConfig, kind_of
from nomax.train.one import explained, load_and_train
from nomax.train.phis import spoken
from nomax.train.stop import Stop

Job = tuple[RunConfig, Path]


def train_in_parallel(jobs: Sequence[Job], command: str, stop: Stop, console: Console, tensorboard: bool) -> int:
    """Train all of them at once, and return the worst exit code. What each has to say goes to FOLDER.log."""
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    for config, folder in jobs:
        folder.parent.mkdir(parents=True, exist_ok=True)
        processes.append(spawn.Process(target=_work, args=(config, folder, command, tensorboard, os.getpid())))
    for process in processes:
        process.start()
    try:
        _watch(jobs, processes, stop, console)
    finally:
        for process in processes:
            process.join()
    codes = [code if code >= 0 else 128 - code for process in processes if (code := process.exitcode) is not None]
    for code, (config, folder) in zip(codes, jobs, strict=True):
        text = _log(folder).read_text().strip().splitlines()
        if code not in (0, 130, 143):
            print(
                f"nomax {kind_of(config).command(config)}: {folder} failed. The end of {_log(folder)}:", file=sys.stderr
            )
            print("\n".join(text[-8:]), file=sys.stderr)
        elif text:
            console.print(text[-1])
    return stop.exit_code or max(codes)


def _work(config: RunConfig, folder: Path, command: str, tensorboard: bool, parent: int) -> None:
    with _log(folder).open("a", buffering=1) as log, Stop(parent) as stop:
        sys.stdout = sys.stderr = log
        torch.set_num_threads(config.threads or 1)
        console = Console(file=log)
        world = World(torch.device(chosen(config.device)))
        work = partial(load_and_train, config, folder, command, world, stop, console, tensorboard)
        code = explained(work, kind_of(config).command(config))
    os._exit(code)


def _watch(jobs: Sequence[Job], processes: Sequence[BaseProcess], stop: Stop, console: Console) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    told, printed = False, time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        tasks = [bars.add_task(spoken(config.model.phi), total=config.steps, text="") for config, _ in jobs]
        while any(process.is_alive() for process in processes):
            if stop.asked and not told:
                told = True
                for process in processes:
                    process.terminate()  # after Ctrl-C they know already; being told twice does no harm
            lines = [metrics.last(folder) for _, folder in jobs]
            for task, line in zip(tasks, lines, strict=True):
                bars.update(task, completed=line.get("step", 0), text=progress.words(line))
            if not console.is_terminal and time.monotonic() - printed > progress.PLAIN_EVERY:
                printed = time.monotonic()
                for (config, _), line in zip(jobs, lines, strict=True):
                    start = f"{spoken(config.model.phi)}: step {line.get('step', 0)}/{config.steps}"
                    console.print(f"{start}, {progress.words(line)}")
            time.sleep(0.2)


def _log(folder: Path) -> Path:
    return folder.with_name(folder.name + ".log")
