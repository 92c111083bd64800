"""Verdicts: what our runs say about a claim, in numbers, and at which scale."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

from nomax.study.claims import CLAIMS
from nomax.study.engine.result import AnyResult, ImageResult, Result, TrainedResult
from nomax.study.engine.statistics import Cell, Columns, Comparison, Interval, by_cell, lengths, repeated, seeds

Outcome = Literal["reproduced", "contradicted", "undecided"]

# One point of accuracy is our choice, since the paper has no numbers. A smaller difference would not change
# what anybody uses.
MARGIN = 0.01


@dataclass(frozen=True)
class Premise:
    """A condition for judging a claim, whether it holds, and what to do if it does not."""

    sentence: str
    """With its numbers, and true: "softmax reaches 71.2 % at L = 49, below the bar of 80.0 %"."""
    holds: bool
    remedy: str = ""


@dataclass(frozen=True)
class Verdict:
    """A judged claim. `dataclasses.asdict` of it is an entry of verdicts.json."""

    claim: str
    text: str = field(default="", kw_only=True)
    """The claim as a sentence; of the papers' claims it is known."""
    verdict: Outcome
    sentence: str = ""
    scale: str = ""
    seeds: list[int] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    premises: list[Premise] = field(default_factory=list)
    needed: str = ""
    """The seeds and hours that would decide it, or another remedy, if it is undecided."""
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    """The noise behind it, by what is compared: `nomax study --plan` plans with it."""

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


ABOVE_ZERO = "Reproduced if the interval is above 0, contradicted if below."
BOTH_ABOVE_ZERO = "Reproduced if both intervals are above 0, contradicted if one is below."


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Combine several parts of one claim: contradicted if one is, reproduced if all are."""
    judged = list(outcomes)
    if "contradicted" in judged:
        return "contradicted"
    return "reproduced" if judged and set(judged) == {"reproduced"} else "undecided"


def points(interval: Interval) -> str:
    """Format a difference of accuracies in percentage points: "+0.4 points [−0.2, +1.0]"."""
    if not interval.known:
        return f"{_signed(interval.mean)} points (no interval: fewer than two {interval.lacking})"
    return f"{_signed(interval.mean)} points [{_signed(interval.low)}, {_signed(interval.high)}]"


def amount(value: float, unit: str, signed: bool = False) -> str:
    """Format a number with its unit: "0.40 points", "+0.012 nats"."""
    if value == 0:
        return "0"
    scaled, digits = (100 * value, 2) if unit == "points" else (value, 3)
    return f"{scaled:{'+' if signed else ''}.{digits}f} {unit}".replace("-", "−").strip()


def difference(interval: Interval, unit: str = "points", more: str = "higher", less: str = "lower") -> str:
    """Word a signed difference: "lower by 0.165 nats [0.120, 0.210]", never "higher by −0.165"."""
    word, sign = (less, -1.0) if interval.mean < 0 else (more, 1.0)
    mean, *ends = (
        amount(sign * value, "") if unit != "points" else amount(sign * value, unit).partition(" ")[0]
        for value in (interval.mean, *sorted((interval.low, interval.high), key=lambda v: sign * v))
    )
    if not interval.known:
        return f"{word} by {mean} {unit} (no interval: fewer than two {interval.lacking})"
    return f"{word} by {mean} {unit} [{', '.join(ends)}]"


def spread(interval: Interval, digits: int = 3, signed: bool = False, unit: str = "") -> str:
    """Format a number with its interval."""
    sign = "+" if signed else ""

    def form(value: float) -> str:
        return f"{value:{sign}.{digits}f}".replace("-", "−") if value == value else "unknown"

    if not interval.known:
        return f"{form(interval.mean)}{unit} (no interval: too few runs)"
    return f"{form(interval.mean)}{unit} [{form(interval.low)}, {form(interval.high)}]"


def plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers as plain JSON: an interval becomes a list [mean, low, high], and an unknown number null."""
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


CHANCE_NOTE = "A run that diverged counts as chance and is marked with a cross; one that failed is left out."


