"""What a gate adds to a step of training: the CPU time of models with and without it, which take turns."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from nomax import _colours
from nomax.models import ViT, ViTConfig
from nomax.nn.attention import Gate
from nomax.study.figure import Figure, Table, legend, sheet
from nomax.study.image_run import macs
from nomax.study.setup import Setup
from nomax.study.statistics import Interval, contrast
from nomax.study.verdict import Verdict, plain, within

ROUNDS = 9  # each times both models once, so whatever else the machine does meets both
TOKENS = 800  # of a step, about; at least one image
PAPER = 0.093  # more core-hours, S/8 with relu
ABOUT = (PAPER / 2, PAPER * 2)  # from half to double: another machine can be held to no more than that


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


@lru_cache(maxsize=8)
def measure(setup: Setup, gate: Gate) -> tuple[Cost, ...]:
    """Time steps of the set-up's models for this, or of its first model with every patch, shortest sequences first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple(_cost(model, gate) for model in _models(setup))
    finally:
        torch.set_num_threads(threads)


def recalled(setup: Setup, numbers: Mapping[str, Any]) -> tuple[Cost, ...]:
    """The measurement that a verdict was made from, as its numbers have it."""
    return tuple(
        Cost(
            model.variant,
            model.tokens,
            tuple(numbers["rounds"][model.variant]),
            numbers["multiply-adds"][model.variant],
        )
        for model in _models(setup)
    )


def verdict(costs: Sequence[Cost]) -> Verdict:
    """The longest sequences are judged: S/8, which the paper measured, has its longest."""
    longest = costs[-1]
    listed = "; ".join(f"{cost.variant} (L = {cost.tokens}): {percent(cost.time)}" for cost in costs)
    sentence = (
        f"The gate adds {percent(longest.time)} to the CPU time of a step of training {longest.variant}, and "
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


def figure(costs: Sequence[Cost]) -> Figure:
    """What the gate adds, by model."""
    caption = (
        f"What the gate adds to the CPU time of a step of training (geometric mean of {ROUNDS} interleaved rounds, "
        "95 % interval) and to the encoder's multiply-adds. The dashed level is the paper's +9.3 % core-hours for S/8."
    )
    alternative = "What the gate adds, by model. " + " ".join(
        f"{cost.variant}: {percent(cost.time)} CPU time, {100 * cost.macs:+.1f} % multiply-adds." for cost in costs
    )
    columns = ("model", "L", "CPU time added", "low", "high", "multiply-adds added")
    table = Table(columns, tuple(_listed(cost) for cost in costs))
    return Figure("gate-cost", "The cost of the gate", caption, alternative, table, lambda: _paint(costs))


def percent(interval: Interval) -> str:
    """A share that is added, with its interval."""
    low, mean, high = (100 * value for value in (interval.low, interval.mean, interval.high))
    return f"{mean:+.1f} % [{low:+.1f}, {high:+.1f}]".replace("-", "−")


def _listed(cost: Cost) -> tuple[str | int | float, ...]:
    mean, low, high, more = (round(x, 4) for x in (cost.time.mean, cost.time.low, cost.time.high, cost.macs))
    return cost.variant, cost.tokens, mean, low, high, more


def _models(setup: Setup) -> list[ViTConfig]:
    if setup.gate_models:
        models = [ViTConfig(variant, qk_norm=True) for variant in setup.gate_models]
    else:
        models = [setup.run("relu/L", patch=patch).config.model for patch in setup.patches]
    return sorted(models, key=lambda model: model.tokens)


def _cost(model: ViTConfig, gate: Gate) -> Cost:
    without, gated = replace(model, phi="relu/L", gate=None), replace(model, phi="relu/L", gate=gate)
    steps = [_Step(config) for config in (without, gated)]
    for step in steps:
        step()  # warms up
    times = [[step() for step in steps] for _ in range(ROUNDS)]
    ratios = tuple(second / first for first, second in times)
    return Cost(model.variant, model.tokens, ratios, macs(gated) / macs(without) - 1)


class _Step:
    """A step of training on random images: returns the seconds of CPU time that it took."""

    def __init__(self, config: ViTConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        count = max(1, TOKENS // config.tokens)
        size = config.image_size if isinstance(config.image_size, tuple) else (config.image_size, config.image_size)
        self.images = torch.rand(count, config.channels, *size, generator=generator)
        self.labels = torch.randint(max(config.num_classes, 1), (count,), generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = ViT.from_config(config)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> float:
        start = time.process_time()
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return time.process_time() - start


def _paint(costs: Sequence[Cost]) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    picture, (axis,) = sheet(1, height=3.4)
    timed, counted = _colours.of("relu").light, _colours.SOFT.light
    for place, cost in enumerate(costs):
        found = cost.time
        axis.plot([place, place], [found.low, found.high], "-", lw=2.2, color=timed, zorder=3)
        axis.plot(place, found.mean, "o", ms=8, color=timed, zorder=4)
        axis.plot(place + 0.12, cost.macs, "s", ms=7, color=counted, zorder=4)
    axis.axhline(PAPER, color=_colours.INK.light, lw=1.3, ls=(0, (5, 3)))
    axis.axhline(0, color=_colours.SOFT.light, lw=0.8)
    axis.set_xticks(range(len(costs)), [f"{cost.variant} (L = {cost.tokens})" for cost in costs])
    axis.set_xlim(-0.6, max(len(costs), 1) - 0.4)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))
    axis.set_ylabel("added by the gate")
    handles = [
        Line2D([], [], color=timed, marker="o", ms=8, lw=2.2, label="CPU time, 95 % interval"),
        Line2D([], [], color=counted, marker="s", ms=7, ls="", label="multiply-adds"),
        Line2D([], [], color=_colours.INK.light, lw=1.3, ls=(0, (5, 3)), label="paper, S/8"),
    ]
    legend(picture, handles, columns=3)
    return picture
