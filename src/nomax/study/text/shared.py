"""Shared by the studies of text: scores and verdicts in nats per token, and figures with a line for each kind."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from nomax import _figures
from nomax._figures import PAPER
from nomax.phi import SOFTMAX
from nomax.study.claims import BLEU_BAR
from nomax.study.engine.figure import (
    BROKEN,
    LOST,
    MARKERS,
    Figure,
    Table,
    handle,
    legend,
    nothing_yet,
    plain_powers,
    sheet,
)
from nomax.study.engine.result import TextResult, where
from nomax.study.engine.statistics import Columns, Comparison, Interval, differences, pooled, seeds
from nomax.study.engine.verdict import Outcome, Premise, Verdict, agree, difference, learned, plain, settle, spread
from nomax.study.engine.verdict import basis as basis_of

Cell = TypeVar("Cell", bound=Hashable)

# 0.02 nats are 2 % of perplexity. The paper's differences, of about one BLEU, go with several times that, and no choice
# between two models would hang on less.
MARGIN = 0.02
UNIFORM = "a uniform guess over the vocabulary"
LOST_NOTE = f"A run that diverged counts as {UNIFORM} and is marked with a cross; one that failed is left out."


def loss(result: TextResult) -> float | None:
    """Return the nats per token of the test split; those of a uniform guess if the run diverged."""
    return math.log(result.vocabulary) if result.status == "diverged" else result.loss


def quality(result: TextResult) -> float | None:
    """Return minus the loss: the larger, the better."""
    nll = loss(result)
    return None if nll is None else -nll


def measurement(name: str) -> Callable[[TextResult], float | None]:
    """Return a score: what was measured under this name; None if the run did not get there."""
    return lambda result: result.measured.get(name)


def lead(first: Sequence[TextResult], second: Sequence[TextResult], columns: Columns) -> dict[Any, list[float]]:
    """Return by how many nats the loss of the first is lower, at equal cell and seed."""
    return differences(first, second, columns, quality)


def basis(results: Sequence[TextResult], cells: dict[Cell, list[float]]) -> str:
    """Return what a number rests on."""
    return basis_of(results, cells, UNIFORM)


def nats(interval: Interval) -> str:
    """Format a difference of losses: "+0.031 nats [−0.004, +0.066]"."""
    return f"{spread(interval, signed=True, unit=' nats')}"


def scale(results: Sequence[TextResult]) -> str:
    """Say at which scale the runs speak: "128 wide, 2+2 layers, 512 slots, 600 steps of 1,024 tokens"."""
    if not results:
        return "no runs"
    models = "; ".join(dict.fromkeys(result.variant.rpartition(", ")[0] for result in results))
    slots = ", ".join(f"{count:,}" for count in sorted({result.slots for result in results}))
    lengths = ", ".join(f"{count:,}" for count in sorted({result.tokens for result in results}))
    steps = ", ".join(
        f"{count:,} steps of {batch:,} tokens" for count, batch in sorted({(r.steps, r.batch_size) for r in results})
    )
    data = ", ".join(sorted({result.data for result in results}))
    pieces = ", ".join(f"{count:,}" for count in sorted({result.vocabulary for result in results}))
    return f"{models}, {slots} slots, at most {lengths} tokens, {steps} of {data} in {pieces} pieces"


@dataclass(frozen=True)
class Lead:
    """The lead of one kind over another at equal cell and seed: in loss, and in BLEU, the paper's own metric."""

    cells: dict[Any, list[float]]
    """Nats by which the loss is lower."""
    bleu_cells: dict[Any, list[float]]

    @property
    def loss(self) -> Interval:
        """The mean over the cells, with its interval."""
        return pooled(self.cells)

    @property
    def bleu(self) -> Interval:
        """The mean over the cells, with its interval."""
        return pooled(self.bleu_cells)

    @property
    def bleu_numbers(self) -> list[float]:
        """The same as plain numbers: runs that broke off have no BLEU, and a verdict does not hang on it."""
        return [self.bleu.mean, self.bleu.low, self.bleu.high]

    @property
    def agreement(self) -> list[Premise]:
        """That loss and BLEU do not contradict each other, where there is a BLEU."""
        return [agree({"loss": self.loss, "BLEU": self.bleu})] if self.bleu.known else []

    def words(self, more: str = "lower", less: str = "higher") -> str:
        """Return the lead as "lower by 0.031 nats [0.010, 0.052], BLEU higher by 0.42 [0.10, 0.74]"."""
        words = difference(self.loss, "nats", more, less)
        if self.bleu.mean != self.bleu.mean:
            return words
        return f"{words}, and BLEU {difference(self.bleu, 'BLEU')}"


def compare(first: Sequence[TextResult], second: Sequence[TextResult], columns: Columns) -> Lead:
    """Return how far the first is ahead of the second."""
    return Lead(lead(first, second, columns), differences(first, second, columns, measurement("bleu")))


