"""One run from beginning to end: train, measure, and write the outcome."""

import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch._dynamo  # which an optimiser imports at its first step: here, once for all processes

from nomax.console import Console
from nomax.ops import build, cpu
from nomax.study import image_measures, text_measures
from nomax.study.image_run import ImageRun
from nomax.study.row import Row
from nomax.study.run import Run
from nomax.study.store import Store
from nomax.study.text_run import TextRun
from nomax.train import files
from nomax.train import run as run_folder
from nomax.train.distributed import World, chosen
from nomax.train.health import NonFiniteError
from nomax.train.one import load_and_train
from nomax.train.stop import Stop

BUSY = 75  # the exit code of a process that found its run held by another one
SPENT = "spent.json"
EVERY = 5.0  # seconds between notes of the time spent, which is all that a killed process can lose of it


def in_process(run: Run, store: Path, command: str, retry: bool = False) -> None:
    """Do one run in a process of its own, with one thread, and leave with its exit code. What it says goes to a log."""
    place = Store(store)
    with place.log(run.key).open("a", buffering=1) as log:
        sys.stdout = sys.stderr = log
        code = 1
        try:
            torch.set_num_threads(run.config.threads or 1)
            with StopWithParent() as stop:
                code = settle(run, place, command, stop, Console(file=log), retry)
        except KeyboardInterrupt:  # the second one, of somebody who does not want to wait
            code = 130
        except BaseException:
            traceback.print_exc(file=log)
    os._exit(code)


class StopWithParent(Stop):
    """Asked to stop by a signal, or by the death of the process that started this one, whoever has adopted it since."""

    @property
    def exit_code(self) -> int:
        """As of Stop."""
        parent = multiprocessing.parent_process()
        orphaned = parent is not None and not parent.is_alive()
        return super().exit_code or (128 + signal.SIGTERM if orphaned else 0)


def settle(run: Run, store: Store, command: str, stop: Stop, console: Console, retry: bool = False) -> int:
    """Bring a run to its outcome, unless it has one. Returns 0, BUSY, or the exit code of having been stopped."""
    with store.claim(run.key) as free:
        if not free:
            return BUSY
        before = store.outcome(run.key)  # whoever held it until now may have finished it
        if before is not None and not (retry and before.status == "failed"):
            return 0
        store.reopen(run.key)
        row = work(run, store.folder(run.key), command, stop, console)
        if row is None:
            return stop.exit_code or BUSY
        store.finish(row)
        if row.status != "failed":  # which a retry goes on with
            tidy(store.folder(run.key))
    return 0


def work(run: Run, folder: Path, command: str, stop: Stop, console: Console) -> Row | None:
    """Train and measure, and say what came out; None if asked to stop before the end, or if others train there.

    That a run diverges or fails is a result like others. That the machine fails it (a full or broken disk, too little
    memory) is not: the error is raised, and the run is left.
    """
    _load_kernels()
    with Meter(folder) as meter:
        try:
            results = _results(run, folder, command, stop, console)
        except run_folder.BusyError as error:
            console.print(str(error))
            return None
        except NonFiniteError as error:
            console.print(str(error))
            where = f"{error}; it first appeared in {error.report['where']}"
            return Row.of(run, "diverged", **meter.spent(), diverged_at=error.report["step"], error=where)
        except Exception as error:
            if of_the_machine(error):
                raise
            console.print(traceback.format_exc())
            return Row.of(run, "failed", **meter.spent(), error=f"{type(error).__name__}: {error}")
        if results is None:
            return None
        if not math.isfinite(results["loss"]):
            said = f"the loss on the test split is {results['loss']}"
            return Row.of(run, "diverged", **meter.spent(), diverged_at=run.config.steps, error=said)
        return Row.of(run, "done", **results, **meter.spent())


def of_the_machine(error: Exception) -> bool:
    """Whether an error says something about the disk or the memory, and so nothing about the run."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    said = str(error)  # safetensors puts the number into words
    in_words = any(f"(os error {number})" in said for number in numbers)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in numbers or in_words


def tidy(folder: Path) -> None:
    """Keep of a run that is over what is small: its words, its numbers, its times and its model."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _results(run: Run, folder: Path, command: str, stop: Stop, console: Console) -> dict[str, Any] | None:
    """All that is measured, by column; None if asked to stop."""
    device = chosen(run.config.device)
    if load_and_train(run.config, folder, command, World(torch.device(device)), stop, console, tensorboard=False):
        return None
    found = run_folder.result(folder)
    if found is None:
        raise RuntimeError(f"{folder} has no result.json after the training.")
    if isinstance(run, TextRun):
        return text_measures.measure(run, folder, device, stop)
    if isinstance(run, ImageRun):
        return image_measures.measure(run, folder, found, device, stop)
    raise TypeError(f"{type(run).__name__} is not a kind of run that can be measured: use ImageRun or TextRun.")


def _load_kernels() -> None:
    """Load the kernels, or compile them, before the time is taken."""
    try:
        cpu.instruction_set()
    except build.BuildError as error:
        print(f"nomax study: without compiled kernels, so slowly: {error}", file=sys.stderr)


class Meter:
    """The seconds that a run takes, by the clock and of CPU time, over all of its interruptions."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SPENT
        self._before = self._read()
        self._clock, self._cpu = time.monotonic(), time.process_time()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._note, daemon=True)

    def spent(self) -> dict[str, float]:
        """So far: seconds and core_seconds."""
        clock, cpu = time.monotonic() - self._clock, time.process_time() - self._cpu
        return {
            "seconds": round(self._before["seconds"] + clock, 3),
            "core_seconds": round(self._before["core_seconds"] + cpu, 3),
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._write()

    def _note(self) -> None:
        while not self._over.wait(EVERY):
            self._write()

    def _write(self) -> None:
        # A folder without a configuration is not a run yet, and training takes only an empty one.
        if (self.path.parent / "config.json").is_file():
            try:
                files.write(self.path, json.dumps(self.spent()))
            except OSError as error:
                print(f"nomax study: {self.path} could not be written: {error}", file=sys.stderr)

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self.path.read_text())
            return {name: float(found[name]) for name in ("seconds", "core_seconds")}
        except (OSError, ValueError, KeyError, TypeError):
            return {"seconds": 0.0, "core_seconds": 0.0}
