"""`nomax selftest`: random calls of this machine's kernels against float64, and a record of what was tried."""

import dataclasses
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nomax.bench import fuzz
from nomax.bench.frame import known, now, results_folder, threads_restored
from nomax.bench.machine import machine, versions
from nomax.bench.results import write
from nomax.bench.tables import markdown_table
from nomax.ops import cpu
from nomax.ops.build import BuildError

RESULTS = ("out", "sum", "entropy", "query", "key", "value", "bias")
ENOUGH = 20  # violations, after which nobody learns more from the next
PAIRS = "avx512_bf16"  # the instruction set that multiplies pairs of bfloat16
PARALLEL = 2e5  # operations of a call from which on the kernels use several threads


@dataclass(frozen=True)
class Options:
    """Try this machine's kernels on random calls and compare every number with float64.

    Shapes, strides, groups of heads, masks, packed sequences, dropout, rows, activations, dtypes, and values that are
    tiny, huge, constant, NaN or infinite are drawn at random, forwards and with gradients. A case is a call for each
    instruction set that the machine has. Each number must keep the bound that docs/attention.md states; what a row does
    not see must not change a bit of it, nor may the number of threads. The exit code is 1 if anything is wrong, with a
    command that repeats it. Ctrl-C stops it and keeps what was found.

    Writes selftest.json (counts, worst cases, machine, versions) and selftest.md (tables).
    """

    minutes: float | None = None
    """How long to try; a minute, if neither this nor --calls is given."""
    calls: int | None = None
    """How many calls to try."""
    seed: int = 0
    """Another seed gives other calls; the same seed the same ones."""
    first: int = 0
    """The number of the first case: to repeat one, or to go on where another test stopped."""
    isa: tuple[str, ...] = ()
    """Instruction sets to try; all that this machine has, if none is given."""
    output: Path | None = None
    """Folder for the record; if not given, benchmarks/results where that exists, else the current folder."""
    smoke: bool = False
    """Try it on a hundred calls, in seconds: shows only that it works."""


@dataclass
class Record:
    """What was tried, and what was found."""

    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str | None]
    started: str
    smoke: bool
    finished: str | None = None  # None: it was stopped, and this is what was found until then
    seconds: float = 0.0
    calls: int = 0
    gradients: int = 0
    numbers: int = 0  # compared with float64
    threads_compared: int = 0  # calls that were repeated with two threads
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    worst: dict[str, dict[str, Any]] = field(default_factory=dict)  # by dtype, instruction set and result
    violations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def worst_ratio(self) -> float:
        return max((entry["ratio"] for entry in self.worst.values()), default=0.0)

    def json(self) -> str:
        """All of it as JSON."""
        plain = dataclasses.asdict(self) | {"worst_ratio": self.worst_ratio}
        plain["kinds"] = {kind: dict(sorted(counts.items())) for kind, counts in sorted(self.kinds.items())}
        plain["worst"] = dict(sorted(self.worst.items()))
        return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def run(options: Options) -> int:
    """Return 0 if nothing is wrong, 1 if something is, 2 if the options cannot be served, 130 if it was stopped."""
    try:
        instruction_sets = _check(options)
    except (ValueError, BuildError) as error:
        print(f"nomax selftest: {error}", file=sys.stderr)
        return 2
    console, folder = Console(highlight=False, markup=False), results_folder(options.output)
    record = Record(dataclasses.asdict(options) | {"output": None}, machine(), versions(), now(), options.smoke)
    calls = 100 if options.smoke else options.calls
    minutes = options.minutes or (None if calls else 1.0)
    console.print(f"Trying {', '.join(instruction_sets)} kernels against float64, seed {options.seed}.")
    stopped = False
    with threads_restored():
        torch.set_num_threads(1)
        try:
            _try(record, options, calls or sys.maxsize, minutes, instruction_sets, folder, console)
            record.finished = now()
        except KeyboardInterrupt:
            stopped = True
    _write(record, folder)
    console.print(_summary(record), soft_wrap=True)
    console.print(f"Written: {folder / 'selftest.json'}, {folder / 'selftest.md'}")
    if record.violations:
        return 1
    if stopped:
        console.print("Stopped: what was found until then is kept.")
        return 130
    return 0


def _try(
    record: Record,
    options: Options,
    calls: int,
    minutes: float | None,
    instruction_sets: list[str],
    folder: Path,
    console: Console,
) -> None:
    start = said = time.monotonic()
    pause = 10 if console.is_terminal else 60
    for number in itertools.count(options.first):
        case = fuzz.draw(options.seed, number)
        expectation = fuzz.expected(case)
        for instructions in instruction_sets:  # what float64 says is the dearest part, and the same for all
            if record.calls < calls:
                _try_one(record, options.seed, case, expectation, instructions, console)
        moment = time.monotonic()
        record.seconds = round(moment - start, 1)
        if moment - said > pause:
            said = moment
            console.print(_summary(record), soft_wrap=True)
            _write(record, folder)
        late = minutes is not None and moment - start >= 60 * minutes
        if late or record.calls >= calls or len(record.violations) >= ENOUGH:
            break


