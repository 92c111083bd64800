"""Attention weights of the α study, before training and during it.

Before: the mean weight over the sequence length (the paper's Sec. 3). During: the sums of rows, the size of attention
beside the residual stream and the learned scales, which show why a power of L is needed (its first open question).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean
from typing import Any, ClassVar

import numpy as np
import torch

from nomax import _figures
from nomax.data.images.batches import evaluation_batches
from nomax.data.images.transforms import Evaluation
from nomax.data.source import part
from nomax.evaluate import row_statistics
from nomax.models import ViT
from nomax.phi import SOFTMAX, Phi
from nomax.study.engine.experiment import ViTMeasurement, vit_macs
from nomax.study.engine.figure import BROKEN, MARKERS, Figure, Table, handle, legend, nothing_yet, plain_powers, sheet
from nomax.study.engine.result import ImageResult, Numbers, Result, measured
from nomax.study.engine.statistics import contrast, slope_weights, turned
from nomax.study.engine.verdict import Verdict, above, plain, spread
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
class InitialWeights(ViTMeasurement):
    """The mean weight of untrained models of one length: over layers, heads and some images, for each φ and seed."""

    kind: ClassVar[str] = "initial-weights"

    data: str
    transform: Evaluation
    phis: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS
    images: int = IMAGES

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
    """Return models of several lengths, each with softmax, three α of relu, and every other h at α = 1."""
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
    """Return the mean weights that were measured, shortest sequences first."""
    return tuple(
        Start(phi.activation, phi.alpha, result.tokens, seed, weight)
        for result in sorted(measured(results, InitialWeights.kind), key=lambda result: result.tokens)
        for name, weights in result.numbers.items()
        for phi in [Phi.parse(name)]
        for seed, weight in zip(SEEDS, weights, strict=False)
    )


def patches(setup: Setup) -> list[int]:
    """Return the patches that divide the images and give lengths worth looking at, the largest first."""
    least, most = LENGTHS
    divide = [patch for patch in range(setup.image_size, 0, -1) if setup.image_size % patch == 0]
    return [patch for patch in divide if least <= setup.length(patch) <= most]


def exponents(starts: tuple[Start, ...], activation: str, alpha: float = 1.0) -> list[float]:
    """Return the power of L that the mean weights of each seed follow: the slope of their logarithms."""
    powers = []
    for seed in SEEDS:
        line = [s for s in starts if (s.activation, s.alpha, s.seed) == (activation, alpha, seed)]
        if len(line) > 1 and all(start.mean_weight > 0 for start in line):
            weights = slope_weights([math.log(start.tokens) for start in line])
            powers.append(sum(w * math.log(start.mean_weight) for w, start in zip(weights, line, strict=True)))
    return powers


def sums(starts: tuple[Start, ...], activation: str, alpha: float = 1.0) -> dict[int, float]:
    """Return L·E[a] by length, the mean over the seeds."""
    line = [start for start in starts if (start.activation, start.alpha) == (activation, alpha)]
    by_length = {tokens: [s.mean_weight for s in line if s.tokens == tokens] for tokens in {s.tokens for s in line}}
    return {tokens: tokens * fmean(by_length[tokens]) for tokens in sorted(by_length)}


def initial_verdict(starts: tuple[Start, ...], setup: Setup) -> Verdict:
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
    exponents_said = ", ".join(f"{name} {value:.2f}".replace("-", "−") for name, value in others.items())
    sentence = (
        f"In untrained models the mean weight of relu/L falls as L^{spread(power, 2)} from L = {lengths[0]} to "
        f"{lengths[-1]} ({len(SEEDS)} initialisations, {IMAGES} images). L times the mean is {listed}; "
        f"for normal scores it would be {EXPECTED['relu']:.2f}, in softmax it is 1. "
        + (f"Exponents of others at α = 1: {exponents_said}. " if exponents_said else "")
        + f"Reproduced if the interval is below −{FAST_ENOUGH:g}, contradicted if above."
    )
    numbers = {
        "exponent": power,
        "exponents of others": others,
        "L times the mean weight": {name: sums(starts, name) for name in ("relu", *others)},
        "expected": {name: EXPECTED[name] for name in ("relu", *others) if name in EXPECTED},
    }
    outcome = above(turned(power), FAST_ENOUGH)
    model = setup.models[0]
    scale = f"{model} untrained, L = {', '.join(map(str, lengths))}, {setup.image_size}-pixel {setup.data}, qk-norm"
    return Verdict("W-init", outcome, sentence, scale, list(SEEDS), plain(numbers))


def initial_figure(starts: tuple[Start, ...], setup: Setup) -> Figure:
    """Draw the mean weight over L, for three α of relu and for every h at α = 1."""
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
    return Figure(
        "init", title, caption, _describe_initial(starts, setup), table, lambda: _paint_initial(starts, setup)
    )


def _expected(activation: str, alpha: float) -> float | None:
    known = activation in EXPECTED and (alpha == 1 or activation == SOFTMAX)
    return round(EXPECTED[activation], 4) if known else None


def _describe_initial(starts: tuple[Start, ...], setup: Setup) -> str:
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


def _paint_initial(starts: tuple[Start, ...], setup: Setup) -> Any:
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
    left.plot(list(line), [v / n for n, v in line.items()], color=_figures.colour_of(SOFTMAX).light, lw=1.3, ls=BROKEN)
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
    right.axhline(1, color=_figures.colour_of(SOFTMAX).light, lw=1.3, ls=BROKEN)
    right.set(xscale="log", title="α = 1", xlabel="L", ylabel="L × mean weight")
    for axis in (left, right):
        axis.set_xticks(sorted(line), [str(tokens) for tokens in sorted(line)], minor=False)
        axis.set_xticks([], minor=True)
    handles = [
        handle(name, color=_figures.colour_of(name).light, marker=MARKERS.get(name, "*")) for name in setup.activations
    ]
    legend(picture, [*handles, handle("softmax", color=_figures.colour_of(SOFTMAX).light, lw=1.3, ls=BROKEN)])
    return picture


Points = Sequence[Mapping[str, Any]]  # the recorded steps of a run: {"step": …, "layers": [{"row_sum": …}, …]}

ACTIVATION = "relu"  # the h whose curve over α decides
STYLES: dict[float, Any] = {0.0: ":", 0.5: "-.", 1.0: "-", 1.5: (0, (4, 2)), 2.0: (0, (1, 1))}


def _mean(name: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda point: fmean(layer[name] for layer in point["layers"])


def _loudness(point: Mapping[str, Any]) -> float:
    """Return the size of what the first layer's attention adds, beside the embedded patches that it is added to."""
    first = point["layers"][0]
    return float(first["output"] / first["residual"])


