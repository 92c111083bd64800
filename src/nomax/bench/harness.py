"""Run a bench: its options, its checks and races, and the files that it writes.

A subject is one file: its Options, its goals, and a Bench of `measure` and `report`, passed to `run_bench`.
"""

import ctypes
import dataclasses
import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from nomax._files import did_you_mean, write, write_json
from nomax.bench import render
from nomax.bench.results import CannotMeasureError, Case, Check, Goal, Results
from nomax.console import Console, Progress
from nomax.ops import build, cpu
from nomax.train import run_folder

FLAGS = ("fma", "avx2", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")
# In seconds. A call that takes longer is sampled three times only, or once: its noise is small, and the wait long.
SLOW, VERY_SLOW = 2.0, 8.0


@dataclass(frozen=True)
class Options:
    """The options that all benches have."""

    rounds: int = 5
    """Samples per participant; the best counts. Calls longer than 2 seconds get three, longer than 8 one."""
    output: Path | None = None
    """Folder for the results; by default benchmarks/results below the current folder."""
    load_limit: float = 0.5
    """Refuse to start while the machine is busier than this (its load average over the last minute)."""
    smoke: bool = False
    """Run on toy sizes, with the first of several settings, in seconds, only to check that it works."""

    def validate(self) -> None:
        """Raise an error that says what is wrong with the options, or which package is missing."""

    def shrunk(self) -> Self:
        """Return toy options, for smoke runs."""
        return dataclasses.replace(self, rounds=2)


@dataclass(frozen=True)
class ThreadedOptions(Options):
    """The options of benches that vary the number of threads."""

    threads: tuple[int, ...] = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    """Numbers of threads to measure with, one after the other."""

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), threads=self.threads[:1])


class Run:
    """A bench in progress: its subject runs checks and races and reports its progress here."""

    def __init__(self, options: Options, results: Results, progress: Progress) -> None:
        self.results = results
        self._options, self._progress, self._task = options, progress, progress.add_task("")
        self.finish: Callable[[], object] = lambda: None  # waits until a GPU has done what it was asked for

    def expect(self, steps: int) -> None:
        """Set the total number of checks, races and other steps."""
        self._progress.update(self._task, total=steps)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show a step while it is running."""
        self._progress.update(self._task, description=text)
        yield
        self._progress.advance(self._task)

    @contextmanager
    def checking(self, shape: str, dtype: str, name: str) -> Iterator[Check]:
        """Check a participant of ours: a crash is a wrong result too, and the rest is still worth measuring."""
        torch.set_num_threads(max(getattr(self._options, "threads", (1,))))
        check = Check(shape, dtype, name)
        with self.step(f"{shape}, {dtype}, {name}: checking"):
            try:
                yield check
            except Exception as error:
                check.failure = f"{type(error).__name__}: {error}"
        self.results.checks.append(check)

    def race(self, case: Case, calls: Mapping[str, Callable[[], Any]]) -> None:
        """Time calls against each other; add their seconds to the case, and the case to the results."""
        least_seconds = 1e-4 if self._options.smoke else 0.02
        self._measure(case, lambda: race(calls, self._options.rounds, least_seconds, self.finish))

    def take_turns(self, case: Case, samplers: Mapping[str, Callable[[], float]]) -> None:
        """Do the same for participants that return the seconds to count."""
        self._measure(case, lambda: take_turns(samplers, dict.fromkeys(samplers, self._options.rounds)))

    def _measure(self, case: Case, samples: Callable[[], dict[str, list[float]]]) -> None:
        torch.set_num_threads(case.threads)
        with self.step(case.label()):
            case.samples = samples()
        self.results.cases.append(case)

    def note_versions(self, *packages: str) -> None:
        """Record the versions of peers."""
        self.results.versions |= {name: version(name) for name in packages}


@dataclass(frozen=True)
class Bench:
    """A subject: its name, its measurements, its report, and its goals."""

    name: str
    measure: Callable[[Any, Run], Iterator[RenderableType]]  # gets the options, yields tables as they are finished
    report: Callable[[Results], list[str]]  # the paragraphs of the Markdown file
    goals: tuple[Goal, ...]
    draw: Callable[[Results], str] | None = None  # an SVG


def run_bench(bench: Bench, options: Options) -> int:
    """Measure, show each table when it is done, and write NAME.json, NAME.md and, if the bench draws one, NAME.svg.

    Returns 0 on success, 1 if a result was wrong, 2 if the options cannot be met, 130 if it was stopped.
    """
    try:
        _require_positive(options)
        options.validate()
        if not options.smoke:
            check_load(options.load_limit)
    except (ImportError, ValueError) as error:
        return _refuse(bench, error)
    options = options.shrunk() if options.smoke else options
    console, folder = Console(), options.output or Path("benchmarks/results")
    # Folders of the user's are nobody else's business.
    shown = {
        name: "a folder of the user's" if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    results = Results(shown | {"output": None}, machine(), versions(), now(), load())
    stopped = False
    with _progress(console) as progress, threads_restored():
        try:
            for table in bench.measure(options, Run(options, results, progress)):
                console.print(table)
                write_json(folder / f"{bench.name}.json", results.plain())
            results.finished = now()
        except KeyboardInterrupt:
            stopped = True
        except CannotMeasureError as error:
            return _refuse(bench, error)

    results.load_after = load()
    results.goals = [goal.judge(results) for goal in bench.goals]
    console.print(render.goal_table(results))
    _write(bench, results, folder, console)
    for check in results.wrong():
        console.print(Text.assemble(("WRONG", "bold red"), f" {check}"))
    if stopped:
        console.print("Stopped: what was measured until then is kept.")
        return 130
    return 1 if results.wrong() else 0


def _write(bench: Bench, results: Results, folder: Path, console: Console) -> None:
    paths = [folder / f"{bench.name}.{ending}" for ending in ("json", "md", "svg")[: 3 if bench.draw else 2]]
    write_json(paths[0], results.plain())
    write(paths[1], render.markdown(bench.name, results, bench.report(results)))
    if bench.draw:
        try:
            write(paths[2], bench.draw(results))
        except ImportError:
            console.print("No figure: it needs matplotlib (pip install matplotlib).")
            paths.pop()
    console.print(f"Written: {', '.join(map(str, paths))}")


def _refuse(bench: Bench, error: Exception) -> int:
    print(f"nomax bench {bench.name}: {error}", file=sys.stderr)
    return 2


def _require_positive(options: Options) -> None:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        numbers = value if field.type == tuple[int, ...] else (value,) if field.type is int else None
        least = 0 if field.name == "workers" else 1
        if numbers is not None and min(numbers, default=-1) < least:
            raise ValueError(f"--{field.name.replace('_', '-')} must be at least {least}.")


def known(kind: str, name: str, table: Collection[str]) -> str:
    """Return a name that is in the table; otherwise raise an error that suggests one."""
    if name in table:
        return name
    hint = did_you_mean(name, table, cutoff=0.4)
    raise ValueError(f"there is no {kind} {name!r}{hint} There are: {', '.join(table)}.")


def race(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    least_seconds: float,
    finish: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return each call's seconds, one sample per round; a sample repeats a short call for `least_seconds`.

    finish: waits for calls that return before they are done, as on a GPU; called once in a sample, not for each call.
    """
    first = {name: _sample(call, 1, finish) for name, call in calls.items()}
    samplers, limits = {}, {}
    for name, call in calls.items():
        samplers[name] = partial(_sample, call, _repeats(call, first[name], least_seconds, finish), finish)
        limits[name] = rounds if first[name] <= SLOW else min(rounds, 2) if first[name] <= VERY_SLOW else 0
    gc.collect()
    gc.disable()
    try:
        samples = take_turns(samplers, limits)
    finally:
        gc.enable()
    return {name: [*([first[name]] if first[name] > SLOW else []), *samples[name]] for name in calls}


