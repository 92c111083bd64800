"""φ, the map from attention scores to attention weights: its notation and the table of its activations.

weight_ij = gain · n_i^(-alpha) · h(score_ij + shift - threshold·√(2 log n_i))

n_i = L, the number of keys that `length` counts for query i
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Activation:
    """A pointwise h, its derivative, and whether it is never negative (only then do weights have an entropy)."""

    name: str
    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    nonnegative: bool


def _gelu_derivative(x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return torch.special.ndtr(x) + x * density


def _sigmoid_derivative(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _silu_derivative(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


# The kernels know an activation by its place in this table, so new ones go to the end.
ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("relu", torch.relu, lambda x: (x > 0).to(x.dtype), nonnegative=True),
        Activation("relu2", lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x), nonnegative=True),
        Activation("gelu", F.gelu, _gelu_derivative, nonnegative=False),
        # F.softplus turns linear at 20, an error of 2e-9 that float64 would show.
        Activation("softplus", lambda x: -F.logsigmoid(-x), torch.sigmoid, nonnegative=True),
        Activation("identity", lambda x: x, torch.ones_like, nonnegative=False),
        Activation("relu6", F.relu6, lambda x: ((x > 0) & (x < 6)).to(x.dtype), nonnegative=True),
        Activation("sigmoid", torch.sigmoid, _sigmoid_derivative, nonnegative=True),
        Activation("silu", F.silu, _silu_derivative, nonnegative=False),
        Activation("cube", lambda x: x * x * x, lambda x: 3 * x * x, nonnegative=False),
    )
}

SOFTMAX = "softmax"

# Not pointwise, so not in the table: maps of a whole row of scores, for comparison.
ROW_MAPS = (SOFTMAX, "sparsemax", "entmax15")

MINUS_LOG_L: Literal["-log L"] = "-log L"
ROOT = "sqrt(2 log L)"

NOTATION = "[gain*]activation[(x+shift), (x-log L) or (x-threshold*sqrt(2 log L))][/L[^alpha]][, L=keys or L=<integer>]"


@dataclass(frozen=True, slots=True)
class Phi:
    """The map from scores to weights. `Phi.parse("relu/L")` reads the notation, and `str(phi)` writes it.

    length is what L counts: "visible", the keys that a query may see (independent of padding, and the same in training
    and in cached decoding); "keys", all key positions of the tensor; or a fixed integer.

    threshold lowers the scores by that many √(2 log L), besides the shift. √(2 log L) is about the largest of L scores
    that are normally distributed with a variance of 1, so with 1 few weights of random scores are left.
    """

    activation: str
    alpha: float = 0.0
    gain: float = 1.0
    shift: float | Literal["-log L"] = 0.0
    length: int | Literal["visible", "keys"] = "visible"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        names = (*ACTIVATIONS, *ROW_MAPS)
        if self.activation not in names:
            nearest = get_close_matches(str(self.activation).lower(), names, n=1, cutoff=0.6)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ValueError(f"activation={self.activation!r} is unknown; {hint}Choose one of {', '.join(names)}.")
        # Adding 0.0 turns -0.0 into 0.0, which prints and parses as the same φ.
        object.__setattr__(self, "alpha", _finite("alpha", self.alpha) + 0.0)
        object.__setattr__(self, "gain", _finite("gain", self.gain) + 0.0)
        if self.shift != MINUS_LOG_L:
            allowed = f"a finite number or {MINUS_LOG_L!r}"
            object.__setattr__(self, "shift", _finite("shift", self.shift, allowed) + 0.0)
        object.__setattr__(self, "threshold", _finite("threshold", self.threshold) + 0.0)
        if self.length not in ("visible", "keys") and not (type(self.length) is int and self.length >= 1):
            raise ValueError(f'length={self.length!r} must be "visible", "keys" or an integer of at least 1.')
        given = (self.alpha, self.gain, self.shift, self.length, self.threshold)
        if self.activation in ROW_MAPS and given != (0, 1, 0, "visible", 0):
            raise ValueError(
                f"{self.activation} normalises each row itself, and takes no alpha, gain, shift, threshold or length: "
                f'got {self!r}. Write phi="{self.activation}".'
            )

    @property
    def depends_on_length(self) -> bool:
        """Return whether weights change with L."""
        return self.alpha != 0 or self.shifts_by_length

    @property
    def shifts_by_length(self) -> bool:
        """Return whether the number that is added to the scores changes with L."""
        return self.shift == MINUS_LOG_L or self.threshold != 0

    @staticmethod
    def parse(phi: "str | Phi") -> "Phi":
        """Read a φ from its notation, e.g. "relu/L" or "sigmoid(x-log L)"; a Phi is returned as it is."""
        if isinstance(phi, str):
            # torch.compile warns of a cache and ignores it, and parses each φ only once.
            return _parse(phi) if torch.compiler.is_compiling() else _parse_cached(phi)
        if isinstance(phi, Phi):
            return phi
        raise TypeError(f'phi={phi!r} must be a string such as "relu/L", or a nomax.Phi; got a {type(phi).__name__}.')

    def __str__(self) -> str:
        gain = "" if self.gain == 1 else f"{_write(self.gain)}*"
        shift = MINUS_LOG_L if self.shift == MINUS_LOG_L else "" if self.shift == 0 else _write_signed(self.shift)
        if self.threshold != 0:
            sign, size = _write_signed(-self.threshold)[0], abs(self.threshold)
            shift += f"{sign}{ROOT}" if size == 1 else f"{sign}{_write(size)}*{ROOT}"
        shift = f"(x{shift})" if shift else ""
        alpha = "" if self.alpha == 0 else "/L" if self.alpha == 1 else f"/L^{_write(self.alpha)}"
        length = "" if self.length == "visible" else f", L={self.length}"
        return f"{gain}{self.activation}{shift}{alpha}{length}"


def _finite(name: str, value: object, allowed: str = "a finite number") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be {allowed}.")
    return float(value)


def _write(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _write_signed(number: float) -> str:
    return f"{'-' if number < 0 else '+'}{_write(abs(number))}"


_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"

_PHI = re.compile(
    rf"(?:(?P<gain>[+-]?{_NUMBER})\*)?"
    r"(?P<activation>[a-z]\w*)"
    rf"(?:\(x(?P<shift>[+-]{_NUMBER}|-logL)?(?:(?P<rise>[+-])(?:(?P<times>{_NUMBER})\*)?sqrt\(2logL\))?\))?"
    rf"(?P<over>/L(?:\^(?P<alpha>[+-]?{_NUMBER}))?)?"
    r"(?:,L=(?P<length>visible|keys|\d+))?"
)


def _parse(text: str) -> Phi:
    match = _PHI.fullmatch("".join(text.split()))
    if match is None or match["activation"] not in (*ACTIVATIONS, *ROW_MAPS):
        nearest = _nearest_spelling(text)
        hint = f"; did you mean {nearest!r}?" if nearest else "."
        raise ValueError(
            f"phi={text!r} cannot be read{hint} A φ is written {NOTATION}, "
            f"and its activation is one of {', '.join(ACTIVATIONS)}; or it is {' or '.join(ROW_MAPS)} alone."
        )
    shift, length = match["shift"], match["length"] or "visible"
    threshold = float(match["times"] or 1) * (-1 if match["rise"] == "+" else 1) if match["rise"] else 0.0
    return Phi(
        activation=match["activation"],
        alpha=float(match["alpha"] or 1) if match["over"] else 0.0,
        gain=float(match["gain"] or 1),
        shift=MINUS_LOG_L if shift == "-logL" else float(shift or 0),
        length=int(length) if length.isdigit() else length,  # type: ignore[arg-type]
        threshold=threshold,
    )


_parse_cached = lru_cache(maxsize=1024)(_parse)


def _nearest_spelling(text: str) -> str | None:
    written = "".join(text.split()).lower().replace("√", "sqrt")
    spellings = {spelling.replace(" ", "").lower(): spelling for spelling in _spellings_around(written)}
    nearest = get_close_matches(written, spellings, n=1, cutoff=0.6)
    return spellings[nearest[0]] if nearest else None


def _spellings_around(written: str) -> Iterator[str]:
    """Yield every valid spelling that uses the numbers in an invalid one."""
    # The digits of relu2 and relu6 belong to their names, and a 2 to the root; three numbers are as many as a φ needs.
    numbers = re.findall(rf"(?<![\w.]){_NUMBER}", re.sub(r"sqrt\(?2", "", written))[:3]
    gains = ["", *(f"{number}*" for number in numbers)]
    shifts = ["", "(x-log L)", *(f"(x{sign}{number})" for number in numbers for sign in "+-")]
    if "sq" in written:
        shifts += [f"(x{sign}{times}{ROOT})" for times in ("", *(f"{number}*" for number in numbers)) for sign in "-+"]
    alphas = ["", "/L", *(f"/L^{number}" for number in numbers)]
    lengths = ["", ", L=keys", *(f", L={number}" for number in numbers if number.isdigit() and int(number) >= 1)]
    yield from ROW_MAPS
    for pieces in product(gains, ACTIVATIONS, shifts, alphas, lengths):
        yield "".join(pieces)