def translates(results: Sequence[TextResult], column: str) -> Premise:
    """State that softmax attention with plain feed-forward layers translates, whatever the value of a column."""
    baseline = where(results, attention=SOFTMAX, memory="relu")
    compared = dict.fromkeys(getattr(result, column) for result in results)
    return learned(
        baseline, measurement("bleu"), BLEU_BAR, column, compared=compared, say=lambda bleu: f"{bleu:.1f} BLEU"
    )


def judged(
    claim: str,
    outcome: Outcome,
    sentence: str,
    results: Sequence[TextResult],
    numbers: Mapping[str, Any],
    premises: Sequence[Premise] = (),
    *,
    comparisons: Mapping[str, Comparison | None] | None = None,
) -> Verdict:
    """Return the verdict, or that there is nothing to judge where a number that it rests on is not known."""
    if any(number.mean != number.mean for number in numbers.values() if isinstance(number, Interval)):
        outcome, sentence, numbers = "undecided", "The runs that this compares are not all there: nothing to judge.", {}
    return settle(
        claim,
        outcome,
        sentence,
        results=results,
        scale=scale(results),
        numbers=plain(numbers),
        premises=premises,
        comparisons=comparisons,
    )


SIGNS = "os^DvP<*"
Score = Callable[[TextResult], float | None]


@dataclass(frozen=True)
class Panel:
    """A score that gets a panel, and a column of the table."""

    title: str
    score: Score
    logarithmic: bool = False


@dataclass(frozen=True)
class Point:
    """A kind of model at one place: a score for each seed that has one."""

    kind: str
    activation: str
    """That of its attention, for the colour of a kind whose name does not say it."""
    place: float | None
    entries: tuple[tuple[float, ...], ...]
    """By panel."""
    seeds: int
    lost: int

    def mean(self, panel: int) -> float | None:
        """The mean over the seeds."""
        return fmean(self.entries[panel]) if self.entries[panel] else None


def figure(
    results: Sequence[TextResult],
    panels: Sequence[Panel],
    kind: Callable[[TextResult], str],
    place: Callable[[TextResult], float | None],
    *,
    name: str,
    title: str,
    caption: str,
    axis: str,
    logarithmic: bool = False,
) -> Figure:
    """Draw scores over a number. A kind whose place is None, such as softmax over α, is a level."""
    points = collect(results, panels, kind, place)
    caption = f"{caption} Means over {_count(results)}, bands from the lowest to the highest. {LOST_NOTE}"
    return Figure(
        name,
        title,
        caption,
        describe(points, panels, axis),
        table(points, panels, axis),
        lambda: _paint_lines(points, panels, axis, logarithmic),
    )


def listing(
    results: Sequence[TextResult],
    panels: Sequence[Panel],
    kind: Callable[[TextResult], str],
    *,
    name: str,
    title: str,
    caption: str,
) -> Figure:
    """Draw kinds one below the other, in the order of the results."""
    points = collect(results, panels, kind, lambda result: None)
    caption = f"{caption} Means over {_count(results)}, bars from the lowest to the highest. {LOST_NOTE}"
    return Figure(
        name,
        title,
        caption,
        describe(points, panels, ""),
        table(points, panels, ""),
        lambda: _paint_list(points, panels),
    )


def collect(
    results: Sequence[TextResult],
    panels: Sequence[Panel],
    kind: Callable[[TextResult], str],
    place: Callable[[TextResult], float | None],
) -> list[Point]:
    """Return the points, kind after kind, each from the smallest place."""
    groups: dict[tuple[str, float | None], list[TextResult]] = {}
    for result in results:
        groups.setdefault((kind(result), place(result)), []).append(result)
    order = list(dict.fromkeys(name for name, _ in groups))
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1] or 0.0))
    points = []
    for key in keys:
        here = groups[key]
        entries = tuple(tuple(v for result in here if (v := panel.score(result)) is not None) for panel in panels)
        lost = sum(result.status == "diverged" for result in here)
        points.append(Point(key[0], here[0].activation, key[1], entries, len(here), lost))
    return points


def table(points: Sequence[Point], panels: Sequence[Panel], axis: str) -> Table:
    """Tabulate the means behind a figure."""
    columns = ("kind", *([axis] if axis else []), *(panel.title for panel in panels), "seeds", "diverged")
    rows = []
    for point in points:
        means = [point.mean(number) for number in range(len(panels))]
        shown = [None if mean is None else float(f"{mean:.5g}") for mean in means]
        rows.append((point.kind, *([point.place] if axis else []), *shown, point.seeds, point.lost))
    return Table(columns, tuple(rows))


def describe(points: Sequence[Point], panels: Sequence[Panel], axis: str) -> str:
    """Describe the figure in words: the ends of every line."""
    if not points:
        return "An empty figure: no run has finished yet."
    sentences = []
    for number, panel in enumerate(panels):
        parts = []
        for kind in dict.fromkeys(point.kind for point in points):
            line = [point for point in points if point.kind == kind and point.entries[number]]
            ends = [line[0], line[-1]] if len(line) > 1 else line
            words = ", ".join(
                f"{point.mean(number):.4g}" + (f" at {point.place:g}" if point.place is not None else "")
                for point in ends
            )
            parts.append(f"{kind} {words or 'nothing yet'}")
        over = f" over {axis}" if axis else ""
        sentences.append(f"{panel.title[0].upper()}{panel.title[1:]}{over}: {'; '.join(parts)}.")
    return " ".join(sentences)


