"""How sparse does ReLU attention become in training, what do more zeros cost, and can they be skipped for speed?

    nomax data get fashion-mnist help-de-en
    nomax study zeros                  an hour and a half on one core
    nomax study zeros --setup hour     models of the same size, trained longer
    nomax study zeros --setup day      four hours of one core; models whose attention matters

Language models and vision transformers that differ in their attention alone: shifts of the scores before h, fixed and
learned ones; thresholds β·√(2 log L); and an L1 penalty of the weights, which rises to λ in training. Shown are their
loss or error beside the share of their weights that are exactly zero, and blocks of a long cache: keys of a layer over
many documents of the training text, one after the other, with queries of the test text. relu(s + shift) is zero for a
whole block if an upper bound on its scores is not above −shift. How many blocks are all zero, how many of them the
bounds can tell, and the time of bounds and of attention over the blocks that are left: nomax.study.engine.blocks.
Options change the text models; images keep to the set-up of the same name. What came out: results/zeros/verdicts.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nomax.phi import SOFTMAX
from nomax.study.engine.blocks import BOUNDS, ORDERS, SIZES
from nomax.study.engine.experiment import TrainedExperiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.result import ImageResult, Result
from nomax.study.engine.statistics import Comparison, Interval, accuracy, comparison, contrast
from nomax.study.engine.verdict import MARGIN as POINT
from nomax.study.engine.verdict import Outcome, Premise, Verdict, above, learned, plain, settle, spread, worst
from nomax.study.engine.verdict import scale as image_scale
from nomax.study.images.over_alpha import bar
from nomax.study.text.phi import predicts
from nomax.study.text.setup import TextSetup
from nomax.study.text.shared import MARGIN, loss
from nomax.study.text.shared import scale as text_scale
from nomax.study.zeros.figures import blocks, frontier, speed
from nomax.study.zeros.kinds import (
    BASE,
    NONE,
    PAYS,
    Found,
    by_kind,
    error,
    every_run,
    gain,
    image_setup,
    lengths_of,
    mean_of,
    measured,
    values_of,
)

TITLE = "How sparse does ReLU attention become, and can its zeros be skipped?"
CLAIMS = ("Q-zeros", "Q-sparse")
KIND = "text"

_DATA = {"data": "help-de-en"}
CHANGES = {"default": {**_DATA, "steps": 1200, "warmup": 60}, "hour": _DATA, "day": {"seeds": (0, 1)}}
WORTH = 5  # margins of loss or error by which attention must help, so that to lose one is not to lose much of it
MANY = 0.9  # "nine in ten"


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TrainedExperiment]:
    """Return every kind, of text and of images, seed after seed; in each, the kinds that verdicts need come first."""
    return [run for _, run in every_run(setup, seeds)]


def figures(results: Sequence[Result], setup: TextSetup) -> list[Figure]:
    """Draw loss against zeros, the blocks that could be skipped, and what skipping gains."""
    text, images = by_kind(results, setup)
    return [frontier(text, images), blocks(text, images), speed(text)]


def verdicts(results: Sequence[Result], setup: TextSetup) -> list[Verdict]:
    """Judge whether zeros are free, and whether skipping them pays."""
    text, images = by_kind(results, setup)
    return [_free(text, images, setup), _pays(text)]


def _as_good(found: Found, score: Callable[[Any], float | None], margin: float) -> Found:
    """Return the kinds whose mean loss or error is at most a margin above that of relu/L."""
    base = mean_of(found.get(BASE, ()), score)
    if base is None:
        return {}
    means = {kind: mean_of(results, score) for kind, results in found.items() if not kind.level}
    return {kind: found[kind] for kind, mean in means.items() if mean is not None and mean <= base + margin}


def _free(text: Found, images: Found, setup: TextSetup) -> Verdict:
    """Judge whether nine in ten weights can be zero at no cost."""
    shares: dict[str, Interval] = {}
    noise: dict[str, Comparison | None] = {}
    words: list[str] = []
    sides: tuple[tuple[str, Found, Any, float, str], ...] = (
        ("text", text, loss, MARGIN, f"{MARGIN:g} nats"),
        ("images", images, error, POINT, f"{100 * POINT:g} point of accuracy"),
    )
    for name, found, score, margin, said in sides:
        good = _as_good(found, score, margin)
        means = {kind: mean for kind, some in good.items() if (mean := mean_of(some, measured("zeros"))) is not None}
        if not means:
            shares[name] = Interval(math.nan, math.nan, math.nan)
            continue
        best = max(means, key=lambda kind: means[kind])
        values = values_of(good[best], measured("zeros"))
        shares[name] = contrast([values])
        noise[f"the zeros of {name}"] = comparison({best: values}, [MANY], margin=POINT, unit="of the weights")
        base = mean_of(found[BASE], measured("zeros"))
        words.append(
            f"of {name}, {best.name} has {spread(shares[name])} of its weights zero, the most of {len(good)} of "
            f"{len(found)} kinds that are at most {said} behind relu/L, which has {base:.3f}"
        )
    sentence = (
        f"On test data: {'; '.join(words)}. Reproduced if the intervals of text and images are above {MANY:g}, "
        "contradicted if one is below."
    )
    outcome = worst([above(share, MANY) for share in shares.values()])
    return _judged("Q-zeros", outcome, sentence, text, images, dict(shares), noise, setup)


def _pays(text: Found) -> Verdict:
    """Judge whether skipping is faster, by the best of all kinds, orders and lengths: a choice that favours it."""
    good = _as_good(text, loss, MARGIN)
    gains = {
        (kind, order, keys): mean
        for kind, results in good.items()
        for order in ORDERS
        for keys in lengths_of(text)
        if (mean := mean_of(results, gain(order, keys))) is not None
    }
    if not gains:
        sentence = "No time has been measured yet: nothing to judge."
        return Verdict("Q-sparse", "undecided", sentence, text_scale([]), [], {})
    kind, order, keys = max(gains, key=lambda place: gains[place])
    together = values_of(good[kind], gain(order, keys))
    best, noise = contrast([together]), comparison({kind: together}, [PAYS], margin=PAYS - 1, unit="times")
    zeros, none = (mean_of(good[kind], measured(f"{name} {keys}")) for name in ("cache_zeros", f"{order} 16 zero"))
    told = max(
        mean_of(good[kind], measured(f"{order} {size} {bound} {keys}")) or 0 for size in SIZES for bound in BOUNDS
    )
    copied = contrast([values_of(good[kind], gain(order, keys, "copied"))])
    sentence = (
        f"Of the {len(good)} kinds whose loss is at most {MARGIN:g} nats above that of relu/L, {kind.name} gains the "
        f"most: attention of one query over {keys:,} keys ({order} order) takes {spread(best, 2)} times as long as a "
        f"bound and attention over the blocks it leaves if they lie together, and {spread(copied, 2)} times if they "
        f"are copied together first. There {zeros or 0:.1%} of the weights are zero, {none or 0:.1%} of the blocks of "
        f"16 keys are all zero, and a bound tells at most {told:.1%} of blocks. Sorting the keys is not counted. To "
        f"pay is to be {PAYS:g} times as fast: reproduced if the interval with copying is above, contradicted if that "
        "without is below."
    )
    by_place = {f"{kind.name}, {order}, {keys:,} keys": round(mean, 3) for (kind, order, keys), mean in gains.items()}
    numbers = {"together": best, "copied": copied, "gains": by_place}
    outcome: Outcome = "reproduced" if above(copied, PAYS) == "reproduced" else "undecided"
    if above(best, PAYS) == "contradicted":
        outcome = "contradicted"
    return _judged("Q-sparse", outcome, sentence, text, {}, numbers, {"the gain": noise})


def _judged(
    claim: str,
    outcome: Outcome,
    sentence: str,
    text: Found,
    images: Found,
    numbers: Mapping[str, Any],
    comparisons: Mapping[str, Comparison | None],
    setup: TextSetup | None = None,
) -> Verdict:
    of_text, of_images = ([result for some in found.values() for result in some] for found in (text, images))
    premises = [predicts(of_text), matters(text, loss, MARGIN, "the loss is {:.3f} nats")]
    if setup:
        premises += [_classifies(of_images), matters(images, error, POINT, "the error of images is {:.3f}")]
    scales = [text_scale(of_text), *([image_scale(of_images, image_setup(setup).image_size)] if setup else [])]
    if any(number.mean != number.mean for number in numbers.values() if isinstance(number, Interval)):
        outcome, sentence, numbers = "undecided", "The runs that this compares are not all there: nothing to judge.", {}
    both = [*of_text, *of_images]
    scale = "; ".join(scales)
    said: dict[str, Any] = {"scale": scale, "numbers": plain(numbers), "premises": premises, "comparisons": comparisons}
    return settle(claim, outcome, sentence, results=both, **said)


def matters(found: Found, score: Callable[[Any], float | None], margin: float, said: str) -> Premise:
    """State that attention is worth so much to the models that a margin of loss or error says something about it.

    said: what the score counts, with a place for its number.
    """
    with_it, without = (mean_of(found.get(kind, ()), score) for kind in (BASE, NONE))
    if with_it is None or without is None:
        return Premise("no model without attention has been run", False, "Run relu/L and no attention.")
    worth, bar = without - with_it, WORTH * margin
    words = f"without attention {said.format(worth)} higher than with relu/L"
    if worth < bar:
        remedy = "Train longer, or on other data, until attention is worth more."
        return Premise(f"{words}, less than {bar:g}: its zeros cost little because it does little", False, remedy)
    return Premise(f"{words}, at least {bar:g}", True)


def _classifies(results: Sequence[ImageResult]) -> Premise:
    softmax = [result for result in results if result.activation == SOFTMAX]
    return learned(softmax, accuracy, bar(softmax[0].data) if softmax else 0.0, "data")
