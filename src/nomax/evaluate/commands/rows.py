"""`nomax rows`: statistics of a model's attention weights, per layer and head, as a table and a figure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD

from nomax import data
from nomax.console import Console, Progress, Table
from nomax.data.batches import evaluation_batches
from nomax.evaluate import rows_figure
from nomax.evaluate.commands import terminal
from nomax.evaluate.rows import HeadRows, row_statistics
from nomax.evaluate.runs import Run, load_all
from nomax.evaluate.sources import part

COLUMNS = {
    "mean weight × L": "row_sum",
    "± row sums": "row_sum_sd",
    "zeros": "zeros",
    "empty rows": "empty",
    "entropy": "entropy",
    "effective keys": "effective_keys",
}


@dataclass(frozen=True)
class Options:
    """Measure how a model's attention weights are spread over the keys, layer by layer and head by head.

    mean weight × L: 1 in softmax, whose weights are 1/L in the mean; this is the mean row sum, too. zeros: weights that
    are exactly 0. empty rows: queries that give no key any weight. entropy: of the rows divided by their sums, in nats;
    not defined for a φ with negative weights. effective keys: (Σ|a|)² / Σa². L is the number of keys.

    Writes rows.json (every head) and rows.svg (a figure) into the output folder.
    """

    runs: terminal.Runs
    """Run folders that `nomax train` wrote, saved models, or models of the hub."""
    data: str | None = None
    """Whose test images to look at; if not given, those that belong to each run's training data."""
    images: int = 32
    """How many images, spread evenly over the test split."""
    heads: bool = False
    """Show every head in the table, not only the layers' means."""
    output: Path = Path()
    """The folder for rows.json and rows.svg."""
    device: str | None = None
    """cpu, cuda, …; if not given, a GPU if there is one."""
    smoke: bool = False
    """Try it on two images."""


def run(options: Options) -> int:
    """Return 0, or 2 if the options cannot be served."""
    console = Console()
    try:
        if options.images < 1:
            raise ValueError(f"--images {options.images} must be at least 1.")
        runs = load_all(options.runs, options.device)
        found: dict[str, list[HeadRows]] = {}
        with terminal.progress(console) as progress:
            for one in runs:
                found[one.title] = _measure(one, options, progress)
    except terminal.EXPECTED as error:
        return terminal.tell("rows", error)
    for title, rows in found.items():
        console.print(_table(title, rows, options.heads))
    _write(options.output, found, console)
    return 0


def _measure(one: Run, options: Options, progress: Progress) -> list[HeadRows]:
    source = data.load(options.data or one.data, "test")
    number = min(2 if options.smoke else options.images, len(source))
    chosen = part(source, np.linspace(0, len(source) - 1, number).round().astype(np.int64))
    with evaluation_batches(chosen, one.transform, 8) as batches:
        images = (image for batch, _ in batches for image in batch)
        return row_statistics(one.model, images, terminal.advancing(progress, one.title, number))


def _write(folder: Path, found: dict[str, list[HeadRows]], console: Console) -> None:
    terminal.write_json(folder / "rows.json", found)
    files = ["rows.json"]
    try:
        terminal.write(folder / "rows.svg", rows_figure.draw(found))
        files.append("rows.svg")
    except ImportError as error:
        console.print(f"No figure: {error}.")
    console.print(f"Written: {', '.join(str(folder / name) for name in files)}")


def _table(title: str, rows: Sequence[HeadRows], every_head: bool) -> Table:
    length = rows[0].length
    note = "" if every_head else ". Means over the heads; --heads shows each."
    caption = f"L = {length}, 1/L = {1 / length:.3g}, log L = {math.log(length):.3g}{note}"
    table = Table(box=SIMPLE_HEAD, title=f"\n{title}", caption=caption, title_style="bold", caption_justify="left")
    table.add_column("layer", justify="right")
    if every_head:
        table.add_column("head", justify="right")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for layer in sorted({row.layer for row in rows}):
        of_layer = [row for row in rows if row.layer == layer]
        if every_head:
            for row in of_layer:
                cells = [_cell(name, [getattr(row, name)]) for name in COLUMNS.values()]
                table.add_row(str(layer + 1), str(row.head + 1), *cells)
            table.add_section()
        else:
            cells = [_cell(name, [getattr(row, name) for row in of_layer]) for name in COLUMNS.values()]
            table.add_row(str(layer + 1), *cells)
    return table


def _cell(name: str, values: list[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    mean = sum(known) / len(known)
    if name in ("zeros", "empty"):
        return f"{mean:.1%}"
    return f"{mean:.3g}" if abs(mean) > 1e-6 else "0"  # what float32 leaves of nothing
