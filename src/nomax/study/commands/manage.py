"""`nomax study list`, `draw`, `merge` and `export`: everything about studies except running them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.box import SIMPLE_HEAD

from nomax import _files
from nomax.console import Console, Table
from nomax.study import STUDIES, kind, load, short, text_setup
from nomax.study import setup as setups
from nomax.study.engine.publication import Publication, results_folders
from nomax.study.engine.publish import redraw, to_csv
from nomax.study.engine.runner import Estimate, spell_time, unfinished, unique
from nomax.study.engine.store import Store, merge

STORE = Path("runs/study")


@dataclass(frozen=True)
class List:
    """List the studies: the question of each, the claims it judges, how many runs it has, and how long they will take.

    Times are for one core, and cover only runs that are not in the store yet. `nomax study NAME --dry-run` lists all
    runs.
    """

    setup: str = "default"
    """Size of the studies: default, hour, day or smoke."""
    store: Path = STORE
    """Folder of all runs; finished ones are used to estimate the time of others."""

    def run(self) -> int:
        """Print the table."""
        return _attempt("list", self._list)

    def _list(self) -> str:
        setups.named(self.setup)
        store = Store(self.store, create=False)
        estimate = Estimate(store.results())
        table = Table(box=SIMPLE_HEAD)
        for column in ("study", "asks", "claims", "runs", "to do", "core time"):
            table.add_column(column, justify="right" if column in ("runs", "to do", "core time") else "left")
        for name in STUDIES:
            study = load(name)
            text = kind(study) == "text"
            changes = getattr(study, "CHANGES", None)
            setup = text_setup.SETUPS[self.setup] if text else setups.named(self.setup, changes)
            runs = unique(study.grid(setup, setup.seeds))
            Publication.read(Path("results", name)).lend(store, runs)
            left = unfinished(runs, store)
            seconds = sum(estimate.seconds(run) for run in left)
            claims = " ".join(study.CLAIMS)
            table.add_row(name, study.TITLE, claims, str(len(runs)), str(len(left)), spell_time(seconds))
        Console().print(table)
        return f"Set-up {self.setup}; {estimate.source}. To run one: nomax study NAME --setup {self.setup}"


@dataclass(frozen=True)
class Draw:
    """Redraw the figures of results folders from the runs and verdicts in them, without a store.

    Everything else in the folders stays as it is, including attention maps, which need the models. For example:
    nomax study draw results/alpha results/scaling
    """

    results: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[RESULTS ...]", help_behavior_hint="(default: results)")]
    ] = (Path("results"),)
    """Folders that `nomax study` wrote (each with a study.json), or folders that contain such folders."""

    def run(self) -> int:
        """Draw the figures; return 0, or 2 if something cannot be drawn."""
        return _attempt("draw", self._draw)

    def _draw(self) -> str:
        return "\n".join(f"Written: {', '.join(map(str, redraw(each)))}" for each in results_folders(self.results))


@dataclass(frozen=True)
class Merge:
    """Copy the finished runs of other stores into one, such as those that array jobs filled with --shard.

    A run that is in both is left as it is; two different outcomes of one run are an error that names both. Afterwards
    `nomax study NAME` finds the runs done, and draws the figures. Exit codes: 0 success, 2 nothing was copied, for the
    reason printed.
    """

    folders: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER [FOLDER ...]", help_behavior_hint="(at least one)")]
    ]
    """Stores to copy from: folders given to `nomax study --store`."""
    store: Path = STORE
    """Store to copy the runs into."""

    def run(self) -> int:
        """Merge the stores; return 0, or 2 if they cannot be merged, and then nothing has been copied."""
        return _attempt("merge", self._merge)

    def _merge(self) -> str:
        if not self.folders:
            raise ValueError("name at least one store, the folder of `nomax study --store`.")
        for folder in self.folders:
            _check_store(folder)
            if folder.resolve() == self.store.resolve():
                raise ValueError(f"{folder} is the store itself; name others, or another --store.")
        store = Store(self.store)
        copied = merge(store, [Store(folder) for folder in self.folders])
        return f"{len(copied)} runs are new in {self.store}, which now has {len(store.finished())}."


@dataclass(frozen=True)
class Export:
    """Write the results in a store as CSV, one line per run.

    Without a file, print them to the terminal.
    """

    file: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="[FILE]")]] = None
    """File to write, ending in .csv."""
    study: str | None = None
    """Export only the runs of this study."""
    store: Path = STORE
    """Store to read: the folder given to `nomax study --store`."""

    def run(self) -> int:
        """Write the results; return 0, or 2 if there is nothing to write or nowhere to write it."""
        return _attempt("export", self._export)

    def _export(self) -> str:
        _check_store(self.store)
        results = Store(self.store).results(study=None if self.study is None else short(self.study))
        if not results:
            whose = "" if self.study is None else f" of the study {self.study}"
            raise ValueError(f"{self.store} has no finished run{whose}.")
        if self.file is None:
            print(to_csv(results), end="")
            return ""
        if self.file.suffix == ".parquet":
            raise ValueError(f"{self.file}: Parquet is no longer written. Give a name that ends in .csv.")
        if self.file.suffix != ".csv":
            raise ValueError(f"{self.file} must end in .csv.")
        _files.write(self.file, to_csv(results))
        return f"{len(results)} runs: {self.file}"


def _attempt(command: str, work: Callable[[], str]) -> int:
    """Do the work of a command and print its message; return 0, or 2 after an error that the user can fix."""
    try:
        said = work()
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax study {command}: {error}", file=sys.stderr)
        return 2
    if said:
        Console().print(said, soft_wrap=True)
    return 0


def _check_store(folder: Path) -> None:
    if not (folder / "runs").is_dir():
        raise FileNotFoundError(f"{folder} is not a store: it has no folder runs. Give that of `nomax study --store`.")
