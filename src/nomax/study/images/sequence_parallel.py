"""Does relu/L parallelise over the sequence with fewer gathers than softmax? (The caption of the paper's Fig. 1.)

    nomax study sequence-parallel     about four minutes; times need a quiet machine

Three schedules of both: keys travel in a ring, keys are gathered, or keys stay and queries are gathered; and torch's
context_parallel. Counted: exchanges and bytes of a layer. Measured: time on 1, 2 and 4 local ranks, and the error of
rings in bfloat16, up to 16 simulated ranks. Modelled, from stated figures: time on 8, 64 and 512 devices.

The claim is about the number of exchanges, so only that is judged: it is reproduced if relu/L needs strictly fewer,
forwards and backwards, than the best softmax schedule with the same memory. What came out:
results/sequence-parallel/verdicts.md.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from nomax import _figures
from nomax.parallel import measure
from nomax.parallel.measure import EXACT, KINDS, LAYERS, MODELLED, ROUNDED, Machine, modelled
from nomax.parallel.peers import HELD, PHI, WAYS
from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import Experiment, Measurement
from nomax.study.engine.figure import Figure, Table, handle, legend, nothing_yet, sheet
from nomax.study.engine.result import Numbers, Result, measured
from nomax.study.engine.verdict import Outcome, Verdict, plain
from nomax.study.images.setup import Setup
from nomax.train.console import Stop

TITLE = "Does relu/L parallelise over the sequence with fewer gathers?"
CLAIMS = ("W-parallel",)

RANKS = (1, 2, 4)  # times among several are to be seen beside those of one
ROUNDS = 9  # each times every way once, so whatever else the machine does meets all
SHADES = (1.0, 0.7, 0.45, 0.2)  # of the colour of a φ, by kind of exchange
CORES = "cores"

Way = tuple[str, str]  # φ and schedule


@dataclass(frozen=True)
class Split(Measurement):
    """Something of every way among local ranks."""

    ranks: int
    length: int = measure.TIMED
    dtype: str = "bfloat16"

    @property
    def variant(self) -> str:
        """The number of ranks, in words."""
        return f"{self.ranks} ranks"

    @property
    def tokens(self) -> int:
        """The length of the whole sequence."""
        return self.length

    @property
    def flops(self) -> int:
        """Floating point operations of one pass of all ways, forwards and backwards."""
        return len(WAYS) * 14 * measure.BATCH * measure.HEADS * measure.DIM * self.length**2


@dataclass(frozen=True)
class SplitExchanges(Split):
    """Exchanges and bytes of every way among local ranks: the same on every machine."""

    kind: ClassVar[str] = "split-exchanges"

    def measure(self, stop: Stop) -> Numbers | None:
        """Return, by way, the exchanges by kind forwards and backwards, and the bytes."""
        numbers: dict[str, tuple[float, ...]] = {}
        for cost in measure.costs(self.ranks, self.length, dtype=self.dtype):
            counts = [each[kind] for each in (cost.forward, cost.backward) for kind in KINDS]
            numbers[f"{cost.phi}, {cost.schedule}"] = (*counts, cost.bytes_forward, cost.bytes_backward)
        return None if stop.asked else numbers


@dataclass(frozen=True)
class SplitTime(Split):
    """Times of every way among local ranks."""

    kind: ClassVar[str] = "split-time"
    alone: ClassVar[bool] = True

    rounds: int = ROUNDS

    @property
    def flops(self) -> int:
        """Floating point operations of all rounds."""
        return (self.rounds + 2) * super().flops

    def measure(self, stop: Stop) -> Numbers | None:
        """Return the seconds of every way in each round, and the cores that the ranks shared."""
        costs = measure.costs(self.ranks, self.length, self.rounds, self.dtype)
        numbers = {f"{cost.phi}, {cost.schedule}": tuple(cost.seconds) for cost in costs}
        return None if stop.asked else numbers | {CORES: (float(len(os.sched_getaffinity(0))),)}


@dataclass(frozen=True)
class RingError(Measurement):
    """The error of rings in bfloat16, in one process that plays all ranks."""

    kind: ClassVar[str] = "ring-error"

    length: int = 1024
    most: int = measure.MOST_RANKS

    @property
    def variant(self) -> str:
        """The largest ring, in words."""
        return f"rings of up to {self.most} ranks"

    @property
    def tokens(self) -> int:
        """The length of the whole sequence."""
        return self.length

    @property
    def flops(self) -> int:
        """Floating point operations of all rings."""
        return 3 * 5 * 32 * measure.BATCH * measure.HEADS * measure.DIM * self.length**2

    def measure(self, stop: Stop) -> Numbers | None:
        """Return the errors of each φ and precision of parts, over rings of 1, 2, 4, … ranks."""
        return {phi: tuple(line.values()) for phi, line in measure.errors(self.length, self.most).items()}


def grid(setup: Setup, seeds: Sequence[int]) -> list[Experiment]:
    """All numbers of ranks, and the rings; nothing is trained, so a set-up changes nothing but a smoke test."""
    if setup.name == "smoke":
        small = measure.COUNTED
        return [SplitExchanges(2, small), SplitTime(2, small, rounds=1), RingError(64, 4)]
    counted = [SplitExchanges(ranks) for ranks in RANKS if ranks > 1]
    return [*counted, *(SplitTime(ranks) for ranks in RANKS), RingError()]


@dataclass(frozen=True)
class Counts:
    """What one way costs a rank, forwards and backwards."""

    kinds: Mapping[str, int]
    megabytes: float

    @property
    def exchanges(self) -> int:
        """All of them: each is waited for, so these are the synchronisation points."""
        return sum(self.kinds.values())


def collect(rows: Sequence[Result]) -> dict[int, dict[Way, Counts]]:
    """What was counted, by the number of ranks and the way."""
    return {
        ranks: {
            way: Counts(
                {kind: int(numbers[i] + numbers[i + len(KINDS)]) for i, kind in enumerate(KINDS)},
                sum(numbers[2 * len(KINDS) :]) / 1e6,
            )
            for way, numbers in ways.items()
        }
        for ranks, ways in _by_ranks(rows, SplitExchanges.kind).items()
    }


def milliseconds(rows: Sequence[Result]) -> dict[int, dict[Way, float]]:
    """The median time of each way, by the number of ranks."""
    times = _by_ranks(rows, SplitTime.kind)
    return {ranks: {way: 1e3 * median(each) for way, each in ways.items()} for ranks, ways in times.items()}


def _by_ranks(rows: Sequence[Result], kind: str) -> dict[int, dict[Way, tuple[float, ...]]]:
    by_ranks: dict[int, dict[Way, tuple[float, ...]]] = {}
    for row in sorted(measured(rows, kind), key=lambda row: int(row.settings["ranks"] or 0)):
        ways = by_ranks.setdefault(int(row.settings["ranks"] or 0), {})
        for name, numbers in row.numbers.items():
            phi, _, schedule = name.partition(", ")
            if name != CORES:
                ways[phi, schedule] = tuple(numbers)
    return by_ranks


def ring_errors(rows: Sequence[Result]) -> dict[str, dict[int, float]]:
    """The error of each φ and precision of parts, by the number of ranks."""
    return {
        phi: {2**i: error for i, error in enumerate(line)}
        for row in measured(rows, RingError.kind)
        for phi, line in row.numbers.items()
    }


def fewest(ways: Mapping[Way, Counts]) -> dict[str, dict[str, int]]:
    """The fewest exchanges of each φ, by what a rank holds of the others' at a time."""
    return {
        held: {
            phi: min(each.exchanges for way, each in ways.items() if way[0] == phi and way[1].startswith(schedule))
            for phi in (PHI, SOFTMAX)
        }
        for schedule, held in HELD.items()
    }


