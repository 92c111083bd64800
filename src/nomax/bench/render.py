"""Results as text and figures: numbers, tables for the terminal and in Markdown, and SVG with descriptions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD

from nomax import _figures
from nomax._figures import BAD, GOOD, INK, PAPER
from nomax.bench.results import Goal, Results, counted
from nomax.console import Table

UNITS = {"seconds": " s", "bytes": " bytes", "per second": " /s"}  # of goals; others are ratios
GOAL_COLUMNS = ("goal", "mode", "bound", "worst", "verdict", "where the worst was")
STYLE: dict[Any, Any] = {**_figures.STYLE, "font.size": 10, "axes.spines.left": False}
# Apart in shape, too, for those who do not see red and green.
KEPT: dict[str, Any] = {"marker": "o", "ms": 7, "color": GOOD.light}
MISSED: dict[str, Any] = {"marker": "X", "ms": 8, "color": BAD.light}
# All bars are of one φ, and have its colour; those of the second mode are paler.
STRENGTHS, LETTERS = (1.0, 0.4), (PAPER.light, INK.light)


def seconds(value: float | None) -> str:
    """Format a time in a suitable unit."""
    if value is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def times(value: float | None) -> str:
    """Format a ratio."""
    return "–" if value is None else f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def number(value: float | None, form: str = ",.0f") -> str:
    """Format a number, or return a dash if there is none."""
    return f"{value:{form}}" if value else "–"


def terminal_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", words: int = 2) -> Table:
    """Return a table for the terminal; the given number of first columns hold words, the others numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title=f"\n{title}" if title else None)
    for place, column in enumerate(columns):
        table.add_column(column.replace("vs ", "vs\n"), justify="left" if place < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(lines)


def goal_rows(results: Results) -> list[tuple[str, str, str, str, str, str]]:
    """Return goal, mode, bound, worst value, verdict and where the worst was."""
    rows = []
    for goal in results.goals:
        sign, bound = ("≥", goal["at_least"]) if "at_least" in goal else ("≤", goal["at_most"])
        percent, unit = "share" in goal["quantity"], UNITS.get(goal["quantity"], "×")
        bound_text = f"{sign} {bound:.0%}" if percent else f"{sign} {bound:,.15g}{unit}"
        worst, verdict = "–", goal["verdict"]
        if "worst" in goal:
            value = goal["worst"]
            worst = f"{value:.1%}" if percent else f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g}{unit}"
        if verdict == "not met":
            verdict = f"not met in {goal['measured'] - goal['kept']} of {goal['measured']}"
        rows.append((goal["goal"], goal["mode"], bound_text, worst, verdict, goal.get("where", "")))
    return rows


