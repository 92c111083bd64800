"""`nomax bench probe`: the few-shot probe's regression against scikit-learn's RidgeClassifier, on the same features."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from rich.console import RenderableType

from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, run_bench
from nomax.bench.results import Case, Goal, Results
from nomax.evaluate import fewshot

OURS, PEER = "nomax", "scikit-learn"
LARGEST_DIFFERENCE = 1e-3  # of accuracies: near-ties that rounding decides

Features = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]


class Task(NamedTuple):
    """The regressions to fit."""

    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    l2: tuple[float, ...]
    predict: bool = True
    """Also predict the test images."""


ALL = 10**9  # more shots than there are images: all of them
SWEEP = tuple(2.0**power for power in range(6, 20))
TASKS = {
    "fit": Task((ALL,), (0,), (fewshot.RIDGE,), predict=False),
    "one": Task((ALL,), (0,), (fewshot.RIDGE,)),
    "sweep, fit": Task((ALL,), (0,), SWEEP, predict=False),
    "sweep": Task((ALL,), (0,), SWEEP),
    "protocol": Task(fewshot.SHOTS, fewshot.SEEDS, (fewshot.RIDGE,)),
}
GOALS = tuple(Goal("against scikit-learn's RidgeClassifier", "speedup", 5.0, task, PEER) for task in TASKS)
COLUMNS = ("work", "classes", "threads", OURS, PEER, f"vs {PEER}")


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure the speed of nomax.evaluate.fewshot against scikit-learn's RidgeClassifier on this machine's CPU.

    Both get the same float32 features, whiten them, add the constant feature, fit ridge regressions to ±1 targets and
    predict the test images. one: all training images, l2 = 2¹⁰. sweep: the same with 14 l2, from 2⁶ to 2¹⁹. fit: both
    without the prediction. protocol: the few-shot table, 1, 5, 10 and 25 images per class, three seeds, l2 = 2¹⁰. If
    accuracies differ by more than near-ties explain, there is no ratio, and the exit code is 1. Ctrl-C stops it and
    keeps the measurements so far.

    Writes probe.json (every sample, machine, versions) and probe.md (a table).
    """

    images: int = 10_000
    """Training images."""
    test_images: int = 10_000
    """Test images; with many classes, predicting them takes most of the time."""
    width: int = 768
    """Features per image."""
    classes: tuple[int, ...] = (10, 100, 1000)
    """Numbers of classes, one after the other."""

    def validate(self) -> None:
        if max(self.classes) > self.images:
            raise ValueError(f"--classes {max(self.classes)} needs at least as many --images, not {self.images}.")
        if importlib.util.find_spec("sklearn") is None:
            raise ImportError("the peer is missing: pip install scikit-learn")

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), images=60, test_images=60, width=16, classes=(3,))


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    run.note_versions("scikit-learn")
    limited = import_module("threadpoolctl").threadpool_limits  # of scikit-learn's libraries; it comes with it
    run.expect(2 * len(options.classes) * len(TASKS) * len(options.threads))
    for classes in options.classes:
        features = make_features(options.images, options.test_images, options.width, classes)
        for name, task in TASKS.items():
            for threads in options.threads:
                case = Case(f"{classes} classes", "float32", name, threads, ours=(OURS,))
                with limited(threads):
                    with run.checking(case.shape, case.dtype, name) as check:
                        torch.set_num_threads(threads)
                        whole = task._replace(predict=True)
                        difference = float(np.abs(ours(features, whole) - peer(features, whole)).max())
                        check.bound("accuracy", difference, LARGEST_DIFFERENCE)
                    if check.right:
                        case.differences[PEER] = difference
                        run.race(case, {OURS: partial(ours, features, task), PEER: partial(peer, features, task)})
        rows = _rows([case for case in run.results.cases if case.shape == f"{classes} classes"])
        yield render.terminal_table(COLUMNS, rows, "Ridge probe against scikit-learn", words=1)


def make_features(images: int, test_images: int, width: int, classes: int) -> Features:
    """Return features of overlapping classes, correlated, with offsets and scales, in random order."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(classes, width))
    mixing = generator.normal(size=(width, width)) / width**0.5 + np.eye(width)
    offsets, scales = generator.normal(size=width), generator.uniform(0.2, 5, width)

    def draw(number: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        labels = generator.permutation(np.arange(number) % classes)
        x = (centres[labels] + 6 * generator.normal(size=(number, width))) @ mixing * scales + offsets
        return x.astype(np.float32), labels

    return (*draw(images), *draw(test_images))


def ours(features: Features, task: Task) -> npt.NDArray[np.float64]:
    """Return our accuracies, [shots, seeds, l2]; empty without prediction."""
    if task.predict:
        return fewshot.accuracies(*features, shots=task.shots, seeds=task.seeds, l2=task.l2)
    train, labels = torch.from_numpy(features[0]), features[1]
    for shots in task.shots:
        for seed in task.seeds:
            chosen = [places[:shots] for places in fewshot.shuffled(labels, seed)]
            rows = torch.from_numpy(np.concatenate(chosen))
            probe = fewshot.fit(train, rows, [len(of_class) for of_class in chosen], task.l2)
            for l2 in task.l2:
                probe.weights(l2)
    return np.empty(0)


def peer(features: Features, task: Task) -> npt.NDArray[np.float64]:
    """Return the same from scikit-learn: whitened once for each choice of images, fitted for each l2."""
    from sklearn.linear_model import RidgeClassifier

    train, labels, test, expected = features
    accuracies = []
    for shots in task.shots:
        for seed in task.seeds:
            chosen = np.concatenate([places[:shots] for places in fewshot.shuffled(labels, seed)])
            x, targets = train[chosen], labels[chosen]
            mean, deviation = x.mean(0), x.std(0) + np.float32(fewshot.EPSILON)
            x = _whitened(x, mean, deviation)
            shown = _whitened(test, mean, deviation) if task.predict else None
            for l2 in task.l2:
                classifier = RidgeClassifier(alpha=l2, fit_intercept=False).fit(x, targets)
                if task.predict:
                    accuracies.append(classifier.score(shown, expected))
    return np.array(accuracies).reshape((len(task.shots), len(task.seeds), len(task.l2)) if task.predict else 0)


def _whitened(x: Any, mean: Any, deviation: Any) -> npt.NDArray[np.float32]:
    full = np.full((len(x), x.shape[1] + 1), fewshot.CONSTANT, np.float32)
    np.divide(np.subtract(x, mean, out=full[:, :-1]), deviation, out=full[:, :-1])
    return full


def _rows(cases: list[Case]) -> list[list[str]]:
    return [
        [
            *(case.mode, case.shape.removesuffix(" classes"), str(case.threads)),
            *(render.seconds(case.best(name)) for name in (OURS, PEER)),
            render.times(case.speedup(OURS, PEER)),
        ]
        for case in cases
    ]


def report(results: Results) -> list[str]:
    """Return the table, with the conditions of the measurement."""
    options = results.options
    text = (
        f"{options['images']:,} × {options['width']} float32 features for training and {options['test_images']:,} for "
        f"the test, on {render.measured_on(results, PEER)}. {render.best_of(results)} one: "
        "all training images, one regulariser; sweep: 14 regularisers, 2⁶ to 2¹⁹; protocol: 1, 5, 10 and 25 shots, "
        "three seeds. Whitening, fits and predictions of the test images are counted; where it says fit, no "
        "predictions."
    )
    return [text, render.markdown_table(COLUMNS, _rows(results.cases))]


BENCH = Bench("probe", _measure, report, GOALS)
run = partial(run_bench, BENCH)
