"""Which power of L? Accuracy of L^-α·h for the paper's seven h, over α and three sequence lengths (Fig. 2).

    nomax study alpha                  minutes, on the bundled images, with fewer h, α and lengths
    nomax study alpha --setup hour     one to two hours on two cores

It judges whether the best α is close to 1, whether one h wins there, what α = 0 costs and whether that grows with L,
what the nonlinearity is worth, and whether weights start at a size of 1/L. What came out: results/alpha/verdicts.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

import numpy as np

from nomax.phi import SOFTMAX
from nomax.study import initial, sweep
from nomax.study.figure import COLOURS, Figure
from nomax.study.row import ImageRow, where
from nomax.study.run import Run
from nomax.study.scores import accuracy, basis, lengths, percent, pooled, repeated, scale, seeds, values
from nomax.study.setup import Setup
from nomax.study.statistics import Best, Interval, contrast, paired
from nomax.study.verdict import MARGIN, Verdict, above, plain, points, worst

TITLE = "Which power of the sequence length?"
CLAIMS = ("W-alpha", "W-h", "W-degrade", "W-identity", "W-init")

NEAR = 0.5  # "close to 1": at most half way to α = 0 or 2, the ends of the paper's axis
# The paper says "typically" and "for every h": three pairs of h and L in four is the least that this can mean.
TYPICAL = 0.75


def grid(setup: Setup, seeds: Sequence[int]) -> list[Run]:
    """Every h with every α, and softmax, at every length. One seed after the other: a budget cuts off whole seeds."""
    phis = [sweep.phi(activation, alpha) for activation in setup.activations for alpha in setup.alphas]
    return [
        setup.run(phi, patch=patch, seed=seed) for seed in seeds for patch in setup.patches for phi in [SOFTMAX, *phis]
    ]


def figures(rows: Sequence[ImageRow], setup: Setup) -> list[Figure]:
    """Accuracy over α by length, and the mean weight at initialisation over the length."""
    title = "Accuracy of L⁻ᵅ·h over the exponent α"
    caption = (
        "Each h is trained with its weights multiplied by L⁻ᵅ; the broken line is softmax, which has no α. "
        "The paper's Fig. 2 shows the same for S/32, S/16 and S/8 on ImageNet."
    )
    return [sweep.figure(rows, _lines(rows), "alpha", title, caption), initial.figure(setup)]


def verdicts(rows: Sequence[ImageRow], setup: Setup) -> list[Verdict]:
    """What the runs say about the five claims."""
    swept = [row for row in rows if row.activation != SOFTMAX]
    at_one = where(swept, alpha=1.0)
    return [
        _best_alpha(swept, setup),
        _no_winner(at_one, setup),
        _degrades(swept, setup),
        _identity(at_one, setup),
        initial.verdict(setup),
    ]


def _lines(rows: Sequence[ImageRow]) -> list[sweep.Line]:
    known = list(COLOURS)
    names = {row.activation for row in rows if row.activation != SOFTMAX}
    order = sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))
    return [sweep.Line(name, name) for name in order]


def _best_alpha(rows: Sequence[ImageRow], setup: Setup) -> Verdict:
    """The share of pairs (h, L) whose best α is close to 1. Seeds are resampled for all pairs together."""
    found = {
        (line.activation, tokens): place
        for line in _lines(rows)
        for tokens in lengths(rows)
        if (place := sweep.best_alpha(line.of(rows, tokens), accuracy)) is not None
    }
    near = [abs(place.place - 1) <= NEAR for place in found.values()]
    share = near_share(found.values(), near)
    alphas = sorted({row.alpha for row in rows})
    by_chance = fmean([abs(alpha - 1) <= NEAR for alpha in alphas]) if alphas else float("nan")
    if not found:
        sentence = "No seed has all α of an h and a length yet: nothing to judge."
    else:
        listed = "; ".join(
            f"{name} {', '.join(f'{found[pair].place:g}' for pair in found if pair[0] == name)}"
            for name in dict.fromkeys(name for name, _ in found)
        )
        known = (
            f"95 % interval {100 * share.low:.0f} to {100 * share.high:.0f} %"
            if share.known
            else "no interval: an interval needs two seeds that have every α"
        )
        sentence = (
            f"The best α lies within {NEAR:g} of 1 in {sum(near)} of {len(near)} pairs of h and L "
            f"({100 * share.mean:.0f} %; {known}; a random choice from the grid: {100 * by_chance:.0f} %). "
            f"Best α for L = {', '.join(map(str, lengths(rows)))}: {listed}. "
            f"Reproduced if the interval is above {100 * TYPICAL:.0f} %, contradicted if below."
        )
    numbers = {
        "share": share,
        "by chance": by_chance,
        "best": {f"{h}, L = {tokens}": [b.place, b.low, b.high] for (h, tokens), b in found.items()},
    }
    return Verdict("W-alpha", above(share, TYPICAL), sentence, scale(rows, setup), seeds(rows), plain(numbers))


def near_share(places: Iterable[Best], near: Sequence[bool]) -> Interval:
    """The share of best places that are close to 1, with its interval."""
    draws = [place.draws for place in places]
    nan = float("nan")
    mean = fmean(near) if near else nan
    if not draws or not all(draws):
        return Interval(mean, nan, nan)
    shares = (np.abs(np.array(draws) - 1) <= NEAR).mean(0)
    low, high = np.percentile(shares, (2.5, 97.5))
    return Interval(mean, float(low), float(high))


def _no_winner(rows: Sequence[ImageRow], setup: Setup) -> Verdict:
    """The best h against the second best, both chosen after the fact, which makes the difference look larger."""
    by_h = {
        name: values(where(rows, activation=name), lambda row: row.tokens, accuracy)
        for name in dict.fromkeys(row.activation for row in rows)
    }
    shared = set.intersection(*(set(found) for found in by_h.values())) if by_h else set()
    if len(by_h) < 2 or not shared:
        sentence = "No seed and length has two h at α = 1 yet: nothing to judge."
        return Verdict("W-h", "undecided", sentence, scale(rows, setup), seeds(rows), {})
    means = {name: fmean(found[key] for key in shared) for name, found in by_h.items()}
    first, second, *_ = ranked = sorted(means, key=lambda name: -means[name])
    cells = paired(by_h[first], by_h[second])
    lead = pooled(cells)
    behind = means[first] - median(means.values())
    sentence = (
        f"At α = 1 the best is {first} ({percent(means[first])}) and the next {second}: a lead of {points(lead)} "
        f"({basis(rows, cells)}). It leads the median of {len(means)} h by {100 * behind:.2f} points and the last, "
        f"{ranked[-1]}, by {100 * (means[first] - means[ranked[-1]]):.2f}. "
        f"A clear win would be a lead of more than {100 * MARGIN:g} point: reproduced if the interval is below that, "
        "contradicted if above."
    )
    # The question turned round: the lead is to be below the margin.
    outcome = above(Interval(-lead.mean, -lead.high, -lead.low), -MARGIN)
    numbers = {"lead": lead, "accuracy": {name: means[name] for name in ranked}, "to the median": behind}
    return Verdict("W-h", outcome, sentence, scale(rows, setup), seeds(rows), plain(numbers))


def _degrades(rows: Sequence[ImageRow], setup: Setup) -> Verdict:
    """What α = 1 gains over α = 0, and how much more it gains at the longest length than at the shortest."""
    scaled, unscaled = (
        values(where(rows, alpha=alpha), lambda row: (row.activation, row.tokens), accuracy) for alpha in (1.0, 0.0)
    )
    cells = repeated(paired(scaled, unscaled))
    used = where(rows, alpha=1.0) + where(rows, alpha=0.0)
    if not cells:
        sentence = "No seed has both α = 0 and α = 1 yet: nothing to judge."
        return Verdict("W-degrade", "undecided", sentence, scale(rows, setup), seeds(rows), {})
    drop = pooled(cells)
    ends = sorted({tokens for _, tokens in cells})
    by_length = {tokens: pooled({cell: cells[cell] for cell in cells if cell[1] == tokens}) for tokens in ends}
    growth = growth_with_length(cells)
    listed = "; ".join(f"L = {tokens}: {points(found)}" for tokens, found in by_length.items())
    more = f"from the shortest to the longest it grows by {points(growth)}" if len(ends) > 1 else "only one length"
    sentence = (
        f"α = 1 is better than α = 0 by {points(drop)} over all h and L ({basis(used, cells)}). {listed}; {more}. "
        "Reproduced if both intervals are above 0, contradicted if one is below."
    )
    numbers = {"drop": drop, "growth": growth, "by length": by_length}
    outcome = worst([above(drop, 0), above(growth, 0)])
    return Verdict("W-degrade", outcome, sentence, scale(rows, setup), seeds(rows), plain(numbers))


def growth_with_length(cells: Mapping[tuple[str, int], Sequence[float]]) -> Interval:
    """The mean of the h that have both, at the longest length minus at the shortest."""
    ends = sorted({tokens for _, tokens in cells})
    names = [name for name, tokens in cells if tokens == ends[0] and (name, ends[-1]) in cells]
    if len(ends) < 2 or not names:
        return Interval(float("nan"), float("nan"), float("nan"))
    chosen = [cells[name, tokens] for tokens in (ends[-1], ends[0]) for name in names]
    return contrast(chosen, [1 / len(names)] * len(names) + [-1 / len(names)] * len(names))


def _identity(rows: Sequence[ImageRow], setup: Setup) -> Verdict:
    """relu against identity at α = 1."""
    relu, identity = (
        values(where(rows, activation=name), lambda row: row.tokens, accuracy) for name in ("relu", "identity")
    )
    cells = paired(relu, identity)
    used = where(rows, activation="relu") + where(rows, activation="identity")
    if not cells:
        sentence = "No seed has both relu and identity at α = 1 yet: nothing to judge."
        return Verdict("W-identity", "undecided", sentence, scale(used, setup), seeds(used), {})
    gain = pooled(cells)
    listed = "; ".join(f"L = {tokens}: {points(contrast([cells[tokens]]))}" for tokens in sorted(cells))
    sentence = (
        f"At α = 1 relu is ahead of identity by {points(gain)} ({basis(used, cells)}). {listed}. "
        "Reproduced if the interval is above 0, contradicted if below."
    )
    by_length = {tokens: contrast([entries]) for tokens, entries in cells.items()}
    numbers = {"gain": gain, "by length": by_length}
    return Verdict("W-identity", above(gain, 0), sentence, scale(used, setup), seeds(used), plain(numbers))
