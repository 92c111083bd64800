"""`nomax study list`: the studies there are, and how long they take."""

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD

from nomax.console import Console, Table
from nomax.study import STUDIES, kind, load, text_setup
from nomax.study import setup as setups
from nomax.study.engine.publication import Publication
from nomax.study.engine.runner import Estimate, spell_time, unfinished, unique
from nomax.study.engine.store import Store


@dataclass(frozen=True)
class Options:
    """List the studies: what each asks, the claims it judges, how many runs it has, and how long they will take.

    Times are of one core, of the runs that are not in the store yet. `nomax study NAME --dry-run` lists all runs.
    """

    setup: str = "default"
    """How large: default, hour or smoke."""
    store: Path = Path("runs/study")
    """Folder of all runs; finished ones say how long others take."""


def run(options: Options) -> int:
    """Print the table."""
    try:
        setups.named(options.setup)
        store = Store(options.store, create=False)
        estimate = Estimate(store.results())
        table = Table(box=SIMPLE_HEAD)
        for column in ("study", "asks", "claims", "runs", "to do", "core time"):
            table.add_column(column, justify="right" if column in ("runs", "to do", "core time") else "left")
        for name in STUDIES:
            study = load(name)
            setup = (text_setup.SETUPS if kind(study) == "text" else setups.SETUPS)[options.setup]
            runs = unique(study.grid(setup, setup.seeds))
            Publication.read(Path("results", name)).lend(store, runs)
            left = unfinished(runs, store)
            seconds = sum(estimate.seconds(run) for run in left)
            claims = " ".join(study.CLAIMS)
            table.add_row(name, study.TITLE, claims, str(len(runs)), str(len(left)), spell_time(seconds))
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax study list: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(table)
    console.print(f"Set-up {options.setup}; {estimate.source}. To run one: nomax study NAME --setup {options.setup}")
    return 0
