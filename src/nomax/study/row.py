"""The result of one run, flat: a line of runs.csv, an object of runs.json, and outcome.json in the run's folder."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from nomax.models.fields import check_fields

if TYPE_CHECKING:
    from nomax.study.run import Run

Status = Literal["done", "diverged", "failed"]
PRIVATE = ("seconds", "core_seconds", "error")  # what differs where the same run is done twice
LARGEST = 2**20  # bytes of outcome.json, which has about a thousand
MOST = 10**30  # beyond the FLOPs of any run


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came out of a run. Where it diverged or failed there is no score: whoever reads it says what that means.

    alpha is φ's exponent of L; that of softmax, which has none, is 0.
    """

    key: str
    status: Status
    phi: str
    activation: str
    alpha: float
    variant: str
    """The model but for φ, in a word."""
    tokens: int
    """The length of sequences."""
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
    loss: float | None = None
    """On the test split."""
    seconds: float = 0.0
    """By the clock: training and all measurements."""
    core_seconds: float = 0.0
    """CPU time of the same."""
    diverged_at: int | None = None
    """The step whose loss or gradient was not finite."""
    error: str | None = None

    @property
    def label(self) -> str:
        """The run in a few words."""
        return f"{self.phi}, {self.variant}, seed {self.seed}"

    @property
    def said(self) -> str:
        """What came out, in a few words; of no use where the run diverged or failed."""
        return f"a test loss of {self.loss}"

    @property
    def result(self) -> dict[str, object]:
        """What two processes that did the same run must agree on: all but the times and the words of an error."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in PRIVATE}

    @classmethod
    def of(cls, run: "Run", status: Status, **results: Any) -> "Row":
        """The row of a run, given what came out of it."""
        return run.row(status=status, **run.facts, **results)

    def to_json(self) -> str:
        """The row as outcome.json holds it."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> "Row":
        """Read outcome.json; a ValueError says what is wrong with it."""
        if len(text) > LARGEST:
            raise ValueError(f"this is not the outcome of a run: it has more than {LARGEST:,} bytes.")
        try:
            plain = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:  # no JSON, or nested too deeply
            raise ValueError(f"this is not the outcome of a run: {error}.") from None
        if not isinstance(plain, dict):
            raise ValueError(f"this is not the outcome of a run: it is a {type(plain).__name__} instead of an object.")
        kind = TextRow if "task" in plain else ImageRow
        try:
            row: Row = kind(**{name: value for name, value in plain.items() if name in _columns(kind)})
        except TypeError as error:  # names what is missing
            raise ValueError(f"this is not the outcome of a run: {error}.") from None
        row.check()
        return row

    def check(self) -> None:
        """Raise a ValueError if a value is none that a run can have."""
        check_fields(self)
        for column in dataclasses.fields(self):
            value = getattr(self, column.name)
            if column.type in (int, int | None) and value is not None and not 0 <= value < MOST:
                raise ValueError(f"{column.name}={value} must be at least 0 and below {MOST:g}.")
        if self.status == "done" and self.loss is None:
            raise ValueError("loss=None cannot be: the run is done.")
        self.to_json().encode()  # fails, with a ValueError, for half a character


@dataclass(frozen=True, kw_only=True)
class ImageRow(Row):
    """What came out of a run of images."""

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

    @property
    def label(self) -> str:
        """The run in a few words; qk-norm is what the paper's runs have, so its absence is what is said."""
        special = [*([] if self.qk_norm else ["no qk-norm"]), *([f"{self.gate} gate"] if self.gate else [])]
        return ", ".join([self.phi, self.variant, *special, f"seed {self.seed}"])

    @property
    def said(self) -> str:
        """What came out, in a few words."""
        return "no accuracy" if self.accuracy is None else f"{self.accuracy:.2%} of the test images right"


@dataclass(frozen=True, kw_only=True)
class TextRow(Row):
    """What came out of a run of text. The loss is in nats per token, without smoothing and penalties."""

    task: Literal["translate", "language"]
    attention: str
    """The kind of attention in a few words: "softmax", "relu/√L with both losses"."""
    memory: str
    """The kind of feed-forward layer: "relu", "softmax", "softmax + LN"."""
    slots: int
    """Of each feed-forward layer."""
    documents: bool
    """Whether sequences are documents of `tokens` tokens, or single segments of at most so many."""
    vocabulary: int
    """Pieces, so log(vocabulary) is the loss of a uniform guess."""
    gamma: float = 1.0
    """Where a learned γ starts."""
    penalty: float = 0.0
    """The weight of ReLUFormer's losses: the larger of the two."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What else was measured after the training, by name: bleu, chrf, zeros, …"""

    @property
    def label(self) -> str:
        """The run in a few words: "softmax, relu × 512 slots, 128 tokens, seed 0"."""
        length = f"documents of {self.tokens:,} tokens" if self.documents else f"{self.tokens:,} tokens"
        return f"{self.attention}, {self.memory} × {self.slots:,} slots, {length}, seed {self.seed}"

    @property
    def said(self) -> str:
        """What came out, in a few words."""
        bleu = f" and a BLEU of {self.measured['bleu']:.1f}" if "bleu" in self.measured else ""
        return "no loss" if self.loss is None else f"a test loss of {self.loss:.3f} nats{bleu}"


AnyRow = TypeVar("AnyRow", bound=Row)


def where(rows: Iterable[AnyRow], **fields: Any) -> list[AnyRow]:
    """The rows with these values: where(rows, activation="relu", alpha=1, patch=4)."""
    unknown = fields.keys() - _columns(ImageRow) - _columns(TextRow)
    if unknown:
        raise TypeError(f"a row has no field {', '.join(sorted(unknown))}.")
    return [row for row in rows if all(_same(getattr(row, name, None), value) for name, value in fields.items())]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number that a result can have")


def _columns(kind: type[Row]) -> set[str]:
    return {name.name for name in dataclasses.fields(kind)}


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, float) and isinstance(wanted, int | float):
        return math.isclose(found, wanted)  # an α from a grid may have gone through text
    return bool(found == wanted)
