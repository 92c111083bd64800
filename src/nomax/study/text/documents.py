"""Is ReLU attention better for long documents? Softmax and ReLUFormer over the length of what they translate at once.

    nomax data get bible-en-es
    nomax study documents                                                        minutes, two lengths
    nomax study documents --setup hour --lengths 128 512 1024 --seeds 2          an hour and a half on two cores
    nomax study documents --setup hour                                           all lengths, three seeds: five hours
    nomax study documents --setup day                                            six hours of one core; two lengths

Documents are cut and joined to 128 … 2,048 tokens; every run has as many tokens in a step, and as many steps. In the
first three quarters of them documents grow to their length, from 128 tokens: models that saw nothing but long ones
learned to continue the target, and made nothing of the source. It judges the loss on the test split, at equal length,
and where the encoder's attention looks: but only of models that use the source, which is measured, too. What came out:
results/documents/verdicts.md.
"""

from collections.abc import Sequence
from typing import Any

from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import RELUFORMERS, TextExperiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.measures import FAR, FREQUENT
from nomax.study.engine.result import TextResult, where
from nomax.study.engine.statistics import (
    Comparison,
    Interval,
    by_cell,
    comparison,
    contrast,
    differences,
    pooled,
    repeated,
    turned,
    values,
)
from nomax.study.engine.verdict import Outcome, Premise, Verdict, above, difference, spread, worst
from nomax.study.text.setup import TextSetup
from nomax.study.text.shared import MARGIN, Panel, basis, compare, figure, judged, loss, measurement, nats, translates

TITLE = "Is ReLU attention better for long documents?"
CLAIMS = ("S-long", "S-distant")
KIND = "text"

CHANGES = {"day": {"lengths": (128, 512)}}  # where the paper's two are on a par, and where ReLUFormer is ahead

OURS = RELUFORMERS[True, True]
MEASURES = ("bleu", "rows", "distance")
LONG = 512  # tokens, from which the paper's ReLUFormer is ahead
BLEU = "The paper's ReLUFormer is on par to 256 tokens, ahead from 512, and by 1.15 BLEU at 1,024 (Europarl7)."


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TextExperiment]:
    """Return both kinds at every length. One seed after the other, so a budget cuts off whole seeds."""
    return [
        run
        for seed in seeds
        for length in setup.lengths
        for run in (
            setup.run(SOFTMAX, documents=length, seed=seed, measures=MEASURES),
            setup.reluformer(documents=length, seed=seed, measures=MEASURES),
        )
    ]


def figures(results: Sequence[TextResult], setup: TextSetup) -> list[Figure]:
    """Draw loss and BLEU over the length, what the source is worth, and where attention looks."""
    quality = [Panel("test loss (nats)", loss), Panel("BLEU", measurement("bleu"))]
    looks = [
        Panel(f"weight beyond {FAR}", measurement("distant")),
        Panel("on frequent pieces", measurement("frequent")),
        Panel("entropy (nats)", measurement("entropy")),
    ]
    source = [Panel("the source's worth (nats)", measurement("source_use"))]
    use = (
        "By how much the loss rises if every document is given the source of another. Where that is nothing, a model "
        "continues the target, and does not translate."
    )
    caption = (
        f"Left: the share of a row's weight on keys more than {FAR} tokens away. Middle: on the {FREQUENT} most "
        "frequent pieces of what was looked at: stop words and commas, but parts of words, too, where pieces are few. "
        "Both of the encoder. Right: of all attentions."
    )
    return [
        _figure(results, quality, "documents", "Translation by the length of documents", BLEU),
        _figure(results, source, "documents-source", "What the source is worth", use),
        _figure(results, looks, "documents-looks", "Where attention looks in documents", caption),
    ]


def verdicts(results: Sequence[TextResult], setup: TextSetup) -> list[Verdict]:
    """Judge the two claims."""
    return [_grows(results), _distant([result for result in results if result.tokens >= LONG])]


def _figure(results: Sequence[TextResult], panels: list[Panel], name: str, title: str, caption: str) -> Figure:
    words = {"name": name, "title": title, "caption": caption, "axis": "tokens"}
    return figure(
        results, panels, lambda result: result.attention, lambda result: result.tokens, logarithmic=True, **words
    )


