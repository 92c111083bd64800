"""`nomax bench attention`: check, then race our operation against its peers, and write down all that was found."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.text import Text

from nomax.bench import figure, goals, memory, peak, tables
from nomax.bench.frame import check_load, known, now, progress_bar, results_folder, threads_restored
from nomax.bench.gate import check
from nomax.bench.machine import load, machine, versions
from nomax.bench.peers import PEERS, ours, step
from nomax.bench.race import race
from nomax.bench.results import OURS, UNCAUSAL, Case, Results, write
from nomax.bench.shapes import BACKWARD, FORWARD, INFERENCE, SHAPES, Inputs, Shape, make_inputs
from nomax.console import Console, Progress
from nomax.phi import Phi

GRAD_MODES: dict[str, Callable[[], Any]] = {
    FORWARD: torch.no_grad,
    BACKWARD: torch.enable_grad,
    INFERENCE: torch.inference_mode,
}
OTHER_PHIS_FROM = 197  # keys; below, the activation is not what takes the time
LARGEST_DIFFERENCE = 0.05  # of a peer that claims to compute relu/L; bfloat16's roundings stay well below


@dataclass(frozen=True)
class Options:
    """Measure the speed of nomax.attention against its peers on this machine's CPU, and its memory.

    Correctness comes first: a shape on which nomax is wrong by more than twice the error of plain PyTorch in the same
    precision is not timed, and the exit code is 1. Then all participants take turns, round after round, and the best
    round of each counts. Most of the waiting is for torch.compile, which prepares the peers, and for slow peers. Ctrl-C
    stops it and keeps what was measured.

    Writes attention.json (every sample, machine, versions), attention.md (tables) and attention.svg (a figure).
    """

    shapes: tuple[str, ...] = tuple(SHAPES)
    """ViT-S/32, S/16, S/8 and ViT-B/16, long and causal sequences, a padded batch, a decode step, a tiny call."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Precisions of query, key and value."""
    threads: tuple[int, ...] = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    """Numbers of threads to measure with, one after the other."""
    peers: tuple[str, ...] = tuple(PEERS)
    """sdpa: softmax; eager, compiled: relu/L in PyTorch; flex: FlexAttention in log space; peak: the core's limit."""
    phis: tuple[str, ...] = ("gelu/L", "sigmoid/L", "softplus/L", "silu/L", "identity/L")
    """Other activations of ours, measured beside relu/L where there are at least 197 queries."""
    rounds: int = 7
    """Samples of every participant; the best counts. Each lasts at least about 20 ms."""
    memory: bool = True
    """Measure the peak memory of a call with 16,384 keys, too."""
    output: Path | None = None
    """Folder for the results; if not given, benchmarks/results where that exists, else the current folder."""
    load_limit: float = 0.5
    """Refuse to start while the machine is busier than this (its load average over the last minute)."""
    smoke: bool = False
    """Try it on toy sizes, with the first dtype, number of threads and φ, in seconds: shows only that it works."""


def run(options: Options) -> int:
    """Return 0 if all is right, 1 if a result was wrong, 2 if the options cannot be served, 130 if it was stopped."""
    try:
        shapes = _check(options)
    except ValueError as error:
        print(f"nomax bench attention: {error}", file=sys.stderr)
        return 2
    if options.smoke:
        first = {name: getattr(options, name)[:1] for name in ("dtypes", "threads", "phis")}
        options = dataclasses.replace(options, **first, rounds=2)
    console = Console()
    output = results_folder(options.output)
    results = Results(
        options=dataclasses.asdict(options) | {"output": None},
        machine=machine(),
        versions=versions(),
        shapes=shapes,
        started=now(),
        smoke=options.smoke,
        load_before=load(),
    )
    stopped = False
    with progress_bar(console) as progress, threads_restored():
        try:
            for done in _measure(options, shapes, results, progress):
                console.print(done)
                write(output / "attention.json", results.json())
            results.finished = now()
        except KeyboardInterrupt:
            stopped = True

    results.load_after = load()
    results.goals = [goals.judge(goal, results) for goal in goals.GOALS]
    console.print(tables.goal_table(results))
    _write_all(output, results, console)
    for gate in results.red():
        where = f" {gate.shape}, {gate.dtype}, {gate.name}: {gate.reason()}"
        console.print(Text.assemble(("WRONG", "bold red"), where))
    if stopped:
        console.print("Stopped: what was measured until then is kept.")
        return 130
    return 1 if results.red() else 0


