"""What the commands of this folder share: progress, where results go, and how errors are told."""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from nomax.console import Console, Progress
from nomax.train.files import aside

Runs = tyro.conf.Positional[
    Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(at least one)")]
]

# What a user can set right, or a model that is broken: told in one line, without a traceback.
EXPECTED = (ValueError, TypeError, OSError, ImportError, FloatingPointError)


def progress(console: Console) -> Progress:
    """Bars that vanish when the work is done."""
    columns = (BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


def advancing(progress: Progress, description: str, total: int) -> Callable[[int], None]:
    """A new bar, as a function that is told how many more are done."""
    task = progress.add_task(description, total=total)
    return lambda number: progress.advance(task, number)


def tell(command: str, error: Exception) -> int:
    """Print what is wrong, and return the exit code for it."""
    print(f"nomax {command}: {error}", file=sys.stderr)
    return 2


def write(path: Path, content: bytes) -> None:
    """Write a file, complete or not at all, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with aside(path) as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    """Write plain data and dataclasses as JSON; a NaN, which JSON does not have, becomes null."""
    write(path, (json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def check_output(path: Path | None) -> None:
    """Raise now, rather than when all is computed, if results cannot be written to this file."""
    if path is None:
        return
    if path.exists() and not path.is_file():
        raise ValueError(f"--output {path} is not a file: name one that may be written, or a new one.")
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not os.access(there, os.W_OK) or (there != path.absolute() and not there.is_dir()):
        raise ValueError(f"--output {path}: {there} cannot be written to.")


def output(command: str, path: Path | None, content: Any, console: Console) -> int:
    """Write results as JSON, if a file was named for them, and return the exit code."""
    if path is None:
        return 0
    try:
        write_json(path, content)
    except OSError as error:
        tell(command, OSError(f"--output {path} cannot be written: {error.strerror or error}."))
        return 1
    console.print(f"Written: {path}")
    return 0


def _plain(content: Any) -> Any:
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        return _plain(dataclasses.asdict(content))
    if isinstance(content, dict):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return None if isinstance(content, float) and math.isnan(content) else content
