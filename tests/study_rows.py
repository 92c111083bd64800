"""Results of studies that nobody ran: the real grid with an accuracy made up for each run."""

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from nomax import study
from nomax.study.row import Row, TextRow
from nomax.study.run import Run
from nomax.study.setup import Setup
from nomax.study.text_run import TextRun
from nomax.study.text_setup import SETUPS, TextSetup

SETUP = Setup("test", models=("mu", "pico"), activations=("relu", "relu2", "identity"), probes=("digits",))


@lru_cache(maxsize=32)
def grid(name: str, setup: Setup, seeds: tuple[int, ...]) -> list[Run]:
    return study.load(name).grid(setup, seeds)


def noise(row: Row, size: float, salt: str = "") -> float:
    """A normal number that belongs to this run."""
    return size * np.random.default_rng(zlib.crc32(f"{row.label} {salt}".encode())).standard_normal()


def results(
    name: str,
    accuracy: Callable[[Row], float],
    *,
    spread: float = 0.002,
    seeds: Sequence[int] = (0, 1, 2),
    setup: Setup = SETUP,
    time: Callable[[Row], float] = lambda row: 20.0,
    lost: Callable[[Row], bool] = lambda row: False,
) -> list[Row]:
    """A row for every run of a study: its accuracy with noise, and ten-shot accuracy 10 points below."""
    rows = []
    for run in grid(name, setup, tuple(seeds)):
        bare = Row.of(run, "done")
        if lost(bare):
            rows.append(Row.of(run, "diverged", diverged_at=7, core_seconds=3.0, seconds=3.0))
            continue
        value = float(np.clip(accuracy(bare) + noise(bare, spread), 0, 1))
        shots: dict[str, Any] = {"ten_shot": value - 0.1, "probes": {"digits": value - 0.1}} if run.probes else {}
        rows.append(Row.of(run, "done", accuracy=value, loss=1 - value, core_seconds=time(bare), **shots))
    return rows


def text_results(
    name: str,
    loss: Callable[[TextRow], float],
    *,
    measured: Callable[[TextRow], dict[str, float]] = lambda row: {},
    spread: float = 0.002,
    seeds: Sequence[int] = (0, 1, 2),
    setup: TextSetup = SETUPS["hour"],
    lost: Callable[[TextRow], bool] = lambda row: False,
) -> list[TextRow]:
    """A row for every run of a study of text: its loss with noise, and whatever is said to have been measured."""
    rows = []
    for run in text_grid(name, setup, tuple(seeds)):
        bare = Row.of(run, "done")
        if lost(bare):
            rows.append(Row.of(run, "diverged", diverged_at=7, core_seconds=3.0, seconds=3.0))
            continue
        found = {what: value + noise(bare, 1e-4, what) for what, value in measured(bare).items()}
        rows.append(Row.of(run, "done", loss=loss(bare) + noise(bare, spread), measured=found, core_seconds=20.0))
    return rows


@lru_cache(maxsize=32)
def text_grid(name: str, setup: TextSetup, seeds: tuple[int, ...]) -> list[TextRun]:
    return study.load(name).grid(setup, seeds)
