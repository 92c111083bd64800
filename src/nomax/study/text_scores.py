"""What a run of text counts for in figures and verdicts: nats per token of the test split, and what was measured."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from nomax.study.row import TextRow
from nomax.study.scores import basis as basis_of
from nomax.study.scores import seeds, settled, values
from nomax.study.statistics import Interval, paired
from nomax.study.text_setup import TextSetup
from nomax.study.verdict import Outcome, Verdict, plain

Cell = TypeVar("Cell", bound=Hashable)

# 0.02 nats are 2 % of perplexity. The paper's differences, of about one BLEU, go with several times that, and no choice
# between two models would hang on less.
MARGIN = 0.02
UNIFORM = "a uniform guess over the vocabulary"
LOST_NOTE = f"A run that diverged counts as {UNIFORM} and is marked with a cross; one that failed is left out."


def loss(row: TextRow) -> float | None:
    """Nats per token of the test split; those of a uniform guess if the run diverged."""
    return math.log(row.vocabulary) if row.status == "diverged" else row.loss


def quality(row: TextRow) -> float | None:
    """Minus the loss: the larger, the better."""
    found = loss(row)
    return None if found is None else -found


def measurement(name: str) -> Callable[[TextRow], float | None]:
    """What was measured under this name; None if the run did not get there."""
    return lambda row: row.measured.get(name)


def lead(
    first: Sequence[TextRow], second: Sequence[TextRow], cell: Callable[[TextRow], Cell]
) -> dict[Cell, list[float]]:
    """By how many nats the loss of the first is lower, at equal cell and seed."""
    return paired(values(first, cell, quality), values(second, cell, quality))


def collected(
    rows: Sequence[TextRow], cell: Callable[[TextRow], Cell], score: Callable[[TextRow], float | None]
) -> dict[Cell, list[float]]:
    """The values of each cell, over the seeds."""
    found: dict[Cell, list[float]] = {}
    for (place, _), value in values(rows, cell, score).items():
        found.setdefault(place, []).append(value)
    return found


def basis(rows: Sequence[TextRow], cells: dict[Cell, list[float]]) -> str:
    """What a number rests on."""
    return basis_of(rows, cells, UNIFORM)


def nats(interval: Interval) -> str:
    """A difference of losses: "+0.031 nats [−0.004, +0.066]"."""
    return f"{spread(interval, signed=True, unit=' nats')}"


def spread(interval: Interval, digits: int = 3, signed: bool = False, unit: str = "") -> str:
    """A number with its interval."""
    sign = "+" if signed else ""

    def said(value: float) -> str:
        return f"{value:{sign}.{digits}f}".replace("-", "−") if value == value else "unknown"

    if not interval.known:
        return f"{said(interval.mean)}{unit} (no interval: too few runs)"
    return f"{said(interval.mean)}{unit} [{said(interval.low)}, {said(interval.high)}]"


def turned(interval: Interval) -> Interval:
    """The interval of minus the number."""
    return Interval(-interval.mean, -interval.high, -interval.low)


def scale(rows: Sequence[TextRow], setup: TextSetup) -> str:
    """At which scale the runs speak: "128 wide, 2+2 layers, 512 slots, 600 steps of 1,024 tokens of bible-en-es"."""
    if not rows:
        return "no runs"
    models = "; ".join(dict.fromkeys(row.variant.rpartition(", ")[0] for row in rows))
    slots = ", ".join(f"{count:,}" for count in sorted({row.slots for row in rows}))
    lengths = ", ".join(f"{count:,}" for count in sorted({row.tokens for row in rows}))
    steps = ", ".join(
        f"{count:,} steps of {batch:,} tokens" for count, batch in sorted({(r.steps, r.batch_size) for r in rows})
    )
    data = ", ".join(sorted({row.data for row in rows}))
    pieces = ", ".join(f"{count:,}" for count in sorted({row.vocabulary for row in rows}))
    return f"{models}, {slots} slots, at most {lengths} tokens, {steps} of {data} in {pieces} pieces"


def judged(
    claim: str, outcome: Outcome, sentence: str, rows: Sequence[TextRow], setup: TextSetup, numbers: Mapping[str, Any]
) -> Verdict:
    """A verdict, or that there is nothing to judge, where a number that it rests on is not known."""
    if any(number.mean != number.mean for number in numbers.values() if isinstance(number, Interval)):
        outcome, sentence, numbers = "undecided", "The runs that this compares are not all there: nothing to judge.", {}
    return Verdict(claim, settled(outcome, rows), sentence, scale(rows, setup), seeds(rows), plain(numbers))
