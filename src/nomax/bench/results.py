"""What a run has found so far: plain data that becomes the JSON file, and the numbers computed from it."""

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nomax.bench.gate import Gate
from nomax.bench.memory import Memory
from nomax.bench.shapes import Shape

OURS = "relu/L"
UNCAUSAL = "relu/L, not causal"


@dataclass
class Case:
    """One shape in one precision, mode and number of threads: the seconds of every participant, round after round."""

    shape: str
    dtype: str
    mode: str
    threads: int
    flop: float
    samples: dict[str, list[float]]
    peak_flop: float | None = None
    differences: dict[str, float] = field(default_factory=dict)  # of peers that compute relu/L, relative to ours
    unavailable: dict[str, str] = field(default_factory=dict)  # participants that could not run, and why
    ours: tuple[str, ...] = ()  # which participants are ours; none named: those that end with "/L"

    def best(self, name: str) -> float | None:
        """The least seconds of a participant; None if it did not take part."""
        return min(self.samples[name]) if self.samples.get(name) else None

    def speedup(self, ours: str, peer: str) -> float | None:
        """How many times as fast as the peer: its seconds divided by ours."""
        mine, other = self.best(ours), self.best(peer)
        return other / mine if mine and other else None

    def gflops(self, name: str = OURS) -> float | None:
        """10⁹ floating point operations per second."""
        seconds = self.best(name)
        return self.flop / seconds / 1e9 if seconds else None

    def peak_share(self, name: str = OURS) -> float | None:
        """Our speed as a share of the core's measured peak."""
        seconds, peak = self.best(name), self.best("peak")
        return (self.flop / seconds) / (self.peak_flop / peak) if seconds and peak and self.peak_flop else None

    def computed(self) -> dict[str, Any]:
        """Everything that follows from the samples."""
        phis = [name for name in self.samples if name in self.ours or (not self.ours and name.endswith("/L"))]
        peers = [name for name in self.samples if name not in (*phis, "peak")]
        return {
            "best": {name: self.best(name) for name in self.samples},
            "gflops": self.gflops(),
            "peak_share": self.peak_share(),
            "speedup": {phi: {peer: self.speedup(phi, peer) for peer in peers} for phi in phis},
        }


@dataclass
class Results:
    """A whole run."""

    options: dict[str, Any]
    machine: dict[str, object]
    versions: dict[str, str | None]
    shapes: list[Shape]
    started: str
    smoke: bool
    load_before: float
    load_after: float | None = None
    finished: str | None = None  # None: the run was stopped, and these are its results until then
    gates: list[Gate] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)

    def red(self) -> list[Gate]:
        """What was found wrong."""
        return [gate for gate in self.gates if not gate.green]

    def case(self, shape: str, dtype: str, mode: str, threads: int) -> Case | None:
        """The case measured with these settings, if there is one."""
        wanted = (shape, dtype, mode, threads)
        found = (case for case in self.cases if (case.shape, case.dtype, case.mode, case.threads) == wanted)
        return next(found, None)

    def json(self) -> str:
        """All of it, raw samples and computed numbers, as JSON."""
        plain = dataclasses.asdict(self)
        for case, entry in zip(self.cases, plain["cases"], strict=True):
            entry["computed"] = case.computed()
        return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file that is complete or not there: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as file:
        aside = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # a temporary file is for its owner only
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