@dataclass(frozen=True)
class Panel:
    """A quantity over training."""

    title: str
    value: Callable[[Mapping[str, Any]], float]
    logarithmic: bool = True


PANELS = (
    Panel("sum of a row", _mean("row_sum")),
    Panel("attention ÷ residual, layer 1", _loudness),
    Panel("learned qk scale", _mean("scale"), logarithmic=False),
)


@dataclass(frozen=True)
class Line:
    """All recorded runs of one φ and length: the geometric means of each panel's value over the seeds."""

    tokens: int
    activation: str
    alpha: float
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    """By panel, over the steps."""

    @property
    def label(self) -> str:
        """The φ, as the legend has it."""
        return SOFTMAX if self.activation == SOFTMAX else f"relu, α = {self.alpha:g}"


def lines_of(results: Sequence[ImageResult], diagnostics: Mapping[str, Points]) -> list[Line]:
    """Return the lines of softmax and relu with qk-norm, shortest sequences and smallest α first."""
    recorded: dict[tuple[int, str, float], list[Points]] = {}
    for result in results:
        if (
            result.activation in (ACTIVATION, SOFTMAX)
            and result.qk_norm
            and result.gate is None
            and diagnostics.get(result.key)
        ):
            recorded.setdefault((result.tokens, result.activation, result.alpha), []).append(diagnostics[result.key])
    lines = []
    for (tokens, activation, alpha), runs in sorted(recorded.items()):
        steps = [point["step"] for point in runs[0]]
        whole = [points for points in runs if [point["step"] for point in points] == steps]
        values = tuple(
            tuple(geometric_mean([panel.value(points[i]) for points in whole]) for i in range(len(steps)))
            for panel in PANELS
        )
        lines.append(Line(tokens, activation, alpha, tuple(steps), values))
    return lines


