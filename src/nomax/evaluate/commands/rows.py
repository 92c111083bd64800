"""`nomax rows`: statistics of a model's attention weights, per layer and head, as a table and a figure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD

from nomax import data
from nomax.console import Console, Progress, Table
from nomax.data.batches import evaluation_batches
from nomax.evaluate import rows_figure
from nomax.evaluate.commands import terminal
from nomax.evaluate.commands.evaluate_text import corpus_of
from nomax.evaluate.rows import HeadRows, row_statistics, text_row_statistics
from nomax.evaluate.runs import Run, TextRun, load_mixed
from nomax.evaluate.sources import part
from nomax.train import text_data

COLUMNS = {
    "mean weight × L": "row_sum",
    "± row sums": "row_sum_sd",
    "zeros": "zeros",
    "empty rows": "empty",
    "entropy": "entropy",
    "effective keys": "effective_keys",
}


NAMES = {"encoder": "encoder", "decoder": "decoder", "source": "decoder, to the source"}


@dataclass(frozen=True)
class Options:
    """Measure how a model's attention weights are spread over the keys, layer by layer and head by head.

    mean weight × L: 1 in softmax, whose weights are 1/L in the mean; this is the mean row sum, too. zeros: weights that
    are exactly 0. empty rows: queries that give no key any weight. entropy: of the rows divided by their sums, in nats;
    not defined for a φ with negative weights. effective keys: (Σ|a|)² / Σa². L is the number of keys that a query sees;
    of text, where it differs, its mean is shown.

    Of a translation: the encoder's attention, the decoder's to what it has read of the reference, and the decoder's to
    the source. Of a language model: the decoder's. For example: nomax rows runs/translation --data new.en,new.es

    Writes rows.json (every head) and rows.svg (a figure) into the output folder.
    """

    runs: terminal.Runs
    """Run folders that `nomax train` wrote, saved models, or models of the hub."""
    data: str | None = None
    """Whose test images or texts to look at, also FILE,FILE or, for a language model, FILE; if not given, those that
    belong to each run's training data."""
    images: int = 32
    """How many images, spread evenly over the test split."""
    texts: int = 32
    """How many segments, or stretches of documents where the run learned from those, spread evenly."""
    heads: bool = False
    """Show every head in the table, not only the layers' means."""
    output: Path | None = None
    """The folder for rows.json and rows.svg; if not given, the folder of the first run."""
    device: str | None = None
    """cpu, cuda, …; if not given, a GPU if there is one."""
    smoke: bool = False
    """Try it on two images or texts."""


def run(options: Options) -> int:
    """Return 0, 2 if the options cannot be served, or 1 if the results cannot be written."""
    console = Console()
    try:
        for name in ("images", "texts"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} {getattr(options, name)} must be at least 1.")
        runs = load_mixed(options.runs, options.device)
        folder = terminal.place(options.runs) if options.output is None else options.output
        again = terminal.check_mine("rows", folder / "rows.json", '"row_sum_sd"')
        again |= terminal.check_mine("rows", folder / "rows.svg", rows_figure.TITLE)
        found: dict[str, list[HeadRows]] = {}
        with terminal.progress(console) as progress:
            for one in runs:
                if isinstance(one, TextRun):
                    found[one.title] = _measure_text(one, options, progress)
                else:
                    found[one.title] = _measure(one, options, progress)
    except terminal.EXPECTED as error:
        return terminal.tell("rows", error)
    for title, rows in found.items():
        console.print(_table(title, rows, options.heads))
    try:
        _write(folder, found, again, console)
    except OSError as error:
        terminal.tell("rows", OSError(f"{folder} cannot be written to: {error.strerror or error}. Give --output."))
        return 1
    return 0


def _measure(one: Run, options: Options, progress: Progress) -> list[HeadRows]:
    source = data.load(options.data or one.data, "test")
    places = _spread(2 if options.smoke else options.images, len(source))
    with evaluation_batches(part(source, places), one.transform, 8) as batches:
        images = (image for batch, _ in batches for image in batch)
        return row_statistics(one.model, images, terminal.advancing(progress, one.title, len(places)))


def _measure_text(one: TextRun, options: Options, progress: Progress) -> list[HeadRows]:
    corpus, _ = corpus_of(one, options.data)
    examples = text_data.examples(one.config, corpus, one.tokenizer)
    places = _spread(2 if options.smoke else options.texts, len(examples))
    chosen = (examples[place] for place in places)
    return text_row_statistics(one.model, chosen, terminal.advancing(progress, one.title, len(places)))


def _spread(number: int, of: int) -> npt.NDArray[np.int64]:
    """So many places, all of them if there are fewer, spread evenly."""
    return np.linspace(0, of - 1, min(number, of)).round().astype(np.int64)


def _write(folder: Path, found: dict[str, list[HeadRows]], again: bool, console: Console) -> None:
    terminal.write_json(folder / "rows.json", found)
    files = ["rows.json"]
    try:
        terminal.write(folder / "rows.svg", rows_figure.draw(found))
        files.append("rows.svg")
    except ImportError as error:
        console.print(f"No figure: {error}.")
    console.print(terminal.written(again), ", ".join(str(folder / name) for name in files))


def _table(title: str, rows: Sequence[HeadRows], every_head: bool) -> Table:
    parts = list(dict.fromkeys(row.part for row in rows))
    text, length = parts != [""], rows[0].length
    note = "" if every_head else "Means over the heads; --heads shows each."
    about = (
        "L: how many keys a query sees, in the mean."
        if text
        else f"L = {length}, 1/L = {1 / length:.3g}, log L = {math.log(length):.3g}."
    )
    caption = f"{about} {note}".rstrip()
    table = Table(box=SIMPLE_HEAD, title=f"\n{title}", caption=caption, title_style="bold", caption_justify="left")
    if text:
        table.add_column("attention", no_wrap=True)
    for name in ("layer", *(["head"] if every_head else []), *(["L"] if text else []), *COLUMNS):
        table.add_column(name, justify="right")
    for kind in parts:
        for layer in sorted({row.layer for row in rows if row.part == kind}):
            of_layer = [row for row in rows if (row.part, row.layer) == (kind, layer)]
            for group in [[row] for row in of_layer] if every_head else [of_layer]:
                place = [NAMES[kind]] if text else []
                place += [str(layer + 1), *([str(group[0].head + 1)] if every_head else [])]
                place += [f"{group[0].length:.1f}"] if text else []
                cells = [_cell(name, [getattr(row, name) for row in group]) for name in COLUMNS.values()]
                table.add_row(*place, *cells)
            if every_head:
                table.add_section()
        table.add_section()
    return table


def _cell(name: str, values: list[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    mean = sum(known) / len(known)
    if name in ("zeros", "empty"):
        return f"{mean:.1%}"
    return f"{mean:.3g}" if abs(mean) > 1e-6 else "0"  # what float32 leaves of nothing
