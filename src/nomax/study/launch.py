"""Where runs are done: in processes of this machine, or as jobs of a cluster through submitit."""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from nomax.study.run import Run

TIMEOUT = 24 * 60  # minutes that a job of a cluster may take, unless told otherwise


class Handle(Protocol):
    """A run that somebody works on."""

    def code(self) -> int | None:
        """Its exit code, or None while it goes on."""

    def stop(self) -> None:
        """Ask it to write a checkpoint and end."""


class Launcher(Protocol):
    """Something that starts runs."""

    limit: int

    def start(self, run: Run) -> Handle:
        """Start a run, and do not wait for it."""


class Processes:
    """Each run in a process of its own, on this machine."""

    def __init__(self, store: Path, command: str, retry: bool, limit: int) -> None:
        self.arguments, self.limit = (store, command, retry), limit
        self._context = _context()

    def start(self, run: Run) -> Handle:
        """Start a run, and do not wait for it."""
        from nomax.study.work import in_process

        store, command, retry = self.arguments
        process = self._context.Process(target=in_process, args=(run, store, command, retry))
        process.start()
        return _Process(process)


def _context() -> ForkServerContext | SpawnContext:
    """New processes that share nothing with this one. On Linux a server imports torch once for all of them."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nomax.study.work"])
    return context


class _Process:
    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    def code(self) -> int | None:
        found = self.process.exitcode
        return found if found is None or found >= 0 else 128 - found

    def stop(self) -> None:
        self.process.terminate()


@dataclass(frozen=True)
class Work:
    """A run as submitit's jobs carry it. A job that is preempted or out of time is queued again and goes on."""

    run: Run
    store: Path
    command: str
    retry: bool

    def __call__(self) -> int:
        """Do the run, and return its exit code."""
        import torch

        from nomax.console import Console
        from nomax.study.store import Store
        from nomax.study.work import settle
        from nomax.train.stop import Stop

        torch.set_num_threads(self.run.config.threads or int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
        with Stop() as stop:
            return settle(self.run, Store(self.store), self.command, stop, Console(), self.retry)

    def checkpoint(self) -> Any:
        """What submitit queues again: the same, which goes on from the last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class Submitit:
    """Each run as a job of its own: of Slurm, or of whatever submitit finds (cluster=local tries it here)."""

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

    def start(self, run: Run) -> Handle:
        """Submit a run."""
        return _Job(self._executor.submit(Work(run, *self.arguments)))


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


def settings(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as submitit takes them: whole numbers as numbers."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ValueError(f"--submit {word!r} must be KEY=VALUE, such as timeout_min=60 or slurm_partition=gpu.")
        found[name] = int(value) if value.lstrip("-").isdigit() else value
    return found
