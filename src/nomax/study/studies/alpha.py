"""Which power of L? Accuracy of L^-α·h for the paper's seven h, over α and three sequence lengths (Fig. 2).

    nomax study alpha                  minutes, on the bundled images, with fewer h, α and lengths
    nomax study alpha --setup hour     one to two hours on two cores

It judges whether the best α is close to 1, whether one h wins there, what α = 0 costs and whether that grows with L,
what the nonlinearity is worth, and whether weights start at a size of 1/L. What came out: results/alpha/verdicts.md.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from nomax.phi import ACTIVATIONS, SOFTMAX
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.result import ImageResult, Result, trained, where
from nomax.study.engine.statistics import (
    Interval,
    accuracy,
    contrast,
    lengths,
    over_settings,
    paired,
    pooled,
    repeated,
    seeds,
    values,
)
from nomax.study.engine.verdict import MARGIN, Verdict, above, basis, percent, plain, points, scale, settled, worst
from nomax.study.setup import Setup
from nomax.study.studies import alpha_sweep, initial
from nomax.train.console import Stop

TITLE = "Which power of the sequence length?"
CLAIMS = ("W-alpha", "W-h", "W-degrade", "W-identity", "W-init")

# These two are the same function below 6, which scores of normalised queries and keys hardly reach: one cannot win
# against the other.
TWINS = {"relu": "relu6", "relu6": "relu"}


def grid(setup: Setup, seeds: Sequence[int]) -> list[Experiment]:
    """Every h with every α, and softmax, at every length; and the weights of untrained models.

    One seed after the other: a budget cuts off whole seeds.
    """
    phis = [alpha_sweep.phi(activation, alpha) for activation in setup.activations for alpha in setup.alphas]
    models: list[Experiment] = [
        setup.run(phi, patch=patch, seed=seed) for seed in seeds for patch in setup.patches for phi in [SOFTMAX, *phis]
    ]
    return [*models, *initial.measurements(setup)]


def earlier_measurements(setup: Setup, numbers: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    """The weights of untrained models, which an earlier nomax did not keep: they come out the same every time."""
    return [run.result("done", numbers=run.measure(Stop())) for run in initial.measurements(setup)]


def figures(rows: Sequence[Result], setup: Setup) -> list[Figure]:
    """Accuracy over α by length, and the mean weight at initialisation over the length."""
    title = "Accuracy of L⁻ᵅ·h over the exponent α"
    caption = (
        "Each h is trained with its weights multiplied by L⁻ᵅ; the broken line is softmax, which has no α. "
        "The paper's Fig. 2 shows the same for S/32, S/16 and S/8 on ImageNet."
    )
    models = trained(rows)
    return [
        alpha_sweep.figure(models, _lines(models), "alpha", title, caption),
        initial.figure(initial.collect(rows), setup),
    ]


def verdicts(rows: Sequence[Result], setup: Setup) -> list[Verdict]:
    """Judge the five claims."""
    swept = [row for row in trained(rows) if row.activation != SOFTMAX]
    at_one = where(swept, alpha=1.0)
    return [
        _best_alpha(swept, setup),
        _no_winner(at_one, setup),
        _degrades(swept, setup),
        _identity(at_one, setup),
        initial.verdict(initial.collect(rows), setup),
    ]


def _lines(rows: Sequence[ImageResult]) -> list[alpha_sweep.Line]:
    known = list(ACTIVATIONS)
    names = {row.activation for row in rows if row.activation != SOFTMAX}
    order = sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))
    return [alpha_sweep.Line(name, name) for name in order]


def _best_alpha(rows: Sequence[ImageResult], setup: Setup) -> Verdict:
    """The best α close to 1 against the best further away, over all pairs of h and L."""
    lines = {(line.activation, tokens): line.of(rows, tokens) for line in _lines(rows) for tokens in lengths(rows)}
    cells = {pair: leads for pair, here in lines.items() if (leads := alpha_sweep.lead_of_near(here, accuracy))}
    best = {
        pair: place for pair, here in lines.items() if (place := alpha_sweep.best_alpha(here, accuracy)) is not None
    }
    if not cells:
        sentence = "No two seeds have all α of an h and a length, some close to 1 and some not: nothing to judge."
        return Verdict("W-alpha", "undecided", sentence, scale(rows, setup), seeds(rows), {})
    lead = over_settings(cells)
    near = sum(abs(place.place - 1) <= alpha_sweep.NEAR for place in best.values())
    listed = "; ".join(
        f"{name} {', '.join(f'{best[pair].place:g}' for pair in best if pair[0] == name)}"
        for name in dict.fromkeys(name for name, _ in best)
    )
    sentence = (
        f"The best α within {alpha_sweep.NEAR:g} of 1 minus the best further away, both as the other seeds choose "
        f"them: {points(lead)} ({basis(rows, cells)}; the interval is over the settings). "
        f"The highest mean lies within {alpha_sweep.NEAR:g} of 1 in {near} of {len(best)} pairs of h and L "
        f"(a random choice from the grid: {alpha_sweep.near_by_chance(rows):.0%}). "
        f"Best α for L = {', '.join(map(str, lengths(rows)))}: {listed}. "
        "Reproduced if the interval is above 0, contradicted if below."
    )
    numbers = {
        "lead": lead,
        "pairs whose best is near": [near, len(best)],
        "by chance": alpha_sweep.near_by_chance(rows),
        "lead by pair": {f"{h}, L = {tokens}": contrast([entries]) for (h, tokens), entries in cells.items()},
        "best": {f"{h}, L = {tokens}": [found.place, found.low, found.high] for (h, tokens), found in best.items()},
    }
    outcome = settled(above(lead, 0), rows)
    return Verdict("W-alpha", outcome, sentence, scale(rows, setup), seeds(rows), plain(numbers))


def _no_winner(rows: Sequence[ImageResult], setup: Setup) -> Verdict:
    """The best h against the next that is not its twin, chosen after the fact, which makes the lead look larger."""
    by_h = {
        name: values(where(rows, activation=name), lambda row: row.tokens, accuracy)
        for name in dict.fromkeys(row.activation for row in rows)
    }
    shared = set.intersection(*(set(found) for found in by_h.values())) if by_h else set()
    by_h = {name: {key: found[key] for key in found if key in shared} for name, found in by_h.items()}
    if len({min(name, TWINS.get(name, name)) for name in by_h}) < 2 or not shared:
        sentence = "No seed and length has two h at α = 1 yet: nothing to judge."
        return Verdict("W-h", "undecided", sentence, scale(rows, setup), seeds(rows), {})
    means = {name: fmean(found.values()) for name, found in by_h.items()}
    ranked = sorted(means, key=lambda name: -means[name])
    first = ranked[0]
    second = next(name for name in ranked[1:] if name != TWINS.get(first))
    cells = paired(by_h[first], by_h[second])
    lead = pooled(cells)
    behind = means[first] - median(means.values())
    other = "" if second == ranked[1] else " of another kind"
    sentence = (
        f"At α = 1 the best is {first} ({percent(means[first])}) and the next{other} {second}: a lead of "
        f"{points(lead)} ({basis(rows, cells)}). It leads the median of {len(means)} h by {100 * behind:.2f} points "
        f"and the last, {ranked[-1]}, by {100 * (means[first] - means[ranked[-1]]):.2f}. "
        f"A clear win would be a lead of more than {100 * MARGIN:g} point: reproduced if the interval is below that, "
        "contradicted if above."
    )
    # The question turned round: the lead is to be below the margin.
    outcome = settled(above(Interval(-lead.mean, -lead.high, -lead.low), -MARGIN), rows)
    numbers = {"lead": lead, "accuracy": {name: means[name] for name in ranked}, "to the median": behind}
    return Verdict("W-h", outcome, sentence, scale(rows, setup), seeds(rows), plain(numbers))


def _degrades(rows: Sequence[ImageResult], setup: Setup) -> Verdict:
    """Judge what α = 1 gains over α = 0, and how much more it gains at the longest length than at the shortest."""
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
        f"α = 1 minus α = 0, over all h and L: {points(drop)} ({basis(used, cells)}); {more}. {listed}. "
        "Reproduced if both intervals are above 0, contradicted if one is below."
    )
    numbers = {"drop": drop, "growth": growth, "by length": by_length}
    outcome = settled(worst([above(drop, 0), above(growth, 0)]), used)
    return Verdict("W-degrade", outcome, sentence, scale(rows, setup), seeds(rows), plain(numbers))


def growth_with_length(cells: Mapping[tuple[str, int], Sequence[float]]) -> Interval:
    """The mean of the h that have both, at the longest length minus at the shortest."""
    ends = sorted({tokens for _, tokens in cells})
    names = [name for name, tokens in cells if tokens == ends[0] and (name, ends[-1]) in cells]
    if len(ends) < 2 or not names:
        return Interval(float("nan"), float("nan"), float("nan"), lacking="lengths of one h")
    chosen = [cells[name, tokens] for tokens in (ends[-1], ends[0]) for name in names]
    return contrast(chosen, [1 / len(names)] * len(names) + [-1 / len(names)] * len(names))


def _identity(rows: Sequence[ImageResult], setup: Setup) -> Verdict:
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
        f"relu minus identity at α = 1: {points(gain)} ({basis(used, cells)}). {listed}. "
        "Reproduced if the interval is above 0, contradicted if below."
    )
    by_length = {tokens: contrast([entries]) for tokens, entries in cells.items()}
    numbers = {"gain": gain, "by length": by_length}
    return Verdict(
        "W-identity", settled(above(gain, 0), used), sentence, scale(used, setup), seeds(used), plain(numbers)
    )
