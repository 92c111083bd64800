"""One figure of a run's goals: what was measured for each, and the bound that it should keep."""

from collections.abc import Sequence
from typing import Any

from nomax._colours import BAD, GOOD, INK, PAPER
from nomax.bench.figure import STYLE
from nomax.bench.goals import Goal, values
from nomax.bench.results import Results
from nomax.evaluate import figures

# Apart in shape, too, for those who do not see red and green.
KEPT: dict[str, Any] = {"marker": "o", "ms": 7, "color": GOOD.light}
MISSED: dict[str, Any] = {"marker": "X", "ms": 8, "color": BAD.light}


def draw(title: str, aims: Sequence[Goal], results: Results) -> str:
    """The figure as SVG text, with a title and a description for those who cannot see it."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = [[goal for goal in aims if goal.at_least], [goal for goal in aims if not goal.at_least]]
    panels = [panel for panel in panels if panel]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 1.5 + 0.42 * len(aims)), layout="constrained")
        heights = [len(panel) for panel in panels]
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel, results)
        handles: list[Any] = [
            Line2D([], [], ls="", label="keeps the bound", **KEPT),
            Line2D([], [], ls="", label="does not", **MISSED),
            Line2D([], [], ls="", marker="|", ms=13, mew=2, color=INK.light, label="bound"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.suptitle(title + (" (smoke run)" if results.smoke else ""), fontsize=12.5, fontweight="bold")
        return figures.rendered(figure, ".svg", title, describe(aims, results)).decode()


def _draw_panel(axis: Any, panel: Sequence[Goal], results: Results) -> None:
    largest = max(goal.bound for goal in panel)
    for row, goal in enumerate(panel):
        for _, value in values(goal, results):
            kept = value >= goal.bound if goal.at_least else value <= goal.bound
            axis.plot(value, row, mec=PAPER.light, zorder=3, **(KEPT if kept else MISSED))
            largest = max(largest, value)
        axis.plot(goal.bound, row, "|", ms=17, mew=2, color=INK.light, zorder=2)
    axis.set_yticks(range(len(panel)), [f"{goal.text}, {goal.mode}" for goal in panel])
    axis.set_ylim(len(panel) - 0.5, -0.5)
    axis.set_xlim(0, largest * 1.08)
    axis.set_xlabel("times as fast as the other" if panel[0].at_least else "share of the other's memory")
    axis.grid(axis="x", zorder=0)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)


def describe(aims: Sequence[Goal], results: Results) -> str:
    """The figure in words."""
    sentences = []
    for goal in aims:
        sign = "at least" if goal.at_least else "at most"
        found = "; ".join(f"{where}: {value:.2f}" for where, value in values(goal, results)) or "not measured"
        sentences.append(f"{goal.text}, {goal.mode}, {sign} {goal.bound:g}: {found}.")
    return " ".join(sentences)
