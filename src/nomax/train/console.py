"""Talk to the user of a run: names of φ, a progress bar in a terminal or occasional lines elsewhere, clean stops."""

import math
import os
import re
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType
from typing import Any, Self

import torch
from rich.progress import BarColumn, MofNCompleteColumn

from nomax.console import Console, Progress, TextColumn
from nomax.nn import RELUFORMER
from nomax.phi import Phi

NAMED = {"reluformer": str(Phi.parse(RELUFORMER))}  # a φ that nobody wants to type
PLAIN_EVERY = 30.0  # seconds between lines where there is no terminal
WINDOW = 30.0  # seconds over which the speed is taken


def display_name(phi: str) -> str:
    """Return the name by which people know a φ, or its notation if it has none."""
    return {written: name for name, written in NAMED.items()}.get(phi, phi)


def slug(text: str) -> str:
    """Return a text as part of a file name: "relu/L" is relu-L, and no two φ are the same one."""
    signs_and_products = re.sub(r"(?<![\w)])-(?=\d)", "minus", text.replace("*sqrt", "xsqrt"))
    return re.sub(r"[^\w.+=]+", "-", signs_and_products).strip("-.")


class Bar:
    """Show the progress of one run."""

    def __init__(self, title: str, total: int, unit: str, console: Console | None = None, show: bool = True) -> None:
        self.title, self.total, self.unit, self.show = title, total, unit, show
        self.console = console or Console()
        self._marks: deque[tuple[float, int, float]] = deque()
        self._printed = 0.0
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._rich = Progress(*columns, console=self.console) if show and self.console.is_terminal else None
        self._task = self._rich.add_task(title, total=total, text="") if self._rich else None

    def __enter__(self) -> Self:
        if self._rich:
            self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich:
            self._rich.stop()

    def update(self, step: int, line: Mapping[str, float]) -> None:
        """Show a line of the metrics."""
        if not self.show:
            return
        now = time.monotonic()
        self._marks.append((now, step, line.get(self.unit, 0)))
        while len(self._marks) > 2 and now - self._marks[1][0] > WINDOW:
            self._marks.popleft()
        text = self._text(line)
        if self._rich and self._task is not None:
            self._rich.update(self._task, completed=step, text=text)
        elif now - self._printed > PLAIN_EVERY or step == self.total:
            self._printed = now
            self.console.print(f"{self.title}: step {step}/{self.total}, {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.show:
            self.console.print(text)

    def _text(self, line: Mapping[str, float]) -> str:
        pieces = [summarise(line)]
        (since, first, before), (now, step, after) = self._marks[0], self._marks[-1]
        if step > first:
            per_second = (after - before) / (now - since)
            left = round((self.total - step) * (now - since) / (step - first))
            pieces += [f"{per_second:,.0f} {self.unit}/s", f"{timedelta(seconds=left)} left"]
        return ", ".join([*pieces, f"{peak_memory() / 2**20:.0f} MB"])


def summarise(line: Mapping[str, float]) -> str:
    """Return the loss and accuracy of a line of the metrics and, for text, its perplexity."""
    pieces = [f"loss {line['loss']:.4f}"] if "loss" in line else []
    pieces += [f"perplexity {perplexity(line['nll']):.4g}"] if "nll" in line else []
    pieces += [f"accuracy {line['accuracy']:.1%}"] if "accuracy" in line else []
    return ", ".join(pieces)


def perplexity(nll: float) -> float:
    """Return exp of the mean negative log-likelihood of a token; infinity if that overflows."""
    return math.exp(nll) if nll < 700 else math.inf


def peak_memory() -> int:
    """Return this process's peak memory in bytes: GPU memory if it uses one, otherwise main memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # macOS counts bytes, Linux kilobytes


class Stop:
    """Notice requests to stop: a signal, or the death of the process that this one works for.

    Ctrl-C and SIGTERM let the step end and a checkpoint be written.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._signal = 0
        self._parent = parent
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Return whether to stop after this step."""
        return self.exit_code != 0

    @property
    def exit_code(self) -> int:
        """Return 130 after Ctrl-C, 143 after SIGTERM, as a shell reports them; 0 if nobody asked to stop."""
        if self._signal:
            return 128 + self._signal
        return 128 + signal.SIGTERM if self._parent not in (None, os.getppid()) else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who presses Ctrl-C twice does not want to wait
