"""How a benchmark runs from its first check to its last file, whatever it measures."""

from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from nomax.bench import goal_figure, goals, tables
from nomax.bench.frame import now, progress_bar, results_folder, threads_restored
from nomax.bench.goals import Goal
from nomax.bench.machine import load
from nomax.bench.results import Results, write
from nomax.console import Console, Progress


def conduct(
    name: str,
    title: str,
    results: Results,
    aims: tuple[Goal, ...],
    measure: Callable[[Progress], Iterable[RenderableType]],
    markdown: Callable[[Results], str],
    output: Path | None,
) -> int:
    """Measure into `results`, showing each table when it is done, and write name.json, name.md and name.svg.

    Returns 0 if all is right, 1 if a result was wrong, 130 if it was stopped.
    """
    console, folder = Console(), results_folder(output)
    stopped = False
    with progress_bar(console) as progress, threads_restored():
        try:
            for table in measure(progress):
                console.print(table)
                write(folder / f"{name}.json", results.json())
            results.finished = now()
        except KeyboardInterrupt:
            stopped = True

    results.load_after = load()
    results.goals = [goals.judge(goal, results) for goal in aims]
    console.print(tables.goal_table(results))
    files = {f"{name}.json": results.json(), f"{name}.md": markdown(results)}
    try:
        files[f"{name}.svg"] = goal_figure.draw(title, aims, results)
    except ImportError:
        console.print("No figure: it needs matplotlib (pip install 'nomax[plot]').")
    for file, text in files.items():
        write(folder / file, text)
    console.print(f"Written: {', '.join(str(folder / file) for file in files)}")
    for gate in results.red():
        where = ", ".join(part for part in (gate.shape, gate.dtype, gate.name) if part)
        console.print(Text.assemble(("WRONG", "bold red"), f" {where}: {gate.reason()}"))
    if stopped:
        console.print("Stopped: what was measured until then is kept.")
        return 130
    return 1 if results.red() else 0


def heading(name: str, results: Results) -> list[str]:
    """What a Markdown file of results begins with: where it is from, and what must be known before reading it."""
    parts = [f"<!-- Written by `nomax bench {name}`; the raw samples are in {name}.json. -->"]
    if results.smoke:
        parts.append("**A smoke run: the sizes are toys and these numbers mean nothing.**")
    elif not results.finished:
        parts.append("**The run was stopped: these are its results until then.**")
    if red := results.red():
        lines = [f"- {gate.shape}, {gate.dtype}, {gate.name}: {gate.reason()}" for gate in red]
        parts.append("**Wrong results, and so no ratios, for:**\n\n" + "\n".join(lines))
    return parts


def ending(results: Results) -> list[str]:
    """What it ends with: who could not run, and the goals."""
    goal_rows = [list(row) for row in tables.goal_rows(results)]
    parts = [f"- {line}" for line in tables.missing(results.cases)]
    return [*parts, "**Goals**\n\n" + tables.markdown_table(list(tables.GOAL_COLUMNS), goal_rows)]
