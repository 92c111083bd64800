"""`nomax rows`: tabulate and plot statistics of attention weights by layer and head."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax import _figures
from nomax._files import write, write_json
from nomax.console import Console, Progress, Table, counting
from nomax.data import source as sources
from nomax.data.images.batches import evaluation_batches
from nomax.evaluate import terminal
from nomax.evaluate.attention_weights import HeadRows, row_statistics
from nomax.evaluate.runs import TrainedImageModel, TrainedTextModel, load_all, load_any
from nomax.train.text.data import examples

COLUMNS = {
    "mean weight × L": "row_sum",
    "± row sums": "row_sum_sd",
    "zeros": "zeros",
    "empty rows": "empty",
    "entropy": "entropy",
    "effective keys": "effective_keys",
}
TITLE = "How attention weights are spread over the keys"
PANELS = {
    "row_sum": "mean weight × L\n(= mean row sum)",
    "row_sum_sd": "standard deviation\nof row sums",
    "zeros": "share of exact zeros",
    "entropy": "entropy of a row, nats",
    "effective_keys": "effective number of keys",
}
NAMES = {"encoder": "encoder", "decoder": "decoder", "source": "decoder, to the source"}


@dataclass(frozen=True)
class Options:
    """Measure how a model's attention weights are spread over the keys, layer by layer and head by head.

    mean weight × L: 1 for softmax, whose mean weight is 1/L; it equals the mean row sum. zeros: weights that are
    exactly 0. empty rows: queries without any nonzero weight. entropy: of rows divided by their sums, in nats;
    undefined for a φ with negative weights. effective keys: (Σ|a|)² / Σa². L is the number of keys that a query sees;
    in text it varies, and its mean is shown.

    A translation model has the encoder's attention, the decoder's to the reference so far, and the decoder's to the
    source; a language model has the decoder's. For example: nomax rows runs/translation --data new.en,new.es

    Writes rows.json (every head) and rows.svg (a figure) into the output folder.
    """

    runs: terminal.Runs
    data: str | None = None
    """The data set whose test images or texts to use, also FILE,FILE or, for a language model, FILE; if not given, each
    run's own."""
    images: int = 32
    """Number of images, spread evenly over the test split."""
    texts: int = 32
    """Number of segments, or of stretches of documents for a run of documents, spread evenly."""
    heads: bool = False
    """Show every head in the table, not just the means of layers."""
    output: Path | None = None
    """The folder for rows.json and rows.svg; if not given, the folder of the first run."""
    device: terminal.Device = None
    smoke: bool = False
    """Try it on two images or texts."""


def run(options: Options) -> int:
    """Print the tables and write the files. Return 0, or 1 if they cannot be written."""
    console = Console()
    for name, number in {"images": options.images, "texts": options.texts}.items():
        if number < 1:
            raise ValueError(f"--{name} {number} must be at least 1.")
    loaded = load_all(options.runs, options.device, load_any)
    folder = terminal.default_folder(options.runs) if options.output is None else options.output
    replaced = terminal.check_replaceable("rows", folder / "rows.json", '"row_sum_sd"')
    replaced |= terminal.check_replaceable("rows", folder / "rows.svg", TITLE)
    with counting(console) as progress:
        statistics = {trained.title: _measure(trained, options, progress) for trained in loaded}
    for title, rows in statistics.items():
        console.print(_table(title, rows, options.heads))
    try:
        _write(folder, statistics, replaced, console)
    except OSError as error:
        return terminal.failed("rows", f"{folder} cannot be written to: {error.strerror or error}. Give --output.")
    return 0


def _measure(trained: TrainedImageModel | TrainedTextModel, options: Options, progress: Progress) -> list[HeadRows]:
    if isinstance(trained, TrainedTextModel):
        texts = examples(trained.config, trained.corpus(options.data)[0], trained.tokenizer)
        places = _spread(2 if options.smoke else options.texts, len(texts))
        report = terminal.add_bar(progress, trained.title, len(places))
        return row_statistics(trained.model, (texts[place] for place in places), report)
    source = trained.images("test", options.data)
    places = _spread(2 if options.smoke else options.images, len(source))
    report = terminal.add_bar(progress, trained.title, len(places))
    with evaluation_batches(sources.part(source, places), trained.transform, 8) as batches:
        return row_statistics(trained.model, (image for images, _ in batches for image in images), report)


def _spread(number: int, total: int) -> npt.NDArray[np.int64]:
    """Return the indices of `number` of `total` things, evenly spread, or of all if there are fewer."""
    return np.linspace(0, total - 1, min(number, total)).round().astype(np.int64)


def _write(folder: Path, statistics: dict[str, list[HeadRows]], replaced: bool, console: Console) -> None:
    write_json(folder / "rows.json", statistics)
    files = ["rows.json"]
    try:
        write(folder / "rows.svg", draw(statistics))
        files.append("rows.svg")
    except ImportError as error:
        console.print(f"No figure: {error}.")
    console.print(terminal.written(replaced), ", ".join(str(folder / name) for name in files))


