"""The result of one run, flat: a line of runs.csv, an object of runs.json, and outcome.json in the run's folder."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

from nomax._files import check_fields

Status = Literal["done", "diverged", "failed"]
PRIVATE = ("seconds", "core_seconds", "error")  # what differs where the same run is done twice
LARGEST = 2**20  # bytes of outcome.json, which has about a thousand
Numbers = Mapping[str, tuple[float, ...]]
MOST = 10**30  # beyond the FLOPs of any run


class Result:
    """The result of a run. Each kind is a dataclass with these fields and its own."""

    key: str
    status: Status
    variant: str
    """The model but for φ, in a word."""
    tokens: int
    """The length of sequences."""
    seconds: float
    """By the clock: training and all measurements."""
    core_seconds: float
    """CPU time of the same."""
    error: str | None

    @property
    def label(self) -> str:
        """The run in a few words."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """The result in a few words; of no use where the run diverged or failed."""
        raise NotImplementedError

    @property
    def comparable(self) -> dict[str, object]:
        """The columns on which two processes that did the same run must agree: all but the times and the error."""
        return {name: value for name, value in self.to_dict().items() if name not in PRIVATE}

    def to_dict(self) -> dict[str, Any]:
        """Return the columns by name."""
        return {name: getattr(self, name) for name in _columns(type(self))}

    def to_json(self) -> str:
        """Return the result as outcome.json holds it."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> "Result":
        """Read outcome.json; a ValueError says what is wrong with it."""
        if len(text) > LARGEST:
            raise ValueError(f"this is not the outcome of a run: it has more than {LARGEST:,} bytes.")
        try:
            plain = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:  # no JSON, or nested too deeply
            raise ValueError(f"this is not the outcome of a run: {error}.") from None
        if not isinstance(plain, dict):
            raise ValueError(f"this is not the outcome of a run: it is a {type(plain).__name__} instead of an object.")
        return Result.from_dict(plain)

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Result":
        """Return an entry of runs.json, or the content of outcome.json; a ValueError says what is wrong with it."""
        kind: Any = MeasurementResult if "measurement" in plain else TextResult if "task" in plain else ImageResult
        try:
            result: Result = kind(**{name: value for name, value in plain.items() if name in _columns(kind)})
        except TypeError as error:  # names what is missing
            raise ValueError(f"this is not the outcome of a run: {error}.") from None
        result.check()
        return result

    def check(self) -> None:
        """Raise a ValueError for a value that no run can have."""
        check_fields(self)
        for column in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, column.name)
            if column.type in (int, int | None) and value is not None and not 0 <= value < MOST:
                raise ValueError(f"{column.name}={value} must be at least 0 and below {MOST:g}.")
        self.to_json().encode()  # fails, with a ValueError, for half a character


@dataclass(frozen=True, kw_only=True)
class TrainedResult(Result):
    """The result of a training.

    A run that diverged or failed has no score; the reader decides what that counts for.
    alpha is φ's exponent of L; that of softmax, which has none, is 0.
    """

    key: str
    status: Status
    phi: str
    activation: str
    alpha: float
    variant: str
    tokens: int
    seed: int
    data: str
    steps: int
    batch_size: int
    """Images, or tokens, of a step."""
    lr: float
    macs: int
    """Multiply-adds of the model for an image, or a token."""
    train_flops: int
    """6 · macs · batch_size · steps."""
    learned_shift: str | None = None
    """Where attention learns a shift of its scores: "layer" or "head"."""
    attention_l1: float = 0.0
    """The last weight of the L1 penalty of attention weights."""
    loss: float | None = None
    """On the test split; of a trial, on the validation split."""
    seconds: float = 0.0
    core_seconds: float = 0.0
    diverged_at: int | None = None
    """The step whose loss or gradient was not finite."""
    error: str | None = None

    @property
    def trial(self) -> bool:
        """True if it was judged on a validation split: it may choose settings, and never decides a claim."""
        return False

    @property
    def towards_zeros(self) -> list[str]:
        """What makes its weights zero beside φ, in words."""
        shift = [f"shift learned per {self.learned_shift}"] * (self.learned_shift is not None)
        return shift + [f"L1 to {self.attention_l1:g}"] * (self.attention_l1 > 0)

    def check(self) -> None:
        super().check()
        if self.status == "done" and self.loss is None:
            raise ValueError("loss=None cannot be: the run is done.")


@dataclass(frozen=True, kw_only=True)
class ImageResult(TrainedResult):
    """The result of a run of images."""

    size: str
    patch: int
    qk_norm: bool
    gate: str | None
    classes: int
    accuracy: float | None = None
    subset_accuracy: float | None = None
    ten_shot: float | None = None
    """The mean over the probes' data sets; None without probes."""
    probes: Mapping[str, float] = field(default_factory=dict)
    """Ten-shot accuracy by data set, the mean over three choices of the shots."""
    held_out: float = 0.0
    """Share of the training images that it is judged on instead of the test split."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """All else that was measured after the training, by name: zeros, …"""

    @property
    def trial(self) -> bool:
        return self.held_out > 0

    @property
    def label(self) -> str:
        """The run in a few words. The paper's runs have qk-norm, so only its absence is named."""
        special = [*([] if self.qk_norm else ["no qk-norm"]), *([f"{self.gate} gate"] if self.gate else [])]
        special += self.towards_zeros + [f"trial at {self.lr:g}"] * self.trial
        return ", ".join([self.phi, self.variant, *special, f"seed {self.seed}"])

    @property
    def summary(self) -> str:
        images = "validation" if self.trial else "test"
        return "no accuracy" if self.accuracy is None else f"{self.accuracy:.2%} of the {images} images right"


