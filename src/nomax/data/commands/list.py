"""`nomax data list`: the named data sets, and which of them are here."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from nomax.data.registry import ENTRIES, Entry, TextEntry, cache_folder
from nomax.data.text.entries import TEXTS

NARROWEST = 106  # columns; below, names and commands would be cut off


@dataclass(frozen=True)
class Options:
    """List the data sets that have a name: how large they are, their licences, and how to get those not here yet.

    The first table has images, the second text: pairs of segments and their translations. Besides these names, every
    command that reads images takes a folder (PATH/train/CLASS/*.jpg), shards (a folder of .tar files, or a pattern such
    as "train-{000000..000009}.tar"), torchvision:NAME and hf:NAME. `nomax data info` describes any of them.
    """


def run(options: Options) -> int:
    """Print the table."""
    folder = cache_folder()
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("name", "train", "test", "classes", "download", "licence", "state"):
        numbers = title in ("train", "test", "classes", "download")
        table.add_column(title, justify="right" if numbers else "left", no_wrap=True)
    for entry in ENTRIES.values():
        table.add_row(
            entry.name,
            f"{entry.counts['train']:,}",
            f"{entry.counts['test']:,}",
            f"{entry.classes:,}",
            f"{entry.download / 1e6:,.0f} MB" if entry.packages else "–",
            entry.licence,
            state(entry, folder),
        )
    console = Console()
    console.width = max(console.width, NARROWEST)
    console.print(table)
    console.print(_texts(folder))
    console.print(
        f"Fetched data sets are kept in {folder}; the environment variable NOMAX_DATA changes that.", soft_wrap=True
    )
    return 0


def _texts(folder: Path) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("name", "train", "valid", "test", "documents", "download", "licence", "state"):
        numbers = title not in ("name", "licence", "state")
        table.add_column(title, justify="right" if numbers else "left", no_wrap=True)
    for entry in TEXTS.values():
        table.add_row(
            entry.name,
            *(f"{entry.counts[split]:,}" for split in ("train", "valid", "test")),
            f"{sum(entry.documents.values()):,}",
            f"{entry.download / 1e6:,.0f} MB",
            entry.licence,
            state(entry, folder),
        )
    return table


def state(entry: Entry | TextEntry, folder: Path) -> str:
    """Whether a data set is here, or how to get it."""
    if entry.packages:
        return "ready" if entry.is_prepared(folder / entry.name) else f"nomax data get {entry.name}"
    missing = [package for module, package in entry.requires.items() if find_spec(module) is None]
    if missing:
        return f"pip install {' '.join(missing)}"
    return "ready" if entry.requires else "bundled"
