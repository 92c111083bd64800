"""What `nomax bench data` has found: plain data that becomes the JSON file, and tables made of it."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from nomax.bench import photos
from nomax.bench.tables import times
from nomax.console import Table

GOAL = 1.2
LARGEST_DIFFERENCE = 0.01  # mean over pixels in [-1, 1]; two ways to resize may round differently
PEER = "torchvision"
PHOTOS, ARRAYS = "JPEG files", "32×32 arrays"
COLUMNS = ("input", "workers", "pipeline", "images/s", "per worker", f"vs {PEER}")


@dataclass
class Case:
    """One race: images a second of every participant, round after round."""

    what: str
    workers: int
    samples: dict[str, list[float]] = field(default_factory=dict)

    def best(self, name: str) -> float | None:
        """The best round of a participant, if it had one."""
        return max(self.samples[name]) if self.samples.get(name) else None

    def ratio(self, name: str) -> float | None:
        """How many times as fast as torchvision."""
        mine, other = self.best(name), self.best(PEER)
        return mine / other if mine and other else None


@dataclass
class Results:
    """A whole run."""

    options: dict[str, Any]
    machine: dict[str, object]
    versions: dict[str, str | None]
    started: str
    smoke: bool
    load_before: float
    mean_bytes: float = 0.0
    differences: dict[str, float] = field(default_factory=dict)  # from torchvision's images, at the same crops
    cases: list[Case] = field(default_factory=list)
    finished: str | None = None  # None: the run was stopped, and these are its results until then
    load_after: float | None = None

    def wrong(self) -> bool:
        """Whether our images are not what they should be."""
        return not all(value <= LARGEST_DIFFERENCE for value in self.differences.values())

    def verdict(self) -> str:
        """Whether the goal was reached wherever files were read."""
        found = [case.ratio(name) for case in self.cases if case.what == PHOTOS for name in ("folder", "shards")]
        ratios = [ratio for ratio in found if ratio]
        if self.smoke or not ratios:
            return "not measured"
        kept = sum(ratio >= GOAL for ratio in ratios)
        outcome = "met" if kept == len(ratios) else f"not met in {len(ratios) - kept} of {len(ratios)}"
        return f"{outcome}, worst {times(min(ratios))}"

    def json(self) -> str:
        """All of it, raw samples and computed numbers, as JSON."""
        plain = dataclasses.asdict(self) | {"goal": GOAL, "verdict": self.verdict()}
        for case, entry in zip(self.cases, plain["cases"], strict=True):
            entry["best"] = {name: case.best(name) for name in case.samples}
            entry["ratio"] = {name: case.ratio(name) for name in case.samples if name != PEER}
        return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def _rows(results: Results) -> list[list[str]]:
    rows = []
    for case in results.cases:
        for name in case.samples:
            best, ratio = case.best(name), case.ratio(name)
            if best is not None:
                each = f"{best / case.workers:,.0f}" if case.workers else "–"
                ours = "" if name == PEER else times(ratio)
                rows.append([case.what, str(case.workers), name, f"{best:,.0f}", each, ours])
    return rows


def table(results: Results) -> Table:
    """The results for the terminal."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(COLUMNS):
        shown.add_column(name, justify="left" if number in (0, 2) else "right", no_wrap=True)
    for row in _rows(results):
        shown.add_row(*row)
    return shown


def markdown(results: Results) -> str:
    """The table for the README, with what it was measured on."""
    parts = ["<!-- Written by `nomax bench data`; the raw samples are in data.json. -->"]
    if results.smoke:
        parts.append("**A smoke run: these numbers mean nothing.**")
    elif results.wrong():
        parts.append(f"**Our images differ from torchvision's ({results.differences}), and so no speed is given.**")
    elif not results.finished:
        parts.append("**The run was stopped: these are its results until then.**")
    options, software = results.options, results.versions
    size = f"{photos.WIDTH}×{photos.HEIGHT}"
    files = options["folder"] or f"{options['photos']} JPEGs of {size} pixels made from noise and shapes"
    parts.append(
        f"{results.machine['cpu']} ({results.machine['cores']} cores), nomax {software['nomax']}, "
        f"torch {software['torch']}, torchvision {software.get('torchvision')}, Pillow {software.get('pillow')}, "
        f"{results.started[:10]}. Files: {files}, {results.mean_bytes / 1e3:.0f} kB on average, read from memory; "
        f"decoded whole, cropped as RandomResizedCrop does to {options['size']} pixels, flipped, scaled to [-1, 1], in "
        f"batches of {options['batch_size']}. torchvision: ImageFolder and DataLoader. 0 workers: one process does it "
        "all, in one thread. With workers, ours send bytes, and the main process makes floats of them. "
        f"Best of {options['rounds']} interleaved rounds."
    )
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *_rows(results))]
    parts.append("\n".join(lines))
    parts.append(f"Goal: at least {GOAL}× from files, with every number of workers: {results.verdict()}.")
    return "\n\n".join(parts) + "\n"
