"""Does a gate remove the need for length scaling, and what does it cost? relu and relu² over α, with and without it
(Fig. 4).

    nomax study gate                  minutes, on the bundled images
    nomax study gate --setup hour     one to two hours on two cores; its runs without a gate are those of `alpha`

The gate multiplies the joined heads by SiLU of another projection of the input. (The paper does not name its function;
SiLU is that of the earlier work it refers to.) It judges whether α = 1 is still better than α = 0 with a gate. What the
gate costs is measured apart, on steps of training that take turns, and set beside the paper's +9.3 %. What came out:
results/gate/verdicts.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nomax.nn.attention import Gate
from nomax.study import gate_cost, sweep
from nomax.study.figure import Figure
from nomax.study.row import ImageRow, where
from nomax.study.run import Run
from nomax.study.scores import accuracy, basis, lengths, pooled, scale, seeds, settled, values
from nomax.study.setup import Setup
from nomax.study.statistics import paired
from nomax.study.verdict import MARGIN, Outcome, Verdict, above, plain, points

TITLE = "Does a gate remove the need for length scaling?"
CLAIMS = ("W-gate", "W-gatecost")

GATE: Gate = "silu"
CHOICES: tuple[Gate | None, ...] = (None, GATE)
LINES = [
    sweep.Line(f"{name}{', gate' * (gate is not None)}", name, gate=gate, broken=gate is not None)
    for name in sweep.PAIRED
    for gate in CHOICES
]


def grid(setup: Setup, seeds: Sequence[int]) -> list[Run]:
    """Both h with every α, with and without the gate, at every length; and softmax without."""
    return sweep.pairs(setup, seeds, [{"gate": gate} for gate in CHOICES])


def figures(
    rows: Sequence[ImageRow], setup: Setup, before: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Figure]:
    """Accuracy over α by length, with and without the gate; and the gate's cost by length.

    before: the numbers of verdicts by claim, if the cost is not to be measured again.
    """
    caption = (
        "Filled: no gate, as in all other runs; hollow: a SiLU gate. The dashed level is softmax without a gate. The "
        "paper's Fig. 4 shows the same for S/32, S/16 and S/8."
    )
    costs = gate_cost.recalled(setup, before["W-gatecost"]) if before else gate_cost.measure(setup, GATE)
    title = "Accuracy over α with and without a gate"
    return [sweep.figure(rows, LINES, "gate", title, caption), gate_cost.figure(costs)]


def verdicts(rows: Sequence[ImageRow], setup: Setup) -> list[Verdict]:
    """Whether α = 1 still helps with a gate, and whether the gate costs what the paper says."""
    swept = [row for row in rows if row.activation in sweep.PAIRED and row.qk_norm]
    return [_still_needed(swept, setup), gate_cost.verdict(gate_cost.measure(setup, GATE))]


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
