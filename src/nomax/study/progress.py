"""What a grid shows while it works: bars in a terminal, a line for each finished run elsewhere."""

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, TaskID

from nomax.console import Console, Progress, TextColumn
from nomax.study.estimate import spelled
from nomax.study.row import Row
from nomax.study.run import Run

PLAIN_EVERY = 30.0  # seconds between lines about what goes on, where there is no terminal


class View:
    """The progress of a grid."""

    def __init__(self, title: str, total: int, done: int, console: Console) -> None:
        self.total, self.done, self.console = total, done, console
        self._printed = time.monotonic()
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
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

    def finished(self, row: Row, done: int, seconds_left: float) -> None:
        """Tell what came out of a run."""
        left = f"; about {spelled(seconds_left)} left" if done < self.total else ""
        self.say(f"{done}/{self.total}  {row.label}: {outcome(row)}{left}")

    def show(
        self, done: int, working: Sequence[tuple[Run, int]], waiting: int, elsewhere: int, seconds_left: float
    ) -> None:
        """Show what goes on, what is left, and when it will end."""
        self.done = done
        end = datetime.now() + timedelta(seconds=seconds_left)
        text = f"{len(working)} going on, {waiting} left, until about {end:%H:%M} ({spelled(seconds_left)})"
        if elsewhere:
            text += f"; {elsewhere} in the hands of another process"
        if self.console.is_terminal:
            self._show_bars(working, text)
        elif time.monotonic() - self._printed > PLAIN_EVERY:
            self._printed = time.monotonic()
            steps = "; ".join(f"{run.label}, step {step}/{run.config.steps}" for run, step in working)
            self.say(f"{done}/{self.total}  {text}. {steps}")

    def _show_bars(self, working: Sequence[tuple[Run, int]], text: str) -> None:
        self._bars.update(self._whole, completed=self.done, text=text)
        for run, step in working:
            if run.key not in self._tasks:
                self._tasks[run.key] = self._bars.add_task(run.label, total=run.config.steps, text="")
            self._bars.update(self._tasks[run.key], completed=step)
        for key in self._tasks.keys() - {run.key for run, _ in working}:
            self._bars.remove_task(self._tasks.pop(key))


def outcome(row: Row) -> str:
    """What came out of a run, in a few words."""
    if row.status == "done":
        return f"{row.said} in {spelled(row.seconds)}"
    return f"diverged at step {row.diverged_at}" if row.status == "diverged" else f"failed: {row.error}"
