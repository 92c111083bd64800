"""Does relu/L keep up with softmax as compute grows? Both over model sizes and patches (Fig. 1).

    nomax study scaling                  minutes, on the bundled images, one size
    nomax study scaling --setup hour     half an hour on two cores
    nomax study scaling --setup day      eleven hours of one core; CIFAR-10

Left: accuracy (among the label subset, where the data has one); right: mean 10-shot accuracy on other data. Both
against the CPU time that the run took. It judges the difference at equal size and seed, and how fast accuracy grows
with compute. What came out: results/scaling/verdicts.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

from nomax import _figures
from nomax.phi import SOFTMAX
from nomax.study.claims import ACCURACY_BARS, LARGEST_BARS
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.figure import (
    LOST,
    Figure,
    Table,
    handle,
    legend,
    nothing_yet,
    percent_axis,
    plain_powers,
    sheet,
)
from nomax.study.engine.result import ImageResult, where
from nomax.study.engine.statistics import (
    Interval,
    accuracy,
    comparison,
    contrast,
    differences,
    pooled,
    repeated,
    seeds,
    slope_weights,
    ten_shot,
)
from nomax.study.engine.verdict import (
    CHANCE_NOTE,
    MARGIN,
    Outcome,
    Premise,
    Verdict,
    above,
    basis,
    learned,
    percent,
    plain,
    points,
    scale,
    settle,
    worst,
)
from nomax.study.images.setup import Setup

# Larger models need more steps to be the better ones.
CHANGES = {
    "hour": {"steps": 2400, "patches": (14, 7, 4)},
    "day": {
        "data": "cifar10",
        "image_size": 32,
        "models": ("pico", "nano", "micro"),
        "patches": (8, 4),
        "lengths": (),
        "steps": 15_600,
        "augment": True,
        "probes": ("fashion-mnist", "mnist", "digits"),
    },
}
TITLE = "Does relu/L keep up with softmax as compute grows?"
CLAIMS = ("W-match", "W-transfer")

RELU = "relu/L"
PHIS = (SOFTMAX, RELU)
MARKERS = "osD^vP*X<>hp"
SCORES: dict[str, Callable[[ImageResult], float | None]] = {"accuracy": accuracy, "10-shot accuracy": ten_shot}


@dataclass(frozen=True)
class Point:
    """The runs of one φ and one model, all seeds."""

    phi: str
    variant: str
    tokens: int
    core_hours: float
    flops: int
    entries: tuple[float, ...]
    lost: int

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return fmean(self.entries)


def grid(setup: Setup, seeds: Sequence[int]) -> list[Experiment]:
    """Return both φ with every size and patch. One seed after the other, so a budget cuts off whole seeds."""
    return [
        setup.run(phi, model=model, patch=patch, seed=seed, measure=True)
        for seed in seeds
        for model in setup.models
        for patch in setup.patches
        for phi in PHIS
    ]


def figures(results: Sequence[ImageResult], setup: Setup) -> list[Figure]:
    """Draw accuracy and 10-shot accuracy against measured compute."""
    count = len(seeds(results))
    caption = (
        "Each point is a model, its place the CPU time that training and evaluation took and, at the top, the floating "
        "point operations of its training; lines are least squares in the logarithm of CPU time. "
        f"Means over {count} seed{'s' * (count != 1)}, bars from the lowest to the highest. {CHANCE_NOTE} "
        "The paper's Fig. 1 shows S/32 to L/16 on ImageNet-21k, against TPU core-hours."
    )
    title = "Accuracy against compute: relu/L and softmax"
    panels = {name: collect(results, score) for name, score in SCORES.items()}
    return [Figure("scaling", title, caption, _describe(panels), _table(panels), lambda: _paint(panels))]


def verdicts(results: Sequence[ImageResult], setup: Setup) -> list[Verdict]:
    """Judge whether relu/L matches softmax, in accuracy and in transfer."""
    return [
        _matches("W-match", "accuracy", results, setup),
        _matches("W-transfer", "10-shot accuracy", results, setup),
    ]


def collect(results: Sequence[ImageResult], score: Callable[[ImageResult], float | None]) -> list[Point]:
    """Return the points of a panel, from the least compute; none without a finished run that has this score."""
    marks = []
    if any(result.status == "done" and score(result) is not None for result in results):
        for phi in PHIS:
            for variant in dict.fromkeys(result.variant for result in where(results, phi=phi)):
                here = where(results, phi=phi, variant=variant)
                entries = tuple(value for result in here if (value := score(result)) is not None)
                done = [result for result in here if result.status == "done" and result.core_seconds > 0]
                if entries and done:  # the time of a run that stopped early says nothing
                    hours = geometric_mean([result.core_seconds / 3600 for result in done])
                    lost = sum(result.status == "diverged" for result in here)
                    point = Point(phi, variant, here[0].tokens, hours, here[0].train_flops, entries, lost)
                    marks.append(point)
    return sorted(marks, key=lambda point: point.core_hours)


def _matches(claim: str, name: str, results: Sequence[ImageResult], setup: Setup) -> Verdict:
    score = SCORES[name]
    judged = [result for result in results if result.phi in PHIS]
    flops = {result.variant: result.train_flops for result in judged}
    cells = dict(
        sorted(
            differences(where(judged, phi=RELU), where(judged, phi=SOFTMAX), "variant", score).items(),
            key=lambda item: flops[item[0]],
        )
    )
    measured = [result for result in judged if result.status == "done" and score(result) is not None]
    if not cells or not measured:
        what = "has both relu/L and softmax finished" if measured or name == "accuracy" else f"has a {name} (no probes)"
        sentence = f"No size and seed {what}: nothing to judge."
        return settle(claim, "undecided", sentence, results=judged, scale=scale(judged, setup.image_size), numbers={})
    difference = pooled(cells)
    by_size = {variant: contrast([entries]) for variant, entries in cells.items()}
    steeper, at_most = trend(cells, flops)
    slopes = {phi: _slope([point for point in collect(judged, score) if point.phi == phi]) for phi in PHIS}
    listed = ", ".join(f"{variant} {100 * gain.mean:+.2f}".replace("-", "−") for variant, gain in by_size.items())

    def signed(slope: float) -> str:
        return f"{100 * slope:+.1f}".replace("-", "−")

    growth = (
        f"A tenfold of CPU time brings {signed(slopes[RELU])} points with relu/L and {signed(slopes[SOFTMAX])} "
        f"with softmax; per tenfold of operations relu/L gains {points(steeper)} on softmax, which "
        f"makes {points(at_most)} at the largest model. "
        if math.isfinite(steeper.mean)
        else "One amount of compute has no slope. "
    )
    sentence = (
        f"relu/L minus softmax in {name}, at equal size and seed: {points(difference)} "
        f"({basis(judged, cells)}; {listed}). {growth}"
        f"To approach or match is to trail by no more than {100 * MARGIN:g} point: reproduced if the interval is above "
        f"−{100 * MARGIN:g} and that at the largest model not all below, contradicted if either is all below."
    )
    # A lower slope is no objection while relu/L is ahead; to end up clearly behind is.
    behind: Outcome = "contradicted" if above(at_most, -MARGIN) == "contradicted" else "reproduced"
    outcome = worst([above(difference, -MARGIN), behind])
    numbers = {
        "difference": difference,
        "by size": by_size,
        "slope difference per tenfold operations": steeper,
        "difference at the largest model, by the slope": at_most,
        "slope per tenfold CPU time": slopes,
        "accuracy": {f"{point.phi}, {point.variant}": point.mean for point in collect(judged, score)},
        "core-hours": {f"{point.phi}, {point.variant}": point.core_hours for point in collect(judged, score)},
    }
    return settle(
        claim,
        outcome,
        sentence,
        results=judged,
        scale=scale(judged, setup.image_size),
        numbers=plain(numbers),
        premises=_premises(where(judged, phi=SOFTMAX), list(cells), collect(judged, accuracy)),
        comparisons={"the difference": comparison(cells, [-MARGIN], margin=MARGIN)},
    )


def _premises(softmax: Sequence[ImageResult], compared: Sequence[str], models: Sequence[Point]) -> list[Premise]:
    """State that softmax has learned at every size, best at the largest, and gains from compute."""
    bar = ACCURACY_BARS.get(softmax[0].data, 0.5) if softmax else 0.5
    largest = max(softmax, key=lambda result: result.train_flops).variant if softmax else ""
    premises = [learned(softmax, accuracy, bar, "variant", compared=compared)]
    if softmax and softmax[0].data in LARGEST_BARS:
        top = where(softmax, variant=largest)
        premises.append(learned(top, accuracy, LARGEST_BARS[softmax[0].data], "variant"))
    slope = _slope([point for point in models if point.phi == SOFTMAX])
    if math.isfinite(slope):
        change = f"{100 * slope:+.1f} points".replace("-", "−")
        sentence = f"a tenfold of CPU time changes the accuracy of softmax by {change}"
        remedy = "Train longer: larger models need more steps to be the better ones."
        premises.append(Premise(sentence, slope > 0, remedy))
    return premises


def trend(cells: dict[str, list[float]], flops: dict[str, int]) -> tuple[Interval, Interval]:
    """Return how much relu/L gains on softmax per tenfold of operations, and that line at the largest model.

    At one size both φ spend the same operations, so the line goes through paired differences.
    """
    used = repeated(cells)
    x = [math.log10(flops[variant]) for variant in used]
    if len(set(x)) < 2:
        return Interval(math.nan, math.nan, math.nan), Interval(math.nan, math.nan, math.nan)
    weights, reach = slope_weights(x), max(x) - fmean(x)
    entries = list(used.values())
    return contrast(entries, weights), contrast(entries, [1 / len(x) + reach * weight for weight in weights])


def _slope(points_: Sequence[Point]) -> float:
    x = [math.log10(point.core_hours) for point in points_]
    if len(set(x)) < 2:
        return math.nan
    return sum(weight * point.mean for weight, point in zip(slope_weights(x), points_, strict=True))


def _table(panels: dict[str, list[Point]]) -> Table:
    columns = ("score", "φ", "model", "L", "core-hours", "training FLOPs", "mean", "lowest", "highest", "seeds", "lost")
    rows = [
        (
            name,
            point.phi,
            point.variant,
            point.tokens,
            float(f"{point.core_hours:.3g}"),
            point.flops,
            round(point.mean, 4),
            round(min(point.entries), 4),
            round(max(point.entries), 4),
            len(point.entries),
            point.lost,
        )
        for name, marks in panels.items()
        for point in marks
    ]
    return Table(columns, tuple(rows))


def _describe(panels: dict[str, list[Point]]) -> str:
    sentences = []
    for name, marks in panels.items():
        parts = [
            f"{phi} from {percent(line[0].mean)} ({line[0].variant}, {line[0].core_hours:.2g} core-hours) to "
            f"{percent(line[-1].mean)} ({line[-1].variant}, {line[-1].core_hours:.2g})"
            for phi in PHIS
            if (line := [point for point in marks if point.phi == phi])
        ]
        start = f"{name[0].upper()}{name[1:]} against compute, logarithmic"
        sentences.append(f"{start}: {'; '.join(parts) or 'no finished run with this score'}.")
    return " ".join(sentences)


def _paint(panels: dict[str, list[Point]]) -> Any:
    shown = {name: marks for name, marks in panels.items() if marks or name == "accuracy"}
    picture, axes = sheet(len(shown), height=4.6, same_y=False)
    variants = list(dict.fromkeys(point.variant for marks in panels.values() for point in marks))
    markers = {variant: MARKERS[place % len(MARKERS)] for place, variant in enumerate(variants)}
    for axis, (name, marks) in zip(axes, shown.items(), strict=True):
        _panel(axis, marks, markers)
        axis.set_ylabel(name)
        percent_axis(axis)
    handles = [handle(phi, color=_figures.colour_of(phi).light, lw=2.5) for phi in PHIS]
    handles += [handle(name, ls="", marker=marker, color=_figures.SOFT.light, ms=7) for name, marker in markers.items()]
    if any(point.lost for marks in panels.values() for point in marks):
        handles.append(handle("some diverged", **LOST))
    legend(picture, handles, columns=6)
    return picture


def _panel(axis: Any, marks: Sequence[Point], markers: dict[str, str]) -> None:
    if not marks:
        nothing_yet(axis)
        return
    axis.set_xscale("log")
    for phi in PHIS:
        colour = _figures.colour_of(phi).light
        line = [point for point in marks if point.phi == phi]
        slope = _slope(line)
        if math.isfinite(slope):
            ends = [line[0].core_hours, line[-1].core_hours]
            middle = fmean(math.log10(point.core_hours) for point in line)
            level = fmean(point.mean for point in line)
            fitted = [level + slope * (math.log10(end) - middle) for end in ends]
            axis.plot(ends, fitted, "-", lw=1.3, color=colour, alpha=0.6)
        for point in line:
            axis.plot([point.core_hours] * 2, [min(point.entries), max(point.entries)], "-", lw=1.2, color=colour)
            marker = markers[point.variant]
            axis.plot(
                point.core_hours, point.mean, marker, ms=7.5, color=colour, mec=_figures.PAPER.light, mew=0.7, zorder=3
            )
            if point.lost:
                axis.plot(point.core_hours, point.mean, "x", ms=10, mew=2, color=colour, zorder=4)
    axis.set_xlabel("core-hours")
    _hours(axis)
    _operations(axis, marks)


def _hours(axis: Any) -> None:
    """Label the bottom axis with plain numbers at 1, 2 and 5 of each decade; over many decades, at 1 alone."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 500 else (1,)))
    plain_powers(axis.xaxis)


def _operations(axis: Any, marks: Sequence[Point]) -> None:
    """Label the top axis with the operations of each model, at the mean of its places. Leave out labels that touch."""
    from matplotlib.ticker import NullFormatter, NullLocator

    places = {
        point.flops: geometric_mean([other.core_hours for other in marks if other.flops == point.flops])
        for point in marks
    }
    low, high = (math.log(value) for value in axis.get_xlim())
    kept: dict[float, str] = {}
    for flops, place in sorted(places.items()):
        if not kept or (math.log(place) - math.log(max(kept))) / (high - low) > 0.19:
            kept[place] = f"{flops:.1e}".replace("e+", "e")
    top = axis.secondary_xaxis("top")
    top.set_xticks(list(kept), list(kept.values()), fontsize=9)
    top.xaxis.set_minor_locator(NullLocator())
    top.xaxis.set_minor_formatter(NullFormatter())
    top.set_xlabel("training FLOPs", fontsize=10)
