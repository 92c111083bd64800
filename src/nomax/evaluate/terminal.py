"""Common parts of the commands of this folder: arguments, progress, where results go, and how errors are told."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from nomax._files import write_json
from nomax.console import Console, Progress, Table
from nomax.data import Source
from nomax.data.source import part

Runs = tyro.conf.Positional[
    Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(at least one)")]
]
OneRun = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]

BEGINNING = 1 << 20  # bytes of a file in which its mark is looked for

SMOKE = "A smoke run: these numbers mean nothing."  # the caption of a table

# What a user can set right, or a model that is broken: told in one line, without a traceback.
EXPECTED = (ValueError, TypeError, OSError, ImportError, FloatingPointError)


def progress(console: Console) -> Progress:
    """Return progress bars that vanish when the work is done."""
    columns = (BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


def add_bar(progress: Progress, description: str, total: int) -> Callable[[int], None]:
    """Add a bar, and return a function that is told how many more are done."""
    task = progress.add_task(description, total=total)
    return lambda number: progress.advance(task, number)


def results_table(title: str, caption: str | None) -> Table:
    """Return an empty table with a bold title and a caption on the left."""
    return Table(box=SIMPLE_HEAD, title=title, caption=caption, title_style="bold", caption_justify="left")


def print_error(command: str, error: Exception) -> int:
    """Print what is wrong, and return the exit code for it."""
    print(f"nomax {command}: {error}", file=sys.stderr)
    return 2


def first_images(source: Source, classes: int, images: int) -> Source:
    """Return the first images of the first classes: enough to try whether something works."""
    places = [np.flatnonzero(source.labels == label)[:images] for label in range(classes)]
    return part(source, np.concatenate(places))


def default_folder(runs: Sequence[str]) -> Path:
    """Return where files go that were given no place: the folder of the first run, or here if that is on the hub."""
    first = Path(runs[0]).expanduser()
    return first if first.is_dir() else Path()


def check_output(path: Path | None) -> None:
    """Raise now, rather than when all is computed, if results cannot be written to this file."""
    if path is None:
        return
    if path.exists() and not path.is_file():
        raise ValueError(f"--output {path} is not a file: name one that may be written, or a new one.")
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not os.access(there, os.W_OK) or (there != path.absolute() and not there.is_dir()):
        raise ValueError(f"--output {path}: {there} cannot be written to.")


def check_replaceable(command: str, path: Path, mark: str) -> bool:
    """Return True if an earlier file of the command is here, known by its mark; raise if it is any other file."""
    check_output(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if mark.encode() not in file.read(BEGINNING):
            raise ValueError(
                f"{path} is there, and nomax {command} did not write it: move it away, or give another --output."
            )
    return True


def written(replaced: bool) -> str:
    """Return the beginning of a line that says what was written."""
    return "Written, in place of an earlier one:" if replaced else "Written:"


def write_results(command: str, path: Path | None, content: Any, console: Console) -> int:
    """Write results as JSON, if a file was named for them, and return the exit code."""
    if path is None:
        return 0
    try:
        write_json(path, content)
    except OSError as error:
        print_error(command, OSError(f"--output {path} cannot be written: {error.strerror or error}."))
        return 1
    console.print(f"Written: {path}")
    return 0