def scale(results: Sequence[ImageResult], image_size: int) -> str:
    """Say at which scale the runs speak: "pico, L = 16, 49, 28-pixel fashion-mnist-small, 150 steps of 64 images"."""
    if not results:
        return "no runs"
    sizes = ", ".join(dict.fromkeys(result.size for result in sorted(results, key=lambda result: result.macs)))
    steps = ", ".join(f"{count:,}" for count in sorted({result.steps for result in results}))
    batch = ", ".join(f"{count:,}" for count in sorted({result.batch_size for result in results}))
    data = ", ".join(sorted({result.data for result in results}))
    tokens = ", ".join(map(str, lengths(results)))
    return f"{sizes}, L = {tokens}, {image_size}-pixel {data}, {steps} steps of {batch} images"


def basis(results: Sequence[TrainedResult], cells: Mapping[Cell, Sequence[float]], lost_counts: str = "chance") -> str:
    """Say what a number rests on: "6 settings, 18 pairs, seeds 0, 1, 2"."""
    count, pairs = len(repeated(cells)), sum(map(len, repeated(cells).values()))
    words = f"{count} setting{'s' * (count != 1)}, {pairs} pair{'s' * (pairs != 1)}"
    lost, failed = (sum(result.status == status for result in results) for status in ("diverged", "failed"))
    ended = f", {lost} run{'s' * (lost != 1)} diverged and count{'s' * (lost == 1)} as {lost_counts}" if lost else ""
    if failed:
        ended += f", {failed} run{'s' * (failed != 1)} failed and {'are' if failed != 1 else 'is'} left out"
    listed = ", ".join(map(str, seeds(results)))
    return f"{words}, seed{'s' * (len(seeds(results)) != 1)} {listed or 'none'}{ended}"


def settled(outcome: Outcome, results: Sequence[Result]) -> Outcome:
    """Return the outcome, or undecided if most of the runs did not finish."""
    done = sum(result.status == "done" for result in results)
    return outcome if 2 * done >= len(results) else "undecided"


def percent(value: float) -> str:
    """Format an accuracy: "84.2 %"."""
    return f"{100 * value:.1f} %"


def learned(
    baseline: Sequence[AnyResult],
    score: Callable[[AnyResult], float | None],
    bar: float,
    columns: Columns,
    *,
    compared: Iterable[Any] | None = None,
    say: Callable[[float], str] = percent,
    say_cell: Callable[[Any], str] = str,
) -> Premise:
    """State that softmax, the baseline, has learned: its mean over seeds reaches the bar in every cell compared.

    score: the larger, the better. compared: the cells that the verdict rests on; if not given, all of the baseline's.
    """
    means = {cell: fmean(entries) for cell, entries in by_cell(baseline, columns, score).items()}
    wanted = list(means) if compared is None else list(dict.fromkeys(compared))
    remedy = "Train longer, or train a larger model, until the baseline reaches the bar."
    missing = [cell for cell in wanted if cell not in means]
    if not wanted or missing:
        where = f" at {', '.join(map(say_cell, missing))}" if missing else ""
        return Premise(f"softmax has not been run{where}", False, "Run the softmax baseline.")
    low = [cell for cell in wanted if means[cell] < bar]
    if low:
        listed = ", ".join(f"{say(means[cell])} at {say_cell(cell)}" for cell in low)
        return Premise(f"softmax has not learned enough: {listed}, below the bar of {say(bar)}", False, remedy)
    least = min(means[cell] for cell in wanted)
    return Premise(f"softmax has learned: at least {say(least)} everywhere, and the bar is {say(bar)}", True)


def agree(metrics: Mapping[str, Interval], bound: float = 0.0) -> Premise:
    """State that no two metrics contradict each other: their intervals do not lie on opposite sides of the bound.

    All metrics must point the same way: the larger, the better for the same side.
    """
    sides = {name: above(interval, bound) for name, interval in metrics.items()}
    names = " and ".join(metrics)
    for first, second in combinations(metrics, 2):
        if {sides[first], sides[second]} == {"reproduced", "contradicted"}:
            statements = [f"{name} says {_side(metrics[name], bound)}" for name in (first, second)]
            remedy = "Train longer: metrics of models that have learned agree."
            return Premise(f"{statements[0]}, but {statements[1]}", False, remedy)
    return Premise(f"{names} do not contradict each other", True)


def _side(interval: Interval, bound: float) -> str:
    numbers = ", ".join(f"{value:+.3g}".replace("-", "−") for value in (interval.low, interval.high))
    return f"{'more' if interval.mean > bound else 'less'} than {bound:g} ([{numbers}])"


