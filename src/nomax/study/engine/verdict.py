"""A verdict: a claim, what our runs say about it, in numbers, and at which scale they can say so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nomax.study.engine.result import ImageResult, Result, TrainedResult
from nomax.study.engine.statistics import Cell, Interval, lengths, repeated, seeds

if TYPE_CHECKING:
    from nomax.study.setup import Setup

Outcome = Literal["reproduced", "contradicted", "undecided"]

# One point of accuracy is our choice, since the paper has no numbers. A smaller difference would not change
# what anybody uses.
MARGIN = 0.01


@dataclass(frozen=True)
class Verdict:
    """A judged claim. `dataclasses.asdict` of it is an entry of verdicts.json."""

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


CHANCE_NOTE = "A run that diverged counts as chance and is marked with a cross; one that failed is left out."


def scale(rows: Sequence[ImageResult], setup: "Setup") -> str:
    """At which scale the runs speak: "pico, L = 16, 49, 196, 28-pixel fashion-mnist-small, 150 steps of 64 images"."""
    if not rows:
        return "no runs"
    sizes = ", ".join(dict.fromkeys(row.size for row in sorted(rows, key=lambda row: row.macs)))
    steps = ", ".join(f"{count:,}" for count in sorted({row.steps for row in rows}))
    batch = ", ".join(f"{count:,}" for count in sorted({row.batch_size for row in rows}))
    data = ", ".join(sorted({row.data for row in rows}))
    tokens = ", ".join(map(str, lengths(rows)))
    return f"{sizes}, L = {tokens}, {setup.image_size}-pixel {data}, {steps} steps of {batch} images"


def basis(rows: Sequence[TrainedResult], cells: Mapping[Cell, Sequence[float]], lost_counts: str = "chance") -> str:
    """Return what a number rests on: "6 settings, 18 pairs, seeds 0, 1, 2"."""
    count, pairs = len(repeated(cells)), sum(map(len, repeated(cells).values()))
    words = f"{count} setting{'s' * (count != 1)}, {pairs} pair{'s' * (pairs != 1)}"
    lost, failed = (sum(row.status == status for row in rows) for status in ("diverged", "failed"))
    ended = f", {lost} run{'s' * (lost != 1)} diverged and count{'s' * (lost == 1)} as {lost_counts}" if lost else ""
    if failed:
        ended += f", {failed} run{'s' * (failed != 1)} failed and {'are' if failed != 1 else 'is'} left out"
    listed = ", ".join(map(str, seeds(rows)))
    return f"{words}, seed{'s' * (len(seeds(rows)) != 1)} {listed or 'none'}{ended}"


def settled(outcome: Outcome, rows: Sequence[Result]) -> Outcome:
    """The outcome; but nothing is decided by runs most of which did not come to their end."""
    done = sum(row.status == "done" for row in rows)
    return outcome if 2 * done >= len(rows) else "undecided"


def percent(value: float) -> str:
    """An accuracy: "84.2 %"."""
    return f"{100 * value:.1f} %"


PAPER = "Wortsman et al. 2023"
TEXT_PAPER = "Shen et al. 2023"


@dataclass(frozen=True)
class Claim:
    """A sentence that a study can reproduce or contradict, and where it comes from."""

    id: str
    sentence: str
    source: str


CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        Claim(
            "W-match",
            "relu/L approaches or matches softmax in how accuracy scales with compute.",
            f"{PAPER}, abstract and Fig. 1",
        ),
        Claim("W-transfer", "The same holds for 10-shot transfer.", f"{PAPER}, Fig. 1 right"),
        Claim("W-alpha", "The best α is close to 1, for every h and every length.", f"{PAPER}, Fig. 2"),
        Claim("W-h", "No h clearly wins at α ≈ 1.", f"{PAPER}, Fig. 2"),
        Claim(
            "W-degrade",
            "Without length scaling accuracy degrades, more so for longer sequences.",
            f"{PAPER}, abstract and Fig. 2",
        ),
        Claim("W-identity", "Removing the nonlinearity costs accuracy.", f"{PAPER}, Sec. 3"),
        Claim("W-init", "At initialisation the mean weight is O(1/L) for α = 1.", f"{PAPER}, Sec. 3"),
        Claim("W-qknorm", "qk-layernorm has no large effect at these sizes.", f"{PAPER}, Fig. 3"),
        Claim("W-gate", "A gate does not remove the need for length scaling.", f"{PAPER}, Fig. 4"),
        Claim("W-gatecost", "The gate costs about 9 % more core-hours (9.3 % for S/8 with relu).", f"{PAPER}, Sec. 4"),
        Claim("S-softmax-ffn", "A softmax memory is worse than a ReLU feed-forward layer.", f"{TEXT_PAPER}, Sec. 3"),
        Claim("S-ln", "With LayerNorm on its output a softmax memory is as good as ReLU.", f"{TEXT_PAPER}, Sec. 3"),
        Claim(
            "S-slots",
            "With many slots ReLU is ahead of softmax, with or without LayerNorm.",
            f"{TEXT_PAPER}, Sec. 3",
        ),
        Claim(
            "S-central",
            "A softmax memory centralises: the largest 0.2 % of its weights hold most of their sum.",
            f"{TEXT_PAPER}, Sec. 3",
        ),
        Claim(
            "S-variance",
            "The output of a softmax memory has a small variance beside the residual's, that of ReLU has not.",
            f"{TEXT_PAPER}, Sec. 3",
        ),
        Claim("S-diverge", "ReLU put into attention directly does not converge.", f"{TEXT_PAPER}, Sec. 4"),
        Claim(
            "S-factor",
            "With the variance factor alone ReLU attention converges, but trails softmax.",
            f"{TEXT_PAPER}, Sec. 4",
        ),
        Claim(
            "S-losses",
            "With the two losses it matches or beats softmax, and without the normalisation loss it falls back.",
            f"{TEXT_PAPER}, Sec. 4",
        ),
        Claim(
            "S-speed",
            "ReLUFormer is as fast as softmax, and about 1.7 times as fast as sparsemax and 1.5-entmax.",
            f"{TEXT_PAPER}, Sec. 4",
        ),
        Claim(
            "S-long",
            "The advantage of ReLUFormer grows with the length of documents: on par to 256 tokens, ahead from 512.",
            f"{TEXT_PAPER}, Sec. 5",
        ),
        Claim(
            "S-distant",
            "ReLU attention keeps distant words, and spends less on commas and stop words.",
            f"{TEXT_PAPER}, Sec. 5",
        ),
        Claim(
            "Q-text",
            "The vision paper's L^-1 carries over to text: the best α is close to 1.",
            "a question of ours, which neither paper answers",
        ),
    )
}
