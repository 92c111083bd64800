"""Can ReLU replace softmax in attention for text? Softmax, ReLUFormer without each of its parts, and other maps.

    nomax data get bible-en-es
    nomax study relu-attention                  minutes, with a smaller model
    nomax study relu-attention --setup hour     half an hour on two cores

Translation models that differ in their attention alone. ReLUFormer has a learning rate of its own, and the others
that of softmax, both chosen by text-rate. It judges the loss on the test split, and measures the entropy of rows and
their zeros in trained models, and how long untrained ones take to read and predict a batch. What came out:
results/relu-attention/verdicts.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nomax.phi import SOFTMAX
from nomax.study import speed
from nomax.study.figure import Figure
from nomax.study.row import TextRow, where
from nomax.study.scores import pooled, values
from nomax.study.statistics import Interval, paired
from nomax.study.text_figure import Panel, listing
from nomax.study.text_run import KINDS, TextRun
from nomax.study.text_scores import MARGIN, basis, judged, lead, loss, measurement, nats, spread, turned
from nomax.study.text_setup import TextSetup
from nomax.study.verdict import Verdict, above, worst

TITLE = "Can ReLU replace softmax in attention for text?"
CLAIMS = ("S-diverge", "S-factor", "S-losses", "S-speed")
KIND = "text"

DIRECT, OURS = "relu", KINDS[True, True]
FACTOR, UNNORMALISED = KINDS[False, False], KINDS[False, True]
# A loss so much higher than softmax's is called not to converge: e times its perplexity. A run that breaks off, and so
# counts as a uniform guess, is further away than that as soon as softmax has learned which words are frequent.
GAP = 1.0
BLEU = (
    "The paper has 34.22 BLEU for softmax, 33.19 for the factor alone, 34.56 with both losses and 33.19 without that "
    "of normalisation; ReLU put in directly diverges (IWSLT14)."
)


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TextRun]:
    """Ten kinds of attention. One seed after the other, so a budget cuts off whole seeds."""
    return [run for seed in seeds for run in _kinds(setup, seed)]


def figures(
    rows: Sequence[TextRow], setup: TextSetup, before: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Figure]:
    """Loss, BLEU, entropy and zeros of each kind, and the times.

    before: the numbers of verdicts by claim, if times are not to be measured again.
    """
    panels = [
        Panel("test loss (nats)", loss),
        Panel("BLEU", measurement("bleu")),
        Panel("entropy", measurement("entropy")),
        Panel("zeros", measurement("zeros")),
    ]
    title = "Ten kinds of attention in the same translation model"
    caption = (
        f"{BLEU} Entropy: in nats, of rows of weights divided by their sum. Zeros: of the weights of visible keys. "
        "Both on test sentences, means over rows, heads and all attentions. The learning rate is "
        f"{setup.reluformer_lr:g} for ReLUFormer and what lacks parts of it, {setup.lr:g} for the others."
    )
    named = {"name": "relu-attention", "title": title, "caption": caption}
    times = before["S-speed"]["seconds"] if before else speed.measure(setup)
    return [listing(rows, panels, lambda row: row.attention, **named), speed.figure(setup, times)]


def verdicts(rows: Sequence[TextRow], setup: TextSetup) -> list[Verdict]:
    """What the runs say about the four claims."""
    return [_diverges(rows, setup), _factor(rows, setup), _losses(rows, setup), speed.verdict(setup)]


def _kinds(setup: TextSetup, seed: int) -> list[TextRun]:
    return [
        setup.run(SOFTMAX, seed=seed),
        setup.run("relu", seed=seed),
        *(setup.reluformer(losses=losses, seed=seed) for losses in sorted(KINDS)),
        setup.run("relu/L", seed=seed),
        setup.run("sparsemax", seed=seed),
        setup.run("entmax15", seed=seed),
        setup.run("relu", joined_norm="rela", seed=seed),
    ]


def _ahead(rows: Sequence[TextRow], first: str, second: str) -> tuple[Interval, str]:
    """By how much the loss of the first is lower, and what that rests on."""
    chosen = where(rows, attention=first) + where(rows, attention=second)
    cells = lead(where(rows, attention=first), where(rows, attention=second), lambda row: row.data)
    return pooled(cells), basis(chosen, cells)


def _diverges(rows: Sequence[TextRow], setup: TextSetup) -> Verdict:
    behind, said = _ahead(rows, SOFTMAX, DIRECT)
    used = where(rows, attention=DIRECT)
    broken = sum(row.status == "diverged" for row in used)
    sentence = (
        f"The loss of ReLU put in directly is higher than that of softmax by {nats(behind)} ({said}); {broken} of "
        f"{len(used)} runs broke off. {BLEU} Not to converge is to be {GAP:g} nat behind: reproduced if the interval "
        "is above, contradicted if below."
    )
    compared = used + where(rows, attention=SOFTMAX)
    return judged("S-diverge", above(behind, GAP), sentence, compared, setup, {"behind": behind, "broke off": broken})


def _factor(rows: Sequence[TextRow], setup: TextSetup) -> Verdict:
    behind, said = _ahead(rows, SOFTMAX, FACTOR)
    sentence = (
        f"With the factor alone the loss is higher than that of softmax by {nats(behind)} ({said}). {BLEU} Reproduced "
        f"if the interval is above 0 and below {GAP:g} nat, contradicted if it lies outside."
    )
    outcome = worst([above(behind, 0), above(turned(behind), -GAP)])
    return judged("S-factor", outcome, sentence, where(rows, attention=FACTOR), setup, {"behind": behind})


def _losses(rows: Sequence[TextRow], setup: TextSetup) -> Verdict:
    ahead, said = _ahead(rows, OURS, SOFTMAX)
    gain, _ = _ahead(rows, OURS, UNNORMALISED)
    entropy, _ = _ahead(rows, OURS, KINDS[True, False])
    fall = pooled(paired(*(_entropies(where(rows, attention=kind)) for kind in (OURS, UNNORMALISED))))
    numbers = {"over softmax": ahead, "over no normalisation loss": gain, "over no entropy loss": entropy}
    told = ""
    if fall.known:  # a run that broke off has no rows to look at, so the verdict does not hang on this
        numbers["entropy over no normalisation loss"] = fall
        told = f" Without that of normalisation the entropy of rows falls by {spread(fall)}, in the paper by 1.52."
    sentence = (
        f"With both losses the loss is lower than that of softmax by {nats(ahead)} ({said}), and lower than without "
        f"that of normalisation by {nats(gain)}, or of entropy by {nats(entropy)}.{told} {BLEU} To match is to trail "
        f"by no more than {MARGIN:g} nats: reproduced if the first interval is above −{MARGIN:g} and the second above "
        "0, contradicted if one is below."
    )
    outcome = worst([above(ahead, -MARGIN), above(gain, 0)])
    return judged("S-losses", outcome, sentence, where(rows, attention=OURS), setup, numbers)


def _entropies(rows: Sequence[TextRow]) -> dict[tuple[str, int], float]:
    return values(rows, lambda row: row.data, measurement("entropy"))
