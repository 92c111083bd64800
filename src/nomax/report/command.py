"""`nomax report`: what the studies found, as one HTML page."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nomax.console import Console
from nomax.evaluate import terminal
from nomax.report import page

Places = tyro.conf.Positional[
    Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[RESULTS ...]", help_behavior_hint="(default: results)")]
]


@dataclass(frozen=True)
class Options:
    """Write one HTML page of what the studies found: verdicts, figures and the tables behind them, training curves.

    The page needs no network and no other file; send it, print it, read it on a phone. The table of verdicts alone is
    written beside it, as Markdown. For example:
    nomax report results/alpha results/scaling --out mine.html
    """

    results: Places = (Path("results"),)
    """Folders that `nomax study` wrote (each with a study.json), or folders that hold some."""
    out: Path = Path("results/report.html")
    """The page."""


def run(options: Options) -> int:
    """Return 0, or 2 if the page cannot be written."""
    try:
        if options.out.is_dir():
            raise ValueError(f"--out {options.out} is a folder; give the name of a file, such as report.html in it.")
        written = page.write(options.results, options.out)
    except terminal.EXPECTED as error:
        return terminal.print_error("report", error)
    for name in written.missing:
        print(f"nomax report: {name} is missing; the page shows the rest.", file=sys.stderr)
    what = f"{_count(written.studies, 'study', 'studies')}, {_count(written.verdicts, 'verdict', 'verdicts')}"
    message = f"Written: {written.path} ({_size(written.size)}; {what}), {written.table}"
    Console().print(message)
    return 0


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"
