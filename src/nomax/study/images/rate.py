"""Which learning rate suits which φ? Trials on held-out images, the same number for each φ.

    nomax study rate --setup day     about an hour on two cores

Every φ is trained with every rate and judged on a tenth of the training images, which it is not trained on: the test
split chooses nothing. The other studies train every φ with softmax's best rate, as the paper did, and beside it with
its own best. It judges no claim. What came out: results/rate/rate.svg.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nomax import _figures
from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.figure import Figure, Table, handle, legend, nothing_yet, percent_axis, sheet
from nomax.study.engine.result import ImageResult
from nomax.study.engine.statistics import accuracy
from nomax.study.engine.verdict import Verdict, percent
from nomax.study.images.setup import HELD_OUT, Setup

TITLE = "Which learning rate suits which φ?"
CLAIMS: tuple[str, ...] = ()

MARKERS = "osD^vP*X<>"
DASHES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (6, 1)))


def grid(setup: Setup, seeds: Sequence[int]) -> list[Experiment]:
    """Return every φ that is tried with every rate, at the first length. Trials have one seed of their own."""
    length = setup.every_length()[0]
    return [setup.trial(phi, rate, length) for rate in setup.rates for phi in setup.tried]


def figures(results: Sequence[ImageResult], setup: Setup) -> list[Figure]:
    """Draw accuracy on held-out images over the learning rate, a line for each φ."""
    tried = trials(results)
    best = best_rates(tried)
    summary = "; ".join(f"{phi} {rate:g} ({percent(tried[phi][rate])})" for phi, rate in best.items())
    summary = f"Best: {summary}." if summary else "No trial has finished."
    caption = (
        f"Accuracy on the {HELD_OUT:.0%} of the training images that were held out, one run for each φ and rate. "
        f"{summary} A run that diverged counts as chance."
    )
    table = Table(
        ("φ", "learning rate", "accuracy on held-out images"),
        tuple((phi, rate, round(value, 4)) for phi, values in tried.items() for rate, value in values.items()),
    )
    words = f"Accuracy on held-out images over learning rates, a line for each φ. {summary}"
    return [Figure("rate", TITLE, caption, words, table, lambda: _paint(tried))]


def verdicts(results: Sequence[ImageResult], setup: Setup) -> list[Verdict]:
    """Judge nothing: this study chooses numbers."""
    return []


def trials(results: Sequence[ImageResult]) -> dict[str, dict[float, float]]:
    """Return the accuracy of each φ on held-out images, by learning rate."""
    tried: dict[str, dict[float, float]] = {}
    for result in sorted(results, key=lambda result: (result.phi != SOFTMAX, result.phi, result.lr)):
        value = accuracy(result)
        if value is not None:
            tried.setdefault(result.phi, {})[result.lr] = value
    return tried


def best_rates(tried: Mapping[str, Mapping[float, float]]) -> dict[str, float]:
    """Return the learning rate with which each φ did best."""
    return {phi: max(values, key=lambda rate: values[rate]) for phi, values in tried.items()}


def _paint(tried: Mapping[str, Mapping[float, float]]) -> Any:
    picture, (axis,) = sheet(1)
    if not tried:
        nothing_yet(axis)
        return picture
    handles = []
    for place, (phi, values) in enumerate(tried.items()):
        look: dict[str, Any] = {
            "color": _figures.colour_of(phi).light,
            "marker": MARKERS[place % len(MARKERS)],
            "ls": DASHES[place % len(DASHES)],
        }
        axis.plot(list(values), list(values.values()), lw=1.7, ms=5.5, **look)
        handles.append(handle(phi, **look))
    rates = sorted({rate for values in tried.values() for rate in values})
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.set_xticks([], minor=True)
    axis.set(xlabel="learning rate", ylabel="accuracy on held-out images")
    percent_axis(axis)
    legend(picture, handles)
    return picture
