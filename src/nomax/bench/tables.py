"""Results as text: numbers, tables on the terminal and in Markdown, and what the Markdown file of each bench shares."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD

from nomax.bench.results import Results
from nomax.console import Table

GOAL_COLUMNS = ("goal", "mode", "bound", "worst", "verdict", "where the worst was")


def seconds(value: float | None) -> str:
    """Write a time in the unit that suits it."""
    if value is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def times(value: float | None) -> str:
    """Write a ratio."""
    return "–" if value is None else f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def number(value: float | None, form: str = ",.0f") -> str:
    """Write a number in a format, or a dash if there is none."""
    return f"{value:{form}}" if value else "–"


def terminal_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", words: int = 2) -> Table:
    """Return a table for the terminal; the first columns, so many, hold words, the others numbers."""
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
        percent = "share" in goal["quantity"]
        bound_text = f"{sign} {bound:.0%}" if percent else f"{sign} {bound:g}×"
        worst, verdict = "–", goal["verdict"]
        if "worst" in goal:
            worst = f"{goal['worst']:.1%}" if percent else f"{goal['worst']:.3g}×"
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
    """Return the participants that could not run, with the reason and where: of one shape, or of all."""
    places: dict[str, list[str]] = {}
    for case in results.cases:
        for name, reason in case.unavailable.items() if shape in (None, case.shape) else ():
            places.setdefault(f"{name} could not run: {reason}", []).append(case.label())
    return [f"{text} ({'; '.join(where)})" for text, where in places.items()]


def measured_on(results: Results, *peers: str) -> str:
    """Name the machine, the software, peers included, and the day."""
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
    """Return the Markdown file of a bench: what must be known before reading it, the report, and the goals."""
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
