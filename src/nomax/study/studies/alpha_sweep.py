"""Shared by the sweeps over α: one panel per length, one line per kind of model, and their table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from nomax import _colours
from nomax._colours import INK, PAPER
from nomax.phi import SOFTMAX, Phi
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.figure import MARKERS, Figure, Table, legend, nothing_yet, percent_axis, sheet
from nomax.study.engine.result import AnyResult, ImageResult, where
from nomax.study.engine.statistics import Best, accuracy, best, chosen_elsewhere, lengths, seeds
from nomax.study.engine.verdict import CHANCE_NOTE, percent
from nomax.study.setup import Setup

PAIRED = ("relu", "relu2")  # the h of the paper's Figs. 3 and 4
NEAR = 0.5  # "close to 1": at most half way to α = 0 or 2, the ends of the paper's axis
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

    def of(self, rows: Sequence[ImageResult], tokens: int) -> list[ImageResult]:
        """Its runs of one length, from the smallest α."""
        found = where(rows, activation=self.activation, qk_norm=self.qk_norm, gate=self.gate, tokens=tokens)
        return sorted(found, key=lambda row: (row.alpha, row.seed))


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


def phi(activation: str, alpha: float) -> str:
    """L^-α · h in our notation."""
    return str(Phi(activation, alpha))


def pairs(setup: Setup, seeds: Sequence[int], choices: Sequence[Mapping[str, Any]]) -> list[Experiment]:
    """Both h of PAIRED with every α and each of the choices, at every length; and softmax as it is.

    The runs of a pair follow each other: a machine that slows down for a while slows both.
    """
    return [
        run
        for seed in seeds
        for patch in setup.patches
        for run in (
            setup.run(SOFTMAX, patch=patch, seed=seed),
            *(
                setup.run(phi(name, alpha), patch=patch, seed=seed, **choice)
                for name in PAIRED
                for alpha in setup.alphas
                for choice in choices
            ),
        )
    ]


def curve(rows: Sequence[ImageResult]) -> list[Point]:
    """A line's runs of one length as points over α."""
    found = []
    for alpha in sorted({row.alpha for row in rows}):
        here = where(rows, alpha=alpha)
        entries = tuple(value for row in here if (value := accuracy(row)) is not None)
        if entries:
            found.append(Point(alpha, entries, sum(row.status == "diverged" for row in here)))
    return found


def best_alpha(rows: Sequence[AnyResult], score: Callable[[AnyResult], float | None]) -> Best | None:
    """Return where a line's runs of one length score highest, over the seeds that have every α; None without one."""
    grid, whole = _curves(rows, score)
    return best(whole, grid) if whole and len(grid) > 1 else None


def lead_of_near(
    rows: Sequence[AnyResult], score: Callable[[AnyResult], float | None], within: float = NEAR
) -> list[float]:
    """Return by how much a line's best α close to 1 beats its best further away, for each seed that has every α.

    Which α is the best of each kind is what the other seeds say, so that a lucky run is not chosen for being lucky.
    It makes the seeds depend on each other: intervals are to be taken over lines and lengths.
    """
    grid, whole = _curves(rows, score)
    near = [abs(alpha - 1) <= within for alpha in grid]
    return chosen_elsewhere(whole, near) if len(whole) > 1 and len(set(near)) == 2 else []


def near_by_chance(rows: Sequence[AnyResult], within: float = NEAR) -> float:
    """The share of the α of a grid that is close to 1."""
    grid = sorted({row.alpha for row in rows})
    return fmean([abs(alpha - 1) <= within for alpha in grid]) if grid else float("nan")


def _curves(
    rows: Sequence[AnyResult], score: Callable[[AnyResult], float | None]
) -> tuple[list[float], list[list[float]]]:
    """The grid of α, and the scores over it of every seed that has them all."""
    grid = sorted({row.alpha for row in rows})
    by_seed: dict[int, dict[float, float]] = {}
    for row in rows:
        value = score(row)
        if value is not None:
            by_seed.setdefault(row.seed, {})[row.alpha] = value
    return grid, [[found[alpha] for alpha in grid] for _, found in sorted(by_seed.items()) if len(found) == len(grid)]


def figure(rows: Sequence[ImageResult], lines: Sequence[Line], name: str, title: str, caption: str) -> Figure:
    """The figure of a sweep, in the paper's layout."""
    found = len(seeds(rows))
    told = f"{caption} Lines: mean over {found} seed{'s' * (found != 1)}; bands: lowest to highest. {CHANCE_NOTE}"
    points = _points(rows, lines)
    if points and lowest(points) < floor(points):
        told += " What lies below the axis stands at its lower edge; the table has the values."
    return Figure(name, title, told, describe(rows, lines), table(rows, lines), lambda: _paint(rows, lines))


def floor(points: Sequence[Point]) -> float:
    """Return where the y axis may begin at the lowest: a few runs near chance must not press all others together."""
    means = [point.mean for point in points]
    return median(means) - REACH * (max(means) - median(means))