def goal_table(results: Results) -> Table:
    """Return every goal with its worst case, for the terminal."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title="\nGoals", title_style="bold")
    for name in ("", "goal", "bound", "worst", "verdict"):
        table.add_column(name)
    for text, mode, bound, worst, verdict, where in goal_rows(results):
        mark, style = {"met": ("✓", "green"), "not measured": ("·", "dim")}.get(verdict, ("✗", "red"))
        table.add_row(mark, f"{text}, {mode}", bound, worst, f"{verdict}\n({where})" if where else verdict, style=style)
    return table


def missing(results: Results, shape: str | None = None) -> list[str]:
    """Return the participants that could not run, with the reason and where: for one shape, or for all."""
    places: dict[str, list[str]] = {}
    for case in results.cases:
        for name, reason in case.unavailable.items() if shape in (None, case.shape) else ():
            places.setdefault(f"{name} could not run: {reason}", []).append(case.label())
    return [f"{text} ({'; '.join(where)})" for text, where in places.items()]


def measured_on(results: Results, *peers: str) -> str:
    """Name the machine, the software including peers, and the date."""
    machine, versions = results.machine, results.versions
    software = ", ".join(f"{name} {versions[name]}" for name in ("nomax", "torch", *peers) if name in versions)
    return (
        f"{machine['cpu']} ({machine['cores']} cores, {machine['kernels']} kernels), {software}, {results.started[:10]}"
    )


def best_of(results: Results) -> str:
    """Explain the ratios."""
    return (
        f"“vs” is the other's time divided by ours, each the best of {results.options['rounds']} interleaved rounds "
        "(three for calls of over 2 s, one of over 8 s)."
    )


def markdown(name: str, results: Results, report: Sequence[str]) -> str:
    """Return the Markdown file of a bench: an introduction, the report, and the goals."""
    parts = [f"<!-- Written by `nomax bench {name}`; the raw samples are in {name}.json. -->"]
    if results.smoke:
        parts.append("**A smoke run: the sizes are toys and these numbers mean nothing.**")
    elif not results.finished:
        parts.append("**The run was stopped: these are its results until then.**")
    if wrong := results.wrong():
        parts.append("**Wrong results, and so no ratios, for:**\n\n" + "\n".join(f"- {check}" for check in wrong))
    parts += [*report, *(f"- {line}" for line in missing(results))]
    parts.append("**Goals**\n\n" + markdown_table(GOAL_COLUMNS, goal_rows(results)))
    return "\n\n".join(parts) + "\n"


def goal_figure(title: str, goals: Sequence[Goal], results: Results) -> str:
    """Draw the measurements for each goal, and the bound that they should keep."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = [[goal for goal in goals if goal.at_least], [goal for goal in goals if not goal.at_least]]
    panels = [panel for panel in panels if panel]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 1.5 + 0.42 * len(goals)), layout="constrained")
        heights = [len(panel) for panel in panels]
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_goals(axis, panel, results)
        handles: list[Any] = [
            Line2D([], [], ls="", label="keeps the bound", **KEPT),
            Line2D([], [], ls="", label="does not", **MISSED),
            Line2D([], [], ls="", marker="|", ms=13, mew=2, color=INK.light, label="bound"),
        ]
        return _finished(figure, title, handles, results, _goals_in_words(goals, results))


def _draw_goals(axis: Any, panel: Sequence[Goal], results: Results) -> None:
    largest = max(goal.bound for goal in panel)
    for row, goal in enumerate(panel):
        for _, value in goal.values(results):
            axis.plot(value, row, mec=PAPER.light, zorder=3, **(KEPT if goal.kept(value) else MISSED))
            largest = max(largest, value)
        axis.plot(goal.bound, row, "|", ms=17, mew=2, color=INK.light, zorder=2)
    axis.set_yticks(range(len(panel)), [f"{goal.text}, {goal.mode}" for goal in panel])
    axis.set_ylim(len(panel) - 0.5, -0.5)
    _scale(axis, largest, "times as fast as the other" if panel[0].at_least else "share of the other's memory")


def _goals_in_words(goals: Sequence[Goal], results: Results) -> str:
    sentences = []
    for goal in goals:
        sign = "at least" if goal.at_least else "at most"
        values = "; ".join(f"{where}: {value:.2f}" for where, value in goal.values(results)) or "not measured"
        sentences.append(f"{goal.text}, {goal.mode}, {sign} {goal.bound:g}: {values}.")
    return " ".join(sentences)


