"""The result of one run, flat: a line of runs.csv, an object of runs.json, and outcome.json in the run's folder."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nomax.study.run import Run, label

Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True)
class Row:
    """What came out of a run. Where it diverged or failed there is no accuracy: whoever reads it says what that means.

    alpha is φ's exponent of L; that of softmax, which has none, is 0.
    """

    key: str
    status: Status
    phi: str
    activation: str
    alpha: float
    variant: str
    size: str
    patch: int
    tokens: int
    qk_norm: bool
    gate: str | None
    seed: int
    data: str
    classes: int
    steps: int
    batch_size: int
    lr: float
    macs: int
    """Multiply-adds of the encoder per image."""
    train_flops: int
    """6 · macs · batch_size · steps."""
    accuracy: float | None = None
    loss: float | None = None
    subset_accuracy: float | None = None
    ten_shot: float | None = None
    """The mean over the probes' data sets; None without probes."""
    probes: Mapping[str, float] = field(default_factory=dict)
    """Ten-shot accuracy by data set, the mean over three choices of the shots."""
    seconds: float = 0.0
    """By the clock: training and all measurements."""
    core_seconds: float = 0.0
    """CPU time of the same."""
    diverged_at: int | None = None
    """The step whose loss or gradient was not finite."""
    error: str | None = None

    @property
    def label(self) -> str:
        """The run in a few words: "relu/L, pico/4, seed 0"."""
        return label(self.phi, self.variant, self.qk_norm, self.gate, self.seed)

    @staticmethod
    def of(run: Run, status: Status, **results: Any) -> "Row":
        """The row of a run, given what came out of it."""
        return Row(status=status, **run.facts, **results)

    def to_json(self) -> str:
        """The row as outcome.json holds it."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> "Row":
        """Read outcome.json; a ValueError says what is wrong with it."""
        try:
            plain = json.loads(text)
            known = {name.name for name in dataclasses.fields(Row)}
            row = Row(**{name: value for name, value in plain.items() if name in known})
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is not the outcome of a run: {error}") from None
        if row.status not in get_args(Status):
            raise ValueError(f"status={row.status!r} must be one of {', '.join(get_args(Status))}.")
        return row


def where(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """The rows with these values: where(rows, activation="relu", alpha=1, patch=4)."""
    unknown = fields.keys() - {name.name for name in dataclasses.fields(Row)}
    if unknown:
        raise TypeError(f"a row has no field {', '.join(sorted(unknown))}.")
    return [row for row in rows if all(_same(getattr(row, name), value) for name, value in fields.items())]


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, float) and isinstance(wanted, int | float):
        return math.isclose(found, wanted)  # an α from a grid may have gone through text
    return bool(found == wanted)
