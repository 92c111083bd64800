"""The results as tables: on the terminal while they come in, and in Markdown for the README."""

from collections.abc import Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.text import Text

from nomax.bench.results import OURS, UNCAUSAL, Case, Results
from nomax.bench.shapes import BACKWARD, FORWARD, INFERENCE, Shape
from nomax.console import Table

PEER_NAMES = {"sdpa": "SDPA", "eager": "eager", "compiled": "compiled", "flex": "Flex"}


def seconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def times(value: float | None) -> str:
    """A ratio."""
    return "–" if value is None else f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def shape_tables(shape: Shape, cases: Sequence[Case]) -> Group:
    """All that was measured of one shape. A ratio is the peer's time divided by ours."""
    sizes = f"{shape.batch}×{shape.heads} heads, {shape.queries} queries, {shape.keys} keys, D {shape.dimension}"
    title = Text.assemble((f"\n{shape.name}", "bold"), f"  {shape.note}: {sizes}")
    peers = {f"vs\n{name}": partial(Case.speedup, ours=OURS, peer=peer) for peer, name in PEER_NAMES.items()}
    main = _table(["time", "GFLOP/s", "of\npeak", *peers])
    for case in cases:
        speed, share = case.gflops(), case.peak_share()
        row = [seconds(case.best(OURS)), f"{speed:.1f}" if speed else "–", f"{share:.0%}" if share else "–"]
        main.add_row(*_setting(case), *row, *(times(ratio(case)) for ratio in peers.values()))

    phis = list(dict.fromkeys(name for case in cases for name in case.samples if name.endswith("/L") and name != OURS))
    more = {f"{phi}\nvs SDPA": partial(Case.speedup, ours=phi, peer="sdpa") for phi in phis}
    more |= {"vs not\ncausal": partial(Case.speedup, ours=OURS, peer=UNCAUSAL)} if shape.causal else {}
    others = _table(list(more))
    for case in cases:
        others.add_row(*_setting(case), *(times(ratio(case)) for ratio in more.values()))
    parts: list[RenderableType] = [title, main, *(("", others) if more else ()), *missing(cases)]
    return Group(*parts)


