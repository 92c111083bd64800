"""Results of studies that nobody ran: the real grid with an accuracy made up for each run."""

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from nomax import study
from nomax.phi import Phi
from nomax.study.engine.experiment import Experiment, Measurement, TextExperiment
from nomax.study.engine.result import MeasurementResult, Numbers, Result, TextResult
from nomax.study.images import gate
from nomax.study.images.setup import Setup
from nomax.study.text.setup import SETUPS, TextSetup

SETUP = Setup("test", models=("mu", "pico"), activations=("relu", "relu2", "identity"), probes=("digits",))


@lru_cache(maxsize=32)
def grid(name: str, setup: Setup, seeds: tuple[int, ...]) -> list[Experiment]:
    """The trainings of a study."""
    return [run for run in study.load(name).grid(setup, seeds) if not isinstance(run, Measurement)]


def measurements(name: str, setup: Any = SETUP) -> list[MeasurementResult]:
    """A result for every measurement of a study that has some."""
    runs = [run for run in study.load(name).grid(setup, (0,)) if isinstance(run, Measurement)]
    return [run.result("done", numbers=_numbers(run)) for run in runs]


def _numbers(run: Measurement) -> Numbers:
    if run.kind == "gate-cost":
        return {gate.RATIOS: tuple(1.08 + n / 200 for n in range(9)), gate.ADDED: (0.06,)}
    if run.kind == "speed":
        factors = {"ReLUFormer": 1.0, "softmax": 1.1, "sparsemax": 6.4, "1.5-entmax": 9.0}
        return {name: tuple(0.01 * factor * (1 + 0.01 * n) for n in range(9)) for name, factor in factors.items()}
    if run.kind == "attention-speed":
        return {"relu/L": tuple(0.01 + n / 1e4 for n in range(9)), "softmax": tuple(0.02 + n / 1e4 for n in range(9))}
    return {
        phi: tuple(0.4 * run.tokens ** -Phi.parse(phi).alpha * (1 + seed / 100) for seed in run.seeds)
        for phi in run.phis
    }


def noise(result: Result, size: float, salt: str = "") -> float:
    """A normal number that belongs to this run."""
    return size * np.random.default_rng(zlib.crc32(f"{result.label} {salt}".encode())).standard_normal()


def image_results(
    name: str,
    accuracy: Callable[[Result], float],
    *,
    spread: float = 0.002,
    seeds: Sequence[int] = (0, 1, 2),
    setup: Setup = SETUP,
    time: Callable[[Result], float] = lambda result: 20.0,
    lost: Callable[[Result], bool] = lambda result: False,
) -> list[Result]:
    """A result for every run of a study: its accuracy with noise, and ten-shot accuracy 10 points below."""
    results = []
    for run in grid(name, setup, tuple(seeds)):
        bare = run.result("done")
        if lost(bare):
            results.append(run.result("diverged", diverged_at=7, core_seconds=3.0, seconds=3.0))
            continue
        value = float(np.clip(accuracy(bare) + noise(bare, spread), 0, 1))
        shots: dict[str, Any] = {"ten_shot": value - 0.1, "probes": {"digits": value - 0.1}} if run.probes else {}
        results.append(run.result("done", accuracy=value, loss=1 - value, core_seconds=time(bare), **shots))
    return results


def text_results(
    name: str,
    loss: Callable[[TextResult], float],
    *,
    measured: Callable[[TextResult], dict[str, float]] = lambda result: {},
    spread: float = 0.002,
    seeds: Sequence[int] = (0, 1, 2),
    setup: TextSetup = SETUPS["hour"],
    lost: Callable[[TextResult], bool] = lambda result: False,
) -> list[TextResult]:
    """A result for every run of a study of text: its loss with noise, and whatever is said to have been measured.

    BLEU goes with the loss if it is not said: 25 at 4 nats, where a model has learned.
    """
    results = []
    for run in text_grid(name, setup, tuple(seeds)):
        bare = run.result("done")
        if lost(bare):
            results.append(run.result("diverged", diverged_at=7, core_seconds=3.0, seconds=3.0))
            continue
        nats = loss(bare) + noise(bare, spread)
        found = {what: value + noise(bare, 1e-4, what) for what, value in measured(bare).items()}
        found = {"bleu": 25 + 10 * (4 - nats), **found} if "bleu" in run.measures else found
        results.append(run.result("done", loss=nats, measured=found, core_seconds=20.0))
    return results


@lru_cache(maxsize=32)
def text_grid(name: str, setup: TextSetup, seeds: tuple[int, ...]) -> list[TextExperiment]:
    return [run for run in study.load(name).grid(setup, seeds) if not isinstance(run, Measurement)]
