"""Shared by the studies over α: what claims are judged on, and figures of one panel per length, one line per model."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from nomax import _figures
from nomax._figures import PAPER
from nomax.phi import SOFTMAX, Phi
from nomax.study.claims import ACCURACY_BARS
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.figure import (
    BROKEN,
    LOST,
    MARKERS,
    Figure,
    Table,
    handle,
    legend,
    nothing_yet,
    percent_axis,
    sheet,
)
from nomax.study.engine.result import ImageResult, where
from nomax.study.engine.statistics import Comparison, Interval, accuracy, differences, lengths, pooled, seeds
from nomax.study.engine.verdict import (
    CHANCE_NOTE,
    Outcome,
    Premise,
    Verdict,
    learned,
    percent,
    plain,
    points,
    scale,
    settle,
)
from nomax.study.images.setup import Length, Setup

PAIRED = ("relu", "relu2")  # the h of the paper's Figs. 3 and 4
# Their studies ask what something else changes, so the two α that differ the most, and three lengths, are enough.
PAIRED_LENGTHS = {
    "day": {
        "lengths": tuple(
            Length(patch, steps, powers=tuple((name, (1.0, 0.0)) for name in PAIRED))
            for patch, steps in ((4, 0), (7, 0), (2, 1875))
        )
    }
}
MAIN = "relu"  # the h that the paper settles on, drawn the strongest
REACH = 3  # how many times as far down from the median the y axis may go as it goes up


@dataclass(frozen=True)
class Line:
    """A kind of model that is trained with every α."""

    label: str
    activation: str
    qk_norm: bool = True
    gate: str | None = None
    broken: bool = False
    """Drawn with a broken line and hollow markers."""

    def of(self, results: Sequence[ImageResult], tokens: int) -> list[ImageResult]:
        """Return its runs of one length, from the smallest α."""
        chosen = where(results, activation=self.activation, qk_norm=self.qk_norm, gate=self.gate, tokens=tokens)
        return sorted(chosen, key=lambda result: (result.alpha, result.seed))


@dataclass(frozen=True)
class Point:
    """A line at one α: an accuracy for each seed."""

    alpha: float
    entries: tuple[float, ...]
    lost: int
    """Those of them that diverged."""

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return fmean(self.entries)


@dataclass(frozen=True)
class Ground:
    """The runs that decide claims over α: those of the lengths at which softmax has learned."""

    setup: Setup
    same: list[ImageResult]
    """Every φ with softmax's learning rate, as in the paper."""
    own: list[ImageResult]
    """Every φ with its own best one, where it was tried."""
    premises: list[Premise]
    left_out: str

    def beside(self, own: Interval) -> str:
        """Return a number with each φ's own learning rate, as a sentence; empty if all have the same."""
        return f"With each φ's own best learning rate: {points(own)}. " if self.setup.own_rates else ""

    def nothing(self, claim: str, reason: str) -> Verdict:
        """Return the verdict that a claim cannot be judged yet."""
        return self.settle(claim, "undecided", f"{reason}: nothing to judge.", {})

    def settle(
        self,
        claim: str,
        outcome: Outcome,
        sentence: str,
        numbers: Mapping[str, Any],
        comparisons: Mapping[str, Comparison | None] | None = None,
        premises: Sequence[Premise] = (),
    ) -> Verdict:
        """Return the verdict, if its premises hold."""
        return settle(
            claim,
            outcome,
            f"{sentence}{self.left_out}",
            results=self.same,
            scale=scale(self.same, self.setup.image_size),
            numbers=plain(numbers),
            premises=[*self.premises, *premises],
            comparisons=comparisons,
        )


def ground(results: Sequence[ImageResult], setup: Setup) -> Ground:
    """Return the runs to judge by: those of the lengths at which softmax reaches the bar of its data."""
    same = [result for result in results if result.lr == setup.lr]
    softmax = where(same, activation=SOFTMAX, qk_norm=True, gate=None)
    premises = {
        tokens: learned(here, accuracy, bar(here[0].data), "tokens", say_cell=_say_length)
        for tokens in lengths(softmax)
        if (here := where(softmax, tokens=tokens))
    }
    kept = [tokens for tokens, premise in premises.items() if premise.holds]
    short = "; ".join(premise.sentence for premise in premises.values() if not premise.holds)
    if not kept:
        whole = list(premises.values()) or [learned([], accuracy, 0.0, "tokens")]
        return Ground(setup, same, same, whole, "")
    own = [result for result in results if result.lr == setup.own_rate(result.phi)]
    same, own = ([result for result in some if result.tokens in kept] for some in (same, own))
    left_out = f" Lengths that are left out: {short}." if short else ""
    return Ground(setup, same, own, [premises[tokens] for tokens in kept], left_out)


