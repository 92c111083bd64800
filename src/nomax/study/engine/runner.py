"""The runner: start the runs of a grid that are left, show their progress, and stop in time."""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, TaskID

from nomax.console import Console, Progress, TextColumn
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.result import Result, TrainedResult
from nomax.study.engine.store import Store
from nomax.study.engine.worker import BUSY, Handle, Launcher
from nomax.train import metrics
from nomax.train.console import Stop

TICK = 0.1  # seconds between looks at the runs that are going on
LOOK_AGAIN = 1.0  # seconds between looks at runs that cannot be started: held by others, or too long for the budget


@dataclass
class GridReport:
    """The outcome of one call of the runner."""

    finished: list[Result] = field(default_factory=list)
    """Outcomes since the call, also those that other processes brought."""
    left: list[Experiment] = field(default_factory=list)
    """Runs without an outcome: stopped, beyond the budget, or crashed."""
    crashed: list[Experiment] = field(default_factory=list)
    """Those among them whose process crashed."""

    @property
    def exit_code(self) -> int:
        """1 if a process ended without an outcome, or if all new runs failed; 0 otherwise."""
        failed = bool(self.finished) and all(result.status == "failed" for result in self.finished)
        return 1 if self.crashed or failed else 0


def run_grid(
    runs: Sequence[Experiment],
    store: Store,
    launcher: Launcher,
    stop: Stop,
    console: Console,
    *,
    study: str,
    retry: bool = False,
    budget: float | None = None,
) -> GridReport:
    """Bring every run of a grid to its outcome, as far as the budget goes, or until asked to stop.

    budget: seconds. What would not end within it is not started, and what has not ended then is stopped, with a
    checkpoint. Runs that another process holds are waited for; if that process dies, they are taken over.
    """
    deadline = None if budget is None else time.monotonic() + budget
    grid = _Grid(runs, store, launcher, study, retry, deadline)
    ending = False
    with ProgressView(study, len(grid.runs), grid.done, console) as view:
        try:
            while grid.working or (grid.waiting and not ending):
                grid.collect(view)
                if not ending and (stop.asked or (deadline is not None and time.monotonic() >= deadline)):
                    ending = True
                    view.say("Stopping: every run writes a checkpoint." if grid.working else "Stopping.")
                    for active in grid.working.values():
                        active.handle.stop()
                if not ending and not grid.start_more():
                    break
                view.show(grid.done, grid.working_now(), len(grid.waiting), len(grid.elsewhere), grid.seconds_left())
                time.sleep(TICK)
        finally:
            for active in grid.working.values():  # only after an error here, or a second Ctrl-C
                active.handle.stop()
    store.belongs([run.key for run in grid.runs], study)
    left = [run for run in grid.runs if store.outcome(run.key) is None]
    return GridReport(grid.finished, left, grid.crashed)


def unique(runs: Iterable[Experiment]) -> list[Experiment]:
    """Drop repeated runs and keep the order: a grid may name the same one in two places."""
    return list({run.key: run for run in runs}.values())


def unfinished(runs: Iterable[Experiment], store: Store, retry: bool = False) -> list[Experiment]:
    """Return the runs that have no outcome, or that failed and are to be tried again."""
    left = []
    for run in unique(runs):
        result = store.outcome(run.key)
        if result is None or (retry and result.status == "failed"):
            left.append(run)
    return left


def shard(runs: Sequence[Experiment], text: str | None) -> list[Experiment]:
    """Return one of n parts of a grid, "1/4" to "4/4". A run stays in its part whatever else is in the grid."""
    if text is None:
        return list(runs)
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise ValueError(f"--shard {text!r} must be i/n with i from 1 to n, such as 1/4.")
    return [run for run in runs if int(run.key, 16) % int(parts) == int(number) - 1]


def share_left(run: Experiment, store: Store) -> float:
    """Return the share of a run that is left, from 1 to 0."""
    return 1 - min(metrics.last(store.folder(run.key)).get("step", 0) / run.steps, 1)


@dataclass(frozen=True)
class _Active:
    run: Experiment
    handle: Handle