def _count(results: Sequence[TextResult]) -> str:
    count = len(seeds(results))
    return f"{count} seed{'s' * (count != 1)}"


def _paint_lines(points: Sequence[Point], panels: Sequence[Panel], axis: str, logarithmic: bool) -> Any:
    picture, axes = sheet(len(panels), height=4.2, same_y=False)
    names = list(dict.fromkeys(point.kind for point in points))
    looks = _looks(points)
    for number, (panel, part) in enumerate(zip(panels, axes, strict=True)):
        if not any(point.entries[number] for point in points):
            nothing_yet(part)
        for kind in names:
            line = [point for point in points if point.kind == kind and point.entries[number]]
            levels = [point for point in line if point.place is None]
            for point in levels:
                part.axhline(fmean(point.entries[number]), **_level(looks[kind]))
            _draw(part, [point for point in line if point.place is not None], number, looks[kind])
        part.set_title(panel.title)
        part.set_xlabel(axis)
        places = sorted({point.place for point in points if point.place is not None})
        if logarithmic and places:
            part.set_xscale("log", base=2)
            part.set_xticks(places, [_short(place) for place in places])
            part.set_xticks([], minor=True)
        if panel.logarithmic and any(point.entries[number] for point in points):
            part.set_yscale("log")
            plain_powers(part.yaxis)
    level = {point.kind for point in points if point.place is None}
    handles = [handle(kind, **(_level(looks[kind]) if kind in level else looks[kind])) for kind in names]
    _finish(picture, handles, points)
    return picture


def _level(look: dict[str, Any]) -> dict[str, Any]:
    return {"color": look["color"], "lw": 1.3, "ls": BROKEN}


def _draw(part: Any, line: Sequence[Point], number: int, look: dict[str, Any]) -> None:
    if not line:
        return
    places = [point.place for point in line]
    low, high = ([end(point.entries[number]) for point in line] for end in (min, max))
    part.fill_between(places, low, high, color=look["color"], alpha=0.13, lw=0)
    part.plot(places, [fmean(point.entries[number]) for point in line], **look)
    for point in line:
        if point.lost:
            part.plot(point.place, fmean(point.entries[number]), "x", ms=9, mew=2, color=look["color"], zorder=4)


def _paint_list(points: Sequence[Point], panels: Sequence[Panel]) -> Any:
    picture, axes = sheet(len(panels), height=1.6 + 0.34 * max(len(points), 4), same_y=True)
    for number, (panel, part) in enumerate(zip(panels, axes, strict=True)):
        part.set_title(panel.title)
        if not any(point.entries[number] for point in points):
            nothing_yet(part)
            continue
        for place, point in enumerate(points):
            if point.entries[number]:
                look: dict[str, Any] = {"color": _colour(point), "zorder": 3}
                part.plot([min(point.entries[number]), max(point.entries[number])], [place] * 2, lw=1.6, **look)
                sign = "x" if point.lost else "o"
                part.plot(fmean(point.entries[number]), place, sign, ms=7, mew=2 if point.lost else 1, **look)
        part.grid(axis="x")
        if panel.logarithmic:
            part.set_xscale("log")
            plain_powers(part.xaxis)
        else:
            part.locator_params(axis="x", nbins=3)
            part.tick_params(axis="x", labelsize="small")
    if points:
        axes[0].set_yticks(range(len(points)), [point.kind for point in points])
        axes[0].invert_yaxis()
    _finish(picture, [], points)
    return picture


def _short(place: float) -> str:
    """Format a power of two, short enough to stand beside the next one: 512, 1k, 2k."""
    return f"{place / 1024:g}k" if place >= 1024 and place % 1024 == 0 else f"{place:g}"


def _finish(picture: Any, handles: list[Any], points: Sequence[Point]) -> None:
    if any(point.lost for point in points):
        handles.append(handle("diverged", **LOST))
    if handles:
        legend(picture, handles)


def _colour(point: Point) -> str:
    return _figures.colour_of(point.kind, point.activation).light


def _looks(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Return how kinds are drawn: in the colour of their φ; a second one of a φ with a broken line, hollow markers."""
    looks: dict[str, dict[str, Any]] = {}
    for point in points:
        if point.kind not in looks:
            colour, sign = _colour(point), MARKERS.get(point.kind, SIGNS[len(looks) % len(SIGNS)])
            looks[point.kind] = {"color": colour, "marker": sign, "ms": 5.5, "lw": 1.7}
            if any(look["color"] == colour for kind, look in looks.items() if kind != point.kind):
                looks[point.kind] |= {"ls": (0, (2, 1.4)), "mfc": PAPER.light}
    return looks
