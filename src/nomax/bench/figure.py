"""One figure of a run: how many times faster than softmax attention, shape by shape."""

from typing import Any

from nomax import _colours
from nomax._colours import BAD, INK, PAPER
from nomax.bench.goals import bound_against_sdpa
from nomax.bench.results import OURS, Results
from nomax.bench.shapes import BACKWARD, FORWARD
from nomax.evaluate import figures

TITLE = "Attention without softmax: speed relative to PyTorch’s softmax attention"
STYLE: dict[Any, Any] = {**figures.STYLE, "font.size": 10, "axes.spines.left": False}
OURS_COLOUR = _colours.of(OURS).light
# Both are of relu/L, and have its colour; the second is paler.
STRENGTH = {FORWARD: 1.0, BACKWARD: 0.4}
LETTERS = {FORWARD: PAPER.light, BACKWARD: INK.light}


def draw(results: Results) -> str:
    """The figure as SVG text, with a title and a description for those who cannot see it."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    threads = sorted({case.threads for case in results.cases})
    dtypes = list(dict.fromkeys(case.dtype for case in results.cases)) or ["float32"]
    shapes = list(dict.fromkeys(case.shape for case in results.cases if case.shape != "tiny"))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 1.7 + 0.52 * max(len(shapes), 2)), layout="constrained")
        axes = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
        for axis, dtype in zip(axes, dtypes, strict=True):
            _draw_panel(axis, results, dtype, shapes, threads)
        axes[0].set_yticks(range(len(shapes)), shapes)
        axes[0].set_ylim(len(shapes) - 0.4, -0.6)

        first, *more = [f"{n} thread{'s' * (n > 1)}" for n in threads] or ["1 thread"]
        handles: list[Any] = [
            Patch(color=OURS_COLOUR, alpha=STRENGTH[mode], lw=0, label=f"{mode}, {first}")
            for mode in (FORWARD, BACKWARD)
        ]
        if more:
            dot = Line2D([], [], ls="", marker="o", ms=5, mfc=PAPER.light, mec=INK.light, label=more[-1])
            handles.append(dot)
        handles.append(Line2D([], [], ls="", marker="|", ms=11, mew=2, color=BAD.light, label="goal"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.suptitle(TITLE + (" (smoke run)" if results.smoke else ""), fontsize=12.5, fontweight="bold")
        return figures.rendered(figure, ".svg", TITLE, describe(results)).decode()


def _draw_panel(axis: Any, results: Results, dtype: str, shapes: list[str], threads: list[int]) -> None:
    height, largest = 0.36, 1.0
    for row, shape in enumerate(shapes):
        for offset, mode in ((-height / 2, FORWARD), (height / 2, BACKWARD)):
            ratios = [_ratio(results, shape, dtype, mode, n) for n in threads]
            y = row + offset
            known = [ratio for ratio in ratios if ratio is not None]
            if not known:
                continue
            axis.barh(y, ratios[0] or 0, height * 0.92, color=OURS_COLOUR, alpha=STRENGTH[mode], lw=0, zorder=2)
            if len(ratios) > 1 and ratios[-1] is not None:
                axis.plot(ratios[-1], y, "o", ms=5, mfc=PAPER.light, mec=INK.light, zorder=4)
            goal = None if results.smoke else bound_against_sdpa(shape, dtype, mode)
            if goal is not None:
                axis.plot(goal, y, "|", ms=11, mew=2, color=BAD.light, zorder=3)
            if ratios[0] is not None:
                place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "zorder": 6}
                axis.annotate(f"{ratios[0]:.2f}", (0, y), (4, -0.5), fontsize=8.5, color=LETTERS[mode], **place)
            largest = max(largest, *known, goal or 0)
    axis.axvline(1, color=INK.light, lw=1, zorder=5)
    axis.set_xlim(0, largest * 1.08)
    axis.set_title(dtype, fontsize=11)
    axis.set_xlabel("times as fast as SDPA")
    axis.grid(axis="x", zorder=0)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)


def describe(results: Results) -> str:
    """The figure in words."""
    sentences = []
    for case in results.cases:
        ratio = case.speedup(OURS, "sdpa")
        if ratio is not None and case.shape != "tiny":
            plural = "s" * (case.threads > 1)
            sentences.append(f"{case.shape}, {case.dtype}, {case.mode}, {case.threads} thread{plural}: {ratio:.2f}.")
    return "How many times as fast as PyTorch’s softmax attention relu/L is. " + " ".join(sentences)


def _ratio(results: Results, shape: str, dtype: str, mode: str, threads: int) -> float | None:
    case = results.case(shape, dtype, mode, threads)
    return case.speedup(OURS, "sdpa") if case else None