def training_figure(results: Sequence[ImageResult], diagnostics: Mapping[str, Points]) -> Figure:
    """Draw row sums, the size of attention beside the residual stream, and learned scales, over training."""
    lines = lines_of(results, diagnostics)
    caption = (
        "Left: the mean sum of a query's weights; softmax's is 1 by definition. Middle: the root mean square of what "
        "the first layer's attention adds, over that of the embedded patches. Right: the mean product of the learned "
        "scales of queries and keys. Means over layers, heads and seeds. Without a power of L rows sum to tens, and "
        "attention drowns the patches and their positions from the first step on; the learned scale hardly makes up "
        "for it."
    )
    columns = ("L", "φ", "step", *(panel.title for panel in PANELS))
    table: tuple[tuple[str | int | float | None, ...], ...] = tuple(
        (line.tokens, line.label, step, *(float(f"{values[i]:.4g}") for values in line.values))
        for line in lines
        for i, step in enumerate(line.steps)
        if i in (0, len(line.steps) // 2, len(line.steps) - 1)
    )
    title = "Why a power of L: what attention does while it trains"
    return Figure(
        "inside", title, caption, _describe_training(lines), Table(columns, table), lambda: _paint_training(lines)
    )


def _describe_training(lines: Sequence[Line]) -> str:
    if not lines:
        return "An empty figure: no run has recorded its attention yet."
    parts = [
        f"{line.label} at L = {line.tokens}: rows sum to {line.values[0][0]:.3g} at the start and "
        f"{line.values[0][-1]:.3g} at the end, attention over residual is {line.values[1][0]:.3g} and "
        f"{line.values[1][-1]:.3g}"
        for line in lines
    ]
    return f"Three quantities over training steps, a row of panels for each length. {'; '.join(parts)}."


def _paint_training(lines: Sequence[Line]) -> Any:
    shown = lengths_shown(lines)
    picture, axes = sheet(len(PANELS), height=2.5 * max(len(shown), 1) + 0.8, same_y=False, rows=max(len(shown), 1))
    if not lines:
        nothing_yet(axes[0])
        return picture
    for place, tokens in enumerate(shown):
        for number, panel in enumerate(PANELS):
            axis = axes[place * len(PANELS) + number]
            for line in (line for line in lines if line.tokens == tokens):
                axis.plot([step + 1 for step in line.steps], line.values[number], **_look(line))
            axis.set_xscale("log")
            if panel.logarithmic:
                axis.set_yscale("log")
                plain_powers(axis.yaxis)
            plain_powers(axis.xaxis)
            axis.set_title(f"L = {tokens}: {panel.title}", fontsize=10)
            if place == len(shown) - 1:
                axis.set_xlabel("training step")
    unique = {line.label: line for line in lines}
    legend(picture, [handle(label, **_look(line)) for label, line in unique.items()], columns=3)
    return picture


def lengths_shown(lines: Sequence[Line]) -> list[int]:
    """Return the shortest and the longest sequences that were recorded."""
    known = sorted({line.tokens for line in lines})
    return list(dict.fromkeys([known[0], known[-1]])) if known else []


def _look(line: Line) -> dict[str, Any]:
    return {
        "color": _figures.colour_of(line.activation).light,
        "ls": BROKEN if line.activation == SOFTMAX else STYLES.get(line.alpha, "-"),
        "lw": 2.2 if line.alpha == 1 else 1.5,
    }
