"""Does qk-layernorm matter? relu and relu² over α, with and without it, at three sequence lengths (Fig. 3).

    nomax study qk-norm                 minutes, on the bundled images
    nomax study qk-norm --setup day      three hours of one core; its runs with qk-norm are those of `alpha`

It judges whether LayerNorm of queries and keys changes accuracy at these sizes; the paper found no large effect and
warned that this may change at scale. What came out: results/qk-norm/verdicts.md.
"""

from collections.abc import Sequence

from nomax.study.engine.experiment import Experiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.result import ImageResult, finals, where
from nomax.study.engine.statistics import accuracy, comparison, contrast, differences, pooled, repeated
from nomax.study.engine.verdict import MARGIN, Outcome, Verdict, basis, points, within
from nomax.study.images import over_alpha
from nomax.study.images.setup import Setup

CHANGES = over_alpha.PAIRED_LENGTHS
TITLE = "Does qk-layernorm matter?"
CLAIMS = ("W-qknorm",)

LINES = [
    over_alpha.Line(f"{name}{', no qk-norm' * (not norm)}", name, qk_norm=norm, broken=not norm)
    for name in over_alpha.PAIRED
    for norm in (True, False)
]


def grid(setup: Setup, seeds: Sequence[int]) -> list[Experiment]:
    """Return both h with every α, with and without qk-norm, at every length; and softmax with it."""
    return over_alpha.pairs(setup, seeds, [{"qk_norm": norm} for norm in (True, False)])


def figures(results: Sequence[ImageResult], setup: Setup) -> list[Figure]:
    """Draw accuracy over α by length, with and without qk-norm."""
    caption = (
        "Filled: queries and keys are normalised, as in all other runs; hollow: they are not. The dashed level is "
        "softmax with qk-norm. The paper's Fig. 3 shows the same for S/32, S/16 and S/8."
    )
    return [over_alpha.figure(results, LINES, "qk-norm", "Accuracy over α with and without qk-layernorm", caption)]


def verdicts(results: Sequence[ImageResult], setup: Setup) -> list[Verdict]:
    """Judge whether the effect is smaller than a point, at the lengths where softmax has learned."""
    ground = over_alpha.ground(finals(results), setup)
    swept = [result for result in ground.same if result.activation in over_alpha.PAIRED and result.gate is None]
    normed, free = (where(swept, qk_norm=norm) for norm in (True, False))
    everywhere = differences(normed, free, ("activation", "tokens", "alpha"), accuracy)
    cells = {cell: entries for cell, entries in everywhere.items() if cell[2] == 1}
    if not cells:
        return [ground.nothing("W-qknorm", "No seed has a run at α = 1 both with and without qk-norm yet")]
    effect, over_all = pooled(cells), pooled(everywhere)
    single = {cell: contrast([entries]) for cell, entries in repeated(cells).items()}
    (name, tokens, _), largest = max(single.items(), key=lambda item: abs(item[1].mean))
    # Opposite effects must not hide each other in a mean. More parts than these would have one that is large by chance.
    by_h = [pooled({cell: cells[cell] for cell in cells if cell[0] == name}) for name in over_alpha.PAIRED]
    outcome: Outcome = within(effect, -MARGIN, MARGIN)
    if any(within(part, -MARGIN, MARGIN) == "contradicted" for part in by_h):
        outcome = "contradicted"
    sentence = (
        f"At α = 1 qk-norm changes accuracy by {points(effect)} ({basis(where(swept, alpha=1.0), cells)}); the largest "
        f"effect is {points(largest)} for {name} at L = {tokens}; over all α it is {points(over_all)}. "
        f"A large effect would be more than {100 * MARGIN:g} point: reproduced if the interval lies within that, "
        "contradicted if it or that of one h lies outside."
    )
    by_cell = {f"{name}, L = {tokens}": part for (name, tokens, _), part in single.items()}
    numbers = {"effect": effect, "over all α": over_all, "by h and L": by_cell}
    noise = {"the effect": comparison(cells, [-MARGIN, MARGIN], margin=MARGIN)}
    return [ground.settle("W-qknorm", outcome, sentence, numbers, noise)]
