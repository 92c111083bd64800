"""What attention does while it trains: why a power of L is needed (the paper's first open question)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

from nomax import _figures
from nomax.phi import SOFTMAX
from nomax.study.engine.figure import Figure, Table, legend, nothing_yet, plain_powers, sheet
from nomax.study.engine.result import ImageResult

Points = Sequence[Mapping[str, Any]]  # the recorded steps of a run: {"step": …, "layers": [{"row_sum": …}, …]}

ACTIVATION = "relu"  # the h whose curve over α decides
STYLES: dict[float, Any] = {0.0: ":", 0.5: "-.", 1.0: "-", 1.5: (0, (4, 2)), 2.0: (0, (1, 1))}


def _mean(name: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda point: fmean(layer[name] for layer in point["layers"])


def _loudness(point: Mapping[str, Any]) -> float:
    """Return the size of what the first layer's attention adds, beside the embedded patches that it is added to."""
    first = point["layers"][0]
    return float(first["output"] / first["residual"])


@dataclass(frozen=True)
class Panel:
    """A quantity over training."""

    title: str
    value: Callable[[Mapping[str, Any]], float]
    logarithmic: bool = True


PANELS = (
    Panel("sum of a row", _mean("row_sum")),
    Panel("attention ÷ residual, layer 1", _loudness),
    Panel("learned qk scale", _mean("scale"), logarithmic=False),
)


@dataclass(frozen=True)
class Line:
    """All recorded runs of one φ and length: the geometric means of each panel's value over the seeds."""

    tokens: int
    activation: str
    alpha: float
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    """By panel, over the steps."""

    @property
    def label(self) -> str:
        """The φ, as the legend has it."""
        return SOFTMAX if self.activation == SOFTMAX else f"relu, α = {self.alpha:g}"


def collect(results: Sequence[ImageResult], diagnostics: Mapping[str, Points]) -> list[Line]:
    """The lines of softmax and relu with qk-norm, shortest sequences and smallest α first."""
    recorded: dict[tuple[int, str, float], list[Points]] = {}
    for result in results:
        if (
            result.activation in (ACTIVATION, SOFTMAX)
            and result.qk_norm
            and result.gate is None
            and diagnostics.get(result.key)
        ):
            recorded.setdefault((result.tokens, result.activation, result.alpha), []).append(diagnostics[result.key])
    lines = []
    for (tokens, activation, alpha), runs in sorted(recorded.items()):
        steps = [point["step"] for point in runs[0]]
        whole = [points for points in runs if [point["step"] for point in points] == steps]
        values = tuple(
            tuple(geometric_mean([panel.value(points[i]) for points in whole]) for i in range(len(steps)))
            for panel in PANELS
        )
        lines.append(Line(tokens, activation, alpha, tuple(steps), values))
    return lines


def figure(results: Sequence[ImageResult], diagnostics: Mapping[str, Points]) -> Figure:
    """Row sums, the size of attention beside the residual stream, and learned scales, over training."""
    lines = collect(results, diagnostics)
    caption = (
        "Left: the mean sum of a query's weights; softmax's is 1 by definition. Middle: the root mean square of what "
        "the first layer's attention adds, over that of the embedded patches. Right: the mean product of the learned "
        "scales of queries and keys. Means over layers, heads and seeds. Without a power of L rows sum to tens, and "
        "attention drowns the patches and their positions from the first step on; the learned scale hardly makes up "
        "for it."
    )
    columns = ("L", "φ", "step", *(panel.title for panel in PANELS))
    table: tuple[tuple[str | int | float | None, ...], ...] = tuple(
        (line.tokens, line.label, step, *(float(f"{values[i]:.4g}") for values in line.values))
        for line in lines
        for i, step in enumerate(line.steps)
        if i in (0, len(line.steps) // 2, len(line.steps) - 1)
    )
    title = "Why a power of L: what attention does while it trains"
    return Figure("inside", title, caption, _describe(lines), Table(columns, table), lambda: _paint(lines))


def _describe(lines: Sequence[Line]) -> str:
    if not lines:
        return "An empty figure: no run has recorded its attention yet."
    parts = [
        f"{line.label} at L = {line.tokens}: rows sum to {line.values[0][0]:.3g} at the start and "
        f"{line.values[0][-1]:.3g} at the end, attention over residual is {line.values[1][0]:.3g} and "
        f"{line.values[1][-1]:.3g}"
        for line in lines
    ]
    return f"Three quantities over training steps, a row of panels for each length. {'; '.join(parts)}."


def _paint(lines: Sequence[Line]) -> Any:
    from matplotlib.lines import Line2D

    shown = lengths_shown(lines)
    picture, axes = sheet(len(PANELS), height=2.5 * max(len(shown), 1) + 0.8, same_y=False, rows=max(len(shown), 1))
    if not lines:
        nothing_yet(axes[0])
        return picture
    for place, tokens in enumerate(shown):
        for number, panel in enumerate(PANELS):
            axis = axes[place * len(PANELS) + number]
            for line in (line for line in lines if line.tokens == tokens):
                axis.plot([step + 1 for step in line.steps], line.values[number], **_look(line))
            axis.set_xscale("log")
            if panel.logarithmic:
                axis.set_yscale("log")
                plain_powers(axis.yaxis)
            plain_powers(axis.xaxis)
            axis.set_title(f"L = {tokens}: {panel.title}", fontsize=10)
            if place == len(shown) - 1:
                axis.set_xlabel("training step")
    unique = {line.label: line for line in lines}
    legend(picture, [Line2D([], [], label=label, **_look(line)) for label, line in unique.items()], columns=3)
    return picture


def lengths_shown(lines: Sequence[Line]) -> list[int]:
    """The shortest and the longest sequences that were recorded."""
    known = sorted({line.tokens for line in lines})
    return list(dict.fromkeys([known[0], known[-1]])) if known else []


def _look(line: Line) -> dict[str, Any]:
    return {
        "color": _figures.colour_of(line.activation).light,
        "ls": (0, (5, 3)) if line.activation == SOFTMAX else STYLES.get(line.alpha, "-"),
        "lw": 2.2 if line.alpha == 1 else 1.5,
    }
