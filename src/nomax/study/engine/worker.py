"""Do one run from beginning to end (train, measure, write the outcome): here, in processes, or as cluster jobs."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch._dynamo  # which an optimiser imports at its first step: here, once for all processes

from nomax import _files
from nomax.console import Console
from nomax.ops import build, cpu
from nomax.study.engine import measures
from nomax.study.engine.experiment import Experiment, ImageExperiment, Measurement, TextExperiment
from nomax.study.engine.result import Result
from nomax.study.engine.store import Store
from nomax.train import run_folder
from nomax.train.console import Stop
from nomax.train.distributed import World, resolve_device
from nomax.train.jobs import Job, train
from nomax.train.nonfinite import NonFiniteError

BUSY = 75  # the exit code of a process that found its run held by another one
SPENT = "spent.json"
EVERY = 5.0  # seconds between notes of the time spent, which is all that a killed process can lose of it


def run_in_process(run: Experiment, store: Path, command: str, retry: bool = False) -> None:
    """Do one run in this process, with one thread, and exit with its code. Its output goes to a log."""
    place = Store(store)
    with place.log(run.key).open("a", buffering=1) as log:
        sys.stdout = sys.stderr = log
        code = 1
        try:
            torch.set_num_threads(run.threads or 1)
            with StopWithParent() as stop:
                code = run_to_outcome(run, place, command, stop, Console(file=log), retry)
        except KeyboardInterrupt:  # the second one, of somebody who does not want to wait
            code = 130
        except BaseException:
            traceback.print_exc(file=log)
    os._exit(code)


class StopWithParent(Stop):
    """A request to stop: a signal, or the death of the parent process."""

    @property
    def exit_code(self) -> int:
        parent = multiprocessing.parent_process()
        orphaned = parent is not None and not parent.is_alive()
        return super().exit_code or (128 + signal.SIGTERM if orphaned else 0)


def run_to_outcome(
    run: Experiment, store: Store, command: str, stop: Stop, console: Console, retry: bool = False
) -> int:
    """Bring a run to its outcome, unless it has one. Returns 0, BUSY, or the exit code of having been stopped."""
    with store.claim(run.key) as free:
        if not free:
            return BUSY
        before = store.outcome(run.key)  # whoever held it until now may have finished it
        if before is not None and not (retry and before.status == "failed"):
            return 0
        store.reopen(run.key)
        result = execute(run, store.folder(run.key), command, stop, console)
        if result is None:
            return stop.exit_code or BUSY
        store.finish(result)
        if result.status != "failed":  # which a retry goes on with
            remove_checkpoints(store.folder(run.key))
    return 0


def execute(run: Experiment, folder: Path, command: str, stop: Stop, console: Console) -> Result | None:
    """Train, measure and return the result; None if asked to stop, or if another process trains there.

    A run that diverges or fails is a result like any other. A failure of the machine (a full or broken disk, too little
    memory) is not: the error is raised, and the run is left.
    """
    _load_kernels()
    with Meter(folder) as meter:
        try:
            measured = _measured(run, folder, command, stop, console)
        except run_folder.BusyError as error:
            console.print(str(error))
            return None
        except NonFiniteError as error:
            console.print(str(error))
            where = f"{error}; it first appeared in {error.report['where']}"
            return run.result("diverged", **meter.spent(), diverged_at=error.report["step"], error=where)
        except Exception as error:
            if is_machine_failure(error):
                raise
            console.print(traceback.format_exc())
            return run.result("failed", **meter.spent(), error=f"{type(error).__name__}: {error}")
        if measured is None:
            return None
        if not math.isfinite(measured.get("loss", 0.0)):
            reason = f"the loss on the test split is {measured['loss']}"
            return run.result("diverged", **meter.spent(), diverged_at=run.steps, error=reason)
        return run.result("done", **measured, **meter.spent())


def is_machine_failure(error: Exception) -> bool:
    """Return True if an error is about the disk or the memory, and not about the run."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    message = str(error)  # safetensors puts the number into words
    in_words = any(f"(os error {number})" in message for number in numbers)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in numbers or in_words


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a finished run, and keep what is small."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _measured(run: Experiment, folder: Path, command: str, stop: Stop, console: Console) -> dict[str, Any] | None:
    """Return all that is measured, by column; None if asked to stop."""
    if isinstance(run, Measurement):
        numbers = run.measure(stop)
        return None if numbers is None else {"numbers": numbers}
    if not isinstance(run, ImageExperiment | TextExperiment):
        raise TypeError(
            f"{type(run).__name__} is not a kind of run: use ImageExperiment, TextExperiment or Measurement."
        )
    device = resolve_device(run.config.device)
    if train(Job(run.config, folder, command), World(torch.device(device)), stop, console):
        return None
    training = run_folder.result(folder)
    if training is None:
        raise RuntimeError(f"{folder} has no result.json after the training.")
    if isinstance(run, TextExperiment):
        return measures.measure_text(run, folder, device, stop)
    return measures.measure_images(run, folder, training, device, stop)


