"""Does a gate remove the need for length scaling, and what does it cost? relu and relu² over α, with and without it
(Fig. 4).

    nomax study gate                  minutes, on the bundled images
    nomax study gate --setup hour     one to two hours on two cores; its runs without a gate are those of `alpha`

The gate multiplies the joined heads by SiLU of another projection of the input. (The paper does not name its function;
SiLU is that of the earlier work it refers to.) It judges whether α = 1 is still better than α = 0 with a gate, and sets
the CPU time of the gate beside the paper's +9.3 %. What came out: results/gate/verdicts.md.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from nomax.nn.attention import Gate
from nomax.study import sweep
from nomax.study.figure import Figure, Table, legend, nothing_yet, sheet
from nomax.study.row import ImageRow, where
from nomax.study.run import Run
from nomax.study.scores import accuracy, basis, lengths, pooled, scale, seeds, settled, values
from nomax.study.setup import Setup
from nomax.study.statistics import Interval, contrast, paired
from nomax.study.verdict import MARGIN, Outcome, Verdict, above, plain, points, within

TITLE = "Does a gate remove the need for length scaling?"
CLAIMS = ("W-gate", "W-gatecost")

GATE: Gate = "silu"
CHOICES: tuple[Gate | None, ...] = (None, GATE)
LINES = [
    sweep.Line(f"{name}{', gate' * (gate is not None)}", name, gate=gate, broken=gate is not None)
    for name in sweep.PAIRED
    for gate in CHOICES
]
PAPER = 0.093  # more core-hours, S/8 with relu
ABOUT = (PAPER / 2, PAPER * 2)  # from half to double: another size on another machine can be held to no more than that


def grid(setup: Setup, seeds: Sequence[int]) -> list[Run]:
    """Both h with every α, with and without the gate, at every length; and softmax without."""
    return sweep.pairs(setup, seeds, [{"gate": gate} for gate in CHOICES])


def figures(rows: Sequence[ImageRow], setup: Setup) -> list[Figure]:
    """Accuracy over α by length, with and without the gate; and the gate's cost by length."""
    caption = (
        "Filled: no gate, as in all other runs; hollow: a SiLU gate. The dashed level is softmax without a gate. The "
        "paper's Fig. 4 shows the same for S/32, S/16 and S/8."
    )
    return [sweep.figure(rows, LINES, "gate", "Accuracy over α with and without a gate", caption), _cost_figure(rows)]


def verdicts(rows: Sequence[ImageRow], setup: Setup) -> list[Verdict]:
    """Whether α = 1 still helps with a gate, and whether the gate costs what the paper says."""
    swept = [row for row in rows if row.activation in sweep.PAIRED and row.qk_norm]
    return [_still_needed(swept, setup), _cost(swept, setup)]


def _still_needed(rows: Sequence[ImageRow], setup: Setup) -> Verdict:
    gains = {}
    for gate in (GATE, None):
        scaled, unscaled = (
            values(where(rows, gate=gate, alpha=alpha), lambda row: (row.activation, row.tokens), accuracy)
            for alpha in (1.0, 0.0)
        )
        gains[gate] = paired(scaled, unscaled)
    cells = gains[GATE]
    used = [row for row in where(rows, gate=GATE) if row.alpha in (0.0, 1.0)]
    if not cells:
        sentence = "No seed has both α = 0 and α = 1 with a gate yet: nothing to judge."
        return Verdict("W-gate", "undecided", sentence, scale(used, setup), seeds(used), {})
    gain, without = pooled(cells), pooled(gains[None])
    by_length = {
        tokens: pooled({cell: entries for cell, entries in cells.items() if cell[1] == tokens})
        for tokens in sorted({tokens for _, tokens in cells})
    }
    listed = "; ".join(f"L = {tokens}: {points(found)}" for tokens, found in by_length.items())
    sentence = (
        f"α = 1 minus α = 0 with a gate: {points(gain)} ({basis(used, cells)}). {listed}. "
        + (f"Without a gate: {points(without)}. " if gains[None] else "")
        + "Reproduced if the interval with a gate is above 0. Contradicted if that without one is, and that with one "
        f"below {100 * MARGIN:g} point: only a need that was there can have been removed."
    )
    outcome: Outcome = "reproduced" if above(gain, 0) == "reproduced" else "undecided"
    if above(without, 0) == "reproduced" and above(gain, MARGIN) == "contradicted":
        outcome = "contradicted"
    best = {
        f"{line.label}, L = {tokens}": [found.place, found.low, found.high]
        for line in LINES
        for tokens in lengths(rows)
        if (found := sweep.best_alpha(line.of(rows, tokens), accuracy)) is not None
    }
    numbers = {"gain": gain, "gain without a gate": without, "by length": by_length, "best α": best}
    return Verdict("W-gate", settled(outcome, used), sentence, scale(used, setup), seeds(used), plain(numbers))


