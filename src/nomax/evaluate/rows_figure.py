"""Row statistics as a figure: one panel per statistic, layers from left to right, heads as points."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nomax.evaluate import figures
from nomax.evaluate.rows import HeadRows

TITLE = "How attention weights are spread over the keys"
PANELS = {
    "row_sum": "mean weight × L\n(= mean row sum)",
    "row_sum_sd": "standard deviation\nof row sums",
    "zeros": "share of exact zeros",
    "entropy": "entropy of a row, nats",
    "effective_keys": "effective number of keys",
}


def draw(found: Mapping[str, Sequence[HeadRows]], kind: str = ".svg") -> bytes:
    """The figure of the statistics of some runs, by their titles."""
    matplotlib = figures.require()
    from matplotlib.figure import Figure

    found = _series(found)
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(11, 3.2), layout="constrained")
        axes = figure.subplots(1, len(PANELS), squeeze=False)[0]
        for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
            _panel(axis, found, name)
            axis.set_title(label, fontsize=9.5)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
        figure.suptitle(TITLE, fontsize=11.5, fontweight="bold")
        return figures.rendered(figure, kind, TITLE, describe(found))


def _series(found: Mapping[str, Sequence[HeadRows]]) -> dict[str, Sequence[HeadRows]]:
    """A line for each run, or for each part of one that has several."""
    lines: dict[str, Sequence[HeadRows]] = {}
    for title, rows in found.items():
        parts = list(dict.fromkeys(row.part for row in rows))
        for part in parts:
            label = title if len(parts) == 1 else f"{title}, {part}"
            lines[label] = [row for row in rows if row.part == part]
    return lines


def _panel(axis: Any, found: Mapping[str, Sequence[HeadRows]], name: str) -> None:
    layers = 1 + max(row.layer for rows in found.values() for row in rows)
    for number, (title, rows) in enumerate(found.items()):
        colour = figures.COLOURS[number % len(figures.COLOURS)]
        marker = figures.MARKERS[number % len(figures.MARKERS)]
        # Side by side, so that the points of two runs do not hide each other.
        aside = 0.3 * ((number + 0.5) / len(found) - 0.5) * (len(found) > 1)
        x = np.array([row.layer + 1 + aside for row in rows])
        y = np.array([getattr(row, name) for row in rows])
        axis.plot(x, y, marker, ms=3.5, alpha=0.55, mew=0, color=colour)
        means = [(layer + 1 + aside, mean(rows, name, layer)) for layer in sorted({row.layer for row in rows})]
        axis.plot(*zip(*means, strict=True), "-", marker=marker, ms=5.5, lw=1.4, color=colour, label=title)
    if name == "row_sum":
        axis.axhline(1, color="#333333", lw=0.8, ls=":")
    axis.set_xlabel("layer")
    axis.set_xticks(range(1, layers + 1, math.ceil(layers / 6)))
    axis.set_xlim(0.5, layers + 0.5)
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]) if name == "row_sum" else 0)
    axis.grid(axis="y", color="#dddddd", lw=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    if not any(math.isfinite(getattr(row, name)) for rows in found.values() for row in rows):
        axis.text(0.5, 0.5, "not defined", transform=axis.transAxes, ha="center", color="#777777")


def mean(rows: Sequence[HeadRows], name: str, layer: int) -> float:
    """A statistic's mean over the heads of a layer."""
    return float(np.mean([getattr(row, name) for row in rows if row.layer == layer]))


def describe(found: Mapping[str, Sequence[HeadRows]]) -> str:
    """The figure in words."""
    sentences = ["Means over the heads of each layer, from the first to the last."]
    for title, rows in found.items():
        layers = sorted({row.layer for row in rows})
        for name, label in PANELS.items():
            values = ", ".join(_short(mean(rows, name, layer)) for layer in layers)
            sentences.append(f"{title}, {' '.join(label.split())}: {values}.")
    return " ".join(sentences)


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not defined"
