"""Does relu/L parallelise over the sequence with fewer gathers than softmax? (The caption of the paper's Fig. 1.)

    nomax study sequence-parallel     about five minutes; times need a core for each of four ranks, and a quiet machine

Three schedules of both: keys travel in a ring (softmax's is torch's context_parallel), keys are gathered, or keys stay
and queries are gathered. Counted: exchanges and bytes of a layer. Measured: time on 2 and 4 local ranks, and the error
of rings in bfloat16, up to 16 simulated ranks. Modelled, from stated figures: time on 8, 64 and 512 devices. The claim
is judged by the gathers, schedule by schedule. What came out: results/sequence-parallel/verdicts.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from nomax import _figures
from nomax.parallel import measure
from nomax.parallel.measure import KINDS, LAYERS, MODELLED, ROUNDED, Machine, modelled
from nomax.parallel.peers import PHI, WAYS
from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import Experiment, Measurement
from nomax.study.engine.figure import Figure, Table, nothing_yet, sheet
from nomax.study.engine.result import Numbers, Result, measured
from nomax.study.engine.verdict import Outcome, Verdict, plain
from nomax.study.images.setup import Setup
from nomax.train.console import Stop

TITLE = "Does relu/L parallelise over the sequence with fewer gathers?"
CLAIMS = ("W-parallel",)

RANKS = (1, 2, 4)  # times among several are to be seen beside those of one
ROUNDS = 9  # each times every way once, so whatever else the machine does meets all
SHARED = ("keys travel", "keys gathered", "keys stay")  # schedules that both φ have

Way = tuple[str, str]  # φ and schedule


@dataclass(frozen=True)
class SplitCost(Measurement):
    """Exchanges, bytes and times of every way among local ranks."""

    kind: ClassVar[str] = "sequence-parallel"
    alone: ClassVar[bool] = True

    ranks: int
    length: int = measure.TIMED
    rounds: int = ROUNDS
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
        """Floating point operations of all rounds."""
        one = 14 * measure.BATCH * measure.HEADS * measure.DIM * self.length**2
        return (self.rounds + 2) * len(WAYS) * one

    def measure(self, stop: Stop) -> Numbers | None:
        """Return, by way, the exchanges by kind forwards and backwards and the bytes; and the seconds."""
        numbers: dict[str, tuple[float, ...]] = {}
        for cost in measure.costs(self.ranks, self.length, self.rounds, self.dtype):
            counts = [*(cost.forward[kind] for kind in KINDS), *(cost.backward[kind] for kind in KINDS)]
            numbers[f"{cost.phi}, {cost.schedule}"] = (*counts, cost.bytes_forward, cost.bytes_backward)
            numbers[f"{cost.phi}, {cost.schedule}: seconds"] = tuple(cost.seconds)
        return None if stop.asked else numbers


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
        return [SplitCost(2, measure.COUNTED, 1), RingError(64, 4)]
    return [*(SplitCost(ranks) for ranks in RANKS), RingError()]


@dataclass(frozen=True)
class Counts:
    """What one way costs a rank, forwards and backwards."""

    gathers: int
    reduce_scatters: int
    messages: int
    megabytes: float
    milliseconds: float | None
    """The median; None if no time was taken."""

    @property
    def exchanges(self) -> int:
        """All of them: each is waited for, so these are the synchronisation points."""
        return self.gathers + self.reduce_scatters + self.messages


def collect(rows: Sequence[Result]) -> dict[int, dict[Way, Counts]]:
    """What was counted, by the number of ranks and the way."""
    costs: dict[int, dict[Way, Counts]] = {}
    for row in sorted(measured(rows, SplitCost.kind), key=lambda row: int(row.settings["ranks"] or 0)):
        ways = costs.setdefault(int(row.settings["ranks"] or 0), {})
        for name, numbers in row.numbers.items():
            if name.endswith(": seconds"):
                continue
            phi, _, schedule = name.partition(", ")
            kinds = [int(forward + backward) for forward, backward in zip(numbers[:3], numbers[3:6], strict=True)]
            seconds = row.numbers.get(f"{name}: seconds", ())
            time = 1e3 * median(seconds) if seconds else None
            ways[phi, schedule] = Counts(kinds[0], kinds[1], kinds[2], sum(numbers[6:8]) / 1e6, time)
    return costs


def ring_errors(rows: Sequence[Result]) -> dict[str, dict[int, float]]:
    """The error of each φ and precision of parts, by the number of ranks."""
    return {
        phi: {2**i: error for i, error in enumerate(line)}
        for row in measured(rows, RingError.kind)
        for phi, line in row.numbers.items()
    }


def verdicts(rows: Sequence[Result], setup: Setup) -> list[Verdict]:
    """Compare the gathers of both φ in each schedule that both have."""
    costs, errors = collect(rows), ring_errors(rows)
    if not costs:
        sentence = "Nothing has been counted yet: nothing to judge."
        return [Verdict("W-parallel", "undecided", sentence, "no runs", [], {})]
    most = max(costs)
    ways = costs[most]
    gathers = {name: (ways[PHI, name].gathers, ways[SOFTMAX, name].gathers) for name in SHARED}
    fewer, more = ([name for name, pair in gathers.items() if sign * (pair[0] - pair[1]) < 0] for sign in (1, -1))
    outcome: Outcome = "reproduced" if fewer and not more else "contradicted"
    listed = "; ".join(f"{name}: {ours} and {softmax}" for name, (ours, softmax) in gathers.items())
    best = {phi: min(ways[phi, name].exchanges for name in SHARED) for phi in (PHI, SOFTMAX)}
    sentence = (
        f"Gathers of one attention, forwards and backwards, of relu/L and of softmax: {listed} ({most} ranks). Where "
        "keys stay, relu/L's partial outputs just add up, while softmax first gathers all rows' sums, or else the "
        f"partial outputs themselves. Over all schedules, relu/L needs {best[PHI]} exchanges at best, and softmax "
        f"{best[SOFTMAX]}. {_about_errors(errors)}Reproduced if relu/L has fewer gathers in one schedule and more in "
        "none, contradicted otherwise."
    )
    numbers = {
        "gathers of relu/L and softmax": gathers,
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


def _about_errors(errors: Mapping[str, Mapping[int, float]]) -> str:
    if not errors:
        return ""
    most = max(max(line) for line in errors.values())
    told = ", ".join(f"{line[most] / line[1]:.2f} ({name})" for name, line in errors.items())
    return f"In bfloat16, a ring of {most} has this many times the error of one process: {told}. "


def figures(rows: Sequence[Result], setup: Setup) -> list[Figure]:
    """What each way exchanges and sends; the error of rings; and modelled times."""
    return [_cost_figure(collect(rows)), _error_figure(ring_errors(rows)), _model_figure()]


def _cost_figure(costs: Mapping[int, Mapping[Way, Counts]]) -> Figure:
    caption = (
        "Exchanges of one attention, forwards and backwards, that a rank waits for (left), and what it sends (right), "
        "on the largest number of ranks. Keys travel in a ring, are gathered, or stay in place. Softmax's ring is "
        "torch's context_parallel, which sends gradients round one step further than ours: softmax does not need it. "
        "Times are medians, and each φ's has its own kernels: compare them with those of one rank."
    )
    columns = ("ranks", "φ", "schedule", "gathers", "reduce-scatters", "messages", "MB sent", "ms")
    listed = tuple(
        (ranks, phi, name, each.gathers, each.reduce_scatters, each.messages, round(each.megabytes, 3),
         None if each.milliseconds is None else round(each.milliseconds, 2))
        for ranks, ways in costs.items()
        for (phi, name), each in ways.items()
    )  # fmt: skip
    ways = costs[max(costs)] if costs else {}
    told = " ".join(
        f"{phi}, {name}: {each.exchanges} exchanges, {each.megabytes:.2f} MB." for (phi, name), each in ways.items()
    )
    title = "What a split sequence exchanges"
    alternative = told or "An empty figure: nothing has been counted yet."
    return Figure("sequence-parallel", title, caption, alternative, Table(columns, listed), lambda: _paint_costs(ways))


def _paint_costs(ways: Mapping[Way, Counts]) -> Any:
    picture, axes = sheet(2, height=3.6)
    if not ways:
        nothing_yet(axes[0])
        return picture
    names = [f"{phi}, {name}" for phi, name in ways]
    colours = [_figures.colour_of(phi).light for phi, _ in ways]
    for axis, label, widths in (
        (axes[0], "exchanges", [each.exchanges for each in ways.values()]),
        (axes[1], "MB sent by a rank", [each.megabytes for each in ways.values()]),
    ):
        axis.barh(range(len(ways)), widths, color=colours, height=0.6)
        axis.set_yticks(range(len(ways)), names)
        axis.set_xlabel(label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].invert_yaxis()
    return picture


def _error_figure(errors: Mapping[str, Mapping[int, float]]) -> Figure:
    caption = (
        "The error of attention in bfloat16 when the keys are split over a ring: the norm of the difference from "
        "float64, over that of the result. Parts are rounded to bfloat16, as in torch's context_parallel (dashed), or "
        "computed in float32, as in ours (solid); where lines coincide, the last is on top."
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
        style = "--o" if precision == ROUNDED else "-o"
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
        "of dimension 128; where lines coincide, relu/L's is on top."
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
    picture, (axis,) = sheet(1, height=3.8)
    styles = dict(zip(SHARED, ("-", "--", ":"), strict=True))
    for (phi, name), line in shares.items():
        axis.plot(MODELLED, line, styles[name], marker="o", color=_figures.colour_of(phi).light, label=f"{phi}, {name}")
    axis.set_xscale("log", base=2)
    axis.set_xticks(MODELLED, [str(ranks) for ranks in MODELLED], minor=False)
    axis.set(ylim=(0, 1), xlabel="devices", ylabel="share of time spent waiting")
    axis.legend(frameon=False, fontsize="small")
    return picture
