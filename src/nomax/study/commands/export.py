"""`nomax study export`: the results of all runs as one table."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nomax.console import Console
from nomax.study import short
from nomax.study.publish import table, to_csv
from nomax.study.row import Row
from nomax.study.store import Store
from nomax.train import files


@dataclass(frozen=True)
class Options:
    """Write the results in a store, a line for each run, as CSV or Parquet by the ending of the file.

    Without a file, CSV goes to the terminal. The same numbers are in the store's results.sqlite (table runs).
    """

    file: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="[FILE]")]] = None
    """Ends in .csv or .parquet."""
    study: str | None = None
    """Only the runs of this study."""
    store: Path = Path("runs/study")
    """The store, as `nomax study --store` named it."""


def run(options: Options) -> int:
    """Return 0, or 2 if there is nothing to write or nowhere to write it."""
    try:
        if not (options.store / "runs").is_dir():
            raise FileNotFoundError(f"{options.store} is not a store: it has no folder runs. Give --store.")
        rows = Store(options.store).rows(study=None if options.study is None else short(options.study))
        if not rows:
            whose = "" if options.study is None else f" of the study {options.study}"
            raise ValueError(f"{options.store} has no finished run{whose}.")
        if options.file is None:
            print(to_csv(rows), end="")
            return 0
        export(rows, options.file)
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax study export: {error}", file=sys.stderr)
        return 2
    Console().print(f"{len(rows)} runs: {options.file}")
    return 0


def export(rows: Sequence[Row], path: Path) -> None:
    """Write a .csv or a .parquet file, complete or not at all."""
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"{path} must end in .csv or .parquet.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        files.write(path, to_csv(rows))
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("a .parquet file needs pyarrow: pip install pyarrow; or write a .csv") from error
    columns, records = table(rows)
    values: dict[str, list[Any]] = {name: [record[i] for record in records] for i, name in enumerate(columns)}
    # An empty column has no type of its own, and would have another one in the next file.
    schema = pyarrow.schema([(name, _kind(name, pyarrow)) for name in columns])
    with files.aside(path) as file:
        parquet.write_table(pyarrow.table(values, schema=schema), file)


def _kind(name: str, pyarrow: Any) -> Any:
    """The type of a column."""
    if name in ("qk_norm", "documents"):
        return pyarrow.bool_()
    texts = ("key", "status", "phi", "activation", "variant", "size", "gate", "data", "error")
    if name in (*texts, "task", "attention", "memory"):
        return pyarrow.string()
    whole = ("tokens", "seed", "steps", "batch_size", "macs", "diverged_at", "patch", "classes", "slots", "vocabulary")
    return pyarrow.int64() if name in whole else pyarrow.float64()  # FLOPs of large runs exceed 64 bits
