"""`nomax data list`: the named data sets, and which of them are here."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from rich import box

from nomax.console import Console, Table
from nomax.data.registry import HELP_LANGUAGES, IMAGES, TEXTS, Entry, cache_folder

NOT_HERE = "not here"


@dataclass(frozen=True)
class Options:
    """List the data sets that have a name: how large they are, their licences, and how to get those not here yet.

    The first table has images, the second text: pairs of segments and their translations. Besides these names, every
    command that reads images takes a folder (PATH/train/CLASS/*.jpg), shards (a folder of .tar files, or a pattern such
    as "train-{000000..000009}.tar"), torchvision:NAME and hf:NAME. `nomax data info` describes any of them.
    """


def run(options: Options) -> int:
    """Print the tables, and how to get what is not here. Return 0, or 2 if it is not known where data sets are."""
    console = Console()
    try:
        folder = cache_folder()
        entries: list[Entry] = [*IMAGES.values(), *TEXTS.values()]
        states = {entry.name: state(entry, folder) for entry in entries}
    except (ValueError, OSError) as error:
        print(f"nomax data list: {error}", file=sys.stderr)
        return 2
    console.print(_images(states), "", _texts(states), "", sep="\n")
    languages = ", ".join(HELP_LANGUAGES)
    console.print(fill(f"Besides help-de-en, help-SOURCE-TARGET takes any two of {languages}.", 79))
    if NOT_HERE in states.values():
        console.print("To get one that is not here: nomax data get NAME")
    for name, packages in {entry.name: missing(entry) for entry in IMAGES.values()}.items():
        if packages:
            console.print(f"To use {name}: pip install {' '.join(packages)}")
    console.print(f"Fetched data sets are kept in {folder}; the environment variable NOMAX_DATA changes that.")
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