def verdicts(rows: Sequence[Result], setup: Setup) -> list[Verdict]:
    """Compare the fewest exchanges of both φ with the same memory."""
    costs, errors = collect(rows), ring_errors(rows)
    if not costs:
        sentence = "Nothing has been counted yet: nothing to judge."
        return [Verdict("W-parallel", "undecided", sentence, "no runs", [], {})]
    most = max(costs)
    best = fewest(costs[most])
    fewer = [held for held, pair in best.items() if pair[PHI] < pair[SOFTMAX]]
    outcome: Outcome = "reproduced" if fewer else "contradicted"
    listed = "; ".join(f"{held}: {pair[PHI]} and {pair[SOFTMAX]}" for held, pair in best.items())
    sentence = (
        "The fewest exchanges of one attention, forwards and backwards, of relu/L and of softmax, by what a rank holds "
        f"of the others' ({most} ranks): {listed}. {_about_sums(costs[most])}{_about_errors(errors)}Reproduced if "
        "relu/L needs strictly fewer than the best softmax with the same memory, contradicted otherwise; bytes and "
        "times are not judged."
    )
    numbers = {
        "fewest exchanges by memory": best,
        "exchanges": {
            f"{ranks} ranks": {f"{phi}, {name}": each.exchanges for (phi, name), each in ways.items()}
            for ranks, ways in costs.items()
        },
        "megabytes sent by a rank": {
            f"{ranks} ranks": {f"{phi}, {name}": each.megabytes for (phi, name), each in ways.items()}
            for ranks, ways in costs.items()
        },
        "error of rings in bfloat16": errors,
    }
    scale = f"one attention of {measure.HEADS} heads of dimension {measure.DIM} on {', '.join(map(str, costs))} ranks"
    return [Verdict("W-parallel", outcome, sentence, scale, [0], plain(numbers))]