def bar(data: str) -> float:
    """Return the accuracy that softmax must reach on these data before anything is judged."""
    return ACCURACY_BARS.get(data, 0.5)


def _say_length(tokens: int) -> str:
    return f"L = {tokens}"


def gains(results: Sequence[ImageResult]) -> dict[tuple[str, int], list[float]]:
    """Return what α = 1 gains over α = 0, by h and length."""
    return differences(where(results, alpha=1.0), where(results, alpha=0.0), ("activation", "tokens"), accuracy)


def by_length(cells: Mapping[tuple[str, int], Sequence[float]]) -> dict[int, Interval]:
    """Return the mean over h at each length, the shortest first."""
    return {
        tokens: pooled({cell: entries for cell, entries in cells.items() if cell[1] == tokens})
        for tokens in sorted({tokens for _, tokens in cells})
    }


def shared_by_most(by_name: Mapping[str, Mapping[tuple[int, int], float]]) -> set[tuple[int, int]]:
    """Return the places (length and seed) at which to compare all names: those that most of them have."""
    counts = Counter(place for scores in by_name.values() for place in scores)
    most = max(counts.values(), default=0)
    return {place for place, count in counts.items() if count == most}


def pairs(setup: Setup, seeds: Sequence[int], choices: Sequence[Mapping[str, Any]]) -> list[Experiment]:
    """Return both h of PAIRED with every α and each of the choices, at every length; and softmax as it is.

    The runs of a pair follow each other: a machine that slows down for a while slows both.
    """
    return [
        run
        for seed in seeds
        for length in setup.every_length()
        for run in (
            setup.run(SOFTMAX, length=length, seed=seed),
            *(
                setup.run(name, length=length, seed=seed, **choice)
                for name in setup.phis(length)
                if Phi.parse(name).activation in PAIRED
                for choice in choices
            ),
        )
    ]


def curve(results: Sequence[ImageResult]) -> list[Point]:
    """Return a line's runs of one length as points over α."""
    points = []
    for alpha in sorted({result.alpha for result in results}):
        here = where(results, alpha=alpha)
        entries = tuple(value for result in here if (value := accuracy(result)) is not None)
        if entries:
            points.append(Point(alpha, entries, sum(result.status == "diverged" for result in here)))
    return points


def figure(results: Sequence[ImageResult], lines: Sequence[Line], name: str, title: str, caption: str) -> Figure:
    """Draw accuracy over α in the paper's layout."""
    number = len(seeds(results))
    caption = f"{caption} Lines: mean over {number} seed{'s' * (number != 1)}; bands: lowest to highest. {CHANCE_NOTE}"
    points = _points(results, lines)
    if points and lowest(points) < floor(points):
        caption += " What lies below the axis stands at its lower edge; the table has the values."
    return Figure(name, title, caption, describe(results, lines), table(results, lines), lambda: _paint(results, lines))


def floor(points: Sequence[Point]) -> float:
    """Return where the y axis may begin at the lowest: a few runs near chance must not press all others together."""
    means = [point.mean for point in points]
    return median(means) - REACH * (max(means) - median(means))


def lowest(points: Sequence[Point]) -> float:
    """Return the accuracy of the worst run."""
    return min(min(point.entries) for point in points)


def _points(results: Sequence[ImageResult], lines: Sequence[Line]) -> list[Point]:
    return [point for line in lines for tokens in lengths(results) for point in curve(line.of(results, tokens))]


def table(results: Sequence[ImageResult], lines: Sequence[Line]) -> Table:
    """Tabulate the means of all points, and of softmax."""
    columns = ("L", "model", "α", "mean accuracy", "lowest", "highest", "seeds", "diverged")
    listed: list[tuple[str | int | float | None, ...]] = []
    for tokens in lengths(results):
        for line in (*lines, Line(SOFTMAX, SOFTMAX)):
            for point in curve(line.of(results, tokens)):
                alpha = None if line.activation == SOFTMAX else point.alpha
                ends = (round(value, 4) for value in (point.mean, min(point.entries), max(point.entries)))
                listed.append((tokens, line.label, alpha, *ends, len(point.entries), point.lost))
    return Table(columns, tuple(listed))


