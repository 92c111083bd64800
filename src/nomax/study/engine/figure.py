"""A figure of a study: the picture, its caption, a sentence for those who cannot see it, and the table behind it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nomax import _figures
from nomax._figures import INK, SOFT
from nomax.study.engine.statistics import Interval

Cell = str | int | float | None

MARKERS = {"relu": "o", "relu2": "s", "gelu": "^", "softplus": "D", "identity": "v", "relu6": "P", "sigmoid": "<"}
# Large letters on a small sheet: the figure is still read at 400 pixels.
STYLE: dict[Any, Any] = {
    **_figures.STYLE,
    "font.size": 11,
    "axes.titlesize": 11.5,
    "axes.labelsize": 11,
    "legend.fontsize": 10.5,
}
WIDTH = 7.6  # inches
BROKEN = (0, (5, 3))  # the line of a level, such as softmax's over α
LOST: dict[str, Any] = {"ls": "", "marker": "x", "ms": 8, "mew": 2, "color": INK.light}  # runs that diverged


@dataclass(frozen=True)
class Table:
    """The numbers of a figure."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A figure of a study; its name is that of its file."""

    name: str
    title: str
    caption: str
    alternative: str
    """A description of the picture, in words."""
    table: Table
    paint: Callable[[], Any]
    """Makes the matplotlib figure; called in the figures' style."""

    def draw(self) -> Any:
        """Return the matplotlib figure."""
        with _figures.require().rc_context(STYLE):
            return self.paint()

    def render(self, kind: Literal[".svg", ".png"] = ".svg") -> bytes:
        """Return the bytes of an .svg or .png file, with title and alternative text inside."""
        with _figures.require().rc_context(STYLE):
            return _figures.rendered(self.paint(), kind, self.title, self.alternative)


def sheet(panels: int, height: float = 3.9, same_y: bool = True, rows: int = 1) -> tuple[Any, list[Any]]:
    """Make a matplotlib figure with panels side by side, in one row or several; returns it and its axes in order."""
    from matplotlib.figure import Figure as Sheet

    figure = Sheet(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, max(panels, 1), sharey="row" if same_y else False, squeeze=False)
    axes = list(grid.flat)
    for axis in axes:
        axis.grid(axis="y")
        axis.set_axisbelow(True)
        axis.tick_params(length=3)
    return figure, axes


def legend(figure: Any, handles: Sequence[Any], columns: int = 4) -> None:
    """Put a legend below the panels."""
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=max(1, min(len(handles), columns)),
        frameon=False,
        columnspacing=1.4,
        handlelength=1.8,
        handletextpad=0.5,
    )


def handle(label: str, **look: Any) -> Any:
    """Make an entry of a legend: a line or a marker."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)


def draw_intervals(axis: Any, intervals: Mapping[str, Interval], colours: Sequence[str]) -> None:
    """Draw named estimates one below the other, each with its interval."""
    for place, (interval, colour) in enumerate(zip(intervals.values(), colours, strict=True)):
        axis.plot([interval.low, interval.high], [place] * 2, lw=1.6, color=colour)
        axis.plot(interval.mean, place, "o", ms=7, color=colour)
    axis.set_yticks(range(len(intervals)), list(intervals))
    axis.invert_yaxis()


def nothing_yet(axis: Any) -> None:
    """Label an empty panel as empty."""
    axis.text(0.5, 0.5, "no finished run", transform=axis.transAxes, ha="center", color=SOFT.light)


def percent_axis(axis: Any) -> None:
    """Write the y axis in percent."""
    from matplotlib.ticker import PercentFormatter

    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))


def plain_powers(axis: Any) -> None:
    """Write the powers of ten of a logarithmic axis as plain numbers, since labels are not typeset as formulas."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
