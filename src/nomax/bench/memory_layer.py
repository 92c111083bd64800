"""`nomax bench memory`: the memory of many slots against the three lines that one would write, in time and in bytes."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import RenderableType

from nomax.bench.conduct import conduct
from nomax.bench.frame import check_load, now
from nomax.bench.goals import Goal
from nomax.bench.machine import load, machine, versions
from nomax.bench.memory_subjects import (
    FEW,
    MANY,
    MODES,
    OURS,
    PLAIN,
    TOKENS,
    TRAINING,
    call,
    check,
    layers,
    measured,
    shape,
)
from nomax.bench.memory_tables import markdown, table
from nomax.bench.race import race
from nomax.bench.results import Case, Results
from nomax.console import Progress

Kind = Literal["relu", "softmax"]
PHIS: tuple[Kind, ...] = ("relu", "softmax")
TITLE = "nn.Memory: speed and memory relative to three lines of PyTorch"


def _shapes(slots: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(shape(phi, count, tokens) for phi in PHIS for count in slots for tokens in TOKENS)


GOALS = (
    *(Goal("65,536 slots, time", "speedup", 0.9, mode, _shapes((MANY,)), phis=(OURS,), peer=PLAIN) for mode in MODES),
    *(Goal("few slots, time", "speedup", 0.95, mode, _shapes(FEW), phis=(OURS,), peer=PLAIN) for mode in MODES),
    Goal("65,536 slots, peak memory", "memory share", 0.25, TRAINING, phis=PHIS),
)


@dataclass(frozen=True)
class Options:
    """Measure nn.Memory, a feed-forward layer of learned slots, against plain PyTorch: φ(x @ keys.T) @ values.

    With 65,536 slots the plain version holds a weight for every token and slot, several times over in training; ours
    computes blocks of them. Few slots show that nothing is lost where nothing is to be gained. Training is forward and
    backward, with gradients of x, keys and values. Peak memory is what a training call adds to a process of its own.

    Correctness comes first: a layer that is wrong by more than twice the error of the plain version is not timed, and
    the exit code is 1. Then both take turns, round after round, and the best round of each counts.

    Writes memory.json (every sample, machine, versions), memory.md (tables) and memory.svg (a figure). Ctrl-C stops it
    and keeps what was measured.
    """

    slots: tuple[int, ...] = (*FEW, MANY)
    """Numbers of slots, one after the other."""
    tokens: tuple[int, ...] = TOKENS
    """Numbers of tokens in a call."""
    phis: tuple[Kind, ...] = PHIS
    """How scores become weights."""
    modes: tuple[Literal["inference", "training"], ...] = MODES
    """What is done with the tokens."""
    dim: int = 256
    """Width of tokens, keys and values."""
    threads: tuple[int, ...] = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    """Numbers of threads to measure with, one after the other."""
    rounds: int = 5
    """Samples of both; the best counts. Calls of over 2 seconds get three, of over 8 one."""
    output: Path | None = None
    """Folder for the results; if not given, benchmarks/results where that exists, else the current folder."""
    load_limit: float = 0.5
    """Refuse to start while the machine is busier than this (its load average over the last minute)."""
    smoke: bool = False
    """Try it on toy sizes, with the first number of threads, in seconds: shows only that it works."""


def run(options: Options) -> int:
    """Return 0 if all is right, 1 if a result was wrong, 2 if the options cannot be served, 130 if it was stopped."""
    try:
        sizes = {"slots": options.slots, "tokens": options.tokens, "threads": options.threads}
        for name, values in (*sizes.items(), ("dim", (options.dim,)), ("rounds", (options.rounds,))):
            if not values or min(values) < 1:
                raise ValueError(f"--{name} must be at least 1.")
        if not options.smoke:
            check_load(options.load_limit)
    except ValueError as error:
        print(f"nomax bench memory: {error}", file=sys.stderr)
        return 2
    if options.smoke:
        threads = options.threads[:1]
        options = dataclasses.replace(options, slots=(64, 1024), tokens=(32,), dim=16, threads=threads, rounds=2)
    results = Results(
        options=dataclasses.asdict(options) | {"output": None},
        machine=machine(),
        versions=versions(),
        shapes=[],
        started=now(),
        smoke=options.smoke,
        load_before=load(),
    )
    measure = partial(_measure, options, results)
    return conduct("memory", TITLE, results, GOALS, measure, markdown, options.output)


def _measure(options: Options, results: Results, progress: Progress) -> Iterator[RenderableType]:
    """Measure everything into `results`, and yield a table whenever a φ is finished."""
    settings = len(options.slots) * len(options.tokens)
    task = progress.add_task("", total=len(options.phis) * settings)
    for phi in options.phis:
        for slots in options.slots:
            for tokens in options.tokens:
                name = shape(phi, slots, tokens)
                progress.update(task, description=f"{name}: checking")
                torch.set_num_threads(max(options.threads))
                gate = check(phi, slots, options.dim, toy=options.smoke)
                gate.shape = name
                results.gates.append(gate)
                if gate.green:
                    for case in _cases(options, phi, slots, tokens, partial(progress.update, task)):
                        results.cases.append(case)
                    if TRAINING in options.modes and (not results.memory if options.smoke else slots == MANY):
                        progress.update(task, description=f"{name}: memory")
                        results.memory += measured(phi, slots, tokens, options.dim)
                progress.advance(task)
        yield table(phi, results)


def _cases(options: Options, phi: str, slots: int, tokens: int, tell: Callable[..., Any]) -> Iterator[Case]:
    participants = layers(phi, slots, options.dim)
    x = torch.randn(tokens, options.dim)
    for threads in options.threads:
        torch.set_num_threads(threads)
        for mode in options.modes:
            tell(description=f"{shape(phi, slots, tokens)}, {mode}, {threads} thread{'s' * (threads > 1)}")
            products = 6 if mode == TRAINING else 2
            calls = {who: call(layer, x, mode) for who, layer in participants.items()}
            samples = race(calls, options.rounds, 1e-4 if options.smoke else 0.02)
            flop = 2.0 * products * tokens * slots * options.dim
            yield Case(shape(phi, slots, tokens), "float32", mode, threads, flop, samples, ours=(OURS,))