def _measure(options: Options, shapes: list[Shape], results: Results, progress: Progress) -> Iterator[Any]:
    """Measure everything into `results`, and yield a table whenever a shape is finished."""
    total = sum(len(options.dtypes) * (1 + len(options.threads) * len(shape.modes)) for shape in shapes)
    settings = [(who, mode) for who in memory.PARTICIPANTS for mode in memory.MODES] if options.memory else []
    settings = settings[:1] if options.smoke else settings
    task = progress.add_task("", total=total + len(settings))
    for shape in shapes:
        for dtype in options.dtypes:
            progress.update(task, description=f"{shape.name}, {dtype}: checking")
            torch.set_num_threads(max(options.threads))
            inputs = make_inputs(shape, getattr(torch, dtype))
            right = {}
            for name, (own_inputs, phi) in _entries(options, shape, inputs).items():
                gate = check(own_inputs, phi, gradients=BACKWARD in shape.modes, everywhere=phi == OURS)
                gate.shape, gate.name = shape.name, name
                results.gates.append(gate)
                if gate.green:
                    right[name] = (own_inputs, phi)
            progress.advance(task)
            for threads in options.threads:
                for mode in shape.modes:
                    text = f"{shape.name}, {dtype}, {mode}, {threads} thread{'s' * (threads > 1)}"
                    progress.update(task, description=text)
                    if right:
                        results.cases.append(_case(options, shape, mode, threads, inputs, right))
                    progress.advance(task)
        yield tables.shape_tables(shape, [case for case in results.cases if case.shape == shape.name])
    for who, mode in settings:
        progress.update(task, description=f"memory, {who}, {mode}")
        results.memory.append(memory.measure(who, mode, 512 if options.smoke else memory.LENGTH))
        progress.advance(task)


def _entries(options: Options, shape: Shape, inputs: Inputs) -> dict[str, tuple[Inputs, str]]:
    """What we enter into the race for a shape: a name, and the inputs and φ that it stands for."""
    entries = {OURS: (inputs, OURS)}
    if SHAPES[shape.name].queries >= OTHER_PHIS_FROM:
        entries |= {phi: (inputs, phi) for phi in options.phis}
    if shape.causal:
        entries[UNCAUSAL] = (dataclasses.replace(inputs, causal=False), OURS)
    return entries


def _case(
    options: Options, shape: Shape, mode: str, threads: int, inputs: Inputs, entries: dict[str, tuple[Inputs, str]]
) -> Case:
    torch.set_num_threads(threads)
    if not {"compiled", "flex"}.isdisjoint(options.peers):
        torch.compiler.reset()  # torch limits recompilation: without this, later shapes would run uncompiled
    dtype = str(inputs.query.dtype).removeprefix("torch.")
    case = Case(shape.name, dtype, mode, threads, shape.flop(mode), {})
    calls = {name: step(ours(own_inputs, phi), own_inputs, mode) for name, (own_inputs, phi) in entries.items()}
    with GRAD_MODES[mode]():
        for name in options.peers:
            peer = PEERS[name]
            if mode not in peer.modes or (name == "peak" and not (dtype == "float32" and threads == 1)):
                continue
            try:
                call = peer.prepare(inputs, mode, "eager" if options.smoke else "inductor")
                result = call()
                if peer.computes_relu and OURS in calls:
                    case.differences[name] = _difference(result, calls[OURS]())
            except Exception as error:  # whatever a peer cannot do is worth a note and must not end the run
                case.unavailable[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                continue
            if not case.differences.get(name, 0.0) <= LARGEST_DIFFERENCE:
                case.unavailable[name] = f"its result differs from ours by {case.differences[name]:.1%}"
                continue
            calls[name] = call
        if "peak" in calls:
            case.peak_flop = peak.flop()
        case.samples = race(calls, options.rounds, 1e-4 if options.smoke else 0.02)
    return case


def _difference(theirs: Any, mine: Any) -> float:
    """The largest difference relative to our largest value, over the output or the gradients."""
    pairs = [(theirs, mine)] if isinstance(mine, torch.Tensor) else list(zip(theirs, mine, strict=True))
    tiny = 1e-30  # both may be all zeros
    differences = [(t.double() - m.double()).abs().max() / m.double().abs().max().clamp(tiny) for t, m in pairs]
    return float(torch.stack(differences).max())  # unlike Python's max, this keeps a NaN


def _check(options: Options) -> list[Shape]:
    """The shapes to measure; an error says what is wrong with the options."""
    shapes = [SHAPES[known("shape", name, SHAPES)] for name in options.shapes]
    for name in options.peers:
        known("peer", name, PEERS)
    for phi in options.phis:
        parsed = Phi.parse(phi)
        if str(parsed) != f"{parsed.activation}/L" or parsed.activation == "softmax":
            raise ValueError(f"--phis {phi}: activations are compared at the same scale; write {parsed.activation}/L.")
    if options.rounds < 1 or not options.threads or min(options.threads) < 1:
        raise ValueError("--rounds and --threads must be at least 1.")
    if not options.smoke:
        check_load(options.load_limit)
    return [shape.shrunk() for shape in shapes] if options.smoke else shapes


def _write_all(output: Path, results: Results, console: Console) -> None:
    files = {"attention.json": results.json(), "attention.md": tables.markdown(results)}
    try:
        files["attention.svg"] = figure.draw(results)
    except ImportError:
        console.print("No figure: it needs matplotlib (pip install 'nomax[plot]').")
    for name, text in files.items():
        write(output / name, text)
    console.print(f"Written: {', '.join(str(output / name) for name in files)}")