def missing(cases: Sequence[Case]) -> list[str]:
    """The participants that could not run, with the reason and where."""
    found: dict[str, list[str]] = {}
    for case in cases:
        for name, reason in case.unavailable.items():
            place = f"{case.shape}, {case.dtype}, {case.mode}, {case.threads} thread{'s' * (case.threads > 1)}"
            found.setdefault(f"{name} could not run: {reason}", []).append(place)
    return [f"{text} ({'; '.join(places)})" for text, places in found.items()]


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("dtype", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("thr.", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _setting(case: Case) -> tuple[str, str, str]:
    return case.dtype, {BACKWARD: "fwd + bwd", INFERENCE: "inference"}.get(case.mode, case.mode), str(case.threads)


def goal_rows(results: Results) -> list[tuple[str, str, str, str, str, str]]:
    """Goal, mode, bound, worst value, verdict and where the worst was."""
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


GOAL_COLUMNS = ("goal", "mode", "bound", "worst", "verdict", "where the worst was")


def goal_table(results: Results) -> Table:
    """Every goal with its worst case."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title="\nGoals", title_style="bold")
    for name in ("", "goal", "bound", "worst", "verdict"):
        table.add_column(name)
    for text, mode, bound, worst, verdict, where in goal_rows(results):
        mark, style = {"met": ("✓", "green"), "not measured": ("·", "dim")}.get(verdict, ("✗", "red"))
        table.add_row(mark, f"{text}, {mode}", bound, worst, f"{verdict}\n({where})" if where else verdict, style=style)
    return table


def markdown(results: Results) -> str:
    """The tables for the README, with what they were measured on."""
    parts = ["<!-- Written by `nomax bench attention`; the raw samples are in attention.json. -->"]
    if results.smoke:
        parts.append("**A smoke run: the shapes are toys and these numbers mean nothing.**")
    elif not results.finished:
        parts.append("**The run was stopped: these are its results until then.**")
    if red := results.red():
        lines = [f"- {gate.shape}, {gate.dtype}, {gate.name}: {gate.reason()}" for gate in red]
        parts.append("**Wrong results, and so no ratios, for:**\n\n" + "\n".join(lines))
    parts.append(_measured_on(results))

    threads = sorted({case.threads for case in results.cases})
    for mode in (FORWARD, BACKWARD):
        for dtype in dict.fromkeys(case.dtype for case in results.cases):
            cases = [case for case in results.cases if (case.dtype, case.mode) == (dtype, mode)]
            if shapes := dict.fromkeys(case.shape for case in cases if case.shape != "tiny"):
                columns = ["shape", "GFLOP/s", *(f"vs {name}" for name in PEER_NAMES.values())]
                rows = [_markdown_row(results, shape, dtype, mode, threads) for shape in shapes]
                parts.append(f"**{dtype}, {mode}**\n\n" + markdown_table(columns, rows))
    parts += [text for text in (_overhead(results), _memory(results)) if text]
    parts += [f"- {line}" for line in missing(results.cases)]
    parts.append("**Goals**\n\n" + markdown_table(list(GOAL_COLUMNS), [list(row) for row in goal_rows(results)]))
    return "\n\n".join(parts) + "\n"


def _measured_on(results: Results) -> str:
    machine, versions = results.machine, results.versions
    threads = sorted({case.threads for case in results.cases}) or [1]
    return (
        f"`relu/L` on {machine['cpu']} ({machine['cores']} cores, {machine['kernels']} kernels), "
        f"nomax {versions['nomax']}, torch {versions['torch']}, {results.started[:10]}, "
        f"with {' / '.join(map(str, threads))} thread{'s' * (threads[-1] > 1)}. "
        "“vs” is the peer's time divided by ours, each the best of "
        f"{results.options['rounds']} interleaved rounds of one run (three for calls of over 2 s, one over 8 s). "
        "Shapes: batch × heads × queries (× keys) × D, contiguous tensors."
    )


def _markdown_row(results: Results, shape: str, dtype: str, mode: str, threads: list[int]) -> list[str]:
    cases = [results.case(shape, dtype, mode, n) for n in threads]
    speeds = [case.gflops() if case else None for case in cases]
    row = [_sizes(results, shape), " / ".join(f"{speed:.0f}" if speed else "–" for speed in speeds)]
    for peer in PEER_NAMES:
        ratios = [case.speedup(OURS, peer) if case else None for case in cases]
        row.append(" / ".join(map(times, ratios)) if any(ratios) else "–")
    return row


def _sizes(results: Results, name: str) -> str:
    (shape,) = (shape for shape in results.shapes if shape.name == name)
    keys = () if shape.keys == shape.queries else (shape.keys,)
    return f"{name} ({'×'.join(map(str, (shape.batch, shape.heads, shape.queries, *keys, shape.dimension)))})"


def markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(lines)


def _overhead(results: Results) -> str | None:
    rows = [
        [case.mode, case.dtype, str(case.threads), seconds(case.best(OURS)), seconds(case.best("sdpa"))]
        for mode in (FORWARD, INFERENCE, BACKWARD)
        for case in results.cases
        if (case.shape, case.mode) == ("tiny", mode)
    ]
    title = "**The cost of a call**: one query, one key, one head\n\n"
    return title + markdown_table(["mode", "dtype", "threads", "nomax", "SDPA"], rows) if rows else None


def _memory(results: Results) -> str | None:
    rows = [
        [m.mode, m.participant, f"{m.bytes / 2**20:.0f} MiB", f"{m.share:.1%}"]
        for m in results.memory
        if m.bytes is not None and m.share is not None
    ]
    if not rows:
        return None
    title = f"**Peak extra memory**, one head, L = {results.memory[0].length:,}, float32, results included\n\n"
    return title + markdown_table(["mode", "", "memory", "of the L×L matrix"], rows)
