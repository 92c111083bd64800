"""A results folder as it was published: its runs count as done, wherever their folders are.

So a fresh clone can add seeds to committed results without repeating their runs.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from nomax._files import read_json
from nomax.study import STUDIES
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.result import Result
from nomax.study.engine.store import Store
from nomax.train.vision.diagnostics import FILE as DIAGNOSTICS

ADVICE = "Restore it, or give --fresh to do all of its runs again."
POINTS = 100  # of the steps at which a run looked into itself
DIGITS = 5
LISTS = ("runs", "curves", "diagnostics")

Entries = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Publication:
    """The content of a results folder, by the keys of its runs; empty if there is no such folder."""

    about: Mapping[str, Any] = field(default_factory=dict)
    """study.json."""
    results: Mapping[str, Result] = field(default_factory=dict)
    curves: Entries = field(default_factory=dict)
    diagnostics: Entries = field(default_factory=dict)
    lenders: tuple[Mapping[str, Any], ...] = ()
    """study.json of the other studies whose runs are among these."""

    @staticmethod
    def read(folder: Path) -> "Publication":
        """Read a results folder; a ValueError names the file that is damaged, and the way out."""
        if not (folder / "study.json").is_file():
            return Publication()
        try:
            runs, *entries = (_content(folder / f"{name}.json") for name in LISTS)
            about = read_json(folder / "study.json", ADVICE)
            results = {result.key: result for result in map(Result.from_dict, runs) if result.status != "failed"}
            curves, diagnostics = ({entry["key"]: entry for entry in some} for some in entries)
            datetime.fromisoformat(about.get("finished", "2000-01-01"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = (
                str(error) if ADVICE in str(error) else f"{folder} is not what a study writes: {error!r}. {ADVICE}"
            )
            raise ValueError(message) from None
        return Publication(about, results, curves, diagnostics)

    def joined(self, others: Iterable["Publication"], runs: Iterable[Experiment]) -> "Publication":
        """Return this with those of the runs that other studies have published; its own come first."""
        joined, wanted = self, {run.key for run in runs}
        for other in others:
            if new := wanted & other.results.keys() - joined.results.keys():
                joined = Publication(
                    self.about,
                    {**joined.results, **{key: other.results[key] for key in new}},
                    {**joined.curves, **{key: entry for key, entry in other.curves.items() if key in new}},
                    {**joined.diagnostics, **{key: entry for key, entry in other.diagnostics.items() if key in new}},
                    (*joined.lenders, other.about),
                )
        return joined

    def lend(self, store: Store, runs: Iterable[Experiment]) -> int:
        """Lend a store the published results that it lacks; return how many of these runs it got."""
        wanted = {run.key for run in runs} & self.results.keys()
        lent = {key: self.results[key] for key in sorted(wanted) if store.outcome(key) is None}
        store.published |= lent
        return len(lent)


def neighbours(folder: Path) -> dict[Path, Publication]:
    """Read the results folders beside this one."""
    places = [file.parent for file in sorted(folder.parent.glob("*/study.json"))]
    return {place: Publication.read(place) for place in places if place.resolve() != folder.resolve()}


def _content(path: Path) -> Any:
    return read_json(path, ADVICE) if path.exists() else []


def results_folders(places: Iterable[Path]) -> list[Path]:
    """Find the results folders that these paths name, each once; a path may be one, or a folder that holds some.

    Those that one folder holds come in the order of the papers; other studies follow by name.
    """
    order = {name: place for place, name in enumerate(STUDIES)}
    folders: dict[Path, Path] = {}
    for place in places:
        inside = [place] if (place / "study.json").is_file() else [file.parent for file in place.glob("*/study.json")]
        if not inside:
            what = "holds no study.json, nor does a folder in it" if place.is_dir() else "is no folder"
            raise FileNotFoundError(f"{place} {what}. `nomax study NAME` writes such a folder to results/NAME.")
        inside.sort(key=lambda folder: (order.get(folder.name, len(order)), folder.name))
        folders |= {folder.resolve(): folder for folder in inside}
    return list(folders.values())


def read_diagnostics(folder: Path) -> list[dict[str, Any]]:
    """Return the diagnostics of a run at no more than POINTS steps, spread evenly from the first to the last.

    Of a step that an interrupted run repeated, the last record counts. An incomplete line, as a kill leaves it, is
    skipped.
    """
    try:
        lines = (folder / DIAGNOSTICS).read_bytes().splitlines()
    except OSError:
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            point = json.loads(line)
            by_step[int(point["step"])] = point
        except (ValueError, TypeError, KeyError):
            continue
    points = [by_step[step] for step in sorted(by_step)]
    last = len(points) - 1
    places = range(len(points)) if last < POINTS else [round(n * last / (POINTS - 1)) for n in range(POINTS)]
    return [_rounded(points[place]) for place in places]


def diagnostics_json(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return diagnostics.json: a line for each run, since the points are many."""
    lines = (json.dumps(entry, ensure_ascii=False, separators=(",", ":"), allow_nan=False) for entry in entries)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value
