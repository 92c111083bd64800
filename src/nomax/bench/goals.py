"""What we want to reach, as data, and how far a run got."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nomax.bench.results import OURS, UNCAUSAL, Case, Results
from nomax.bench.shapes import BACKWARD, FORWARD, INFERENCE, SHAPES

VIT = ("S/32", "S/16", "S/8", "B/16")
LONG = ("long-2049", "long-4096")
FLOAT32 = ("float32",)
BFLOAT16 = ("bfloat16",)
BOTH = (*FLOAT32, *BFLOAT16)
SMOOTH = ("gelu/L", "sigmoid/L", "softplus/L", "silu/L")
FROM_197 = ("S/16", "S/8", "B/16", *LONG, "causal-1024", "padded")
EVERY = tuple(name for name in SHAPES if name != "tiny")


@dataclass(frozen=True)
class Goal:
    """A bound that every case it speaks of should keep."""

    text: str
    quantity: Literal["speedup", "time", "peak share", "memory share"]
    bound: float
    mode: str
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = FLOAT32
    phis: tuple[str, ...] = (OURS,)
    peer: str = "sdpa"

    @property
    def at_least(self) -> bool:
        """Whether more is better."""
        return self.quantity in ("speedup", "peak share")


# fmt: off
GOALS = (
    Goal("float32 against SDPA, S/32", "speedup", 1.4, FORWARD, ("S/32",)),
    Goal("float32 against SDPA, other ViT and long", "speedup", 1.3, FORWARD, ("S/16", "S/8", "B/16", *LONG)),
    Goal("float32 against SDPA, ViT and long", "speedup", 1.25, BACKWARD, (*VIT, *LONG)),
    Goal("bfloat16 against SDPA, L ≥ 785", "speedup", 2.4, FORWARD, ("S/8", *LONG), BFLOAT16),
    Goal("bfloat16 against SDPA, L < 785", "speedup", 2.0, FORWARD, ("S/32", "S/16", "B/16"), BFLOAT16),
    Goal("bfloat16 against SDPA, ViT and long", "speedup", 2.0, BACKWARD, (*VIT, *LONG), BFLOAT16),
    Goal("against eager ReLU, every shape", "speedup", 1.0, FORWARD, EVERY, BOTH, peer="eager"),
    Goal("against eager ReLU, every shape", "speedup", 1.0, BACKWARD, EVERY, BOTH, peer="eager"),
    Goal("float32 against eager ReLU, L ≥ 785", "speedup", 2.5, FORWARD, ("S/8", *LONG, "causal-1024"), peer="eager"),
    Goal("float32 against eager ReLU, L ≥ 785", "speedup", 2.0, BACKWARD, ("S/8", *LONG, "causal-1024"), peer="eager"),
    Goal("float32 share of the FMA peak, L ≥ 785", "peak share", 0.85, FORWARD, ("S/8", *LONG)),
    Goal("causal against not causal, time", "time", 0.6, FORWARD, ("causal-1024",), BOTH, peer=UNCAUSAL),
    Goal("causal against not causal, time", "time", 0.65, BACKWARD, ("causal-1024",), BOTH, peer=UNCAUSAL),
    Goal("smooth activations against SDPA, L ≥ 197", "speedup", 1.0, FORWARD, FROM_197, BOTH, SMOOTH),
    Goal("smooth activations against SDPA, L ≥ 197", "speedup", 1.0, BACKWARD, FROM_197, BOTH, SMOOTH),
    Goal("memory of a call at L = 16,384, of the L×L matrix", "memory share", 0.05, FORWARD),
    Goal("memory of a call at L = 16,384, of the L×L matrix", "memory share", 0.05, BACKWARD),
    Goal("time of a tiny call against SDPA's", "time", 2.0, FORWARD, ("tiny",), BOTH),
    Goal("time of a tiny call against SDPA's", "time", 2.0, INFERENCE, ("tiny",), BOTH),
)
# fmt: on


def judge(goal: Goal, results: Results) -> dict[str, Any]:
    """The goal's worst value in this run, where it was, and whether that keeps the bound."""
    found = [] if results.smoke else list(values(goal, results))
    outcome: dict[str, Any] = {
        "goal": goal.text,
        "mode": goal.mode,
        "quantity": goal.quantity,
        "at_least" if goal.at_least else "at_most": goal.bound,
        "verdict": "not measured",
        "measured": len(found),
    }
    if found:
        where, worst = (min if goal.at_least else max)(found, key=lambda pair: pair[1])
        kept = [value >= goal.bound if goal.at_least else value <= goal.bound for _, value in found]
        outcome |= {"verdict": "met" if all(kept) else "not met", "worst": worst, "where": where, "kept": sum(kept)}
    return outcome


def values(goal: Goal, results: Results) -> Iterator[tuple[str, float]]:
    """All that this run says about a goal, and where."""
    if goal.quantity == "memory share":
        for memory in results.memory:
            if memory.participant in goal.phis and memory.mode == goal.mode and memory.share is not None:
                yield f"{memory.participant}, {memory.unit} = {memory.length}", memory.share
        return
    for case in results.cases:
        if case.shape in goal.shapes and case.dtype in goal.dtypes and case.mode == goal.mode:
            for phi in goal.phis:
                if (value := _value(goal, case, phi)) is not None:
                    threads = f"{case.threads} thread{'s' * (case.threads > 1)}"
                    yield f"{case.shape}, {case.dtype}, {threads}" + ("" if phi == OURS else f", {phi}"), value


def _value(goal: Goal, case: Case, phi: str) -> float | None:
    if goal.quantity == "peak share":
        return case.peak_share(phi)
    speedup = case.speedup(phi, goal.peer)
    if speedup is None or goal.quantity == "speedup":
        return speedup
    return 1 / speedup


def bound_against_sdpa(shape: str, dtype: str, mode: str) -> float | None:
    """The speed-up over SDPA that we want for a case, if we want one."""
    for goal in GOALS:
        of_this_kind = (goal.quantity, goal.peer, goal.phis, goal.mode) == ("speedup", "sdpa", (OURS,), mode)
        if of_this_kind and shape in goal.shapes and dtype in goal.dtypes:
            return goal.bound
    return None