def _grows(results: Sequence[TextResult]) -> Verdict:
    ahead = compare(where(results, attention=OURS), where(results, attention=SOFTMAX), "tokens")
    used = repeated(ahead.cells)
    short = {length: entries for length, entries in used.items() if length < LONG}
    long = {length: entries for length, entries in used.items() if length >= LONG}
    at_short, at_long, growth = pooled(short), pooled(long), _difference(long, short)
    listed = ", ".join(f"{n:,}: {contrast([ahead.cells[n]]).mean:+.3f}".replace("-", "−") for n in sorted(ahead.cells))
    sentence = (
        f"The loss of ReLUFormer is {difference(at_short, 'nats', 'lower', 'higher')} than that of softmax below "
        f"{LONG} tokens and {difference(at_long, 'nats', 'lower', 'higher')} from there on; its lead "
        f"{difference(growth, 'nats', 'grows', 'shrinks')} ({basis(results, ahead.cells)}; lead by length {listed} "
        f"nats). {BLEU} Reproduced if the three intervals are above −{MARGIN:g}, 0 and 0, contradicted if one is below"
    )
    outcome = worst([above(at_short, -MARGIN), above(at_long, 0), above(growth, 0)])
    by_length = {length: contrast([ahead.cells[length]]) for length in sorted(ahead.cells)}
    numbers = {"short": at_short, "long": at_long, "growth": growth, "BLEU": ahead.bleu_numbers, "by length": by_length}
    noise = {
        "the lead at long lengths": comparison(long, [0.0], margin=MARGIN, unit="nats"),
        "the lead at short ones": comparison(short, [-MARGIN], margin=MARGIN, unit="nats"),
    }
    return _if_translated("S-long", outcome, sentence, results, numbers, ahead.agreement, noise=noise)


def _difference(first: dict[int, Sequence[float]], second: dict[int, Sequence[float]]) -> Interval:
    if not first or not second:
        return Interval(float("nan"), float("nan"), float("nan"))
    weights = [1 / len(first)] * len(first) + [-1 / len(second)] * len(second)
    return contrast([*first.values(), *second.values()], weights)


def _distant(results: Sequence[TextResult]) -> Verdict:
    ours, softmax = (where(results, attention=kind) for kind in (OURS, SOFTMAX))
    leads = {name: pooled(differences(ours, softmax, "tokens", measurement(name))) for name in ("distant", "frequent")}
    everywhere = values(results, "tokens", measurement("frequent_keys"))
    share = sum(everywhere.values()) / len(everywhere) if everywhere else float("nan")
    sentence = (
        f"From {LONG} tokens on rows of ReLUFormer's encoder have {spread(leads['distant'], signed=True)} more of "
        f"their weight on keys beyond {FAR} tokens than softmax, and {spread(leads['frequent'], signed=True)} more on "
        f"the {FREQUENT} most frequent pieces, which stand in for commas and stop words and are {share:.2f} of all. "
        "The paper shows this in maps of single heads at 1,024 tokens. Reproduced if the first interval is above 0 and "
        "the second below, contradicted if one lies on the other side"
    )
    outcome = worst([above(leads["distant"], 0), above(turned(leads["frequent"]), 0)])
    return _if_translated("S-distant", outcome, sentence, results, {**leads, "share of frequent pieces": share})


def _if_translated(
    claim: str,
    outcome: Outcome,
    sentence: str,
    results: Sequence[TextResult],
    numbers: dict[str, Any],
    premises: Sequence[Premise] = (),
    *,
    noise: dict[str, Comparison | None] | None = None,
) -> Verdict:
    """Return the verdict: undecided where models of long documents make nothing of their sources."""
    long = [result for result in results if result.tokens >= LONG]
    ours, softmax = (
        pooled(by_cell(where(long, attention=kind), "tokens", measurement("source_use"))) for kind in (OURS, SOFTMAX)
    )
    reads = all(above(use, MARGIN) == "reproduced" for use in (ours, softmax))
    premise = (
        f"from {LONG} tokens on the source of another document costs ReLUFormer {nats(ours)} and softmax "
        f"{nats(softmax)}: they {'use theirs' if reads else 'hardly translate'}"
    )
    remedy = "Train longer, until models of long documents use their sources."
    sentence += f", undecided unless both costs of another source are above {MARGIN:g}."
    numbers = {**numbers, "use of the source": {OURS: ours, SOFTMAX: softmax}}
    premises = [translates(results, "tokens"), Premise(premise, reads, remedy), *premises]
    return judged(claim, outcome, sentence, results, numbers, premises, comparisons=noise)
