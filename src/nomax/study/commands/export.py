"""`nomax study export`: the results of all runs as one table."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nomax import _files
from nomax.console import Console
from nomax.study import short
from nomax.study.engine.publish import to_csv
from nomax.study.engine.result import Result
from nomax.study.engine.store import Store


@dataclass(frozen=True)
class Options:
    """Write the results in a store, a line for each run, as CSV.

    Without a file, it goes to the terminal.
    """

    file: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="[FILE]")]] = None
    """Ends in .csv."""
    study: str | None = None
    """Only the runs of this study."""
    store: Path = Path("runs/study")
    """The store, as `nomax study --store` named it."""


def run(options: Options) -> int:
    """Return 0, or 2 if there is nothing to write or nowhere to write it."""
    try:
        if not (options.store / "runs").is_dir():
            raise FileNotFoundError(f"{options.store} is not a store: it has no folder runs. Give --store.")
        rows = Store(options.store).results(study=None if options.study is None else short(options.study))
        if not rows:
            whose = "" if options.study is None else f" of the study {options.study}"
            raise ValueError(f"{options.store} has no finished run{whose}.")
        if options.file is not None:
            export(rows, options.file)
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax study export: {error}", file=sys.stderr)
        return 2
    if options.file is None:
        print(to_csv(rows), end="")
        return 0
    Console().print(f"{len(rows)} runs: {options.file}")
    return 0


def export(rows: Sequence[Result], path: Path) -> None:
    """Write a .csv file, complete or not at all."""
    if path.suffix == ".parquet":
        raise ValueError(f"{path}: Parquet is no longer written. Give a name that ends in .csv.")
    if path.suffix != ".csv":
        raise ValueError(f"{path} must end in .csv.")
    _files.write(path, to_csv(rows))
