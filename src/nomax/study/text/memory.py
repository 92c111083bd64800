"""Is a feed-forward layer a memory? ReLU, softmax and softmax with LayerNorm, over the number of slots.

    nomax data get bible-en-es
    nomax study memory                  minutes, with fewer slots
    nomax study memory --setup hour     one to two hours on two cores
    nomax study memory --setup day      six hours of one core; models that translate

Translation models whose attention is softmax and whose feed-forward layers are φ(x·Kᵀ)·V. It judges the loss on the
test split, and looks into the trained memories: how much they add to the residual stream, how much of their weight the
largest 0.2 % hold, how alike their values are. What came out: results/memory/verdicts.md.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import TextExperiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.result import TextResult, finals, where
from nomax.study.engine.statistics import by_cell, comparison, contrast, pooled, turned
from nomax.study.engine.verdict import ABOVE_ZERO, BOTH_ABOVE_ZERO, Verdict, above, spread, within, worst
from nomax.study.text.setup import TextSetup
from nomax.study.text.shared import MARGIN, Lead, Panel, basis, compare, figure, judged, loss, measurement, translates

TITLE = "Is a feed-forward layer a memory, and does softmax harm it?"
CLAIMS = ("S-softmax-ffn", "S-ln", "S-slots", "S-central", "S-variance")
KIND = "text"

CHANGES = {"day": {"slots": (512, 2048)}}  # a usual number, and one at which the paper's ReLU pulls ahead

RELU, PLAIN, NORMED = "relu", "softmax", "softmax + LN"
MANY = 2048  # slots; the paper's ReLU is ahead of softmax with LayerNorm at 3,072 and 4,096, and not at fewer
USUAL = 512  # slots from which on 0.2 % of them are at least one
MOST = 0.5  # "most of the sum": more than half. The paper says more than 85 %.
SMALL = 0.1  # "small beside the residual": a tenth of its variance, by our choice
BLEU = "The paper has 34.22 BLEU for ReLU, 33.08 for softmax and 34.21 for softmax with LayerNorm (IWSLT14)."


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TextExperiment]:
    """Return the three kinds with every number of slots. One seed after the other, so a budget cuts off whole seeds."""
    return [
        setup.run(SOFTMAX, memory=memory, memory_norm=norm, slots=slots, seed=seed)
        for seed in seeds
        for slots in setup.slots
        for memory, norm in (("relu", False), ("softmax", False), ("softmax", True))
    ]


def figures(results: Sequence[TextResult], setup: TextSetup) -> list[Figure]:
    """Draw loss and BLEU over slots, and what is inside the memories."""
    quality = [Panel("test loss (nats)", loss), Panel("BLEU", measurement("bleu"))]
    inside = [
        Panel("variance ratio", measurement("variance_ratio"), logarithmic=True),
        Panel("share of the top 0.2 %", measurement("top_share")),
        Panel("anisotropy", measurement("anisotropy")),
    ]
    parts = (
        "Left: the variance of what memories add over that of the residual stream. Middle: the part of all weights "
        "that the largest 0.2 % hold. Right: the mean cosine of two values. On test tokens, means over layers."
    )
    return [
        _figure(results, quality, "memory", "Translation by the slots of the feed-forward layers", BLEU),
        _figure(results, inside, "memory-inside", "What is inside the memories", parts),
    ]


def verdicts(results: Sequence[TextResult], setup: TextSetup) -> list[Verdict]:
    """Judge the five claims."""
    results = finals(results)
    return [
        _worse(results),
        _normed(results),
        _many(results),
        _central(results),
        _variance(results),
    ]


def lemma(slots: int, samples: int = 4000) -> tuple[float, float]:
    """Return the variance of Σ φ(x_i)·v_i over n slots, for normal x and v: ReLU's over n/2, and softmax's."""
    generator = np.random.default_rng(0)
    x, v = generator.standard_normal((2, samples, slots))
    weights = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    return float((np.maximum(x, 0) * v).sum(1).var() / (slots / 2)), float((weights * v).sum(1).var())


def _figure(results: Sequence[TextResult], panels: list[Panel], name: str, title: str, caption: str) -> Figure:
    words = {"name": name, "title": title, "caption": caption, "axis": "slots"}
    return figure(results, panels, lambda result: result.memory, lambda result: result.slots, logarithmic=True, **words)


def _lead(results: Sequence[TextResult], second: str) -> Lead:
    return compare(where(results, memory=RELU), where(results, memory=second), "slots")


def _by_slots(cells: dict[int, list[float]]) -> str:
    return ", ".join(f"{slots:,}: {contrast([cells[slots]]).mean:+.3f}".replace("-", "−") for slots in sorted(cells))


def _worse(results: Sequence[TextResult]) -> Verdict:
    ahead = _lead(results, PLAIN)
    sentence = (
        f"The loss of ReLU is {ahead.words()} than that of softmax ({basis(results, ahead.cells)}; lead by slots "
        f"{_by_slots(ahead.cells)} nats). {BLEU} {ABOVE_ZERO}"
    )
    noise = {"the lead": comparison(ahead.cells, [0.0], margin=MARGIN, unit="nats")}
    premises = [translates(results, "slots"), *ahead.agreement]
    outcome = above(ahead.loss, 0)
    return judged("S-softmax-ffn", outcome, sentence, results, _numbers(ahead), premises, comparisons=noise)


def _normed(results: Sequence[TextResult]) -> Verdict:
    few = [result for result in results if result.slots < MANY]
    ahead = _lead(few, NORMED)
    sentence = (
        f"Below {MANY:,} slots the loss of ReLU is {ahead.words()} than that of softmax with LayerNorm "
        f"({basis(few, ahead.cells)}; lead by slots {_by_slots(ahead.cells)} nats). {BLEU} As good is within "
        f"{MARGIN:g} nats: reproduced if the interval is, contradicted if it lies outside."
    )
    noise = {"the lead": comparison(ahead.cells, [-MARGIN, MARGIN], margin=MARGIN, unit="nats")}
    premises = [translates(few, "slots"), *ahead.agreement]
    outcome = within(ahead.loss, -MARGIN, MARGIN)
    return judged("S-ln", outcome, sentence, few, _numbers(ahead), premises, comparisons=noise)


def _many(results: Sequence[TextResult]) -> Verdict:
    many = [result for result in results if result.slots >= MANY]
    ahead, of_normed = _lead(many, PLAIN), _lead(many, NORMED)
    sentence = (
        f"From {MANY:,} slots on the loss of ReLU is {ahead.words()} than that of softmax, and {of_normed.words()} "
        f"than that of softmax with LayerNorm ({basis(many, of_normed.cells)}). The paper finds ReLU ahead at 3,072 "
        f"and 4,096 slots. {BOTH_ABOVE_ZERO}"
    )
    outcome = worst([above(ahead.loss, 0), above(of_normed.loss, 0)])
    numbers = {
        **_numbers(ahead),
        "lead over softmax with LayerNorm": of_normed.loss,
        "BLEU over softmax with LayerNorm": of_normed.bleu_numbers,
    }
    noise = {
        "the lead over softmax": comparison(ahead.cells, [0.0], margin=MARGIN, unit="nats"),
        "the lead over softmax with LayerNorm": comparison(of_normed.cells, [0.0], margin=MARGIN, unit="nats"),
    }
    premises = [translates(many, "slots"), *ahead.agreement, *of_normed.agreement]
    return judged("S-slots", outcome, sentence, many, numbers, premises, comparisons=noise)


def _central(results: Sequence[TextResult]) -> Verdict:
    large = [result for result in results if result.slots >= USUAL]
    score = measurement("top_share")
    softmax, relu = (pooled(by_cell(where(large, memory=kind), "slots", score)) for kind in (PLAIN, RELU))
    sentence = (
        f"From {USUAL} slots on the largest 0.2 % of all weights of softmax hold {spread(softmax)} of their sum, those "
        f"of ReLU {spread(relu)}, on test tokens. The paper has more than 0.85 for softmax. Most is more than "
        f"{MOST:g}: reproduced if the interval of softmax is above, contradicted if below."
    )
    numbers = {"softmax": softmax, "relu": relu}
    return judged("S-central", above(softmax, MOST), sentence, large, numbers, [translates(large, "slots")])


def _variance(results: Sequence[TextResult]) -> Verdict:
    score = measurement("variance_ratio")
    softmax, relu = (pooled(by_cell(where(results, memory=kind), "slots", score)) for kind in (PLAIN, RELU))
    over, of_softmax = lemma(USUAL)
    sentence = (
        f"What memories add has, relative to the residual stream, the variance {spread(softmax)} with softmax and "
        f"{spread(relu)} with ReLU, on test tokens. Before training, for normal numbers and n = {USUAL}, Σ "
        f"relu(x_i)·v_i has {over:.2f} times the variance n/2 of the paper's lemma, and softmax's sum the variance "
        f"{of_softmax:.4f}. Small is less than {SMALL:g}: reproduced if softmax's interval is below and ReLU's above, "
        "contradicted if either lies on the other side."
    )
    outcome = worst([above(turned(softmax), -SMALL), above(relu, SMALL)])
    numbers = {"softmax": softmax, "relu": relu, "over n/2": over, "of softmax's sum": of_softmax}
    return judged("S-variance", outcome, sentence, results, numbers, [translates(results, "slots")])


def _numbers(ahead: Lead) -> dict[str, Any]:
    by_slots = {slots: contrast([ahead.cells[slots]]) for slots in sorted(ahead.cells)}
    return {"lead": ahead.loss, "BLEU": ahead.bleu_numbers, "by slots": by_slots}