def take_turns(samplers: Mapping[str, Callable[[], float]], rounds: Mapping[str, int]) -> dict[str, list[float]]:
    """Sample interleaved, round after round, so that all participants face the same conditions."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(max(rounds.values(), default=0)):
        # There and back again: a machine that slows down or speeds up favours nobody.
        for name in list(samplers) if number % 2 == 0 else reversed(list(samplers)):
            if number < rounds[name]:
                samples[name].append(samplers[name]())
    return samples


def _sample(call: Callable[[], Any], repeats: int, finish: Callable[[], object]) -> float:
    """Return the mean seconds of one call."""
    numbers = range(repeats)
    finish()
    start = perf_counter()
    for _ in numbers:
        call()
    finish()
    return (perf_counter() - start) / repeats


def _repeats(call: Callable[[], Any], first: float, least_seconds: float, finish: Callable[[], object]) -> int:
    if first >= least_seconds:
        return 1
    # The first call of a short one is mostly warm-up: ask again with a few.
    return math.ceil(least_seconds / _sample(call, math.ceil(least_seconds / first / 10), finish))


def bytes_in_a_fresh_process(function: Callable[..., int], *arguments: str | int) -> int | str:
    """Call a function in its own process, where nothing has left memory behind; return its result or why it failed."""
    call = f"from {function.__module__} import {function.__name__} as f; print(f(*{arguments!r}))"
    process = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {process.returncode}"
    return int(process.stdout)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return how far this process's peak memory rises above its current memory in a call (Linux with glibc only)."""
    # Memory that was freed but not given back would be used again, and what uses it would look free.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present
    call()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {name}")


def load() -> float:
    """Return the load average over the last minute."""
    return os.getloadavg()[0]


def check_load(limit: float) -> None:
    """Refuse to measure on a busy machine."""
    busy = load()
    if busy > limit:
        raise ValueError(
            f"the machine is busy: its load average is {busy:.2f}, the limit is {limit:g}. Wait until it "
            f"is quiet, or pass --load-limit {math.ceil(busy) + 1} to measure nevertheless; the load is recorded."
        )


def machine() -> dict[str, Any]:
    """Describe the machine, and the instruction set in use."""
    flags = run_folder.cpu_flags()
    try:
        kernels = cpu.instruction_set()
    except build.BuildError as error:
        kernels = f"none: {error}"
    return run_folder.machine() | {"flags": [flag for flag in FLAGS if flag in flags], "kernels": kernels}


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has products of bfloat16, which PyTorch's own operations use."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(run_folder.cpu_flags())


def versions() -> dict[str, str | None]:
    """Return the versions of the software, and of the compiler of the kernels."""
    try:
        words = [*build._compiler(), "--version"]
        compiler = subprocess.run(words, check=True, capture_output=True, text=True).stdout.partition("\n")[0]
    except (build.BuildError, OSError, subprocess.CalledProcessError):
        compiler = None
    return run_folder.versions() | {"compiler": compiler}


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Restore torch's number of threads afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
