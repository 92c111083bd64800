"""The runner: which runs of a grid are left, who works on them, and when to stop."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nomax.console import Console
from nomax.study.estimate import Estimate
from nomax.study.launch import Handle, Launcher
from nomax.study.progress import View
from nomax.study.row import Row
from nomax.study.run import Run
from nomax.study.store import Store
from nomax.study.work import BUSY
from nomax.train import metrics
from nomax.train.stop import Stop

TICK = 0.1  # seconds between looks at the runs that are going on
LOOK_AGAIN = 1.0  # seconds between looks at runs that cannot be started: held by others, or too long for the budget


@dataclass
class Report:
    """What one call of the runner came to."""

    finished: list[Row] = field(default_factory=list)
    """Outcomes since the call, also those that other processes brought."""
    left: list[Run] = field(default_factory=list)
    """Runs without an outcome: stopped, beyond the budget, or ended without a word."""
    crashed: list[Run] = field(default_factory=list)
    """Of these, those whose process ended without a word."""

    @property
    def exit_code(self) -> int:
        """1 if a process ended without a word, or if nothing came of all that was tried; 0 otherwise."""
        failed = bool(self.finished) and all(row.status == "failed" for row in self.finished)
        return 1 if self.crashed or failed else 0


def run_grid(
    runs: Sequence[Run],
    store: Store,
    launcher: Launcher,
    stop: Stop,
    console: Console,
    *,
    study: str,
    retry: bool = False,
    budget: float | None = None,
) -> Report:
    """Bring every run of a grid to its outcome, as far as the budget goes, or until asked to stop.

    budget: seconds. What would not end within it is not started, and what has not ended then is stopped, with a
    checkpoint. Runs that another process holds are waited for; if that process dies, they are taken over.
    """
    deadline = None if budget is None else time.monotonic() + budget
    grid = _Grid(runs, store, launcher, study, retry, deadline)
    ending = False
    with View(study, len(grid.runs), grid.done, console) as view:
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
    return Report(grid.finished, left, grid.crashed)


def unique(runs: Iterable[Run]) -> list[Run]:
    """The runs, each once, in order: a grid may name the same one in two places."""
    return list({run.key: run for run in runs}.values())


def unfinished(runs: Iterable[Run], store: Store, retry: bool = False) -> list[Run]:
    """The runs that have no outcome, or that failed and shall be tried again."""
    left = []
    for run in unique(runs):
        row = store.outcome(run.key)
        if row is None or (retry and row.status == "failed"):
            left.append(run)
    return left


def shard(runs: Sequence[Run], text: str | None) -> list[Run]:
    """One of n parts of a grid, "1/4" to "4/4". A run stays in its part whatever else is in the grid."""
    if text is None:
        return list(runs)
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise ValueError(f"--shard {text!r} must be i/n with i from 1 to n, such as 1/4.")
    return [run for run in runs if int(run.key, 16) % int(parts) == int(number) - 1]


def share_left(run: Run, store: Store) -> float:
    """How much of a run is still to do, from 1 to 0."""
    return 1 - min(metrics.last(store.folder(run.key)).get("step", 0) / run.config.steps, 1)


@dataclass(frozen=True)
class _Active:
    run: Run
    handle: Handle


class _Grid:
    """The runs of a grid and what has become of each."""

    def __init__(
        self, runs: Sequence[Run], store: Store, launcher: Launcher, study: str, retry: bool, deadline: float | None
    ) -> None:
        self.runs, self.store, self.launcher, self.study, self.deadline = unique(runs), store, launcher, study, deadline
        self.waiting = unfinished(self.runs, store, retry)
        self.before = len(self.runs) - len(self.waiting)
        self.retried = {run.key for run in self.waiting if store.outcome(run.key) is not None}
        self.working: dict[str, _Active] = {}
        self.elsewhere: set[str] = set()
        self.finished: list[Row] = []
        self.crashed: list[Run] = []
        self.estimate = Estimate(store.rows())
        self._look_at = 0.0

    @property
    def done(self) -> int:
        """How many runs have an outcome that stays."""
        return self.before + len(self.finished)

    def collect(self, view: View) -> None:
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
            elif code == 0 and (row := self.store.outcome(key)) is not None:
                self._finish(row)
                view.finished(row, self.done, self.seconds_left())
            else:
                self.crashed.append(active.run)
                said = f"{active.run.label}: its process ended with exit code {code}, without an outcome."
                view.say(f"{said} Its log: {self.store.log(key)}. The same command tries again.")

    def start_more(self) -> bool:
        """Start as many runs as may go on at a time. False: nothing goes on, and nothing can be started or awaited."""
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

    def _consider(self, run: Run) -> None:
        if run.key not in self.retried and (row := self.store.outcome(run.key)) is not None:
            self.waiting.remove(run)
            self._finish(row)
        elif self.deadline is not None and time.monotonic() + self.seconds(run) > self.deadline:
            pass
        elif self.store.busy(run.key):
            self.elsewhere.add(run.key)
        else:
            self.waiting.remove(run)
            self.retried.discard(run.key)
            self.working[run.key] = _Active(run, self.launcher.start(run))

    def _finish(self, row: Row) -> None:
        self.finished.append(row)
        self.estimate.learn(row)
        self.store.belongs([row.key], self.study)

    def seconds(self, run: Run) -> float:
        """How long a run will still take."""
        return self.estimate.seconds(run, share_left(run, self.store))

    def seconds_left(self) -> float:
        """How long all that is left will take."""
        running = [self.seconds(active.run) for active in self.working.values()]
        waiting = [self.estimate.seconds(run) for run in self.waiting]
        return max([(sum(running) + sum(waiting)) / self.launcher.limit, *running, *waiting], default=0.0)

    def working_now(self) -> list[tuple[Run, int]]:
        """The runs that go on here, and the step of each."""
        return [
            (active.run, metrics.last(self.store.folder(key)).get("step", 0)) for key, active in self.working.items()
        ]
