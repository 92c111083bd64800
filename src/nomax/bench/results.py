"""The results of a bench, as the plain data of its JSON file: checks, cases, peak memory, and goals with verdicts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class CannotMeasureError(Exception):
    """Something cannot be measured; the message is the reason, for the user to read."""


def counted(number: int, noun: str) -> str:
    """Return "1 thread" or "2 threads"."""
    return f"{number} {noun}{'s' * (number != 1)}"


@dataclass
class Check:
    """Our errors and those allowed. Checked before anything is timed: wrong results are not timed."""

    shape: str
    dtype: str
    name: str
    error: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    @property
    def right(self) -> bool:
        """Return whether something was compared and all errors are allowed; a NaN never is."""
        return not self.failure and bool(self.error) and not self._wrong()

    def _wrong(self) -> list[str]:
        return [name for name in self.error if not self.error[name] <= self.allowed[name]]

    def compare(
        self, mine: Tensors, plain: Tensors, exact: Tensors, *, roundings: int = 1, largest: bool = True
    ) -> None:
        """Compare tensors by name with float64's: our error may be twice that of plain PyTorch in the same precision.

        Where the plain result happens to be exact, `roundings` roundings of the value are allowed. Tensors may be
        compared in parts, with one call for each.
        largest: of errors and values the largest; else root mean squares, for deep models, whose largest error is
            chance where a score next to zero falls on the other side of ReLU.
        """
        precision = roundings * torch.finfo(getattr(torch, self.dtype)).eps
        size = _largest if largest else _root_mean_square
        for name, tensor in exact.items():
            mine_off, plain_off = (size(tensors[name] - tensor) for tensors in (mine, plain))
            self.bound(name, mine_off, max(2 * plain_off, precision * size(tensor)))

    def bound(self, name: str, error: float, allowed: float) -> None:
        """Record an error and the largest allowed."""
        # Unlike Python's max, numpy's keeps a NaN.
        self.error[name] = float(np.maximum(error, self.error.get(name, 0.0)))
        self.allowed[name] = float(np.maximum(allowed, self.allowed.get(name, 0.0)))

    def reason(self) -> str:
        """Say in words what is wrong."""
        if self.failure or not self.error:
            return self.failure or "nothing was compared"
        errors = ((name, self.error[name], self.allowed[name]) for name in self._wrong())
        return ", ".join(f"{name} off by {error:.2g} (allowed {allowed:.2g})" for name, error, allowed in errors)

    def __str__(self) -> str:
        return f"{self.shape}, {self.dtype}, {self.name}: {self.reason()}"


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


@dataclass
class Case:
    """One shape in one precision, mode and number of threads: the seconds of every participant, round after round."""

    shape: str
    dtype: str
    mode: str
    threads: int
    _: KW_ONLY
    ours: tuple[str, ...]  # the participants that are ours, the one that matters first
    samples: dict[str, list[float]] = field(default_factory=dict)
    flop: float = 0.0  # of one call
    read: int = 0  # bytes that one call reads, where this is what takes the time
    items: int = 0  # images or tokens of one call
    workers: int | None = None  # processes beside the main one
    peak_flop: float | None = None  # of one call of the peer "peak"; its bytes, if reading takes the time
    differences: dict[str, float] = field(default_factory=dict)  # of peers that compute the same, relative to ours
    unavailable: dict[str, str] = field(default_factory=dict)  # participants that could not run, and why

    def label(self, *, with_mode: bool = True) -> str:
        """Return the settings in words."""
        words = [self.shape, self.dtype, self.mode if with_mode else "", counted(self.threads, "thread")]
        words.append("" if self.workers is None else counted(self.workers, "worker"))
        return ", ".join(word for word in words if word)

    def best(self, name: str) -> float | None:
        """Return the best time of a participant in seconds; None if it did not take part."""
        return min(self.samples[name]) if self.samples.get(name) else None

    def speedup(self, ours: str, peer: str) -> float | None:
        """Return our speed-up over a peer: its seconds divided by ours."""
        mine, other = self.best(ours), self.best(peer)
        return other / mine if mine and other else None

    def gflops(self, name: str | None = None) -> float | None:
        """Return a participant's speed in 10⁹ floating point operations per second; ours, if none is named."""
        seconds = self.best(self.ours[0] if name is None else name)
        return self.flop / seconds / 1e9 if seconds and self.flop else None

    def per_second(self, name: str) -> float | None:
        """Return the images or tokens of a participant per second."""
        seconds = self.best(name)
        return self.items / seconds if seconds and self.items else None

    def peak_share(self, name: str | None = None) -> float | None:
        """Return a participant's speed as a share of the measured peak; ours, if none is named."""
        seconds, peak = self.best(self.ours[0] if name is None else name), self.best("peak")
        work = self.read or self.flop
        return (work / seconds) / (self.peak_flop / peak) if seconds and peak and self.peak_flop else None

    @contextmanager
    def attempting(self, name: str) -> Iterator[None]:
        """Let a peer try: record whatever it cannot do, without ending the run."""
        try:
            yield
        except CannotMeasureError as error:
            self.unavailable[name] = str(error)
        except Exception as error:
            self.unavailable[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    def plain(self) -> dict[str, Any]:
        """Return the samples and everything that follows from them."""
        ours = [name for name in self.samples if name in self.ours]
        peers = [name for name in self.samples if name not in (*ours, "peak")]
        computed = {
            "best": {name: self.best(name) for name in self.samples},
            "per_second": {name: self.per_second(name) for name in self.samples} if self.items else None,
            "gflops": self.gflops(),
            "peak_share": self.peak_share(),
            "speedup": {name: {peer: self.speedup(name, peer) for peer in peers} for name in ours},
        }
        return vars(self) | {"computed": computed}


@dataclass
class PeakMemory:
    """The bytes that one call added to its process at the peak, results included, or why they are unknown."""

    participant: str
    mode: str
    length: int
    bytes: int | None = None
    share: float | None = None  # of length × length float32 numbers, or of what a peer takes
    failure: str | None = None
    unit: str = "L"  # what length counts


@dataclass
class Results:
    """A whole run of a bench."""

    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str | None]
    started: str
    load_before: float
    load_after: float | None = None
    finished: str | None = None  # None: the run was stopped, and these are its results until then
    facts: dict[str, Any] = field(default_factory=dict)  # what a subject wants to be known besides
    checks: list[Check] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    memory: list[PeakMemory] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)

    @property
    def smoke(self) -> bool:
        """Return whether the sizes were toy sizes."""
        return bool(self.options.get("smoke"))

    def wrong(self) -> list[Check]:
        """Return the checks that failed."""
        return [check for check in self.checks if not check.right]

    def case(self, shape: str, dtype: str, mode: str, threads: int) -> Case | None:
        """Return the case measured with these settings, if there is one."""
        wanted = (shape, dtype, mode, threads)
        matches = (case for case in self.cases if (case.shape, case.dtype, case.mode, case.threads) == wanted)
        return next(matches, None)

    def plain(self) -> dict[str, Any]:
        """Return all of it, raw samples and computed numbers, for JSON."""
        checks = [vars(check) | {"right": check.right} for check in self.checks]
        return vars(self) | {"checks": checks, "cases": [case.plain() for case in self.cases]}


