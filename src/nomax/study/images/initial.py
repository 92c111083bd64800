"""The mean attention weight of models that have not been trained yet, over the sequence length (the paper's Sec. 3)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch

from nomax import _figures
from nomax.data.images.batches import evaluation_batches
from nomax.data.images.transforms import Evaluation
from nomax.data.source import part
from nomax.evaluate import row_statistics
from nomax.models import ViT, ViTConfig
from nomax.phi import SOFTMAX, Phi
from nomax.study.engine.experiment import Measurement, vit_macs
from nomax.study.engine.figure import MARKERS, Figure, Table, legend, nothing_yet, plain_powers, sheet
from nomax.study.engine.result import Numbers, Result, measured
from nomax.study.engine.statistics import Interval, contrast, slope_weights
from nomax.study.engine.verdict import Verdict, above, plain
from nomax.study.images.setup import Setup, source
from nomax.train.console import Stop

SEEDS = tuple(range(8))
IMAGES = 2
LENGTHS = (4, 400)  # lengths between these: longer ones take time and say nothing more
POWERS = (0.0, 0.5, 1.0)  # of relu, to see what other α do
# E[h(s)] for s ~ N(0, 1), which scores are about when queries and keys are normalised: L·E[a] at α = 1.
EXPECTED: Mapping[str, float] = {
    "relu": 1 / math.sqrt(2 * math.pi),
    "relu2": 0.5,
    "gelu": 1 / (2 * math.sqrt(math.pi)),
    "softplus": 0.8060,
    "identity": 0.0,
    "relu6": 0.3989,
    "sigmoid": 0.5,
    SOFTMAX: 1.0,
}
FAST_ENOUGH = 0.9  # falling as L^-0.9 or faster is called O(1/L): a few lengths cannot tell 0.9 from 1


@dataclass(frozen=True)
class InitialWeights(Measurement):
    """The mean weight of untrained models of one length: over layers, heads and some images, for each φ and seed."""

    kind: ClassVar[str] = "initial-weights"

    model: ViTConfig
    data: str
    transform: Evaluation
    phis: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS
    images: int = IMAGES

    @property
    def variant(self) -> str:
        """The model, in a word."""
        return self.model.variant

    @property
    def tokens(self) -> int:
        """The length of sequences."""
        return self.model.tokens

    @property
    def flops(self) -> int:
        """Floating point operations of all passes."""
        return 2 * vit_macs(self.model) * self.images * len(self.phis) * len(self.seeds)

    def measure(self, stop: Stop) -> Numbers | None:
        """Return the mean weight of each φ, by seed."""
        images = source(self.data)
        chosen = part(images, np.linspace(0, len(images) - 1, self.images).astype(np.int64))
        with evaluation_batches(chosen, self.transform, self.images) as batches:
            shown = next(iter(batches))[0]
        weights: dict[str, list[float]] = {phi: [] for phi in self.phis}
        for seed in self.seeds:
            for phi in self.phis:
                if stop.asked:
                    return None
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    model = ViT.from_config(replace(self.model, phi=phi)).eval()
                weights[phi].append(fmean(head.mean_weight for head in row_statistics(model, shown)))
        return {phi: tuple(entries) for phi, entries in weights.items()}


def measurements(setup: Setup) -> list[InitialWeights]:
    """Models of several lengths, each with softmax, three α of relu, and every other h at α = 1."""
    phis = [Phi(SOFTMAX), *(Phi("relu", alpha) for alpha in POWERS)]
    phis += [Phi(name, 1.0) for name in setup.activations if name != "relu"]
    configs = [setup.run(SOFTMAX, patch=patch).config for patch in patches(setup)]
    names = tuple(map(str, phis))
    return [InitialWeights(config.model, config.data, config.augment.evaluation(), names) for config in configs]


@dataclass(frozen=True)
class Start:
    """The mean weight of one untrained model, over its layers, heads and some images."""

    activation: str
    alpha: float
    tokens: int
    seed: int
    mean_weight: float


def collect(results: Sequence[Result]) -> tuple[Start, ...]:
    """The mean weights that were measured, shortest sequences first."""
    return tuple(
        Start(phi.activation, phi.alpha, result.tokens, seed, weight)
        for result in sorted(measured(results, InitialWeights.kind), key=lambda result: result.tokens)
        for name, weights in result.numbers.items()
        for phi in [Phi.parse(name)]
        for seed, weight in zip(SEEDS, weights, strict=False)
    )


def patches(setup: Setup) -> list[int]:
    """Patches that divide the images and give lengths worth looking at, the largest first."""
    least, most = LENGTHS
    divide = [patch for patch in range(setup.image_size, 0, -1) if setup.image_size % patch == 0]
    return [patch for patch in divide if least <= setup.length(patch) <= most]


def exponents(starts: tuple[Start, ...], activation: str, alpha: float = 1.0) -> list[float]:
    """For each seed, the power of L that its mean weights follow: the slope of their logarithms."""
    powers = []
    for seed in SEEDS:
        line = [s for s in starts if (s.activation, s.alpha, s.seed) == (activation, alpha, seed)]
        if len(line) > 1 and all(start.mean_weight > 0 for start in line):
            weights = slope_weights([math.log(start.tokens) for start in line])
            powers.append(sum(w * math.log(start.mean_weight) for w, start in zip(weights, line, strict=True)))
    return powers


def sums(starts: tuple[Start, ...], activation: str, alpha: float = 1.0) -> dict[int, float]:
    """L·E[a] by length, the mean over the seeds."""
    line = [start for start in starts if (start.activation, start.alpha) == (activation, alpha)]
    by_length = {tokens: [s.mean_weight for s in line if s.tokens == tokens] for tokens in {s.tokens for s in line}}
    return {tokens: tokens * fmean(by_length[tokens]) for tokens in sorted(by_length)}


def verdict(starts: tuple[Start, ...], setup: Setup) -> Verdict:
    """Judge whether the mean weight of relu/L falls as 1/L."""
    lengths = sorted({start.tokens for start in starts})
    if not lengths:
        return Verdict("W-init", "undecided", "No weight has been measured yet: nothing to judge.", "no runs", [], {})
    power = contrast([exponents(starts, "relu")])
    listed = ", ".join(f"{value:.2f}" for value in sums(starts, "relu").values())
    others = {
        name: fmean(powers)
        for name in setup.activations
        if name != "relu" and len(powers := exponents(starts, name)) == len(SEEDS)
    }
    told = ", ".join(f"{name} {value:.2f}".replace("-", "−") for name, value in others.items())
    sentence = (
        f"In untrained models the mean weight of relu/L falls as L^{_interval(power)} from L = {lengths[0]} to "
        f"{lengths[-1]} ({len(SEEDS)} initialisations, {IMAGES} images). L times the mean is {listed}; "
        f"for normal scores it would be {EXPECTED['relu']:.2f}, in softmax it is 1. "
        + (f"Exponents of others at α = 1: {told}. " if told else "")
        + f"Reproduced if the interval is below −{FAST_ENOUGH:g}, contradicted if above."
    )
    numbers = {
        "exponent": power,
        "exponents of others": others,
        "L times the mean weight": {name: sums(starts, name) for name in ("relu", *others)},
        "expected": {name: EXPECTED[name] for name in ("relu", *others) if name in EXPECTED},
    }
    # The question turned round: minus the exponent is to be above.
    outcome = above(Interval(-power.mean, -power.high, -power.low), FAST_ENOUGH)
    model = setup.models[0]
    scale = f"{model} untrained, L = {', '.join(map(str, lengths))}, {setup.image_size}-pixel {setup.data}, qk-norm"
    return Verdict("W-init", outcome, sentence, scale, list(SEEDS), plain(numbers))


def figure(starts: tuple[Start, ...], setup: Setup) -> Figure:
    """The mean weight over L, for other α of relu and for every h at α = 1."""
    title = "The mean attention weight before training"
    caption = (
        f"Left: the mean weight E[a] of untrained models for three α of relu, and of softmax, which is exactly 1/L. "
        f"Right: L times the mean weight at α = 1; dotted: its value for normally distributed scores. Means over "
        f"{len(SEEDS)} initialisations, all layers and heads, {IMAGES} images."
    )
    lines = [(name, 1.0) for name in setup.activations]
    shown = dict.fromkeys([*[("relu", alpha) for alpha in POWERS], *lines, (SOFTMAX, 0.0)])
    rows = [
        (
            name,
            None if name == SOFTMAX else alpha,
            tokens,
            float(f"{value / tokens:.4g}"),
            round(value, 4),
            _expected(name, alpha),
        )
        for name, alpha in shown
        for tokens, value in sums(starts, name, alpha).items()
    ]
    table = Table(("h", "α", "L", "mean weight", "L × mean weight", "expected"), tuple(rows))
    return Figure("init", title, caption, _describe(starts, setup), table, lambda: _paint(starts, setup))


def _expected(activation: str, alpha: float) -> float | None:
    known = activation in EXPECTED and (alpha == 1 or activation == SOFTMAX)
    return round(EXPECTED[activation], 4) if known else None


def _describe(starts: tuple[Start, ...], setup: Setup) -> str:
    if not starts:
        return "An empty figure: nothing has been measured yet."
    sentences = ["Left: mean weights of untrained models over the length, both axes logarithmic."]
    for alpha in POWERS:
        ends = list(sums(starts, "relu", alpha).items())
        words = " and ".join(f"{total / tokens:.3g} at L = {tokens}" for tokens, total in (ends[0], ends[-1]))
        sentences.append(f"relu with α = {alpha:g} has {words}.")
    sentences.append("Right: L times the mean weight at α = 1, from the shortest to the longest.")
    sentences += [
        f"{name}: {', '.join(f'{value:.2f}' for value in sums(starts, name).values())}." for name in setup.activations
    ]
    return " ".join(sentences)


def _paint(starts: tuple[Start, ...], setup: Setup) -> Any:
    from matplotlib.lines import Line2D

    picture, (left, right) = sheet(2, height=4.3, same_y=False)
    if not starts:
        nothing_yet(left)
        return picture
    styles = {0.0: ":", 0.5: "--", 1.0: "-"}
    for alpha in POWERS:
        line = sums(starts, "relu", alpha)
        left.plot(
            list(line),
            [v / n for n, v in line.items()],
            styles[alpha],
            marker="o",
            color=_figures.colour_of("relu").light,
        )
        last = max(line)
        left.annotate(f"α = {alpha:g}", (last, line[last] / last), (8, 0), textcoords="offset points", va="center")
    line = sums(starts, SOFTMAX, 0.0)
    left.plot(
        list(line), [v / n for n, v in line.items()], color=_figures.colour_of(SOFTMAX).light, lw=1.3, ls=(0, (5, 3))
    )
    left.set(
        xlim=(0.8 * min(line), 3 * max(line)),
        xscale="log",
        yscale="log",
        title="relu, three α",
        xlabel="L",
        ylabel="mean weight",
    )
    plain_powers(left.yaxis)
    for name in setup.activations:
        colour, line = _figures.colour_of(name).light, sums(starts, name)
        right.plot(list(line), list(line.values()), "-", marker=MARKERS.get(name, "*"), color=colour)
        if name in EXPECTED:
            right.axhline(EXPECTED[name], color=colour, lw=1, ls=":")
    right.axhline(1, color=_figures.colour_of(SOFTMAX).light, lw=1.3, ls=(0, (5, 3)))
    right.set(xscale="log", title="α = 1", xlabel="L", ylabel="L × mean weight")
    for axis in (left, right):
        axis.set_xticks(sorted(line), [str(tokens) for tokens in sorted(line)], minor=False)
        axis.set_xticks([], minor=True)
    handles = [
        Line2D([], [], color=_figures.colour_of(name).light, marker=MARKERS.get(name, "*"), label=name)
        for name in setup.activations
    ]
    handles.append(Line2D([], [], color=_figures.colour_of(SOFTMAX).light, lw=1.3, ls=(0, (5, 3)), label="softmax"))
    legend(picture, handles)
    return picture


def _interval(power: Interval) -> str:
    low, mean, high = (f"{value:.2f}".replace("-", "−") for value in (power.low, power.mean, power.high))
    return f"{mean} [{low}, {high}]"
