"""Does a gate remove the need for length scaling, and what does it cost? relu and relu² over α, with and without it
(Fig. 4).

    nomax study gate                  minutes, on the bundled images
    nomax study gate --setup hour     one to two hours on two cores; its runs without a gate are those of `alpha`

The gate multiplies the joined heads by SiLU of another projection of the input. (The paper does not name its function;
SiLU is that of the earlier work it refers to.) It judges whether α = 1 is still better than α = 0 with a gate. What the
gate costs is measured apart, on steps of training that take turns, and set beside the paper's +9.3 %. What came out:
results/gate/verdicts.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from nomax import _figures
from nomax.models import ViT, ViTConfig
from nomax.nn.attention import Gate
from nomax.study.engine.experiment import Experiment, ViTMeasurement, cpu_seconds, vit_macs
from nomax.study.engine.figure import BROKEN, Figure, Table, handle, legend, nothing_yet, percent_axis, sheet
from nomax.study.engine.result import Numbers, Result, finals, measured, trained, where
from nomax.study.engine.statistics import Interval, accuracy, best_alpha, comparison, contrast, lengths, pooled
from nomax.study.engine.verdict import MARGIN, Outcome, Verdict, above, basis, plain, points, within
from nomax.study.images import over_alpha
from nomax.study.images.setup import Setup
from nomax.train.console import Stop

CHANGES = over_alpha.PAIRED_LENGTHS
TITLE = "Does a gate remove the need for length scaling?"
CLAIMS = ("W-gate", "W-gatecost")

GATE: Gate = "silu"
CHOICES: tuple[Gate | None, ...] = (None, GATE)
LINES = [
    over_alpha.Line(f"{name}{', gate' * (gate is not None)}", name, gate=gate, broken=gate is not None)
    for name in over_alpha.PAIRED
    for gate in CHOICES
]

ROUNDS = 9  # each times both models once, so whatever else the machine does meets both
TOKENS = 800  # of a step, about; at least one image
PAPER = 0.093  # more core-hours, S/8 with relu
RATIOS, ADDED = "time with the gate over time without", "multiply-adds added"  # of a measurement
ABOUT = (PAPER / 2, PAPER * 2)  # from half to double: another machine can be held to no more than that


@dataclass(frozen=True)
class GateCost(ViTMeasurement):
    """The CPU time of steps of training with and without a gate, which take turns."""

    kind: ClassVar[str] = "gate-cost"
    alone: ClassVar[bool] = True

    gate: Gate
    """That of the second model; the first has none."""
    rounds: int = ROUNDS
    step_tokens: int = TOKENS

    @property
    def images(self) -> int:
        """Images of a step."""
        return max(1, self.step_tokens // self.model.tokens)

    @property
    def flops(self) -> int:
        """Floating point operations of all steps."""
        return 2 * (self.rounds + 1) * 6 * vit_macs(self.model) * self.images

    def measure(self, stop: Stop) -> Numbers | None:
        """Time both models in every round, and return the ratios: with the gate over without it."""
        gated = replace(self.model, gate=self.gate)
        steps = {"without": _Step(self.model, self.images), "with": _Step(gated, self.images)}
        seconds = cpu_seconds(steps, self.rounds, stop)
        if seconds is None:
            return None
        ratios = tuple(more / less for more, less in zip(seconds["with"], seconds["without"], strict=True))
        return {RATIOS: ratios, ADDED: (vit_macs(gated) / vit_macs(self.model) - 1,)}


def grid(setup: Setup, seeds: Sequence[int]) -> list[Experiment]:
    """Return both h with every α, with and without the gate, at every length; softmax without; and the gate's cost."""
    return [*over_alpha.pairs(setup, seeds, [{"gate": gate} for gate in CHOICES]), *costs_to_measure(setup)]


def costs_to_measure(setup: Setup) -> list[GateCost]:
    """Return the set-up's models for this, or its first model with every patch, shortest sequences first."""
    if setup.gate_models:
        models = [ViTConfig(variant, qk_norm=True) for variant in setup.gate_models]
    else:
        models = [setup.run("relu/L", patch=patch).config.model for patch in setup.patches]
    ordered = sorted(models, key=lambda model: model.tokens)
    return [GateCost(replace(model, phi="relu/L", gate=None), GATE) for model in ordered]