def _load_kernels() -> None:
    """Load or compile the kernels before the clock starts."""
    try:
        cpu.instruction_set()
    except build.BuildError as error:
        print(f"nomax study: without compiled kernels, so slowly: {error}", file=sys.stderr)


class Meter:
    """The seconds of a run, by the clock and of CPU time, across interruptions."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SPENT
        self._before = self._read()
        self._clock, self._cpu = time.monotonic(), time.process_time()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._note, daemon=True)

    def spent(self) -> dict[str, float]:
        """Return seconds and core_seconds so far."""
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
                _files.write_json(self.path, self.spent())
            except OSError as error:
                print(f"nomax study: {self.path} could not be written: {error}", file=sys.stderr)

    def _read(self) -> dict[str, float]:
        try:
            spent = json.loads(self.path.read_text())
            return {name: float(spent[name]) for name in ("seconds", "core_seconds")}
        except (OSError, ValueError, KeyError, TypeError):
            return {"seconds": 0.0, "core_seconds": 0.0}


TIMEOUT = 24 * 60  # minutes that a job of a cluster may take, unless told otherwise


class Handle(Protocol):
    """A run in progress."""

    def code(self) -> int | None:
        """Return its exit code, or None while it goes on."""

    def stop(self) -> None:
        """Ask it to write a checkpoint and end."""


class Launcher(Protocol):
    """Something that starts runs."""

    limit: int

    def start(self, run: Experiment) -> Handle:
        """Start a run, and do not wait for it."""


class Processes:
    """Start each run in its own process on this machine."""

    def __init__(self, store: Path, command: str, retry: bool, limit: int) -> None:
        self.arguments, self.limit = (store, command, retry), limit
        self._context = _context()

    def start(self, run: Experiment) -> Handle:
        """Start a run, and do not wait for it."""
        store, command, retry = self.arguments
        process = self._context.Process(target=run_in_process, args=(run, store, command, retry))
        process.start()
        return _Process(process)


def _context() -> ForkServerContext | SpawnContext:
    """Return a way to start processes that share nothing with this one. On Linux a server imports torch once."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class _Process:
    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    def code(self) -> int | None:
        exit_code = self.process.exitcode
        return exit_code if exit_code is None or exit_code >= 0 else 128 - exit_code

    def stop(self) -> None:
        self.process.terminate()


@dataclass(frozen=True)
class ClusterJob:
    """A run as a job of submitit. A job that is preempted or out of time is queued again and resumes."""

    run: Experiment
    store: Path
    command: str
    retry: bool

    def __call__(self) -> int:
        """Do the run, and return its exit code."""
        torch.set_num_threads(self.run.threads or int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
        with Stop() as stop:
            return run_to_outcome(self.run, Store(self.store), self.command, stop, Console(), self.retry)

    def checkpoint(self) -> Any:
        """Return the same job for submitit to queue again; it resumes from the last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class Submitit:
    """Start each run as a job of Slurm, or of whatever submitit finds (cluster=local tries it here)."""

    def __init__(self, store: Path, command: str, retry: bool, limit: int, settings: Mapping[str, Any]) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ImportError("--launcher submitit needs the package of that name: pip install submitit") from error
        settings = dict(settings)
        cluster = settings.pop("cluster", None)
        self.arguments, self.limit = (store, command, retry), limit
        self._executor = submitit.AutoExecutor(folder=store / "submitit" / "%j", cluster=cluster)
        try:
            self._executor.update_parameters(**{"name": "nomax-study", "timeout_min": TIMEOUT, **settings})
        except (AssertionError, NameError, TypeError) as error:  # what submitit raises for settings it does not know
            raise ValueError(f"--submit: {error}") from error

    def start(self, run: Experiment) -> Handle:
        """Submit a run."""
        return _Job(self._executor.submit(ClusterJob(run, *self.arguments)))


class _Job:
    def __init__(self, job: Any) -> None:
        self.job = job

    def code(self) -> int | None:
        if not self.job.done():
            return None
        try:
            return int(self.job.result())
        except Exception as error:  # whatever went wrong in the job or with it
            print(f"nomax study: the job {self.job.job_id} failed: {error}", file=sys.stderr)
            return 1

    def stop(self) -> None:
        self.job.cancel(check=False)


def submit_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE words as submitit takes them: whole numbers as numbers."""
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ValueError(f"--submit {word!r} must be KEY=VALUE, such as timeout_min=60 or slurm_partition=gpu.")
        settings[name] = int(value) if value.lstrip("-").isdigit() else value
    return settings
