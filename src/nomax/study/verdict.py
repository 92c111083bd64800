"""A verdict: a claim, what our runs say about it, in numbers, and at which scale they can say so."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nomax.study.claims import CLAIMS
from nomax.study.statistics import Interval

Outcome = Literal["reproduced", "contradicted", "undecided"]

# One point of accuracy is our choice, since the paper has no numbers. A smaller difference would not change
# what anybody uses.
MARGIN = 0.01


@dataclass(frozen=True)
class Verdict:
    """What the runs say about a claim. `dataclasses.asdict` of it is an entry of verdicts.json."""

    claim: str
    text: str = field(default="", kw_only=True)
    """The claim as a sentence; of the papers' claims it is known."""
    verdict: Outcome
    sentence: str
    scale: str
    seeds: list[int]
    numbers: dict[str, Any]

    def __post_init__(self) -> None:
        known = CLAIMS[self.claim].sentence if self.claim in CLAIMS else self.claim
        object.__setattr__(self, "text", self.text or known)


def above(interval: Interval, bound: float) -> Outcome:
    """Judge "it is larger than the bound": reproduced if all of the interval is, contradicted if none of it is."""
    if not interval.known:
        return "undecided"
    if interval.low > bound:
        return "reproduced"
    return "contradicted" if interval.high < bound else "undecided"


def within(interval: Interval, low: float, high: float) -> Outcome:
    """Judge "it lies from low to high": reproduced if the interval does, contradicted if it lies outside."""
    if not interval.known:
        return "undecided"
    if low <= interval.low and interval.high <= high:
        return "reproduced"
    return "contradicted" if interval.high < low or interval.low > high else "undecided"


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Several parts of one claim: contradicted if one is, reproduced if all are."""
    found = list(outcomes)
    if "contradicted" in found:
        return "contradicted"
    return "reproduced" if found and set(found) == {"reproduced"} else "undecided"


def points(interval: Interval) -> str:
    """A difference of accuracies in percentage points: "+0.4 points [−0.2, +1.0]"."""
    if not interval.known:
        return f"{_signed(interval.mean)} points (no interval: fewer than two {interval.lacking})"
    return f"{_signed(interval.mean)} points [{_signed(interval.low)}, {_signed(interval.high)}]"


def plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as JSON has them: an interval is a list [mean, low, high], and what is not known is null."""
    return {name: _plain(value) for name, value in numbers.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return [_plain(part) for part in (value.mean, value.low, value.high)]
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return round(value, 6) if abs(value) < float("inf") else None
    return value


def _signed(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-", "−") if value == value else "unknown"