def speedup_figure(
    title: str,
    results: Results,
    goals: Sequence[Goal],
    *,
    peer: tuple[str, str],
    shapes: Sequence[str],
    modes: tuple[str, str],
) -> str:
    """Draw our speed-up over a peer, given with its name: a panel per dtype, a row per shape."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    speedups = {
        (case.shape, case.dtype, case.mode, case.threads): case.speedup(case.ours[0], peer[0])
        for case in results.cases
        if case.shape in shapes
    }
    threads = sorted({case.threads for case in results.cases}) or [1]
    dtypes = list(dict.fromkeys(case.dtype for case in results.cases)) or ["float32"]
    colour = _figures.colour_of(results.cases[0].ours[0] if results.cases else "").light
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 1.7 + 0.52 * max(len(shapes), 2)), layout="constrained")
        axes = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
        for axis, dtype in zip(axes, dtypes, strict=True):
            largest = 1.0
            for row, shape in enumerate(shapes):
                for place, mode in enumerate(modes):
                    drawn = [speedups.get((shape, dtype, mode, count)) for count in threads]
                    bound = None if results.smoke else _bound(goals, peer[0], (shape, dtype, mode))
                    largest = max(largest, _draw_bar(axis, (row, place), drawn, bound, colour))
            axis.axvline(1, color=INK.light, lw=1, zorder=5)
            axis.set_title(dtype, fontsize=11)
            _scale(axis, largest, f"times as fast as {peer[1]}")
        axes[0].set_yticks(range(len(shapes)), shapes)
        axes[0].set_ylim(len(shapes) - 0.4, -0.6)

        first, *more = [counted(count, "thread") for count in threads]
        handles: list[Any] = [
            Patch(color=colour, alpha=strength, lw=0, label=f"{mode}, {first}")
            for mode, strength in zip(modes, STRENGTHS, strict=True)
        ]
        if more:
            handles.append(Line2D([], [], ls="", marker="o", ms=5, mfc=PAPER.light, mec=INK.light, label=more[-1]))
        handles.append(Line2D([], [], ls="", marker="|", ms=11, mew=2, color=BAD.light, label="goal"))
        words = [f"How many times as fast as {peer[1]} ours is."]
        for (*setting, count), speedup in speedups.items():
            if speedup is not None:
                words.append(f"{', '.join(map(str, setting))}, {counted(count, 'thread')}: {speedup:.2f}.")
        return _finished(figure, title, handles, results, " ".join(words))


def parts_figure(title: str, parts: Mapping[str, Mapping[str, float]], results: Results) -> str:
    """Draw a bar of milliseconds for each name, in parts."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = list(next(iter(parts.values()), {}))
    colours = [colour.light for colour in _figures.PHI.values()][: len(names)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 2.0 + 0.42 * len(parts)), layout="constrained")
        axis = figure.subplots()
        for row, of_one in enumerate(parts.values()):
            left = 0.0
            for colour, seconds in zip(colours, of_one.values(), strict=True):
                axis.barh(row, seconds * 1e3, 0.7, left, color=colour, lw=0, zorder=2)
                left += seconds * 1e3
        axis.set_yticks(range(len(parts)), list(parts))
        axis.set_ylim(len(parts) - 0.4, -0.6)
        _scale(axis, max((sum(each.values()) for each in parts.values()), default=1e-3) * 1e3, "milliseconds of a step")
        handles = [Patch(color=colour, lw=0, label=name) for colour, name in zip(colours, names, strict=True)]
        words = (
            f"{name}: {', '.join(f'{part} {seconds * 1e3:.2f} ms' for part, seconds in each.items())}."
            for name, each in parts.items()
        )
        return _finished(figure, title, handles, results, " ".join(words))


def _draw_bar(
    axis: Any, place: tuple[int, int], speedups: list[float | None], bound: float | None, colour: str
) -> float:
    """Draw the bar of the fewest threads and the dot of the most; return the largest number drawn."""
    measured = [speedup for speedup in speedups if speedup is not None]
    if not measured:
        return 0.0
    row, mode = place
    height = 0.36
    y = row + (height / 2 if mode else -height / 2)
    axis.barh(y, speedups[0] or 0, height * 0.92, color=colour, alpha=STRENGTHS[mode], lw=0, zorder=2)
    if len(speedups) > 1 and speedups[-1] is not None:
        axis.plot(speedups[-1], y, "o", ms=5, mfc=PAPER.light, mec=INK.light, zorder=4)
    if bound is not None:
        axis.plot(bound, y, "|", ms=11, mew=2, color=BAD.light, zorder=3)
    if speedups[0] is not None:
        settings: dict[str, Any] = {"textcoords": "offset points", "va": "center", "zorder": 6}
        axis.annotate(f"{speedups[0]:.2f}", (0, y), (4, -0.5), fontsize=8.5, color=LETTERS[mode], **settings)
    return max(*measured, bound or 0.0)


def _bound(goals: Sequence[Goal], peer: str, case: tuple[str, str, str]) -> float | None:
    """Return the target speed-up over a peer for a shape, dtype and mode, if there is one."""
    wanted = [goal for goal in goals if (goal.quantity, goal.peer, goal.ours) == ("speedup", peer, ())]
    return next((goal.bound for goal in wanted if goal.about(*case)), None)


def _scale(axis: Any, largest: float, label: str) -> None:
    axis.set_xlim(0, largest * 1.08)
    axis.set_xlabel(label)
    axis.grid(axis="x", zorder=0)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)


def _finished(figure: Any, title: str, handles: list[Any], results: Results, description: str) -> str:
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False)
    figure.suptitle(title + (" (smoke run)" if results.smoke else ""), fontsize=12.5, fontweight="bold")
    return _figures.rendered(figure, ".svg", title, description).decode()