def figures(results: Sequence[Result], setup: Setup) -> list[Figure]:
    """Draw accuracy over α by length, with and without the gate, and the gate's cost by length."""
    caption = (
        "Filled: no gate, as in all other runs; hollow: a SiLU gate. The dashed level is softmax without a gate. The "
        "paper's Fig. 4 shows the same for S/32, S/16 and S/8."
    )
    title = "Accuracy over α with and without a gate"
    return [over_alpha.figure(trained(results), LINES, "gate", title, caption), cost_figure(collect_costs(results))]


def verdicts(results: Sequence[Result], setup: Setup) -> list[Verdict]:
    """Judge whether α = 1 still helps with a gate, and whether the gate costs what the paper says."""
    return [_still_needed(over_alpha.ground(finals(results), setup)), cost_verdict(collect_costs(results))]


def _still_needed(ground: over_alpha.Ground) -> Verdict:
    results = [result for result in ground.same if result.activation in over_alpha.PAIRED and result.qk_norm]
    cells, cells_without = (over_alpha.gains(where(results, gate=gate)) for gate in (GATE, None))
    used = [result for result in where(results, gate=GATE) if result.alpha in (0.0, 1.0)]
    if not cells:
        return ground.nothing("W-gate", "No seed has both α = 0 and α = 1 with a gate yet")
    gain, without = pooled(cells), pooled(cells_without)
    by_length = over_alpha.by_length(cells)
    listed = "; ".join(f"L = {tokens}: {points(part)}" for tokens, part in by_length.items())
    sentence = (
        f"α = 1 minus α = 0 with a gate: {points(gain)} ({basis(used, cells)}). {listed}. "
        + (f"Without a gate: {points(without)}. " if cells_without else "")
        + "Reproduced if the interval with a gate is above 0. Contradicted if that without one is, and that with one "
        f"below {100 * MARGIN:g} point: only a need that was there can have been removed."
    )
    outcome: Outcome = "reproduced" if above(gain, 0) == "reproduced" else "undecided"
    if above(without, 0) == "reproduced" and above(gain, MARGIN) == "contradicted":
        outcome = "contradicted"
    lines = {f"{line.label}, L = {n}": line.of(results, n) for line in LINES for n in lengths(results)}
    best = {name: [best.place, best.low, best.high] for name, best in best_alpha(lines, accuracy).best.items()}
    numbers = {"gain": gain, "gain without a gate": without, "by length": by_length, "best α": best}
    noise = {"the gain with a gate": comparison(cells, [0.0], margin=MARGIN)}
    return ground.settle("W-gate", outcome, sentence, numbers, noise)


@dataclass(frozen=True)
class Cost:
    """Of one model: the share of CPU time that the gate adds, by the rounds, and that of multiply-adds."""

    variant: str
    tokens: int
    ratios: tuple[float, ...]
    macs: float

    @property
    def time(self) -> Interval:
        """The geometric mean over the rounds, as the share that is added."""
        log = contrast([[math.log(ratio) for ratio in self.ratios]])
        return Interval(*(math.exp(value) - 1 for value in (log.mean, log.low, log.high)))


def collect_costs(results: Sequence[Result]) -> list[Cost]:
    """Return the costs that were measured, shortest sequences first."""
    done = sorted(measured(results, GateCost.kind), key=lambda result: result.tokens)
    return [Cost(result.variant, result.tokens, result.numbers[RATIOS], result.numbers[ADDED][0]) for result in done]