def _try_one(
    record: Record, seed: int, case: fuzz.Case, expectation: fuzz.Expectation, instructions: str, console: Console
) -> None:
    def complain(what: str) -> None:
        command = f"nomax selftest --seed {seed} --first {case.number} --calls 1 --isa {instructions}"
        record.violations.append({"what": what, "number": case.number, "case": str(case), "command": command})
        console.print(f"WRONG: {what}\n  {case}\n  again: {command}", soft_wrap=True)

    record.calls += 1
    record.gradients += case.gradients
    for kind, value in (case.kinds | {"instructions": instructions}).items():
        record.kinds.setdefault(kind, Counter())[value] += 1
    try:
        with fuzz.instructions(instructions):
            found = fuzz.call(case)
            again = _with_two_threads(case) if _operations(case) >= PARALLEL else None
        ratios = fuzz.compare(case, found, expectation, pairs=instructions == PAIRS)
    except Exception as error:  # a call that fails is wrong too, and the others are still worth trying
        complain(f"{type(error).__name__}: {error}")
        return
    for name, ratio in ratios.items():
        largest = float(ratio.max()) if ratio.numel() else 0.0
        record.numbers += ratio.numel()
        place = f"{case.kinds['dtype']}, {instructions}, {name}"
        if largest > record.worst.get(place, {"ratio": -1.0})["ratio"]:
            record.worst[place] = {"ratio": largest, "number": case.number, "case": str(case)}
        if largest > 1:
            complain(f"{name} is off by {largest:.3g} times what is allowed")
    if again is not None:
        record.threads_compared += 1
        for name, x in found.items():
            if not torch.equal(x.nan_to_num(), again[name].nan_to_num()):
                complain(f"{name} is not the same with one thread and with two")


def _with_two_threads(case: fuzz.Case) -> dict[str, torch.Tensor]:
    torch.set_num_threads(2)
    try:
        return fuzz.call(case)
    finally:
        torch.set_num_threads(1)


def _operations(case: fuzz.Case) -> float:
    (batch, heads, queries, dim), keys = case.query.shape, case.key.shape[2]
    return 2.0 * batch * heads * queries * keys * (dim + case.value.shape[3])


def _check(options: Options) -> list[str]:
    for name in ("minutes", "calls"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} {value:g} must be more than 0.")
    if options.first < 0:
        raise ValueError(f"--first {options.first} must be at least 0.")
    usable = cpu.instruction_sets()
    return [known("instruction set", name, usable) for name in options.isa] or usable


def _summary(record: Record) -> str:
    rate = record.calls / record.seconds if record.seconds else 0.0
    return (
        f"{record.calls:,} calls, {record.gradients:,} with gradients, {record.numbers:,} numbers, {rate:.0f} calls/s: "
        f"{len(record.violations)} wrong, worst error {record.worst_ratio:.2f} of what is allowed"
    )


def _write(record: Record, folder: Path) -> None:
    write(folder / "selftest.json", record.json())
    write(folder / "selftest.md", markdown(record))


def markdown(record: Record) -> str:
    """The record as tables."""
    parts = ["<!-- Written by `nomax selftest`; the record is selftest.json. -->"]
    if record.smoke:
        parts.append("**A smoke run: it shows only that the test works.**")
    elif not record.finished:
        parts.append("**The test was stopped: this is what was found until then.**")
    parts.append(
        f"{record.calls:,} random calls, {record.gradients:,} of them with gradients, on {record.machine['cpu']} "
        f"({record.machine['cores']} cores), torch {record.versions['torch']}: {record.numbers:,} numbers were "
        f"compared with float64, {record.threads_compared:,} calls repeated with two threads; "
        f"**{len(record.violations)} are wrong**."
    )
    places = {tuple(place.split(", ")) for place in record.worst}
    rows = [
        [
            dtype,
            isa,
            *(f"{record.worst[place]['ratio']:.2f}" if place in record.worst else "–" for place in cells),
        ]
        for dtype, isa in sorted({place[:2] for place in places})
        if (cells := [f"{dtype}, {isa}, {name}" for name in RESULTS])
    ]
    columns = ["dtype", "instructions", "output", "row sum", "entropy", "d query", "d key", "d value", "d bias"]
    parts.append(
        "**The worst error, as a share of [what is allowed](../../docs/attention.md#how-exact)**\n\n"
        + markdown_table(columns, rows)
    )
    counts = [
        [kind, ", ".join(f"{name} {count:,}" for name, count in sorted(values.items()))]
        for kind, values in sorted(record.kinds.items())
    ]
    parts.append("**What was tried**\n\n" + markdown_table(["", "calls"], counts))
    parts += [f"- WRONG: {each['what']}: `{each['command']}`" for each in record.violations]
    return "\n\n".join(parts) + "\n"
