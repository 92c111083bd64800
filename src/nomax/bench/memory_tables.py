"""The results of `nomax bench memory` as tables, on the terminal and in Markdown."""

from nomax.bench import tables
from nomax.bench.conduct import ending, heading
from nomax.bench.memory_subjects import OURS, PLAIN
from nomax.bench.results import Case, Results
from nomax.console import Table

COLUMNS = ("time", "GFLOP/s", "vs plain")


def _row(case: Case) -> list[str]:
    """Our time, our speed, and the plain version's time as a multiple of ours."""
    speed = case.gflops(OURS)
    ratio = tables.times(case.speedup(OURS, PLAIN))
    return [tables.seconds(case.best(OURS)), f"{speed:.0f}" if speed else "–", ratio]


def _memory_rows(results: Results, phi: str | None = None) -> list[list[str]]:
    rows = []
    for entry in results.memory:
        if phi is None or entry.participant.partition(",")[0] == phi:
            size = f"{entry.bytes / 2**20:,.0f} MiB" if entry.bytes is not None else entry.failure or "–"
            share = f"{entry.share:.1%}" if entry.share is not None else ""
            rows.append([entry.participant, f"{entry.length:,}", size, share])
    return rows


def table(phi: str, results: Results) -> Table:
    """All that was measured of one φ."""
    found = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title=f"\n{phi}")
    for column in ("slots and tokens", "mode", "thr.", *COLUMNS):
        found.add_column(column, justify="left" if column in ("slots and tokens", "mode") else "right", no_wrap=True)
    for case in results.cases:
        kind, _, sizes = case.shape.partition(", ")
        if kind == phi:
            found.add_row(sizes, case.mode, str(case.threads), *_row(case))
    for participant, tokens, size, share in _memory_rows(results, phi):
        found.add_row(f"peak memory, {participant}, {tokens} tokens", "training", "1", size, "", share)
    return found


def markdown(results: Results) -> str:
    """The tables for the README, with what they were measured on."""
    parts = heading("memory", results)
    about, software = results.machine, results.versions
    parts.append(
        f"nn.Memory, dim {results.options['dim']}, float32, against `φ(x @ keys.T) @ values` in PyTorch, on "
        f"{about['cpu']} ({about['cores']} cores), nomax {software['nomax']}, torch {software['torch']}, "
        f"{results.started[:10]}. “vs” is the plain version's time divided by ours, each the best of "
        f"{results.options['rounds']} interleaved rounds (three for calls of over 2 s, one of over 8 s). Training is "
        "forward and backward; GFLOP/s counts the six products that the plain version needs, also where ours computes "
        "a seventh instead of keeping the weights."
    )
    rows = [[case.shape, case.mode, str(case.threads), *_row(case)] for case in results.cases]
    parts.append(tables.markdown_table(["", "mode", "threads", *COLUMNS], rows))
    if memory := _memory_rows(results):
        title = "**Peak extra memory** of a training call, results and gradients included\n\n"
        parts.append(title + tables.markdown_table(["", "tokens", "memory", "of plain"], memory))
    return "\n\n".join([*parts, *ending(results)]) + "\n"
