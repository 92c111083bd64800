"""Does the vision paper's L^-1 carry over to text? L^-α·h in a small causal language model.

    nomax data get bible-en-es
    nomax study text-phi                  minutes, with fewer h and α
    nomax study text-phi --setup hour     one to two hours on two cores
    nomax study text-phi --setup day      five hours of one core

Each h is trained with its weights multiplied by L^-α, where L counts what a token may see; no gain is learned, and
there are no penalties. It judges where the loss on the test split is lowest. What came out:
results/text-phi/verdicts.md.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from nomax.phi import SOFTMAX, Phi
from nomax.study.engine.experiment import TextExperiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.result import TextResult, where
from nomax.study.engine.statistics import Interval, best_alpha, comparison, pooled
from nomax.study.engine.verdict import ABOVE_ZERO, Premise, Verdict, above, learned
from nomax.study.text.setup import TextSetup
from nomax.study.text.shared import MARGIN, Panel, basis, figure, judged, lead, loss, nats, quality

TITLE = "Does the vision paper's L^-1 carry over to text?"
CLAIMS = ("Q-text",)
KIND = "text"

CHANGES = {"day": {"activations": ("relu", "gelu", "identity"), "alphas": (0.0, 0.5, 1.0, 1.5)}}

LEARNED = 2.5  # nats by which softmax must be better than a uniform guess
NEAR = 0.25  # of 1: the second paper's L^-½ is another answer


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TextExperiment]:
    """Return every h with every α, and softmax. One seed after the other, so a budget cuts off whole seeds."""
    phis = [str(Phi(activation, alpha)) for activation in setup.activations for alpha in setup.alphas]
    return [
        setup.run(phi, task="language", documents=setup.text_length, seed=seed, measures=())
        for seed in seeds
        for phi in [SOFTMAX, *phis]
    ]


def figures(results: Sequence[TextResult], setup: TextSetup) -> list[Figure]:
    """Draw the loss over α."""
    caption = (
        "Each h is trained with its weights multiplied by L⁻ᵅ, L being the number of tokens that are visible; the "
        "broken line is softmax, which has no α. No paper has this for text; the vision paper's best α is near 1."
    )
    return [
        figure(
            results,
            [Panel("test loss (nats)", loss)],
            lambda result: result.activation,
            lambda result: None if result.activation == SOFTMAX else result.alpha,
            name="text-phi",
            title="Loss of a language model over the exponent α",
            caption=caption,
            axis="exponent α",
        )
    ]


def verdicts(results: Sequence[TextResult], setup: TextSetup) -> list[Verdict]:
    """Judge whether the best α is close to 1, as for images."""
    swept = [result for result in results if result.activation != SOFTMAX]
    by_h = {name: where(swept, activation=name) for name in dict.fromkeys(result.activation for result in swept)}
    alphas = best_alpha(by_h, quality, NEAR)
    best, cells = alphas.best, alphas.leads
    over_half = pooled(lead(where(swept, alpha=1.0), where(swept, alpha=0.5), "activation"))
    listed = ", ".join(f"{name} {place.place:g}" for name, place in best.items())
    sentence = (
        f"The best α within {NEAR:g} of 1 is ahead of the best further away, both as the other seeds choose them, by "
        f"{nats(alphas.lead)}{_said(over_half)} ({basis(swept, cells)}; the first interval is over the h). "
        f"The lowest mean lies within {NEAR:g} of 1 for {alphas.near} of {len(best)} h "
        f"(a random choice from the grid: {alphas.by_chance:.0%}). "
        f"Best α: {listed}. {_levels(results)}{ABOVE_ZERO}"
    )
    numbers = {
        "lead": alphas.lead,
        "h whose best is near": [alphas.near, len(best)],
        "lead over ½": [over_half.mean, over_half.low, over_half.high],
        "by chance": alphas.by_chance,
        "best": {name: [place.place, place.low, place.high] for name, place in best.items()},
    }
    noise = {"the lead": comparison(cells, [0.0], margin=MARGIN, unit="nats", over="settings")}
    return [judged("Q-text", above(alphas.lead, 0), sentence, results, numbers, [predicts(results)], comparisons=noise)]


def predicts(results: Sequence[TextResult]) -> Premise:
    """State that softmax predicts text far better than a uniform guess."""

    def gain(result: TextResult) -> float | None:
        nats_per_token = loss(result)
        return None if nats_per_token is None else math.log(result.vocabulary) - nats_per_token

    baseline = where(results, activation=SOFTMAX)
    return learned(
        baseline,
        gain,
        LEARNED,
        "data",
        say=lambda value: f"{value:.2f} nats better than a uniform guess",
    )


def _said(over_half: Interval) -> str:
    """Say by how much 1 is ahead of the second paper's exponent, if both are there."""
    return f", and 1 is ahead of ½ by {nats(over_half)}" if over_half.mean == over_half.mean else ""


def _levels(results: Sequence[TextResult]) -> str:
    """Say the loss of softmax and of the best other, if both are there."""
    means = {
        phi: fmean(losses)
        for phi in dict.fromkeys(result.phi for result in results)
        if (losses := [value for result in where(results, phi=phi) if (value := loss(result)) is not None])
    }
    if len(means) < 2 or SOFTMAX not in means:
        return ""
    best = min((phi for phi in means if phi != SOFTMAX), key=lambda phi: means[phi])
    return f"The lowest mean loss is {means[best]:.3f} nats with {best}; softmax has {means[SOFTMAX]:.3f}. "