def settle(
    claim: str,
    outcome: Outcome,
    sentence: str,
    *,
    results: Sequence[TrainedResult],
    scale: str,
    numbers: Mapping[str, Any],
    premises: Sequence[Premise] = (),
    comparisons: Mapping[str, Comparison | None] | None = None,
) -> Verdict:
    """Return the verdict, undecided where a premise fails or most runs did not finish.

    Its sentence then begins with the premise that failed. results: what the verdict rests on. comparisons: what the
    outcome hangs on, from which an undecided verdict says what would decide it.
    """
    known = {name: each for name, each in (comparisons or {}).items() if each is not None}
    failed = [premise for premise in premises if not premise.holds]
    outcome = settled(outcome, results)
    needed = ""
    if failed:
        outcome, needed = "undecided", " ".join(dict.fromkeys(premise.remedy for premise in failed if premise.remedy))
        sentence = f"Nothing can be decided: {_joined([premise.sentence for premise in failed])}. {sentence}"
    elif outcome == "undecided":
        needed = would_decide(known, results) if comparisons is not None else ""
    return Verdict(claim, outcome, sentence, scale, seeds(results), plain(numbers), list(premises), needed, known)


def _joined(reasons: Sequence[str]) -> str:
    """Join reasons; what several in a row begin with, up to a colon, is said once."""
    joined, before = [], ""
    for reason in reasons:
        start, colon, rest = reason.partition(": ")
        joined.append(rest if colon and start == before else reason)
        before = start
    return "; ".join(joined)


def would_decide(comparisons: Mapping[str, Comparison], results: Sequence[TrainedResult]) -> str:
    """Say what would decide: how many seeds, and the core-hours that those to come take.

    Of several comparisons whose interval holds a bound it is the one that needs most. Where a mean is less than its
    standard error away from the bound, nobody knows on which side it will end up: then it is the seeds that make the
    interval narrower than the margin.
    """
    number = len(seeds(results))
    hours = sum(result.core_seconds for result in results) / 3600 / max(number, 1)
    if not comparisons:
        return f"A second seed of every setting ({_hours(hours)}) would give an interval." if number == 1 else ""
    plans = {name: _seeds_to_decide(each) for name, each in comparisons.items() if _open(each)}
    if not plans:
        return ""
    name = max(plans, key=lambda name: plans[name] or math.inf)
    each, wanted = comparisons[name], plans[name]
    count = f"{wanted or math.inf:,} {each.over}"
    if wanted is None:
        count = f"more than 1,000 {each.over}"
    elif each.over == "seeds":
        count += f", {wanted - each.seeds} more ({_hours(hours * (wanted - each.seeds))})"
    if _clear(each):
        bound = amount(_nearest(each), each.unit, signed=True)
        mean = amount(each.mean, each.unit, signed=True)
        return f"If {name} stays at {mean}, about {count}, would put its interval clear of {bound} four times in five."
    now, margin = amount(each.half_width(each.seeds), each.unit), amount(each.margin, each.unit)
    if wanted is not None and wanted <= each.seeds:
        return f"{each.seeds} {each.over} give {name} to within ±{now}, already less than {margin}: too close to call."
    return (
        f"{each.seeds} {each.over} give {name} to within ±{now}, and its mean lies within that noise: about {count}, "
        f"would give it to within ±{margin}."
    )


def _open(each: Comparison) -> bool:
    return abs(each.mean - _nearest(each)) <= each.half_width(each.seeds)


def _nearest(each: Comparison) -> float:
    return min(each.bounds, key=lambda bound: abs(each.mean - bound))


def _clear(each: Comparison) -> bool:
    """Return True if the mean is more than a standard error away from every bound."""
    return abs(each.mean - _nearest(each)) > each.deviation / math.sqrt(each.seeds)


def _seeds_to_decide(each: Comparison) -> int | None:
    if not _clear(each):
        return each.seeds_for(each.margin)
    wanted = each.seeds_for(abs(each.mean - _nearest(each)), surely=True)
    return wanted if wanted is None else max(wanted, each.seeds + 1)


def _hours(hours: float) -> str:
    return f"{hours:.1f} core-hours" if hours >= 0.95 else f"{60 * hours:.0f} core-minutes"