def _table(title: str, rows: Sequence[HeadRows], every_head: bool) -> Table:
    text, length = rows[0].part != "", rows[0].length
    about = f"L = {length}, 1/L = {1 / length:.3g}, log L = {math.log(length):.3g}."
    about = "L: the mean number of keys that a query sees." if text else about
    note = "" if every_head else " Means over the heads; --heads shows each."
    numbers = ("layer", *(["head"] if every_head else []), *(["L"] if text else []), *COLUMNS)
    table = terminal.results_table(f"\n{title}", f"{about}{note}", ["attention"] if text else [], numbers)
    for part, layer in dict.fromkeys((row.part, row.layer) for row in rows):
        of_layer = [row for row in rows if (row.part, row.layer) == (part, layer)]
        for group in [[row] for row in of_layer] if every_head else [of_layer]:
            place = [NAMES[part]] if text else []
            place += [str(layer + 1), *([str(group[0].head + 1)] if every_head else [])]
            place += [f"{group[0].length:.1f}"] if text else []
            table.add_row(*place, *(_cell(name, [getattr(row, name) for row in group]) for name in COLUMNS.values()))
        if every_head or layer == max(row.layer for row in rows if row.part == part):
            table.add_section()
    return table


def _cell(name: str, values: list[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    mean = sum(known) / len(known)
    if name in ("zeros", "empty"):
        return f"{mean:.1%}"
    return f"{mean:.3g}" if abs(mean) > 1e-6 else "0"  # float32's rounding of zero


def draw(statistics: Mapping[str, Sequence[HeadRows]], suffix: str = ".svg") -> bytes:
    """Draw the statistics of runs, by title: one panel each, layers from left to right, heads as points."""
    matplotlib = _figures.require()
    from matplotlib.figure import Figure

    lines = _lines(statistics)
    with matplotlib.rc_context(_figures.STYLE):
        figure = Figure(figsize=(11, 3.2), layout="constrained")
        axes = figure.subplots(1, len(PANELS), squeeze=False)[0]
        for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
            _panel(axis, lines, name)
            axis.set_title(label, fontsize=9.5)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
        figure.suptitle(TITLE, fontsize=11.5, fontweight="bold")
        return _figures.rendered(figure, suffix, TITLE, _describe(lines))


def _lines(statistics: Mapping[str, Sequence[HeadRows]]) -> dict[str, Sequence[HeadRows]]:
    """Return a line of the figure for each run, or for each part of a run with several."""
    lines: dict[str, Sequence[HeadRows]] = {}
    for title, rows in statistics.items():
        parts = list(dict.fromkeys(row.part for row in rows))
        for part in parts:
            label = title if len(parts) == 1 else f"{title}, {part}"
            lines[label] = [row for row in rows if row.part == part]
    return lines


def _panel(axis: Any, lines: Mapping[str, Sequence[HeadRows]], name: str) -> None:
    layers = 1 + max(row.layer for rows in lines.values() for row in rows)
    for number, (title, rows) in enumerate(lines.items()):
        colour = _figures.colour_of(title).light
        marker = _figures.MARKERS[number % len(_figures.MARKERS)]  # since runs with the same φ share its colour
        # Side by side, so that the points of two runs do not hide each other.
        aside = 0.3 * ((number + 0.5) / len(lines) - 0.5) * (len(lines) > 1)
        x = np.array([row.layer + 1 + aside for row in rows])
        y = np.array([getattr(row, name) for row in rows])
        axis.plot(x, y, marker, ms=3.5, alpha=0.55, mew=0, color=colour)
        means = [(layer + 1 + aside, _mean(rows, name, layer)) for layer in sorted({row.layer for row in rows})]
        axis.plot(*zip(*means, strict=True), "-", marker=marker, ms=5.5, lw=1.4, color=colour, label=title)
    if name == "row_sum":
        axis.axhline(1, color=_figures.INK.light, lw=0.8, ls=":")
    axis.set_xlabel("layer")
    axis.set_xticks(range(1, layers + 1, math.ceil(layers / 6)))
    axis.set_xlim(0.5, layers + 0.5)
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]) if name == "row_sum" else 0)
    axis.grid(axis="y")
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    if not any(math.isfinite(getattr(row, name)) for rows in lines.values() for row in rows):
        axis.text(0.5, 0.5, "not defined", transform=axis.transAxes, ha="center", color=_figures.SOFT.light)


def _mean(rows: Sequence[HeadRows], name: str, layer: int) -> float:
    """Return a statistic's mean over the heads of a layer."""
    return float(np.mean([getattr(row, name) for row in rows if row.layer == layer]))


def _describe(lines: Mapping[str, Sequence[HeadRows]]) -> str:
    """Describe the figure in words."""
    sentences = ["Means over the heads of each layer, from the first to the last."]
    for title, rows in lines.items():
        layers = sorted({row.layer for row in rows})
        for name, label in PANELS.items():
            values = ", ".join(_short(_mean(rows, name, layer)) for layer in layers)
            sentences.append(f"{title}, {' '.join(label.split())}: {values}.")
    return " ".join(sentences)


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not defined"