def _about_sums(ways: Mapping[Way, Counts]) -> str:
    first, merged = ways[SOFTMAX, "keys stay, sums first"], ways[SOFTMAX, "keys stay"]
    return (
        f"Where keys stay, softmax that gathers its rows' sums before it adds up partial outputs needs "
        f"{first.exchanges} exchanges; one that exchanges partial outputs together with the sums, and merges them, "
        f"needs {merged.exchanges}. "
    )


def _about_errors(errors: Mapping[str, Mapping[int, float]]) -> str:
    if not errors:
        return ""
    most = max(max(line) for line in errors.values())
    told = ", ".join(f"{line[most] / line[1]:.2f} ({name})" for name, line in errors.items())
    return f"In bfloat16, a ring of {most} has this many times the error of one process: {told}. "


def figures(rows: Sequence[Result], setup: Setup) -> list[Figure]:
    """What each way exchanges and sends; the error of rings; and modelled times."""
    return [_cost_figure(rows), _error_figure(ring_errors(rows)), _model_figure()]


def _cost_figure(rows: Sequence[Result]) -> Figure:
    costs, times = collect(rows), milliseconds(rows)
    cores = {int(row.numbers[CORES][0]) for row in measured(rows, SplitTime.kind) if CORES in row.numbers}
    shared = f" that share {' or '.join(map(str, sorted(cores)))} cores" if cores else ""
    caption = (
        "Exchanges of one attention, forwards and backwards, that a rank waits for (left), and what it sends (right), "
        "on the largest number of ranks. Keys travel in a ring, are gathered, or stay in place. “torch” is "
        "context_parallel, which sends gradients round one step further than needed. In the table, times are medians "
        f"on local ranks{shared}; each φ has its own kernels, so compare them with those of one rank."
    )
    columns = ("ranks", "φ", "schedule", *(f"{kind}s" for kind in KINDS), "MB sent", "ms")
    listed = tuple(
        (ranks, phi, name, *(each.kinds.values() if each else (0,) * len(KINDS)),
         round(each.megabytes, 3) if each else 0.0, None if time is None else round(time, 2))
        for ranks in sorted({*costs, *times})
        for phi, name in WAYS
        for each, time in [(costs.get(ranks, {}).get((phi, name)), times.get(ranks, {}).get((phi, name)))]
    )  # fmt: skip
    ways = costs[max(costs)] if costs else {}
    told = " ".join(
        f"{phi}, {name}: {each.exchanges} exchanges, {each.megabytes:.2f} MB." for (phi, name), each in ways.items()
    )
    title = "What a split sequence exchanges"
    alternative = told or "An empty figure: nothing has been counted yet."
    return Figure("sequence-parallel", title, caption, alternative, Table(columns, listed), lambda: _paint_costs(ways))


def _paint_costs(ways: Mapping[Way, Counts]) -> Any:
    picture, axes = sheet(2, height=4.2)
    if not ways:
        nothing_yet(axes[0])
        return picture
    ordered = sorted(ways, key=lambda way: list(HELD).index(way[1].partition(", ")[0]))
    colours = [_figures.colour_of(phi).light for phi, _ in ordered]
    left = [0] * len(ordered)
    for kind, shade in zip(KINDS, SHADES, strict=True):
        widths = [ways[way].kinds[kind] for way in ordered]
        axes[0].barh(range(len(ordered)), widths, left=left, color=colours, alpha=shade, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes[1].barh(range(len(ordered)), [ways[way].megabytes for way in ordered], color=colours, height=0.62)
    for axis, label in zip(axes, ("exchanges", "MB sent by a rank"), strict=True):
        axis.set_yticks(range(len(ordered)), [f"{phi}, {name}" for phi, name in ordered])
        axis.set_xlabel(label)
        axis.grid(axis="x")
        axis.grid(visible=False, axis="y")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].invert_yaxis()
    grey = _figures.INK.light
    names = [f"{kind}s" for kind in KINDS]
    legend(
        picture,
        [
            handle(name, ls="", marker="s", ms=9, color=grey, alpha=shade)
            for name, shade in zip(names, SHADES, strict=True)
        ],
    )
    return picture


