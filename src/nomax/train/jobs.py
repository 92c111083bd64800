"""Runs from their config to the model card: one, several in parallel, and a table that compares them."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
from torch.distributed.checkpoint import state_dict as states

from nomax import _files
from nomax.console import Console, Progress, Table, TextColumn
from nomax.train import console as consoles
from nomax.train import loop, metrics, run_folder
from nomax.train.console import Bar, Stop, display_name
from nomax.train.distributed import World, resolve_device
from nomax.train.loop import Batch, Outcome, Task
from nomax.train.nonfinite import NonFiniteError

if TYPE_CHECKING:
    from nomax.train.text.config import TextConfig
    from nomax.train.vision.config import VisionConfig


class RunTask(Task[Batch], Protocol):
    """A task with a `nomax train` command: it also knows how its runs begin, and what to print at their end."""

    measured: frozenset[str]
    """The numbers of result.json to print."""

    @classmethod
    def open(cls, config: Any, folder: Path, world: World, data: Any = None) -> Self:
        """Start or resume the run in a folder, where the leading rank may write; `data`, if already loaded."""
        ...

    @staticmethod
    def result(config: Any, outcome: Outcome) -> dict[str, Any]:
        """Return the contents of result.json."""
        ...

    @staticmethod
    def summary(result: dict[str, Any]) -> str:
        """Return a result in a few words."""
        ...

    @staticmethod
    def row(result: dict[str, Any]) -> dict[str, str]:
        """Return a result as a row of the table that compares runs, by its columns."""
        ...

    def export(self, folder: Path, weights: dict[str, Any], result: dict[str, Any], command: str) -> None:
        """Write the model, in the hub layout, below the run folder."""
        ...

    @staticmethod
    def next_steps(config: Any, folders: Sequence[Path]) -> str:
        """Return what to do next with finished runs, in words."""
        ...


@dataclass(frozen=True)
class Job:
    """A run to be trained: its config and its folder."""

    config: "VisionConfig | TextConfig"
    folder: Path
    command: str = ""
    """As it was typed, for run.json and the card."""
    tensorboard: bool = False
    data: Any = None
    """The training data, if already loaded."""

    @property
    def log(self) -> Path:
        """The file for the output of a run in its own process."""
        return self.folder.with_name(self.folder.name + ".log")

    def is_finished(self) -> bool:
        """Return whether the run has a result; a damaged one, which was already reported, does not count."""
        try:
            return run_folder.result(self.folder, self.config.task_type().measured) is not None
        except ValueError:
            return False


def train(job: Job, world: World, stop: Stop, console: Console) -> int:
    """Train or resume, evaluate, and write the model. Return 0, or the exit code of a stop."""
    config, folder = job.config, job.folder
    kind = config.task_type()
    bar = Bar(display_name(config.model.phi), config.steps, kind.unit, console, world.leads)
    with ExitStack() as stack:
        _claim(stack, job, world)
        result = world.from_leader(_result(folder, kind) if world.leads else None)
        if isinstance(result, ValueError):
            raise result
        if result:
            bar.say(f"{folder} is finished: {kind.summary(result)}. To train again, remove it or choose another --out.")
            return 0
        task = kind.open(config, folder, world, job.data)
        with bar:
            try:
                outcome, model = loop.train(task, config, folder, world, stop, bar, tensorboard=job.tensorboard)
            except NonFiniteError as error:
                error.report["file"] = str(folder / "nonfinite.json")
                if world.leads:
                    _files.write_json(folder / "nonfinite.json", error.report)
                raise
        if not outcome.finished:
            bar.say(f"{folder} was stopped after step {outcome.step}. The same command goes on from there.")
            return stop.exit_code or 143
        result = kind.result(config, outcome)
        whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = states.get_model_state_dict(model, options=whole)
        if world.leads:
            task.export(folder, weights, result, job.command)
            run_folder.write_results(folder / "result.json", result)
        bar.say(f"{folder} is finished: {kind.summary(result)}.")
    return 0


def exit_code(action: Callable[[], int], command: str) -> int:
    """Run part of a command and return its exit code: 1 after an error, which is printed to stderr."""
    try:
        return action()
    except NonFiniteError as error:
        print(
            f"nomax {command}: {error}. It first appeared in {error.report['where']}. The batch is in "
            f"{error.report['file']}; the checkpoint before it is kept. A lower --lr or --precision fp32 may help.",
            file=sys.stderr,
        )
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(f"nomax {command}: {error.strerror or error}{place}.", file=sys.stderr)
    except (ValueError, run_folder.BusyError) as error:
        print(f"nomax {command}: {error}", file=sys.stderr)
    return 1


def train_in_parallel(jobs: Sequence[Job], stop: Stop, console: Console) -> int:
    """Train all of them at once, each in a single-threaded process, and return the worst exit code.

    The output of each goes to FOLDER.log.
    """
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    for job in jobs:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        # A process loads its own data, which is faster than to hand them over.
        processes.append(spawn.Process(target=_in_process, args=(replace(job, data=None), os.getpid())))
    for process in processes:
        process.start()
    try:
        _watch(jobs, processes, stop, console)
    finally:
        for process in processes:
            process.join()
    codes = [code if code >= 0 else 128 - code for process in processes if (code := process.exitcode) is not None]
    for code, job in zip(codes, jobs, strict=True):
        text = job.log.read_text().strip().splitlines()
        if code not in (0, 130, 143):
            print(f"nomax {job.config.command}: {job.folder} failed. The end of {job.log}:", file=sys.stderr)
            print("\n".join(text[-8:]), file=sys.stderr)
        elif text:
            console.print(text[-1])
    return stop.exit_code or max(codes)


def compare(folder: Path, jobs: Sequence[Job], console: Console) -> None:
    """Print the results of finished runs as a table, and write it to comparison.md and comparison.json."""
    results = [result for job in jobs if (result := run_folder.result(job.folder))]
    rows = [jobs[0].config.task_type().row(result) for result in results]
    columns = list(rows[0])
    table = Table(*columns, title=str(folder))
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    lines = [" | ".join(cells) for cells in (columns, ["---"] * len(columns), *(row.values() for row in rows))]
    text = "\n".join(f"| {line} |" for line in lines)
    _files.write(folder / "comparison.md", f"<!-- Written by `{jobs[0].command}` -->\n\n{text}\n")
    run_folder.write_results(folder / "comparison.json", results)


def _result(folder: Path, kind: type[RunTask[Any]]) -> dict[str, Any] | ValueError | None:
    """Return the result if the run is finished, or the error, so that it can be raised on every rank."""
    try:
        return run_folder.result(folder, kind.measured)
    except ValueError as error:
        return error


def _claim(stack: ExitStack, job: Job, world: World) -> None:
    """Claim the run folder on the leading rank; if that fails, fail on every rank."""
    failure: Exception | None = None
    if world.leads:
        try:
            stack.enter_context(run_folder.claimed(job.folder, job.config, job.command))
        except (ValueError, OSError, run_folder.BusyError) as error:
            failure = error
    failure = world.from_leader(failure)
    if failure is not None:
        raise failure


def _in_process(job: Job, parent: int) -> None:
    with job.log.open("a", buffering=1) as log, Stop(parent) as stop:
        sys.stdout = sys.stderr = log
        torch.set_num_threads(job.config.threads or 1)
        world = World(torch.device(resolve_device(job.config.device)))
        action = partial(train, job, world, stop, Console(file=log))
        code = exit_code(action, job.config.command)
    os._exit(code)


def _watch(jobs: Sequence[Job], processes: Sequence[BaseProcess], stop: Stop, console: Console) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    told, printed = False, time.monotonic()
    names = [display_name(job.config.model.phi) for job in jobs]
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        tasks = [bars.add_task(name, total=job.config.steps, text="") for name, job in zip(names, jobs, strict=True)]
        while any(process.is_alive() for process in processes):
            if stop.asked and not told:
                told = True
                for process in processes:
                    process.terminate()  # after Ctrl-C they know already; being told twice does no harm
            lines = [metrics.last(job.folder) for job in jobs]
            for task, line in zip(tasks, lines, strict=True):
                bars.update(task, completed=line.get("step", 0), text=consoles.summarise(line))
            if not console.is_terminal and time.monotonic() - printed > consoles.PLAIN_EVERY:
                printed = time.monotonic()
                for name, job, line in zip(names, jobs, lines, strict=True):
                    console.print(f"{name}: step {line.get('step', 0)}/{job.config.steps}, {consoles.summarise(line)}")
            time.sleep(0.2)