def describe(results: Sequence[ImageResult], lines: Sequence[Line]) -> str:
    """Describe the figure in words."""
    if not results:
        return "An empty figure: no run has finished yet."
    words = ", ".join(map(str, lengths(results)))
    sentences = [f"Accuracy over the exponent α, one panel for each sequence length L ({words})."]
    for tokens in lengths(results):
        parts = []
        for line in lines:
            points = curve(line.of(results, tokens))
            if points:
                top = max(points, key=lambda point: point.mean)
                parts.append(f"{line.label} {percent(top.mean)} at α = {top.alpha:g} ({_ends(points)})")
        levels = curve(Line(SOFTMAX, SOFTMAX).of(results, tokens))
        parts += [f"softmax {percent(point.mean)}" for point in levels]
        sentences.append(f"L = {tokens}, the best of each line: {'; '.join(parts) or 'nothing yet'}.")
    return " ".join(sentences)


def _ends(points: Sequence[Point]) -> str:
    return ", ".join(f"{percent(point.mean)} at {point.alpha:g}" for point in (points[0], points[-1]))


def _paint(results: Sequence[ImageResult], lines: Sequence[Line]) -> Any:
    by_length = sorted(results, key=lambda result: result.tokens)
    sets = {name: lengths(where(results, data=name)) for name in dict.fromkeys(result.data for result in by_length)}
    across = max(map(len, sets.values()), default=1)
    height = 3.1 * max(len(sets), 1) + 0.9
    picture, axes = sheet(across, height=height, rows=max(len(sets), 1))
    if not sets:
        nothing_yet(axes[0])
    for place, (name, panels) in enumerate(sets.items()):
        in_row = axes[place * across : (place + 1) * across]
        _paint_set(in_row, where(results, data=name), lines, panels, name if len(sets) > 1 else "")
        for axis in in_row[len(panels) :]:
            axis.set_axis_off()
    drawn = [line for line in lines if any(line.of(results, tokens) for tokens in lengths(results))]
    handles = [handle(line.label, **_look(line)) for line in drawn]
    if where(results, activation=SOFTMAX):
        handles.append(handle("softmax", color=_figures.colour_of(SOFTMAX).light, lw=1.6, ls=BROKEN))
    if any(result.status == "diverged" for result in results):
        handles.append(handle("diverged", **LOST))
    if handles:
        legend(picture, handles)
    return picture


def _paint_set(
    axes: Sequence[Any], results: Sequence[ImageResult], lines: Sequence[Line], panels: Sequence[int], name: str
) -> None:
    """Paint one row of panels: a data set, from its shortest sequences to its longest."""
    points = _points(results, lines)
    edge = floor(points) if points else 0.0
    alphas = [point.alpha for point in points] or [0.0, 1.0]
    for axis, tokens in zip(axes, panels, strict=False):
        for line in lines:
            _draw(axis, curve(line.of(results, tokens)), line, edge)
        for point in curve(Line(SOFTMAX, SOFTMAX).of(results, tokens)):
            colour = _figures.colour_of(SOFTMAX).light
            axis.axhspan(min(point.entries), max(point.entries), color=colour, alpha=0.13, lw=0)
            axis.axhline(point.mean, color=colour, lw=1.6, ls=BROKEN, zorder=2.5)
        axis.set_title(f"{name}, L = {tokens:,}".removeprefix(", "))
        axis.set_xlabel("exponent α")
        axis.set_xticks(sorted({*range(math.ceil(min(alphas)), int(max(alphas)) + 1), min(alphas), max(alphas)}))
        axis.set_xlim(min(alphas) - 0.1, max(alphas) + 0.1)  # the same in every panel
    if points and lowest(points) < edge:
        axes[0].set_ylim(bottom=edge - 0.04 * (axes[0].get_ylim()[1] - edge))
    percent_axis(axes[0])
    axes[0].set_ylabel("accuracy")


def _draw(axis: Any, points: Sequence[Point], line: Line, edge: float) -> None:
    if not points:
        return
    alphas, look = [point.alpha for point in points], _look(line)
    lowest, highest = [min(point.entries) for point in points], [max(point.entries) for point in points]
    if line.activation == MAIN:  # bands of all lines would cover each other
        axis.fill_between(alphas, lowest, highest, color=look["color"], alpha=0.16, lw=0)
    axis.plot(alphas, [max(point.mean, edge) for point in points], zorder=4 if line.activation == MAIN else 3, **look)
    for point in points:
        if point.lost:
            axis.plot(point.alpha, max(point.mean, edge), "x", ms=9, mew=2, color=look["color"], zorder=4)


def _look(line: Line) -> dict[str, Any]:
    colour = _figures.colour_of(line.activation).light
    main = line.activation == MAIN
    return {
        "color": colour,
        "marker": MARKERS.get(line.activation, "*"),
        "ms": 6 if main else 4,
        "lw": 2.4 if main else 1.1,
        "ls": (0, (2, 1.4)) if line.broken else "-",
        "mfc": PAPER.light if line.broken else colour,
    }