@dataclass(frozen=True)
class Goal:
    """A bound that every case it applies to should keep."""

    text: str
    quantity: Literal["speedup", "time", "peak share", "memory share", "seconds", "bytes", "per second"]
    bound: float
    mode: str
    peer: str = ""
    shapes: tuple[str, ...] = ()  # none named: all
    dtypes: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()  # the participants it speaks of; none named: each case's first

    @property
    def at_least(self) -> bool:
        """Return whether more is better."""
        return self.quantity in ("speedup", "peak share", "per second")

    def kept(self, value: float) -> bool:
        """Return whether a value keeps the bound."""
        return value >= self.bound if self.at_least else value <= self.bound

    def about(self, shape: str, dtype: str, mode: str) -> bool:
        """Return whether the goal applies to such cases."""
        return mode == self.mode and shape in (self.shapes or (shape,)) and dtype in (self.dtypes or (dtype,))

    def values(self, results: Results) -> Iterator[tuple[str, float]]:
        """Yield all values in a run that the goal applies to, each with its place."""
        if self.quantity in ("memory share", "bytes"):
            for memory in results.memory:
                value = memory.bytes if self.quantity == "bytes" else memory.share
                if memory.participant in self.ours and memory.mode == self.mode and value is not None:
                    yield f"{memory.participant}, {memory.unit} = {memory.length}", value
            return
        for case in results.cases:
            if self.about(case.shape, case.dtype, case.mode):
                for name in self.ours or case.ours[:1]:
                    if (value := self._value(case, name)) is not None:
                        yield case.label(with_mode=False) + ("" if name == case.ours[0] else f", {name}"), value

    def _value(self, case: Case, name: str) -> float | None:
        if self.quantity == "peak share":
            return case.peak_share()
        if self.quantity in ("seconds", "per second"):
            return case.best(name) if self.quantity == "seconds" else case.per_second(name)
        speedup = case.speedup(name, self.peer)
        return 1 / speedup if speedup and self.quantity == "time" else speedup

    def judge(self, results: Results) -> dict[str, Any]:
        """Return the worst value in a run, where it was, and whether it keeps the bound."""
        values = [] if results.smoke else list(self.values(results))
        outcome: dict[str, Any] = {
            "goal": self.text,
            "mode": self.mode,
            "quantity": self.quantity,
            "at_least" if self.at_least else "at_most": self.bound,
            "verdict": "not measured",
            "measured": len(values),
        }
        if values:
            where, worst = (min if self.at_least else max)(values, key=lambda pair: pair[1])
            kept = sum(self.kept(value) for _, value in values)
            verdict = "met" if kept == len(values) else "not met"
            outcome |= {"verdict": verdict, "worst": worst, "where": where, "kept": kept}
        return outcome
