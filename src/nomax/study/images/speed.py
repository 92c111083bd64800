"""How fast attention is on this machine: relu/L in nomax's kernels against softmax in PyTorch's."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from nomax import _figures
from nomax.ops.api import attention
from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import Measurement
from nomax.study.engine.figure import Figure, Table, nothing_yet, sheet
from nomax.study.engine.result import Numbers, Result, measured
from nomax.study.engine.statistics import Interval, contrast
from nomax.train.console import Stop

LENGTHS = (49, 196, 784)
ROUNDS = 9  # each times both once, so whatever else the machine does meets both
TOKENS = 3136  # of a call, so that each takes some milliseconds
HEADS, DIM = 6, 64
RELU = "relu/L"


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
        """The precision."""
        return self.dtype

    @property
    def tokens(self) -> int:
        """The length of sequences."""
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
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds + 1):
            for name, call in calls.items():
                if stop.asked:
                    return None
                start = time.process_time()
                out = call()
                torch.autograd.grad(out, (query, key, value), out.detach())
                seconds[name].append(time.process_time() - start)
        return {name: tuple(times[1:]) for name, times in seconds.items()}  # the first round warms up


def measurements() -> list[AttentionSpeed]:
    """Three lengths in both precisions."""
    return [AttentionSpeed(length, dtype) for dtype in ("float32", "bfloat16") for length in LENGTHS]


def ratios(results: Sequence[Result]) -> dict[tuple[str, int], Interval]:
    """How many times as long as relu/L softmax takes, by precision and length."""
    done = sorted(
        measured(results, AttentionSpeed.kind), key=lambda result: (result.variant != "float32", result.tokens)
    )
    return {
        (result.variant, result.tokens): contrast(
            [[softmax / relu for softmax, relu in zip(result.numbers[SOFTMAX], result.numbers[RELU], strict=True)]]
        )
        for result in done
    }


def figure(results: Sequence[Result]) -> Figure:
    """The speed of relu/L against softmax, by precision and length."""
    ratio = ratios(results)
    caption = (
        f"CPU time of PyTorch's scaled_dot_product_attention over that of relu/L in nomax, forward and backward, one "
        f"thread: means over {ROUNDS} interleaved rounds with 95 % intervals, {HEADS} heads of dimension {DIM}, "
        f"{TOKENS:,} tokens in a call. Beyond 1, relu/L is faster."
    )
    words = "; ".join(
        f"{dtype}, L = {length}: {estimate.mean:.2f} times" for (dtype, length), estimate in ratio.items()
    )
    alternative = f"The time of softmax over that of relu/L. {words or 'Nothing has been measured yet'}."
    table = Table(
        ("precision", "L", "softmax's time over relu/L's", "from", "to"),
        tuple(
            (dtype, length, round(estimate.mean, 3), round(estimate.low, 3), round(estimate.high, 3))
            for (dtype, length), estimate in ratio.items()
        ),
    )
    return Figure("speed", "Speed on this machine", caption, alternative, table, lambda: _paint(ratio))


def _paint(ratio: dict[tuple[str, int], Interval]) -> Any:
    picture, (axis,) = sheet(1, height=2.8)
    if not ratio:
        nothing_yet(axis)
        return picture
    for place, estimate in enumerate(ratio.values()):
        colour = _figures.colour_of(RELU).light
        axis.plot([estimate.low, estimate.high], [place] * 2, lw=1.6, color=colour)
        axis.plot(estimate.mean, place, "o", ms=7, color=colour)
        axis.annotate(f"{estimate.mean:.1f}×", (estimate.high, place), (6, 0), textcoords="offset points", va="center")
    axis.axvline(1, color=_figures.colour_of(SOFTMAX).light, lw=1.6, ls=(0, (5, 3)))
    axis.set_yticks(range(len(ratio)), [f"{dtype}, L = {length}" for dtype, length in ratio])
    axis.invert_yaxis()
    axis.set_xlim(left=0, right=1.15 * max(estimate.high for estimate in ratio.values()))
    axis.set_xlabel("softmax's time ÷ relu/L's")
    return picture