@dataclass(frozen=True, kw_only=True)
class TextResult(TrainedResult):
    """The result of a run of text. The loss is in nats per token, without smoothing and penalties."""

    task: Literal["translate", "language"]
    attention: str
    """The kind of attention in a few words: "softmax", "relu/√L with both losses"."""
    memory: str
    """The kind of feed-forward layer: "relu", "softmax", "softmax + LN"."""
    slots: int
    """Of each feed-forward layer."""
    documents: bool
    """True if sequences are documents of `tokens` tokens; else they are single segments of at most so many."""
    vocabulary: int
    """Pieces, so log(vocabulary) is the loss of a uniform guess."""
    gamma: float = 1.0
    """The start of a learned γ."""
    penalty: float = 0.0
    """The weight of ReLUFormer's losses: the larger of the two."""
    warmup: int = 0
    """Steps; 0 in results of an earlier nomax, which did not keep it."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """All else that was measured after the training, by name: bleu, chrf, zeros, …"""
    split: str = "test"
    """The split that it is judged on: "valid" for trials."""

    @property
    def trial(self) -> bool:
        return self.split != "test"

    @property
    def label(self) -> str:
        """The run in a few words: "softmax, relu × 512 slots, 128 tokens, seed 0"."""
        length = f"documents of {self.tokens:,} tokens" if self.documents else f"{self.tokens:,} tokens"
        trial = f"trial at {self.lr:g}, " if self.trial else ""
        attention = ", ".join([self.attention, *self.towards_zeros])
        return f"{attention}, {self.memory} × {self.slots:,} slots, {length}, {trial}seed {self.seed}"

    @property
    def summary(self) -> str:
        bleu = f" and a BLEU of {self.measured['bleu']:.1f}" if "bleu" in self.measured else ""
        return "no loss" if self.loss is None else f"a {self.split} loss of {self.loss:.3f} nats{bleu}"


@dataclass(frozen=True, kw_only=True)
class MeasurementResult(Result):
    """The result of a measurement of models that were not trained."""

    key: str
    status: Status
    measurement: str
    """The name of what was measured: "gate-cost"."""
    variant: str
    tokens: int
    settings: Mapping[str, str | int | float | bool | None]
    """All that makes it the measurement it is."""
    numbers: Numbers = field(default_factory=dict)
    """As they were measured, by name."""
    seconds: float = 0.0
    core_seconds: float = 0.0
    error: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.numbers, Mapping):  # JSON has lists
            listed = {name: tuple(v) if isinstance(v, list) else v for name, v in self.numbers.items()}
            object.__setattr__(self, "numbers", listed)

    @property
    def label(self) -> str:
        return f"{self.measurement} of {self.variant}, {self.tokens:,} tokens"

    @property
    def summary(self) -> str:
        return f"{sum(map(len, self.numbers.values())):,} numbers"


AnyResult = TypeVar("AnyResult", bound=TrainedResult)


def trained(results: Iterable[Result]) -> list[Any]:
    """Return the results of trainings: what figures and verdicts of models are made of."""
    return [result for result in results if isinstance(result, TrainedResult)]


def finals(results: Iterable[Result]) -> list[Any]:
    """Return the results of trainings that were judged on the test split: what decides claims."""
    return [result for result in trained(results) if not result.trial]


def trials(results: Iterable[Result]) -> list[Any]:
    """Return the results of trainings that were judged on a validation split: what chooses settings."""
    return [result for result in trained(results) if result.trial]


def measured(results: Iterable[Result], measurement: str) -> list[MeasurementResult]:
    """Return the finished measurements of this name."""
    return [
        result
        for result in results
        if isinstance(result, MeasurementResult) and (result.measurement, result.status) == (measurement, "done")
    ]


def where(results: Iterable[AnyResult], **columns: Any) -> list[AnyResult]:
    """Return the results with these values: where(results, activation="relu", alpha=1, patch=4)."""
    unknown = columns.keys() - {*_columns(ImageResult), *_columns(TextResult)}
    if unknown:
        raise TypeError(f"a result has no field {', '.join(sorted(unknown))}.")
    return [
        result
        for result in results
        if all(_same(getattr(result, name, None), value) for name, value in columns.items())
    ]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number that a result can have")


def _columns(kind: Any) -> list[str]:
    return [column.name for column in dataclasses.fields(kind)]


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, float) and isinstance(wanted, int | float):
        return math.isclose(value, wanted)  # an α from a grid may have gone through text
    return bool(value == wanted)