def _error_figure(errors: Mapping[str, Mapping[int, float]]) -> Figure:
    caption = (
        "The error of attention in bfloat16 when the keys are split over a ring: the norm of the difference from "
        "float64, over that of the result. Parts are rounded to bfloat16, as in torch's context_parallel (dashed), or "
        "kept in float32, as in ours (solid). Dotted: everything in float32 until the end."
    )
    table = Table(
        ("φ and parts", "ranks", "relative error"),
        tuple((phi, ranks, float(f"{error:.4g}")) for phi, line in errors.items() for ranks, error in line.items()),
    )
    told = " ".join(
        f"{phi}: {', '.join(f'{error:.2e} with {ranks}' for ranks, error in line.items())}."
        for phi, line in errors.items()
    )
    alternative = told or "An empty figure: nothing has been measured yet."
    title = "The error of a ring in bfloat16"
    return Figure("ring-error", title, caption, alternative, table, lambda: _paint_errors(errors))


def _paint_errors(errors: Mapping[str, Mapping[int, float]]) -> Any:
    picture, (axis,) = sheet(1, height=3.2)
    if not errors:
        nothing_yet(axis)
        return picture
    for name, line in errors.items():
        phi, _, precision = name.partition(", ")
        style = {ROUNDED: "--o", EXACT: ":o"}.get(precision, "-o")
        axis.plot(list(line), list(line.values()), style, color=_figures.colour_of(phi).light, label=name)
    axis.legend(frameon=False, fontsize="small")
    axis.set_xscale("log", base=2)
    ticks = list(next(iter(errors.values())))
    axis.set_xticks(ticks, [str(ranks) for ranks in ticks], minor=False)
    axis.set(ylim=(0, None), xlim=(0.8, 1.25 * max(ticks)), xlabel="ranks", ylabel="relative error")
    return picture


def _model_figure() -> Figure:
    machine = Machine()
    caption = (
        f"Modelled, not measured: devices of {machine.flops / 1e12:g} TFLOP/s that send {machine.bandwidth / 1e9:g} "
        f"GB/s with a latency of {1e6 * machine.latency:g} µs; one attention in bfloat16, forwards and backwards, "
        "without causality. A ring hides its messages behind what it computes, as far as that takes as long; "
        "collectives are not hidden. Shown is the share of time that a device waits, for 131,072 positions of 32 heads "
        "of dimension 128. Softmax (rings) waits as long as relu/L (dots): what it sends besides is one number in a "
        "hundred."
    )
    rows = [
        (name, ranks, phi, schedule, float(f"{1e3 * compute:.4g}"), float(f"{1e3 * wait:.4g}"))
        for name, layer in LAYERS.items()
        for ranks in MODELLED
        for (phi, schedule), (compute, wait) in modelled(layer, ranks).items()
    ]
    table = Table(("layer", "devices", "φ", "schedule", "ms of computing", "ms of waiting"), tuple(rows))
    shares = {
        way: [wait / (compute + wait) for ranks in MODELLED for compute, wait in [modelled(_first(), ranks)[way]]]
        for way in modelled(_first(), MODELLED[0])
    }
    alternative = "The share of time spent waiting, on 8, 64 and 512 devices. " + " ".join(
        f"{phi}, {name}: {', '.join(f'{share:.0%}' for share in line)}." for (phi, name), line in shares.items()
    )
    title = "Modelled waiting on larger machines"
    return Figure("sequence-parallel-model", title, caption, alternative, table, lambda: _paint_model(shares))


def _first() -> measure.Layer:
    return next(iter(LAYERS.values()))


def _paint_model(shares: Mapping[Way, Sequence[float]]) -> Any:
    picture, (axis,) = sheet(1, height=3.4)
    styles = dict(zip(HELD, ("-", "--", ":"), strict=True))
    for (phi, name), line in shares.items():
        colour = _figures.colour_of(phi).light
        if phi == PHI:
            axis.plot(MODELLED, line, styles[name], marker="o", ms=5, color=colour, label=name)
        else:
            axis.plot(MODELLED, line, "o", ms=11, mfc="none", mew=1.8, color=colour)
    axis.set_xscale("log", base=2)
    axis.set_xticks(MODELLED, [str(ranks) for ranks in MODELLED], minor=False)
    axis.set(ylim=(0, 1), xlabel="devices", ylabel="share of time spent waiting")
    axis.legend(frameon=False)
    return picture
