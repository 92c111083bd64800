"""Which learning rate? softmax over learning rates, once: every study then uses the best one for every φ.

    nomax study rate --setup hour --patches 7 4     minutes on two cores

This is how the rate of the set-ups was chosen. It is softmax's rate, as it was the paper's, so that nothing is tuned in
favour of another φ. It judges no claim. What came out: results/rate/rate.svg.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from nomax import _colours
from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.figure import Figure, Table, legend, nothing_yet, percent_axis, sheet
from nomax.study.engine.result import ImageResult, where
from nomax.study.engine.statistics import accuracy, lengths, seeds
from nomax.study.engine.verdict import CHANCE_NOTE, Verdict, percent
from nomax.study.setup import Setup, adapted

TITLE = "Which learning rate suits softmax?"
CLAIMS: tuple[str, ...] = ()

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
MARKERS = "osD^v"
DASHES = ("-", "--", "-.", ":")  # all lines are softmax's, and have its colour


def grid(setup: Setup, seeds: Sequence[int]) -> list[Experiment]:
    """Softmax with every rate at every length."""
    return [
        adapted(setup, lr=rate).run(SOFTMAX, patch=patch, seed=seed)
        for seed in seeds
        for patch in setup.patches
        for rate in RATES
    ]


def figures(rows: Sequence[ImageResult], setup: Setup) -> list[Figure]:
    """Accuracy over the learning rate, a line for each length."""
    means = {(row.tokens, row.lr): _mean(where(rows, tokens=row.tokens, lr=row.lr)) for row in rows}
    best = {
        tokens: max((rate for length, rate in means if length == tokens), key=lambda rate: means[tokens, rate])
        for tokens in lengths(rows)
    }
    said = "; ".join(f"L = {tokens}: best at {rate:g}, {percent(means[tokens, rate])}" for tokens, rate in best.items())
    caption = (
        f"Softmax, trained with each learning rate. {said or 'No finished run'}. The set-up in use has {setup.lr:g}. "
        f"Means over {len(seeds(rows))} seeds, bands from the lowest to the highest. {CHANCE_NOTE}"
    )
    table = Table(
        ("L", "learning rate", "accuracy", "seeds"),
        tuple(
            (tokens, rate, round(mean, 4), len(where(rows, tokens=tokens, lr=rate)))
            for (tokens, rate), mean in sorted(means.items())
        ),
    )
    words = (
        f"Accuracy of softmax over learning rates from {min(RATES):g} to {max(RATES):g}. {said or 'No finished run'}."
    )
    return [Figure("rate", TITLE, caption, words, table, lambda: _paint(rows))]


def verdicts(rows: Sequence[ImageResult], setup: Setup) -> list[Verdict]:
    """None: this study chooses a number."""
    return []


def _mean(rows: Sequence[ImageResult]) -> float:
    return fmean(accuracy(row) or 0.0 for row in rows)


def _paint(rows: Sequence[ImageResult]) -> Any:
    from matplotlib.lines import Line2D

    picture, (axis,) = sheet(1)
    if not rows:
        nothing_yet(axis)
        return picture
    handles = []
    colour = _colours.of(SOFTMAX).light
    for place, tokens in enumerate(lengths(rows)):
        here = where(rows, tokens=tokens)
        rates = sorted({row.lr for row in here})
        found = [[accuracy(row) or 0.0 for row in where(here, lr=rate)] for rate in rates]
        look: dict[str, Any] = {
            "color": colour,
            "marker": MARKERS[place % len(MARKERS)],
            "ls": DASHES[place % len(DASHES)],
        }
        axis.fill_between(rates, list(map(min, found)), list(map(max, found)), color=colour, alpha=0.13, lw=0)
        axis.plot(rates, list(map(fmean, found)), lw=1.7, ms=5.5, **look)
        handles.append(Line2D([], [], label=f"L = {tokens}", **look))
    axis.set_xscale("log")
    rates = sorted({row.lr for row in rows})
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("learning rate")
    axis.set_ylabel("accuracy")
    percent_axis(axis)
    legend(picture, handles)
    return picture
