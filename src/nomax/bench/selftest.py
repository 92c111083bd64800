"""`nomax selftest`: random calls of this machine's kernels against float64, and a record of the calls."""

import dataclasses
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nomax._files import read_json, to_json, write
from nomax.bench import fuzz
from nomax.bench.harness import known, machine, now, threads_restored, versions
from nomax.bench.render import markdown_table
from nomax.console import Console
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
    tiny, huge, constant, NaN or infinite are drawn at random, forward and with gradients. A case is a call for each
    instruction set that the machine has. Each number must keep the bound stated in docs/attention.md; neither hidden
    keys nor the number of threads may change a bit of a row. If anything is wrong, the exit code is 1, and a command
    that repeats it is printed. Ctrl-C stops it and keeps the findings; the same command with --calls continues there.

    Writes selftest.json (counts, worst cases, machine, versions) and selftest.md (tables).
    """

    minutes: float | None = None
    """Minutes to run; one, if neither this nor --calls is given."""
    calls: int | None = None
    """Number of calls to try."""
    seed: int = 0
    """Seed of the calls: the same seed gives the same calls, another seed gives others."""
    first: int = 0
    """Number of the first case: to repeat one, or to continue where another test stopped."""
    isa: tuple[str, ...] = ()
    """Instruction sets to try; by default all that this machine has."""
    output: Path | None = None
    """Folder for the record; by default benchmarks/results below the current folder."""
    smoke: bool = False
    """Make only a hundred calls, in seconds, only to check that it works."""


@dataclass
class Record:
    """The calls tried so far, and the findings."""

    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str | None]
    started: str
    smoke: bool
    finished: str | None = None  # None: it was stopped, and this is what was found until then
    seconds: float = 0.0
    next: int = 0  # the number of the case to go on with
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
        """Return all of it as JSON."""
        plain = dataclasses.asdict(self) | {"worst_ratio": self.worst_ratio}
        plain["kinds"] = {kind: dict(sorted(counts.items())) for kind, counts in sorted(self.kinds.items())}
        plain["worst"] = dict(sorted(self.worst.items()))
        return to_json(plain)

    def resumed(self, path: Path) -> "Record":
        """Return the record in a file if it is of the same test and was stopped, otherwise this one."""
        try:
            plain = read_json(path, "Move it away to begin anew.")
        except FileNotFoundError:
            return self
        mine = json.loads(self.json())
        same = ("options", "machine", "versions", "smoke")
        if not isinstance(plain, dict) or plain.get("finished") or any(plain.get(name) != mine[name] for name in same):
            return self
        try:
            plain.pop("worst_ratio", None)
            before = Record(**plain)
            before.kinds = {kind: Counter(counts) for kind, counts in before.kinds.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error}. Move it away to begin anew.") from None
        return before

    def add(self, case: fuzz.Case, instructions: str, ratios: dict[str, torch.Tensor], threads_compared: bool) -> None:
        """Count a call and the errors of its results."""
        self.calls += 1
        self.gradients += case.gradients
        self.threads_compared += threads_compared
        for kind, value in (case.kinds | {"instructions": instructions}).items():
            self.kinds.setdefault(kind, Counter())[value] += 1
        for name, ratio in ratios.items():
            largest = float(ratio.max()) if ratio.numel() else 0.0
            self.numbers += ratio.numel()
            place = f"{case.kinds['dtype']}, {instructions}, {name}"
            if largest > self.worst.get(place, {"ratio": -1.0})["ratio"]:
                self.worst[place] = {"ratio": largest, "number": case.number, "case": str(case)}


def run(options: Options) -> int:
    """Return 0 if nothing is wrong, 1 if something is, 2 if the options cannot be met, 130 if it was stopped."""
    console, folder = Console(), options.output or Path("benchmarks/results")
    record = Record(dataclasses.asdict(options) | {"output": None}, machine(), versions(), now(), options.smoke)
    record.next = options.first
    try:
        instruction_sets = _check(options)
        record = record.resumed(folder / "selftest.json") if options.calls else record
    except (ValueError, BuildError) as error:
        print(f"nomax selftest: {error}", file=sys.stderr)
        return 2
    if record.calls:
        console.print(f"Going on after the {record.calls:,} calls of {folder / 'selftest.json'}.")
    console.print(f"Trying {', '.join(instruction_sets)} kernels against float64, seed {options.seed}.")
    stopped = False
    with threads_restored():
        torch.set_num_threads(1)
        try:
            _try(record, options, instruction_sets, folder, console)
            record.finished = now()
        except KeyboardInterrupt:
            stopped = True
    _write(record, folder)
    console.print(_summary(record))
    console.print(f"Written: {folder / 'selftest.json'}, {folder / 'selftest.md'}")
    if record.violations:
        return 1
    if stopped:
        console.print("Stopped: what was found until then is kept.")
        return 130
    return 0


def _try(record: Record, options: Options, instruction_sets: list[str], folder: Path, console: Console) -> None:
    calls = 100 if options.smoke else options.calls or sys.maxsize
    minutes = options.minutes or (1.0 if calls == sys.maxsize else math.inf)
    reported = moment = time.monotonic()
    start, pause = reported - record.seconds, 10 if console.is_terminal else 60
    while record.calls < calls and moment - start < 60 * minutes and len(record.violations) < ENOUGH:
        case = fuzz.draw(options.seed, record.next)
        expectation = fuzz.expected(case)
        # What float64 says is the dearest part, and the same for all instruction sets. A case counts when it is whole,
        # so that a test that was stopped goes on with the next one.
        outcomes = [_outcome(case, expectation, name) for name in instruction_sets[: calls - record.calls]]
        for instructions, ratios, threads_compared, complaints in outcomes:
            record.add(case, instructions, ratios, threads_compared)
            command = f"nomax selftest --seed {options.seed} --first {case.number} --calls 1 --isa {instructions}"
            for what in complaints:
                record.violations.append({"what": what, "number": case.number, "case": str(case), "command": command})
                console.print(f"WRONG: {what}\n  {case}\n  again: {command}")
        record.next += 1
        moment = time.monotonic()
        record.seconds = round(moment - start, 1)
        if moment - reported > pause:
            reported = moment
            console.print(_summary(record))
            _write(record, folder)


def _outcome(
    case: fuzz.Case, expectation: fuzz.Expectation, instructions: str
) -> tuple[str, dict[str, torch.Tensor], bool, list[str]]:
    """Call the kernels; return the errors as shares of the allowed ones, and what is wrong, in words."""
    try:
        with _instructions(instructions):
            results = fuzz.call(case)
            again = _with_two_threads(case) if _operations(case) >= PARALLEL else None
        ratios = fuzz.compare(case, results, expectation, pairs=instructions == PAIRS)
    except Exception as error:  # a call that fails is wrong too, and the others are still worth trying
        return instructions, {}, False, [f"{type(error).__name__}: {error}"]
    complaints = [
        f"{name} is off by {float(ratio.max()):.3g} times what is allowed"
        for name, ratio in ratios.items()
        if ratio.numel() and float(ratio.max()) > 1
    ]
    complaints += [
        f"{name} is not the same with one thread and with two"
        for name, x in results.items()
        if again is not None and not torch.equal(x.nan_to_num(), again[name].nan_to_num())
    ]
    return instructions, ratios, again is not None, complaints


@contextmanager
def _instructions(name: str) -> Iterator[None]:
    """Make the kernels use this instruction set."""
    before = os.environ.get("NOMAX_ISA")
    os.environ["NOMAX_ISA"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["NOMAX_ISA"]
        else:
            os.environ["NOMAX_ISA"] = before


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
    """Return the record as tables."""
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