def _cost(rows: Sequence[ImageRow], setup: Setup) -> Verdict:
    """The longest length is judged: S/8, which the paper measured, is its longest."""
    costs = cost_by_length(rows)
    if not costs:
        sentence = "No pair of runs with and without a gate is finished yet: nothing to judge."
        return Verdict("W-gatecost", "undecided", sentence, scale(rows, setup), seeds(rows), {})
    longest = max(costs)
    time, macs, pairs = costs[longest]
    listed = "; ".join(f"L = {tokens}: {_percent(found[0])}" for tokens, found in costs.items())
    sentence = (
        f"At L = {longest} the gate takes {_percent(time)} more CPU time (geometric mean of {pairs} pairs of runs, "
        f"evaluation included) and {100 * macs:.1f} % more multiply-adds; {listed}. The paper has +9.3 % core-hours "
        "for S/8, another size on another machine, so about 9 % is read as half to double of it "
        f"({100 * ABOUT[0]:.1f} to {100 * ABOUT[1]:.1f} %): reproduced if the interval lies within, contradicted if "
        "outside."
    )
    numbers = {
        "time": {tokens: found for tokens, (found, _, _) in costs.items()},
        "multiply-adds": {tokens: found for tokens, (_, found, _) in costs.items()},
        "paper": PAPER,
    }
    used = [row for row in rows if row.status == "done"]
    return Verdict("W-gatecost", within(time, *ABOUT), sentence, scale(used, setup), seeds(used), plain(numbers))


def cost_by_length(rows: Sequence[ImageRow]) -> dict[int, tuple[Interval, float, int]]:
    """For each length: the share of CPU time that the gate adds, that of multiply-adds, and the number of pairs."""
    found = {}
    for tokens in lengths(rows):
        here = [row for row in where(rows, tokens=tokens) if row.status == "done" and row.core_seconds > 0]
        gated, free = (
            values(where(here, gate=gate), lambda row: (row.activation, row.alpha), _log_time) for gate in (GATE, None)
        )
        ratios = [ratio for entries in paired(gated, free).values() for ratio in entries]
        if ratios:
            log = contrast([ratios])
            time = Interval(*(math.exp(value) - 1 for value in (log.mean, log.low, log.high)))
            macs = [fmean(row.macs for row in where(here, gate=gate)) for gate in (GATE, None)]
            found[tokens] = time, macs[0] / macs[1] - 1, len(ratios)
    return found


def _log_time(row: ImageRow) -> float:
    return math.log(row.core_seconds)


def _percent(interval: Interval) -> str:
    if not interval.known:
        return f"{100 * interval.mean:+.1f} % (no interval)".replace("-", "−")
    low, mean, high = (100 * value for value in (interval.low, interval.mean, interval.high))
    return f"{mean:+.1f} % [{low:+.1f}, {high:+.1f}]".replace("-", "−")


def _cost_figure(rows: Sequence[ImageRow]) -> Figure:
    costs = cost_by_length([row for row in rows if row.activation in sweep.PAIRED])
    caption = (
        "What the gate adds to the CPU time of a run (training and evaluation; geometric mean over pairs of runs that "
        "differ in nothing else, 95 % interval) and to the encoder's multiply-adds. The dashed level is the paper's "
        "+9.3 % core-hours for S/8."
    )
    words = [
        f"L = {n}: {_percent(time)} CPU time, {100 * macs:+.1f} % multiply-adds."
        for n, (time, macs, _) in costs.items()
    ]
    alternative = "What the gate adds, by sequence length. " + (" ".join(words) or "No pair of runs yet.")
    columns = ("L", "CPU time added", "low", "high", "multiply-adds added", "pairs")
    listed = tuple(
        (tokens, *(_rounded(value) for value in (time.mean, time.low, time.high)), _rounded(macs), pairs)
        for tokens, (time, macs, pairs) in costs.items()
    )
    title = "The cost of the gate"
    return Figure("gate-cost", title, caption, alternative, Table(columns, listed), lambda: _paint_cost(costs))


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _paint_cost(costs: dict[int, tuple[Interval, float, int]]) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    picture, (axis,) = sheet(1, height=3.4)
    for place, (time, macs, _) in enumerate(costs.values()):
        if time.known:
            axis.plot([place, place], [time.low, time.high], "-", lw=2.2, color="#0072b2", zorder=3)
        axis.plot(place, time.mean, "o", ms=8, color="#0072b2", zorder=4)
        axis.plot(place + 0.12, macs, "s", ms=7, color="#d55e00", zorder=4)
    axis.axhline(PAPER, color="black", lw=1.3, ls=(0, (5, 3)))
    axis.axhline(0, color="#999999", lw=0.8)
    axis.set_xticks(range(len(costs)), [f"L = {tokens}" for tokens in costs])
    axis.set_xlim(-0.6, max(len(costs), 1) - 0.4)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))
    axis.set_ylabel("added by the gate")
    if not costs:
        nothing_yet(axis)
    handles = [
        Line2D([], [], color="#0072b2", marker="o", ms=8, lw=2.2, label="CPU time, 95 % interval"),
        Line2D([], [], color="#d55e00", marker="s", ms=7, ls="", label="multiply-adds"),
        Line2D([], [], color="black", lw=1.3, ls=(0, (5, 3)), label="paper, S/8"),
    ]
    legend(picture, handles, columns=3)
    return picture
