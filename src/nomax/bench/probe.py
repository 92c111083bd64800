"""`nomax bench probe`: the few-shot probe's regression against scikit-learn's RidgeClassifier, on the same features."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD

from nomax.bench.frame import check_load, now, progress_bar, results_folder, threads_restored
from nomax.bench.machine import load, machine, versions
from nomax.bench.race import race
from nomax.bench.results import write
from nomax.bench.ridge import WORKS, make_features, ours, peer
from nomax.bench.tables import seconds, times
from nomax.console import Console, Progress, Table

OURS, PEER = "nomax", "scikit-learn"
GOAL = 5.0
LARGEST_DIFFERENCE = 1e-3  # of accuracies: near-ties that rounding decides


@dataclass(frozen=True)
class Options:
    """Measure the speed of nomax.evaluate.fewshot against scikit-learn's RidgeClassifier on this machine's CPU.

    Both get the same float32 features, whiten them, add the constant feature, fit ridge regressions to ±1 targets and
    predict the test images. one: all training images, l2 = 2¹⁰. sweep: the same with 14 l2, from 2⁶ to 2¹⁹. fit: both
    without the prediction. protocol: the few-shot table, 1, 5, 10 and 25 images per class, three seeds, l2 = 2¹⁰. Where
    accuracies differ by more than near-ties explain, there is no ratio, and the exit code is 1. Ctrl-C stops it and
    keeps what was measured.

    Writes probe.json (every sample, machine, versions) and probe.md (a table).
    """

    images: int = 10_000
    """Training images."""
    test_images: int = 10_000
    """Test images; with many classes, to predict them takes most of the time."""
    width: int = 768
    """Features of an image."""
    classes: tuple[int, ...] = (10, 100, 1000)
    """Numbers of classes, one after the other."""
    threads: tuple[int, ...] = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    """Numbers of threads to measure with, one after the other."""
    rounds: int = 5
    """Samples of each; the best counts. Calls of over 2 seconds are sampled three times."""
    output: Path | None = None
    """Folder for the results; if not given, benchmarks/results where that exists, else the current folder."""
    load_limit: float = 0.5
    """Refuse to start while the machine is busier than this (its load average over the last minute)."""
    smoke: bool = False
    """Try it on toy sizes: shows only that it works."""


@dataclass
class Case:
    """One kind of work, number of classes and of threads: seconds, round after round, and how accuracies differ."""

    work: str
    classes: int
    threads: int
    difference: float
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether both come to the same accuracies."""
        return self.difference <= LARGEST_DIFFERENCE

    @property
    def speedup(self) -> float | None:
        """How many times as fast as scikit-learn; None if the result is wrong."""
        return min(self.samples[PEER]) / min(self.samples[OURS]) if self.samples else None


def run(options: Options) -> int:
    """Return 0 if all is right, 1 if accuracies differ, 2 if the options cannot be served, 130 if it was stopped."""
    try:
        options = _check(options)
        import sklearn
    except (ValueError, ImportError) as error:
        told = error if isinstance(error, ValueError) else "the peer is missing: pip install scikit-learn"
        print(f"nomax bench probe: {told}", file=sys.stderr)
        return 2
    console, output = Console(), results_folder(options.output)
    facts: dict[str, Any] = {
        "options": dataclasses.asdict(options) | {"output": None},
        "machine": machine(),
        "versions": versions() | {"scikit-learn": str(sklearn.__version__)},
        "started": now(),
        "load_before": load(),
        "finished": None,
    }
    cases: list[Case] = []
    try:
        with progress_bar(console) as progress, threads_restored():
            for case in _measure(options, progress):
                cases.append(case)
                write(output / "probe.json", _json(facts, cases))
        facts["finished"] = now()
    except KeyboardInterrupt:
        console.print("Stopped: what was measured until then is kept.")
    facts["load_after"] = load()
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title="\nRidge probe against scikit-learn",
        title_style="bold",
    )
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in _rows(cases):
        table.add_row(*row)
    console.print(table)
    write(output / "probe.json", _json(facts, cases))
    write(output / "probe.md", _markdown(options, facts, cases))
    console.print(f"Written: {output / 'probe.json'}, {output / 'probe.md'}")
    if facts["finished"] is None:
        return 130
    return 0 if all(case.right for case in cases) else 1