class _Grid:
    """The runs of a grid and the state of each."""

    def __init__(
        self,
        runs: Sequence[Experiment],
        store: Store,
        launcher: Launcher,
        study: str,
        retry: bool,
        deadline: float | None,
    ) -> None:
        self.runs, self.store, self.launcher, self.study, self.deadline = unique(runs), store, launcher, study, deadline
        self.waiting = unfinished(self.runs, store, retry)
        self.before = len(self.runs) - len(self.waiting)
        self.retried = {run.key for run in self.waiting if store.outcome(run.key) is not None}
        self.working: dict[str, _Active] = {}
        self.elsewhere: set[str] = set()
        self.finished: list[Result] = []
        self.crashed: list[Experiment] = []
        self.estimate = Estimate(store.results())
        self._look_at = 0.0

    @property
    def done(self) -> int:
        """Runs with a final outcome."""
        return self.before + len(self.finished)

    def collect(self, view: "ProgressView") -> None:
        """Take note of runs that have ended."""
        for key, active in list(self.working.items()):
            code = active.handle.code()
            if code is None:
                continue
            del self.working[key]
            if code == BUSY:  # somebody else was quicker
                self.waiting.append(active.run)
            elif code in (130, 143):
                view.say(f"{active.run.label}: stopped; the same command goes on from its last checkpoint.")
            elif code == 0 and (result := self.store.outcome(key)) is not None:
                self._finish(result)
                view.finished(result, self.done, self.seconds_left())
            else:
                self.crashed.append(active.run)
                message = f"{active.run.label}: its process ended with exit code {code}, without an outcome."
                view.say(f"{message} Its log: {self.store.log(key)}. The same command tries again.")

    def start_more(self) -> bool:
        """Start as many runs as the limit allows; return False if none is running and none can be started."""
        now = time.monotonic()
        idle = not (self.working or self.elsewhere)
        if len(self.working) < self.launcher.limit and (idle or now >= self._look_at):
            before = len(self.working)
            self.elsewhere.clear()
            for run in list(self.waiting):
                if len(self.working) >= self.launcher.limit:
                    break
                self._consider(run)
            self._look_at = now if len(self.working) > before else now + LOOK_AGAIN
        return bool(self.working or self.elsewhere)

    def _consider(self, run: Experiment) -> None:
        if run.key not in self.retried and (result := self.store.outcome(run.key)) is not None:
            self.waiting.remove(run)
            self._finish(result)
        elif self.deadline is not None and time.monotonic() + self.seconds(run) > self.deadline:
            pass
        elif self.store.busy(run.key):
            self.elsewhere.add(run.key)
        elif self.working and (run.alone or any(active.run.alone for active in self.working.values())):
            pass  # until what goes on now has ended
        else:
            self.waiting.remove(run)
            self.retried.discard(run.key)
            self.working[run.key] = _Active(run, self.launcher.start(run))

    def _finish(self, result: Result) -> None:
        self.finished.append(result)
        self.estimate.learn(result)
        self.store.belongs([result.key], self.study)

    def seconds(self, run: Experiment) -> float:
        """Return the seconds that a run still needs."""
        return self.estimate.seconds(run, share_left(run, self.store))

    def seconds_left(self) -> float:
        """Return the seconds until all runs are done."""
        running = [self.seconds(active.run) for active in self.working.values()]
        waiting = [self.estimate.seconds(run) for run in self.waiting]
        return max([(sum(running) + sum(waiting)) / self.launcher.limit, *running, *waiting], default=0.0)

    def working_now(self) -> list[tuple[Experiment, int]]:
        """Return the runs in progress here, and the step of each."""
        return [
            (active.run, metrics.last(self.store.folder(key)).get("step", 0)) for key, active in self.working.items()
        ]


PLAIN_EVERY = 30.0  # seconds between lines about what goes on, where there is no terminal


