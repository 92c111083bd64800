"""What a run counts for in figures and verdicts, and runs put side by side."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

from nomax.study.row import AnyRow, ImageRow, Row
from nomax.study.setup import Setup
from nomax.study.statistics import Interval, contrast
from nomax.study.verdict import Outcome

Cell = TypeVar("Cell", bound=Hashable)

CHANCE_NOTE = "A run that diverged counts as chance and is marked with a cross; one that failed is left out."


def accuracy(row: ImageRow) -> float | None:
    """Among the label subset where the data has one, else on all test images; chance if the run diverged.

    None if it failed, which says nothing about the model: a file was missing, or the machine gave up.
    """
    if row.status == "diverged":
        return 1 / row.classes
    return row.accuracy if row.subset_accuracy is None else row.subset_accuracy


def ten_shot(row: ImageRow) -> float | None:
    """The mean 10-shot accuracy over the probes; 0 if the run diverged, since it has no features."""
    return 0.0 if row.status == "diverged" else row.ten_shot


def values(
    rows: Sequence[AnyRow],
    cell: Callable[[AnyRow], Cell],
    score: Callable[[AnyRow], float | None],
) -> dict[tuple[Cell, int], float]:
    """What each (cell, seed) counts for."""
    found = {}
    for row in rows:
        value = score(row)
        if value is not None:
            found[cell(row), row.seed] = value
    return found


def repeated(cells: Mapping[Cell, Sequence[float]]) -> dict[Cell, Sequence[float]]:
    """The cells that have at least two seeds; all of them where none has, for a mean without an interval."""
    found = {cell: entries for cell, entries in cells.items() if len(entries) > 1}
    return found or dict(cells)


def pooled(cells: Mapping[Cell, Sequence[float]]) -> Interval:
    """The mean over the cells that have at least two seeds, with its interval."""
    return contrast(list(repeated(cells).values()))


def over_settings(cells: Mapping[Cell, Sequence[float]]) -> Interval:
    """The mean over the cells, with an interval from how they differ: for cells whose values depend on each other."""
    found = contrast([[fmean(entries) for entries in cells.values()]] if cells else [])
    return replace(found, lacking="settings")


def seeds(rows: Sequence[Row]) -> list[int]:
    """The seeds there are."""
    return sorted({row.seed for row in rows})


def lengths(rows: Sequence[Row]) -> list[int]:
    """The sequence lengths there are, the shortest first."""
    return sorted({row.tokens for row in rows})


def scale(rows: Sequence[ImageRow], setup: Setup) -> str:
    """At which scale the runs speak: "pico, L = 16, 49, 196, 28-pixel fashion-mnist-small, 150 steps of 64 images"."""
    if not rows:
        return "no runs"
    sizes = ", ".join(dict.fromkeys(row.size for row in sorted(rows, key=lambda row: row.macs)))
    steps = ", ".join(f"{count:,}" for count in sorted({row.steps for row in rows}))
    batch = ", ".join(f"{count:,}" for count in sorted({row.batch_size for row in rows}))
    data = ", ".join(sorted({row.data for row in rows}))
    tokens = ", ".join(map(str, lengths(rows)))
    return f"{sizes}, L = {tokens}, {setup.image_size}-pixel {data}, {steps} steps of {batch} images"


def basis(rows: Sequence[Row], cells: Mapping[Cell, Sequence[float]], lost_counts: str = "chance") -> str:
    """What a number rests on: "6 settings, 18 pairs, seeds 0, 1, 2"."""
    count, pairs = len(repeated(cells)), sum(map(len, repeated(cells).values()))
    words = f"{count} setting{'s' * (count != 1)}, {pairs} pair{'s' * (pairs != 1)}"
    lost, failed = (sum(row.status == status for row in rows) for status in ("diverged", "failed"))
    ended = f", {lost} run{'s' * (lost != 1)} diverged and count{'s' * (lost == 1)} as {lost_counts}" if lost else ""
    if failed:
        ended += f", {failed} run{'s' * (failed != 1)} failed and {'are' if failed != 1 else 'is'} left out"
    listed = ", ".join(map(str, seeds(rows)))
    return f"{words}, seed{'s' * (len(seeds(rows)) != 1)} {listed or 'none'}{ended}"


def settled(outcome: Outcome, rows: Sequence[Row]) -> Outcome:
    """The outcome; but nothing is decided by runs most of which did not come to their end."""
    done = sum(row.status == "done" for row in rows)
    return outcome if 2 * done >= len(rows) else "undecided"


def percent(value: float) -> str:
    """An accuracy: "84.2 %"."""
    return f"{100 * value:.1f} %"
