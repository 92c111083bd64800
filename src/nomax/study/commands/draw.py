"""`nomax study draw`: figures of results folders, drawn again."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nomax.console import Console
from nomax.study.engine.publish import redraw

Places = tyro.conf.Positional[
    Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[RESULTS ...]", help_behavior_hint="(default: results)")]
]


@dataclass(frozen=True)
class Options:
    """Draw the figures of results folders again, from the runs and verdicts in them: no store is needed.

    What else is there stays as it is, attention maps too, which need the models. For example:
    nomax study draw results/alpha results/scaling
    """

    results: Places = (Path("results"),)
    """Folders that `nomax study` wrote (each with a study.json), or folders that hold some."""


def run(options: Options) -> int:
    """Return 0, or 2 if something cannot be drawn."""
    console = Console()
    try:
        folders = [folder for place in options.results for folder in _inside(place)]
        for folder in folders:
            console.print(f"Written: {', '.join(map(str, redraw(folder)))}")
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax study draw: {error}", file=sys.stderr)
        return 2
    return 0


def _inside(place: Path) -> list[Path]:
    found = [place] if (place / "study.json").is_file() else sorted(file.parent for file in place.glob("*/study.json"))
    if not found:
        raise FileNotFoundError(f"{place} holds no study.json, nor does a folder in it: `nomax study NAME` writes one.")
    return found