class ProgressView:
    """The progress of a grid."""

    def __init__(self, title: str, total: int, done: int, console: Console) -> None:
        self.total, self.done, self.console = total, done, console
        self._printed = time.monotonic()
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._bars = Progress(*columns, console=console)
        self._whole = self._bars.add_task(title, total=total, completed=self.done, text="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self.done:
            self.say(f"{self.done} of the {self.total} runs have been done before.")
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text)

    def finished(self, result: Result, done: int, seconds_left: float) -> None:
        """Print the outcome of a run."""
        left = f"; about {spell_time(seconds_left)} left" if done < self.total else ""
        self.say(f"{done}/{self.total}  {result.label}: {tell_outcome(result)}{left}")

    def show(
        self, done: int, working: Sequence[tuple[Experiment, int]], waiting: int, elsewhere: int, seconds_left: float
    ) -> None:
        """Show the runs in progress, the number left, and the expected end."""
        self.done = done
        end = datetime.now() + timedelta(seconds=seconds_left)
        text = f"{len(working)} going on, {waiting} left, until about {end:%H:%M} ({spell_time(seconds_left)})"
        if elsewhere:
            text += f"; {elsewhere} in the hands of another process"
        if self.console.is_terminal:
            self._show_bars(working, text)
        elif time.monotonic() - self._printed > PLAIN_EVERY:
            self._printed = time.monotonic()
            steps = "; ".join(f"{run.label}, step {step}/{run.steps}" for run, step in working)
            self.say(f"{done}/{self.total}  {text}. {steps}")

    def _show_bars(self, working: Sequence[tuple[Experiment, int]], text: str) -> None:
        self._bars.update(self._whole, completed=self.done, text=text)
        for run, step in working:
            if run.key not in self._tasks:
                self._tasks[run.key] = self._bars.add_task(run.label, total=run.steps, text="")
            self._bars.update(self._tasks[run.key], completed=step)
        for key in self._tasks.keys() - {run.key for run, _ in working}:
            self._bars.remove_task(self._tasks.pop(key))


def tell_outcome(result: Result) -> str:
    """Return the outcome of a run in a few words."""
    if result.status == "done":
        return f"{result.summary} in {spell_time(result.seconds)}"
    return (
        f"diverged at step {getattr(result, 'diverged_at', 0)}"
        if result.status == "diverged"
        else f"failed: {result.error}"
    )


# Of one core with AVX2 on small matrices, in training steps. It serves until the first run is finished.
FLOP_PER_SECOND = 25e9
START = 2.0  # seconds to start a process and to load the data

NUMBER = r"\d+(?:\.\d+)?"
PIECE = rf"\s*({NUMBER})\s*(min|[smhd])"  # of a time, such as 30m
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Estimate:
    """Core-seconds per floating point operation, of finished runs that are as similar as there are, else assumed.

    Runs of the same data come before those of the same model: a set-up's precision and batch size matter more.
    """

    def __init__(self, results: Iterable[Result] = ()) -> None:
        self._rates: dict[tuple[str, str], list[float]] = defaultdict(list)
        for result in results:
            self.learn(result)

    def learn(self, result: Result) -> None:
        """Take a finished run into account."""
        if not isinstance(result, TrainedResult) or result.status != "done" or result.train_flops == 0:
            return
        # The clock also counts the time in which other processes had the core. Old results have only that.
        if seconds := result.core_seconds or result.seconds:
            self._rates[result.variant, result.data].append(seconds / result.train_flops)

    def seconds(self, run: Experiment, share: float = 1.0) -> float:
        """Return how long a run will take, or the share of it that is left."""
        model, data = run.facts["variant"], run.facts.get("data")
        similar = (
            [rate for (_, other), rates in self._rates.items() if other == data for rate in rates],
            [rate for (other, _), rates in self._rates.items() if other == model for rate in rates],
            [rate for rates in self._rates.values() for rate in rates],
        )
        rates = self._rates.get((model, data)) or next(filter(None, similar), [1 / FLOP_PER_SECOND])
        return START + share * statistics.median(rates) * run.flops

    @property
    def source(self) -> str:
        """The source of the numbers, in words."""
        number = sum(map(len, self._rates.values()))
        if number:
            return f"estimated from {number} finished run{'s' * (number > 1)}"
        return f"estimated at {FLOP_PER_SECOND / 1e9:.0f} GFLOP/s for a core, until a run is finished"


def parse_seconds(text: str) -> float:
    """Parse "2h", "90m", "1h30m", "45s" or a plain number of seconds."""
    plain = text.strip().lower()
    if re.fullmatch(NUMBER, plain):
        plain += "s"
    total = sum(float(number) * UNITS[unit] for number, unit in re.findall(PIECE, plain))
    if total <= 0 or not re.fullmatch(f"({PIECE})+", plain):
        raise ValueError(f"--budget {text!r} must be a time such as 2h, 90m, 1h30m or 45s.")
    return total


def spell_time(seconds: float) -> str:
    """Format a time as people say it: 45 s, 12 min, 1 h 30 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"
