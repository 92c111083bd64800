"""What every benchmark needs around its measurements: checks of its options, progress, a place for its results."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from nomax.bench.machine import load
from nomax.console import Console, Progress


def known(kind: str, name: str, table: Collection[str]) -> str:
    """Return a name that is in the table; otherwise an error says which one may have been meant."""
    if name in table:
        return name
    folded = {known.casefold(): known for known in table}
    nearest = get_close_matches(name.casefold(), folded, n=1, cutoff=0.4)
    hint = f"; did you mean {folded[nearest[0]]}?" if nearest else "."
    raise ValueError(f"there is no {kind} {name!r}{hint} There are: {', '.join(table)}.")


def check_load(limit: float) -> None:
    """Refuse to measure on a busy machine."""
    busy = load()
    if busy > limit:
        raise ValueError(
            f"the machine is busy: its load average is {busy:.2f}, the limit is {limit:g}. Wait until it "
            f"is quiet, or pass --load-limit {math.ceil(busy) + 1} to measure nevertheless; the load is recorded."
        )


def results_folder(output: Path | None) -> Path:
    """Where the results go: the folder asked for, or benchmarks/results where that exists, or here."""
    usual = Path("benchmarks/results")
    return output or (usual if usual.is_dir() else Path())


def progress_bar(console: Console) -> Progress:
    """A bar that shows what is being measured, how much is done and how long the rest may take."""
    columns = (BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Leave torch with the number of threads that it had before."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