def cost_verdict(costs: Sequence[Cost]) -> Verdict:
    """Judge the longest sequences, since S/8, which the paper measured, has its longest."""
    if not costs:
        return Verdict("W-gatecost", "undecided", "No cost has been measured yet: nothing to judge.", "no runs", [], {})
    longest = costs[-1]
    listed = "; ".join(f"{cost.variant} (L = {cost.tokens}): {added(cost.time)}" for cost in costs)
    sentence = (
        f"The gate adds {added(longest.time)} to the CPU time of a step of training {longest.variant}, and "
        f"{100 * longest.macs:.1f} % to its multiply-adds ({ROUNDS} interleaved rounds; {listed}). The paper has "
        "+9.3 % core-hours for S/8 on TPUs, so about 9 % is read as half to double of it "
        f"({100 * ABOUT[0]:.1f} to {100 * ABOUT[1]:.1f} %): reproduced if the interval lies within, contradicted if "
        "outside."
    )
    numbers = {
        "time": {cost.variant: cost.time for cost in costs},
        "multiply-adds": {cost.variant: cost.macs for cost in costs},
        "paper": PAPER,
        "rounds": {cost.variant: cost.ratios for cost in costs},
    }
    scale = f"{', '.join(cost.variant for cost in costs)} with relu/L, untrained, one CPU thread"
    return Verdict("W-gatecost", within(longest.time, *ABOUT), sentence, scale, [0], plain(numbers))


def cost_figure(costs: Sequence[Cost]) -> Figure:
    """Draw what the gate adds, by model."""
    caption = (
        f"What the gate adds to the CPU time of a step of training (geometric mean of {ROUNDS} interleaved rounds, "
        "95 % interval) and to the encoder's multiply-adds. The dashed level is the paper's +9.3 % core-hours for S/8."
    )
    alternative = "What the gate adds, by model. " + " ".join(
        f"{cost.variant}: {added(cost.time)} CPU time, {100 * cost.macs:+.1f} % multiply-adds." for cost in costs
    )
    columns = ("model", "L", "CPU time added", "low", "high", "multiply-adds added")
    table = Table(columns, tuple(_listed(cost) for cost in costs))
    return Figure("gate-cost", "The cost of the gate", caption, alternative, table, lambda: _paint_costs(costs))


def added(interval: Interval) -> str:
    """Format a share that is added, with its interval."""
    low, mean, high = (100 * value for value in (interval.low, interval.mean, interval.high))
    return f"{mean:+.1f} % [{low:+.1f}, {high:+.1f}]".replace("-", "−")


def _listed(cost: Cost) -> tuple[str | int | float, ...]:
    mean, low, high, more = (round(x, 4) for x in (cost.time.mean, cost.time.low, cost.time.high, cost.macs))
    return cost.variant, cost.tokens, mean, low, high, more


class _Step:
    """A step of training on random images."""

    def __init__(self, config: ViTConfig, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        size = config.image_size if isinstance(config.image_size, tuple) else (config.image_size, config.image_size)
        self.images = torch.rand(count, config.channels, *size, generator=generator)
        self.labels = torch.randint(max(config.num_classes, 1), (count,), generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = ViT.from_config(config)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> None:
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def _paint_costs(costs: Sequence[Cost]) -> Any:
    picture, (axis,) = sheet(1, height=3.4)
    timed, counted = _figures.colour_of("relu").light, _figures.SOFT.light
    if not costs:
        nothing_yet(axis)
    for place, cost in enumerate(costs):
        axis.plot([place, place], [cost.time.low, cost.time.high], "-", lw=2.2, color=timed, zorder=3)
        axis.plot(place, cost.time.mean, "o", ms=8, color=timed, zorder=4)
        axis.plot(place + 0.12, cost.macs, "s", ms=7, color=counted, zorder=4)
    axis.axhline(PAPER, color=_figures.INK.light, lw=1.3, ls=BROKEN)
    axis.axhline(0, color=_figures.SOFT.light, lw=0.8)
    axis.set_xticks(range(len(costs)), [f"{cost.variant} (L = {cost.tokens})" for cost in costs])
    axis.set_xlim(-0.6, max(len(costs), 1) - 0.4)
    percent_axis(axis)
    axis.set_ylabel("added by the gate")
    handles = [
        handle("CPU time, 95 % interval", color=timed, marker="o", ms=8, lw=2.2),
        handle("multiply-adds", color=counted, marker="s", ms=7, ls=""),
        handle("paper, S/8", color=_figures.INK.light, lw=1.3, ls=BROKEN),
    ]
    legend(picture, handles, columns=3)
    return picture
