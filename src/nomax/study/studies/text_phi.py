"""Does the vision paper's L^-1 carry over to text? L^-α·h in a small causal language model.

    nomax data get bible-en-es
    nomax study text-phi                  minutes, with fewer h and α
    nomax study text-phi --setup hour     one to two hours on two cores

Each h is trained with its weights multiplied by L^-α, where L counts what a token may see; no gain is learned, and
there are no penalties. It judges where the loss on the test split is lowest. What came out:
results/text-phi/verdicts.md.
"""

from collections.abc import Sequence
from statistics import fmean

from nomax.phi import SOFTMAX
from nomax.study import sweep
from nomax.study.figure import Figure
from nomax.study.row import TextRow, where
from nomax.study.studies.alpha import NEAR, TYPICAL, near_share
from nomax.study.text_figure import Panel, figure
from nomax.study.text_run import TextRun
from nomax.study.text_scores import judged, loss, quality
from nomax.study.text_setup import TextSetup
from nomax.study.verdict import Verdict, above

TITLE = "Does the vision paper's L^-1 carry over to text?"
CLAIMS = ("Q-text",)
KIND = "text"


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TextRun]:
    """Every h with every α, and softmax. One seed after the other, so a budget cuts off whole seeds."""
    phis = [sweep.phi(activation, alpha) for activation in setup.activations for alpha in setup.alphas]
    return [
        setup.run(phi, task="language", documents=setup.text_length, seed=seed, measures=())
        for seed in seeds
        for phi in [SOFTMAX, *phis]
    ]


def figures(rows: Sequence[TextRow], setup: TextSetup) -> list[Figure]:
    """The loss over α."""
    caption = (
        "Each h is trained with its weights multiplied by L⁻ᵅ, L being the number of tokens that are visible; the "
        "broken line is softmax, which has no α. No paper has this for text; the vision paper's best α is near 1."
    )
    return [
        figure(
            rows,
            [Panel("test loss (nats)", loss)],
            lambda row: row.activation,
            lambda row: None if row.activation == SOFTMAX else row.alpha,
            name="text-phi",
            title="Loss of a language model over the exponent α",
            caption=caption,
            axis="exponent α",
        )
    ]


def verdicts(rows: Sequence[TextRow], setup: TextSetup) -> list[Verdict]:
    """Whether the best α is close to 1, as for images."""
    swept = [row for row in rows if row.activation != SOFTMAX]
    found = {
        name: place
        for name in dict.fromkeys(row.activation for row in swept)
        if (place := sweep.best_alpha(where(swept, activation=name), quality)) is not None
    }
    near = [abs(place.place - 1) <= NEAR for place in found.values()]
    share = near_share(found.values(), near)
    alphas = sorted({row.alpha for row in swept})
    by_chance = fmean([abs(alpha - 1) <= NEAR for alpha in alphas]) if alphas else float("nan")
    listed = ", ".join(f"{name} {place.place:g}" for name, place in found.items())
    known = f"95 % interval {share.low:.0%} to {share.high:.0%}" if share.known else "no interval: one seed"
    sentence = (
        f"The loss is lowest at an α within {NEAR:g} of 1 for {sum(near)} of {len(near)} h ({known}; a random choice "
        f"from the grid: {by_chance:.0%}). Best α: {listed}. {_levels(rows)}"
        f"Reproduced if the interval is above {TYPICAL:.0%}, contradicted if below."
    )
    best = {name: [place.place, place.low, place.high] for name, place in found.items()}
    numbers = {"share": share, "by chance": by_chance, "best": best}
    return [judged("Q-text", above(share, TYPICAL), sentence, rows, setup, numbers)]


def _levels(rows: Sequence[TextRow]) -> str:
    """The loss of softmax and of the best other, if both are there."""
    means = {
        phi: fmean(found)
        for phi in dict.fromkeys(row.phi for row in rows)
        if (found := [value for row in where(rows, phi=phi) if (value := loss(row)) is not None])
    }
    if len(means) < 2 or SOFTMAX not in means:
        return ""
    best = min((phi for phi in means if phi != SOFTMAX), key=lambda phi: means[phi])
    return f"The lowest mean loss is {means[best]:.3f} nats with {best}; softmax has {means[SOFTMAX]:.3f}. "