def lowest(points: Sequence[Point]) -> float:
    """The accuracy of the worst run."""
    return min(min(point.entries) for point in points)


def _points(rows: Sequence[ImageResult], lines: Sequence[Line]) -> list[Point]:
    return [point for line in lines for tokens in lengths(rows) for point in curve(line.of(rows, tokens))]


def table(rows: Sequence[ImageResult], lines: Sequence[Line]) -> Table:
    """The means of all points, and of softmax."""
    columns = ("L", "model", "α", "mean accuracy", "lowest", "highest", "seeds", "diverged")
    listed: list[tuple[str | int | float | None, ...]] = []
    for tokens in lengths(rows):
        for line in (*lines, Line(SOFTMAX, SOFTMAX)):
            for point in curve(line.of(rows, tokens)):
                alpha = None if line.activation == SOFTMAX else point.alpha
                ends = (round(value, 4) for value in (point.mean, min(point.entries), max(point.entries)))
                listed.append((tokens, line.label, alpha, *ends, len(point.entries), point.lost))
    return Table(columns, tuple(listed))


def describe(rows: Sequence[ImageResult], lines: Sequence[Line]) -> str:
    """The figure in words."""
    if not rows:
        return "An empty figure: no run has finished yet."
    words = ", ".join(map(str, lengths(rows)))
    sentences = [f"Accuracy over the exponent α, one panel for each sequence length L ({words})."]
    for tokens in lengths(rows):
        parts = []
        for line in lines:
            points = curve(line.of(rows, tokens))
            if points:
                top = max(points, key=lambda point: point.mean)
                parts.append(f"{line.label} {percent(top.mean)} at α = {top.alpha:g} ({_ends(points)})")
        levels = curve(Line(SOFTMAX, SOFTMAX).of(rows, tokens))
        parts += [f"softmax {percent(point.mean)}" for point in levels]
        sentences.append(f"L = {tokens}, the best of each line: {'; '.join(parts) or 'nothing yet'}.")
    return " ".join(sentences)


def _ends(points: Sequence[Point]) -> str:
    return ", ".join(f"{percent(point.mean)} at {point.alpha:g}" for point in (points[0], points[-1]))


def _paint(rows: Sequence[ImageResult], lines: Sequence[Line]) -> Any:
    from matplotlib.lines import Line2D

    panels, points = lengths(rows), _points(rows, lines)
    edge = floor(points) if points else 0.0
    sheet_, axes = sheet(len(panels), height=4.1 + 0.22 * (len(lines) > 4))
    for axis, tokens in zip(axes, panels, strict=False):
        for line in lines:
            _draw(axis, curve(line.of(rows, tokens)), line, edge)
        for point in curve(Line(SOFTMAX, SOFTMAX).of(rows, tokens)):
            axis.axhline(point.mean, color=_colours.of(SOFTMAX).light, lw=1.3, ls=(0, (5, 3)), zorder=2.5)
        axis.set_title(f"L = {tokens}")
        axis.set_xlabel("exponent α")
    if not panels:
        nothing_yet(axes[0])
    elif points and lowest(points) < edge:
        axes[0].set_ylim(bottom=edge - 0.04 * (axes[0].get_ylim()[1] - edge))
    percent_axis(axes[0])
    axes[0].set_ylabel("accuracy")
    drawn = [line for line in lines if any(line.of(rows, tokens) for tokens in panels)]
    handles = [Line2D([], [], label=line.label, **_look(line)) for line in drawn]
    if where(rows, activation=SOFTMAX):
        handles.append(Line2D([], [], color=_colours.of(SOFTMAX).light, lw=1.3, ls=(0, (5, 3)), label="softmax"))
    if any(row.status == "diverged" for row in rows):
        handles.append(Line2D([], [], ls="", marker="x", ms=8, mew=2, color=INK.light, label="diverged"))
    if handles:
        legend(sheet_, handles)
    return sheet_


def _draw(axis: Any, points: Sequence[Point], line: Line, edge: float) -> None:
    if not points:
        return
    alphas, look = [point.alpha for point in points], _look(line)
    lowest, highest = [min(point.entries) for point in points], [max(point.entries) for point in points]
    axis.fill_between(alphas, lowest, highest, color=look["color"], alpha=0.13, lw=0)
    axis.plot(alphas, [max(point.mean, edge) for point in points], zorder=3, **look)
    for point in points:
        if point.lost:
            axis.plot(point.alpha, max(point.mean, edge), "x", ms=9, mew=2, color=look["color"], zorder=4)
    axis.set_xticks(sorted({*range(int(max(alphas)) + 1), min(alphas), max(alphas)}))


def _look(line: Line) -> dict[str, Any]:
    colour = _colours.of(line.activation).light
    return {
        "color": colour,
        "marker": MARKERS.get(line.activation, "*"),
        "ms": 5.5,
        "lw": 1.7,
        "ls": (0, (2, 1.4)) if line.broken else "-",
        "mfc": PAPER.light if line.broken else colour,
    }
