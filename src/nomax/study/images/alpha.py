"""Which power of L? Accuracy of L^-α·h for the paper's seven h, over α and three sequence lengths (Fig. 2).

    nomax study alpha                  minutes, on the bundled images, with fewer h, α and lengths
    nomax study alpha --setup hour     one to two hours on two cores

It judges whether the best α is close to 1, whether one h wins there, what α = 0 costs, what the nonlinearity is worth,
and whether weights start at a size of 1/L. What came out: results/alpha/verdicts.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nomax import _figures
from nomax.ops.api import attention
from nomax.phi import ACTIVATIONS, SOFTMAX, Phi
from nomax.study.engine.experiment import Experiment, ImageExperiment, Measurement, cpu_seconds
from nomax.study.engine.figure import BROKEN, Figure, Table, draw_intervals, nothing_yet, sheet
from nomax.study.engine.result import ImageResult, Numbers, Result, finals, measured, where
from nomax.study.engine.statistics import (
    Interval,
    accuracy,
    best_alpha,
    comparison,
    contrast,
    differences,
    lengths,
    paired,
    pooled,
    ratio,
    repeated,
    turned,
    values,
)
from nomax.study.engine.verdict import (
    ABOVE_ZERO,
    MARGIN,
    Verdict,
    above,
    agree,
    basis,
    percent,
    points,
)
from nomax.study.images import over_alpha, weights
from nomax.study.images.over_alpha import Ground
from nomax.study.images.setup import Setup
from nomax.train.console import Stop

TITLE = "Which power of the sequence length?"
CLAIMS = ("W-degrade", "W-alpha", "W-identity", "W-h", "W-init")

RELU = "relu/L"
NEAR = 0.5  # "close to 1": at most half way to α = 0 or 2, the ends of the paper's axis
QUESTION = (SOFTMAX, RELU, "relu")  # does relu with its 1/L match softmax, and does it need it?
# Of the calls whose speed is measured: each takes some milliseconds.
LENGTHS, TOKENS, HEADS, DIM = (49, 196, 784), 3136, 6, 64
ROUNDS = 9
# These two are the same function below 6, which scores of normalised queries and keys hardly reach: one cannot win
# against the other.
TWINS = {"relu": "relu6", "relu6": "relu"}


@dataclass(frozen=True)
class AttentionSpeed(Measurement):
    """The CPU time of attention, forward and backward, on one thread, φ after φ in each round."""

    kind: ClassVar[str] = "attention-speed"
    alone: ClassVar[bool] = True

    length: int
    dtype: str
    rounds: int = ROUNDS

    @property
    def variant(self) -> str:
        return self.dtype

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def flops(self) -> int:
        """Floating point operations of all calls."""
        return 2 * (self.rounds + 1) * 12 * TOKENS * self.length * HEADS * DIM

    def measure(self, stop: Stop) -> Numbers | None:
        """Return the seconds of each φ, by round."""
        shape = (3, TOKENS // self.length, HEADS, self.length, DIM)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(shape, generator=generator).to(getattr(torch, self.dtype))
        query, key, value = (x.requires_grad_() for x in inputs.unbind(0))
        calls = {
            RELU: lambda: attention(query, key, value, phi=RELU),
            SOFTMAX: lambda: F.scaled_dot_product_attention(query, key, value),
        }

        def both_ways(call: Callable[[], Tensor]) -> None:
            out = call()
            torch.autograd.grad(out, (query, key, value), out.detach())

        return cpu_seconds({name: partial(both_ways, call) for name, call in calls.items()}, self.rounds, stop)


def grid(setup: Setup, seeds: Sequence[int]) -> list[Experiment]:
    """Return every h with every α, and softmax, at every length; the weights of untrained models; and the speed.

    Every φ has softmax's learning rate, as in the paper, and its own best one beside it. The largest questions come
    first, and of equal ones the cheapest with all their seeds: a budget cuts off the least.
    """
    models = [
        setup.run(phi, length=length, seed=seed, lr=rate)
        for seed in seeds
        for length in setup.every_length()
        if seed in seeds[: length.seeds or None]
        for phi in [SOFTMAX, *setup.phis(length)]
        for rate in dict.fromkeys([setup.lr, setup.own_rate(phi)])
    ]
    return [
        *weights.measurements(setup),
        *sorted(models, key=lambda run: (_rank(run, setup), run.flops)),
        *speed_measurements(),
    ]


def _rank(run: ImageExperiment, setup: Setup) -> int:
    """Return how much hangs on a run: 0 is the most."""
    phi = Phi.parse(run.config.model.phi)
    rank = 0 if str(phi) in QUESTION else 1 if phi.activation in ("relu", "identity") else 2
    longest = run.config.model.tokens > 1000  # one run costs as much as twenty with 49 tokens
    return rank + (run.config.data != setup.data) + (run.config.lr != setup.lr) + 2 * longest


def figures(
    results: Sequence[Result], setup: Setup, diagnostics: Mapping[str, weights.Points] | None = None
) -> list[Figure]:
    """Draw accuracy over α by length, attention during training, its speed, and the mean weight before training."""
    models = [result for result in finals(results) if result.lr == setup.lr]
    title = "Accuracy of L⁻ᵅ·h over the exponent α"
    caption = (
        f"Each h is trained with its weights multiplied by L⁻ᵅ; the broken line is softmax, which has no α."
        f"{_match(models)} The paper's Fig. 2 shows the same for S/32, S/16 and S/8 on ImageNet."
    )
    return [
        over_alpha.figure(models, _lines(models), "alpha", title, caption),
        *([weights.training_figure(models, diagnostics)] if diagnostics else []),
        speed_figure(results),
        weights.initial_figure(weights.collect(results), setup),
    ]


def finding(results: Sequence[Result], setup: Setup) -> str:
    """Say in a sentence how relu compares with softmax, with its 1/L and without; empty if softmax has not learned."""
    ground = over_alpha.ground(finals(results), setup)
    with_length, without = (_lead_over_softmax(ground.same, phi) for phi in (RELU, "relu"))
    if not (with_length and without and all(premise.holds for premise in ground.premises)):
        return ""
    where_learned = ", ".join(map(str, sorted(with_length)))
    return (
        f"relu/L {_close(pooled(with_length))}; without length scaling, relu {_close(pooled(without))} "
        f"(accuracy at L = {where_learned})."
    )


def _close(difference: Interval) -> str:
    """Say how close to softmax a difference of accuracies is, as far as its interval allows."""
    told = points(difference)
    if not difference.known:
        return f"differs from softmax by {told}"
    if difference.low > -MARGIN and difference.high < MARGIN:
        return f"is within a point of softmax, {told}"
    if difference.low <= 0 <= difference.high:
        return f"cannot be told apart from softmax yet, {told}"
    return f"is {'behind' if difference.high < 0 else 'ahead of'} softmax, {told}"


def _lead_over_softmax(results: Sequence[ImageResult], phi: str) -> dict[int, list[float]]:
    """Return how far a φ is ahead of softmax, at equal length and seed, by length."""
    plain_models = where(results, qk_norm=True, gate=None)
    return differences(where(plain_models, phi=phi), where(plain_models, phi=SOFTMAX), "tokens", accuracy)


def _match(results: Sequence[ImageResult]) -> str:
    """Say how far relu/L is ahead of softmax; empty if no length and seed has both."""
    cells = _lead_over_softmax(results, RELU)
    if not cells:
        return ""
    by_length = ", ".join(
        f"{100 * fmean(entries):+.2f} at L = {tokens}".replace("-", "−") for tokens, entries in sorted(cells.items())
    )
    return f" relu/L minus softmax, at equal length and seed: {points(pooled(cells))} ({by_length})."


def verdicts(results: Sequence[Result], setup: Setup) -> list[Verdict]:
    """Judge the five claims, at the lengths where softmax has learned."""
    ground = over_alpha.ground(finals(results), setup)
    return [
        _degrades(ground),
        _best_alpha(ground),
        _identity(ground),
        _no_winner(ground),
        weights.initial_verdict(weights.collect(results), setup),
    ]


def _lines(results: Sequence[ImageResult]) -> list[over_alpha.Line]:
    known = list(ACTIVATIONS)
    names = {result.activation for result in results if result.activation != SOFTMAX}
    order = sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))
    return [over_alpha.Line(name, name) for name in order]


def _best_alpha(ground: Ground) -> Verdict:
    """Judge the best α close to 1 against the best further away, over all pairs of h and L."""
    results = ground.same
    alphas = best_alpha(
        {
            (line.activation, tokens): line.of(results, tokens)
            for line in _lines(results)
            for tokens in lengths(results)
        },
        accuracy,
        NEAR,
    )
    best, cells = alphas.best, alphas.leads
    if not cells:
        return ground.nothing("W-alpha", "No two seeds have all α of an h and a length, some close to 1 and some not")
    listed = "; ".join(
        f"{name} {', '.join(f'{best[pair].place:g} at L = {pair[1]}' for pair in best if pair[0] == name)}"
        for name in dict.fromkeys(name for name, _ in best)
    )
    sentence = (
        f"The best α within {NEAR:g} of 1 minus the best further away, both as the other seeds choose "
        f"them: {points(alphas.lead)} ({basis(results, cells)}; the interval is over the settings). "
        f"The highest mean lies within {NEAR:g} of 1 in {alphas.near} of {len(best)} pairs of h and L "
        f"(a random choice from the grid: {alphas.by_chance:.0%}). Best α: {listed}. {ABOVE_ZERO}"
    )
    numbers = {
        "lead": alphas.lead,
        "pairs whose best is near": [alphas.near, len(best)],
        "by chance": alphas.by_chance,
        "lead by pair": {f"{h}, L = {tokens}": contrast([entries]) for (h, tokens), entries in cells.items()},
        "best": {f"{h}, L = {tokens}": [place.place, place.low, place.high] for (h, tokens), place in best.items()},
    }
    noise = comparison(cells, [0.0], margin=MARGIN, over="settings")
    return ground.settle("W-alpha", above(alphas.lead, 0), sentence, numbers, {"the lead": noise})


def _no_winner(ground: Ground) -> Verdict:
    """Judge the best h against the next that is not its twin. Choosing it after the fact makes the lead look larger."""
    results = where(ground.same, alpha=1.0)
    by_h = {
        name: values(where(results, activation=name), "tokens", accuracy)
        for name in dict.fromkeys(result.activation for result in results)
    }
    shared = over_alpha.shared_by_most(by_h)
    by_h = {name: {key: scores[key] for key in shared} for name, scores in by_h.items() if shared <= scores.keys()}
    if len({min(name, TWINS.get(name, name)) for name in by_h}) < 2 or not shared:
        return ground.nothing("W-h", "No seed and length has two h at α = 1 yet")
    means = {name: fmean(scores.values()) for name, scores in by_h.items()}
    ranked = sorted(means, key=lambda name: -means[name])
    first = ranked[0]
    second = next(name for name in ranked[1:] if name != TWINS.get(first))
    cells = paired(by_h[first], by_h[second])
    lead = pooled(cells)
    behind = means[first] - median(means.values())
    other = "" if second == ranked[1] else " of another kind"
    sentence = (
        f"At α = 1 the best is {first} ({percent(means[first])}) and the next{other} {second}: a lead of "
        f"{points(lead)} ({basis(results, cells)}). It leads the median of {len(means)} h by {100 * behind:.2f} points "
        f"and the last, {ranked[-1]}, by {100 * (means[first] - means[ranked[-1]]):.2f}. "
        f"A clear win would be a lead of more than {100 * MARGIN:g} point: reproduced if the interval is below that, "
        "contradicted if above."
    )
    outcome = above(turned(lead), -MARGIN)  # the lead is to be below the margin
    numbers = {"lead": lead, "accuracy": {name: means[name] for name in ranked}, "to the median": behind}
    return ground.settle("W-h", outcome, sentence, numbers, {"the lead": comparison(cells, [MARGIN], margin=MARGIN)})


def _degrades(ground: Ground) -> Verdict:
    """Judge what α = 1 gains over α = 0; and tell how much more that is at the longest length than at the shortest."""
    cells, own = (repeated(over_alpha.gains(results)) for results in (ground.same, ground.own))
    if not cells:
        return ground.nothing("W-degrade", "No seed has both α = 0 and α = 1 yet")
    drop, own_drop = pooled(cells), pooled(own)
    ends = sorted({tokens for _, tokens in cells})
    by_length = over_alpha.by_length(cells)
    relu = {tokens: contrast([cells["relu", tokens]]) for tokens in ends if ("relu", tokens) in cells}
    growth = growth_with_length(cells, {result.tokens: result.data for result in ground.same})
    listed = "; ".join(f"L = {tokens}: {points(gain)}" for tokens, gain in by_length.items())
    compared = growth.mean == growth.mean
    more = f"from the shortest to the longest it grows by {points(growth)}" if compared else "only one length"
    sentence = (
        f"α = 1 minus α = 0, over all h and L: {points(drop)} ({basis(ground.same, cells)}); {more}. {listed}. "
        f"{ground.beside(own_drop)}{ABOVE_ZERO}"
    )
    numbers = {"drop": drop, "with its own rate": own_drop, "growth": growth, "by length": by_length, "relu": relu}
    comparisons = {"the gain": comparison(cells, [0.0], margin=MARGIN)}
    premise = agree({"softmax's rate for all": drop, "each φ's own rate": own_drop})
    return ground.settle("W-degrade", above(drop, 0), sentence, numbers, comparisons, [premise])


def growth_with_length(cells: Mapping[tuple[str, int], Sequence[float]], data: Mapping[int, str]) -> Interval:
    """Compare the gains at the longest length of each data set with those at its shortest, for the h that have both."""
    chosen: dict[tuple[str, int], Sequence[float]] = {}
    signs: list[float] = []
    for name in dict.fromkeys(data.values()):
        ends = sorted({tokens for _, tokens in cells if data[tokens] == name})
        both = [h for h, tokens in cells if len(ends) > 1 and tokens == ends[0] and (h, ends[-1]) in cells]
        for h in both:
            chosen |= {(h, ends[-1]): cells[h, ends[-1]], (h, ends[0]): cells[h, ends[0]]}
            signs += [1 / len(both), -1 / len(both)]
    if not chosen:
        return Interval(float("nan"), float("nan"), float("nan"), lacking="lengths of one h")
    sets = sum(sign for sign in signs if sign > 0)  # each data set counts as much as another
    return contrast(list(chosen.values()), [sign / sets for sign in signs])


def _identity(ground: Ground) -> Verdict:
    """Judge relu against identity at α = 1."""
    cells, own = (_nonlinearity(results) for results in (ground.same, ground.own))
    if not cells:
        return ground.nothing("W-identity", "No seed has both relu and identity at α = 1 yet")
    gain, own_gain = pooled(cells), pooled(own)
    by_length = {tokens: contrast([entries]) for tokens, entries in sorted(cells.items())}
    listed = "; ".join(f"L = {tokens}: {points(part)}" for tokens, part in by_length.items())
    used = [result for result in where(ground.same, alpha=1.0) if result.activation in ("relu", "identity")]
    sentence = (
        f"relu minus identity at α = 1: {points(gain)} ({basis(used, cells)}). {listed}. "
        f"{ground.beside(own_gain)}{ABOVE_ZERO}"
    )
    numbers = {"gain": gain, "with its own rate": own_gain, "by length": by_length}
    noise = {"the gain": comparison(cells, [0.0], margin=MARGIN)}
    premise = agree({"softmax's rate for all": gain, "each φ's own rate": own_gain})
    return ground.settle("W-identity", above(gain, 0), sentence, numbers, noise, [premise])


def _nonlinearity(results: Sequence[ImageResult]) -> dict[int, list[float]]:
    """Return relu minus identity at α = 1, by length."""
    relu, identity = (where(results, activation=name, alpha=1.0) for name in ("relu", "identity"))
    return differences(relu, identity, "tokens", accuracy)


def speed_measurements() -> list[AttentionSpeed]:
    """Return three lengths in both precisions."""
    return [AttentionSpeed(length, dtype) for dtype in ("float32", "bfloat16") for length in LENGTHS]


def speed_ratios(results: Sequence[Result]) -> dict[tuple[str, int], Interval]:
    """Return how many times as long as relu/L softmax takes, by precision and length."""
    done = sorted(
        measured(results, AttentionSpeed.kind), key=lambda result: (result.variant != "float32", result.tokens)
    )
    return {(result.variant, result.tokens): ratio(result.numbers[SOFTMAX], result.numbers[RELU]) for result in done}


def speed_figure(results: Sequence[Result]) -> Figure:
    """Draw the speed of relu/L against softmax, by precision and length."""
    ratios = speed_ratios(results)
    caption = (
        f"CPU time of PyTorch's scaled_dot_product_attention over that of relu/L in nomax, forward and backward, one "
        f"thread: means over {ROUNDS} interleaved rounds with 95 % intervals, {HEADS} heads of dimension {DIM}, "
        f"{TOKENS:,} tokens in a call. Beyond 1, relu/L is faster."
    )
    words = "; ".join(
        f"{dtype}, L = {length}: {estimate.mean:.2f} times" for (dtype, length), estimate in ratios.items()
    )
    alternative = f"The time of softmax over that of relu/L. {words or 'Nothing has been measured yet'}."
    table = Table(
        ("precision", "L", "softmax's time over relu/L's", "from", "to"),
        tuple(
            (dtype, length, round(estimate.mean, 3), round(estimate.low, 3), round(estimate.high, 3))
            for (dtype, length), estimate in ratios.items()
        ),
    )
    return Figure("speed", "Speed on this machine", caption, alternative, table, lambda: _paint_speed(ratios))


def _paint_speed(ratios: Mapping[tuple[str, int], Interval]) -> Any:
    picture, (axis,) = sheet(1, height=2.8)
    if not ratios:
        nothing_yet(axis)
        return picture
    named = {f"{dtype}, L = {length}": estimate for (dtype, length), estimate in ratios.items()}
    draw_intervals(axis, named, [_figures.colour_of(RELU).light] * len(named))
    for place, estimate in enumerate(ratios.values()):
        axis.annotate(f"{estimate.mean:.1f}×", (estimate.high, place), (6, 0), textcoords="offset points", va="center")
    axis.axvline(1, color=_figures.colour_of(SOFTMAX).light, lw=1.6, ls=BROKEN)
    axis.set_xlim(left=0, right=1.15 * max(estimate.high for estimate in ratios.values()))
    axis.set_xlabel("softmax's time ÷ relu/L's")
    return picture
