"""`nomax study merge`: join the stores of several machines."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nomax.console import Console
from nomax.study.engine.store import Store, merge

Folders = tyro.conf.Positional[
    Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER [FOLDER ...]", help_behavior_hint="(at least one)")]
]


@dataclass(frozen=True)
class Options:
    """Copy the finished runs of other stores into one, such as those that array jobs filled with --shard.

    A run that is in both is left as it is; two different outcomes of one run are an error that names both. Afterwards
    `nomax study NAME` finds the runs done, and draws the figures. Exit codes: 0 all well, 2 nothing was copied, for the
    reason that is told.
    """

    folders: Folders
    """Stores: the folders that `nomax study --store` named."""
    store: Path = Path("runs/study")
    """The store that gets the runs."""


def run(options: Options) -> int:
    """Return 0, or 2 if the stores cannot be joined, and then nothing has been copied."""
    try:
        if not options.folders:
            raise ValueError("name at least one store, the folder of `nomax study --store`.")
        for folder in options.folders:
            if not (folder / "runs").is_dir():
                raise FileNotFoundError(f"{folder} is not a store: it has no folder runs.")
            if folder.resolve() == options.store.resolve():
                raise ValueError(f"{folder} is the store itself; name others, or another --store.")
        store = Store(options.store)
        copied = merge(store, [Store(folder) for folder in options.folders])
    except (ValueError, OSError) as error:
        print(f"nomax study merge: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(
        f"{len(copied)} runs are new in {options.store}, which now has {len(store.finished())}.", soft_wrap=True
    )
    return 0