def _measure(options: Options, progress: Progress) -> Iterator[Case]:
    limited = import_module("threadpoolctl").threadpool_limits  # of scikit-learn's libraries; it comes with it
    task = progress.add_task("", total=len(options.classes) * len(WORKS) * len(options.threads))
    for classes in options.classes:
        features = make_features(options.images, options.test_images, options.width, classes)
        for name, work in WORKS.items():
            calls = {OURS: partial(ours, features, work), PEER: partial(peer, features, work)}
            for threads in options.threads:
                progress.update(task, description=f"{name}, {classes} classes, {threads} thread{'s' * (threads > 1)}")
                torch.set_num_threads(threads)
                with limited(threads):
                    whole = work._replace(predict=True)
                    difference = float(np.abs(ours(features, whole) - peer(features, whole)).max())
                    case = Case(name, classes, threads, difference)
                    if case.right:
                        case.samples = race(calls, options.rounds, 1e-4 if options.smoke else 0.02)
                progress.advance(task)
                yield case


def _check(options: Options) -> Options:
    numbers = (options.images, options.test_images, options.width, options.rounds, *options.classes, *options.threads)
    if not options.classes or not options.threads or min(numbers) < 1:
        raise ValueError("--images, --test-images, --width, --classes, --threads and --rounds must be at least 1.")
    if max(options.classes) > options.images:
        raise ValueError(f"--classes {max(options.classes)} needs at least as many --images, not {options.images}.")
    if options.smoke:
        return dataclasses.replace(
            options, images=60, test_images=60, width=16, classes=(3,), threads=options.threads[:1], rounds=2
        )
    check_load(options.load_limit)
    return options


def _json(facts: dict[str, Any], cases: list[Case]) -> str:
    plain = [dataclasses.asdict(case) | {"speedup": case.speedup} for case in cases]
    return json.dumps(facts | {"goal": GOAL, "cases": plain}, indent=1, ensure_ascii=False) + "\n"


COLUMNS = ("work", "classes", "threads", OURS, PEER, "ratio", "accuracy", f"≥ {GOAL:g}×")


def _rows(cases: list[Case]) -> list[list[str]]:
    rows = []
    for case in cases:
        ratio = case.speedup
        best = [seconds(min(case.samples[name])) if case.samples else "–" for name in (OURS, PEER)]
        accuracy = "same" if case.right else f"WRONG by {case.difference:.2g}"
        verdict = "–" if ratio is None else "met" if ratio >= GOAL else "not met"
        rows.append([case.work, str(case.classes), str(case.threads), *best, times(ratio), accuracy, verdict])
    return rows


def _markdown(options: Options, facts: dict[str, Any], cases: list[Case]) -> str:
    parts = ["<!-- Written by `nomax bench probe`; the raw samples are in probe.json. -->"]
    if options.smoke:
        parts.append("**A smoke run: the sizes are toys and these numbers mean nothing.**")
    elif not facts["finished"]:
        parts.append("**The run was stopped: these are its results until then.**")
    names = facts["versions"]
    parts.append(
        f"{options.images:,} × {options.width} float32 features for training and {options.test_images:,} for the test, "
        f"on {facts['machine']['cpu']}, torch {names['torch']}, scikit-learn {names['scikit-learn']}, "
        f"{facts['started'][:10]}; the best of {options.rounds} interleaved rounds (three for calls of over 2 s, one "
        "over 8 s). one: all training images, one regulariser; sweep: 14 regularisers, 2⁶ to 2¹⁹; protocol: 1, 5, 10 "
        "and 25 shots, three seeds. Whitening, fits and predictions of the test images are counted; where it says fit, "
        "no predictions."
    )
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *_rows(cases))]
    return "\n\n".join([*parts, "\n".join(lines)]) + "\n"
