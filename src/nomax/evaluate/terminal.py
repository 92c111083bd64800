"""Shared parts of the commands in this folder: arguments, progress bars, tables, result files and error messages."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.box import SIMPLE_HEAD

from nomax._files import write_json
from nomax.console import Console, Progress, Table
from nomax.data import Source
from nomax.data.source import part

SEVERAL, HINT = "Run folders that `nomax train` wrote, saved models, or models on the hub.", "(at least one)"
Runs = tyro.conf.Positional[
    Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help=SEVERAL, help_behavior_hint=HINT)]
]
OneRun = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
BatchSize = Annotated[int, tyro.conf.arg(help="Images that pass through the model at a time.")]
Workers = Annotated[int, tyro.conf.arg(help="Processes that prepare images.")]
Device = Annotated[str | None, tyro.conf.arg(help="cpu, cuda, …; if not given, a GPU if there is one.")]
Output = Annotated[Path | None, tyro.conf.arg(help="Also write the results to this JSON file.")]

HEAD_BYTES = 1 << 20  # of a file, in which its mark is looked for

SMOKE = "A smoke run: these numbers mean nothing."  # the caption of a table


def add_bar(progress: Progress, description: str, total: int) -> Callable[[int], None]:
    """Add a bar, and return the function to call with the number just done."""
    task = progress.add_task(description, total=total)
    return lambda number: progress.advance(task, number)


def results_table(title: str, caption: str | None, text: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """Return a table without rows: columns of text, then columns of numbers, which are aligned to the right."""
    table = Table(box=SIMPLE_HEAD, title=title, caption=caption, title_style="bold", caption_justify="left")
    for name in text:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def failed(command: str, error: Exception | str) -> int:
    """Print an error that came after some of the work was done, and return its exit code."""
    print(f"nomax {command}: {error}", file=sys.stderr)
    return 1


def first_images(source: Source, classes: int, images: int) -> Source:
    """Return the first images of the first classes, enough for a smoke run."""
    places = [np.flatnonzero(source.labels == label)[:images] for label in range(classes)]
    return part(source, np.concatenate(places))


def default_folder(runs: Sequence[str]) -> Path:
    """Return the default folder for output files: that of the first run, or the current one if that is on the hub."""
    first = Path(runs[0]).expanduser()
    return first if first.is_dir() else Path()


def check_output(path: Path | None) -> None:
    """Raise now, rather than after the computation, if results cannot be written to this file."""
    if path is None:
        return
    if path.exists() and not path.is_file():
        raise ValueError(f"--output {path} is not a file: name one that may be written, or a new one.")
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not os.access(there, os.W_OK) or (there != path.absolute() and not there.is_dir()):
        raise ValueError(f"--output {path}: {there} cannot be written to.")


def check_replaceable(command: str, path: Path, mark: str) -> bool:
    """Return whether an earlier file of the command, known by its mark, is here; raise if it is any other file."""
    check_output(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if mark.encode() not in file.read(HEAD_BYTES):
            raise ValueError(
                f"{path} is there, and nomax {command} did not write it: move it away, or give another --output."
            )
    return True


def written(replaced: bool) -> str:
    """Return the beginning of the line that names the files written."""
    return "Written, in place of an earlier one:" if replaced else "Written:"


def write_results(command: str, path: Path | None, content: Any, console: Console) -> int:
    """Write results as JSON, if --output names a file, and return the exit code."""
    if path is None:
        return 0
    try:
        write_json(path, content)
    except OSError as error:
        return failed(command, f"--output {path} cannot be written: {error.strerror or error}.")
    console.print(f"Written: {path}")
    return 0
