"""Small line charts: where every line, tick and label goes. The template draws them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from nomax import _colours

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 430, 34, 228
STROKES = 6  # kinds of broken lines that the style sheet has, for several lines of one colour
MOST = 80  # points of a line: it is about 400 pixels wide
FEW = 16  # points of a line that are worth a dot each

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart: its place in the legend, its path, and dots where the points are few."""

    label: str
    phi: str
    """The activation whose colour it has; "" for none."""
    stroke: int
    path: str
    dots: list[Point]


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and what is written there."""

    place: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A line chart, in the units of its drawing, and in words."""

    title: str
    x_title: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]
    alternative: str
    note: str
    """A note on lines that leave the chart."""


def plain(value: float) -> str:
    """A number as it stands at an axis."""
    return f"{value:,.6g}".replace("-", "−")


def percent(value: float) -> str:
    """A share as it stands at an axis."""
    return f"{100 * value:.4g} %".replace("-", "−")


def chart(
    title: str,
    x_title: str,
    lines: Sequence[tuple[str, Sequence[Point]]],
    say: Callable[[float], str] = plain,
    *,
    phis: Sequence[str] | None = None,
    from_zero: bool = False,
    roof: bool = False,
) -> Chart | None:
    """A chart of lines, each a label and its points; None if no point is finite.

    phis: the activation whose colour each line has; if not given, the one that its label names. x counts, as steps and
    layers do. from_zero: y begins there. roof: a line that goes through the roof is cut, so that it does not flatten
    the others.
    """
    known = [(label, [point for point in points if all(map(math.isfinite, point))]) for label, points in lines]
    drawn = [points for _, points in known if points]
    if not drawn:
        return None
    xs = [x for points in drawn for x, _ in points]
    ys = [y for points in drawn for _, y in points]
    left, right = (min(xs), max(xs)) if min(xs) < max(xs) else (xs[0] - 0.5, xs[0] + 0.5)
    top = _roof(drawn) if roof else max(ys)
    low, high = _apart(min(min(ys), top, 0 if from_zero else top), top)
    margin = 0.04 * (high - low)
    low, high = (low - margin if low != 0 else 0), high + margin

    def place(point: Point) -> Point:
        x, y = point[0], min(point[1], high)
        across = LEFT + (RIGHT - LEFT) * (x - left) / (right - left)
        return round(across, 1), round(BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low), 1)

    few = max(map(len, drawn)) <= FEW
    names = [_colours.activation(label) for label, _ in known] if phis is None else phis
    strokes = [names[:place].count(name) % STROKES for place, name in enumerate(names)]
    return Chart(
        title,
        x_title,
        [Tick(place((x, low))[0], plain(x)) for x in ticks(left, right, whole=True)],
        [Tick(place((left, y))[1], say(y)) for y in ticks(low, high)],
        [
            _line(label, phi, stroke, list(map(place, points)), few)
            for (label, points), phi, stroke in zip(known, names, strokes, strict=True)
        ],
        f"{title} by {x_title}. " + " ".join(_words(label, points, say) for label, points in known),
        f"Values above {say(float(f'{high:.3g}'))} are drawn at the upper edge." if max(ys) > high else "",
    )


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers from low to high, about five."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    if whole:
        step = max(1, round(step))
    return [round(n * step, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _apart(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    return (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)


def _roof(lines: Sequence[Sequence[Point]]) -> float:
    """The highest value to show: half as much again as the highest of a usual line."""
    peaks = [max(y for _, y in points) for points in lines]
    usual = median(peaks)
    return max(peaks) if usual <= 0 else min(max(peaks), 1.5 * usual)


def _line(label: str, phi: str, stroke: int, points: list[Point], few: bool) -> Line:
    every = max(1, math.ceil(len(points) / MOST))
    kept = points[:-1:every] + points[-1:]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in kept) if points else ""
    dots = points if few or len(points) == 1 else []
    return Line(label, phi, stroke, path, dots)


def _words(label: str, points: Sequence[Point], say: Callable[[float], str]) -> str:
    if not points:
        return f"{label}: nothing to show."
    if len(points) <= 8:
        return f"{label}: {', '.join(say(float(f'{y:.3g}')) for _, y in points)}."
    (first, start), (last, end) = points[0], points[-1]
    heights = [y for _, y in points]
    values = [say(float(f"{value:.3g}")) for value in (start, end, min(heights), max(heights))]
    return (
        f"{label}: from {values[0]} at {plain(first)} to {values[1]} at {plain(last)}, "
        f"lowest {values[2]}, highest {values[3]}."
    )
