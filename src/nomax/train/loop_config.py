"""What the training loop is told, whatever it trains, and how that is written to config.json and read again."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

FORBID: Mapping[str, Any] = {"extra": "forbid"}  # pydantic would drop an unknown field, a misspelt one, in silence


WARMUP = 5  # by itself a warm-up takes at most one in so many steps; no recipe's own takes more


@dataclass(frozen=True)
class LoopConfig:
    """What the training loop is told, whatever it trains."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = FORBID

    # How the work is done. A run may be continued with other values: the result is the same, but for rounding.
    MACHINE: ClassVar[frozenset[str]] = frozenset(
        {"accumulate", "compile", "distribute", "device", "threads", "workers", "checkpoint_every", "keep"}
    )
    EVALUATED: ClassVar[str] = "test"  # the split that is looked at during the training, and at its end

    steps: int = 0
    batch_size: int = 4096
    lr: float = 1e-3
    warmup: int = 10_000
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    ema: float = 0.0
    seed: int = 0
    log_every: int = 1
    evaluate_every: int = 0  # 0: only at the end
    checkpoint_every: int = 1000
    keep: int = 3
    accumulate: int = 1
    compile: bool = False
    distribute: Literal["ddp", "fsdp"] = "ddp"
    device: str = "auto"
    threads: int = 0  # 0: as many as torch would take
    schedule: Literal["cosine", "inverse-sqrt"] = "cosine"  # of the learning rate, after its warm-up

    def check(self) -> None:
        """Raise a ValueError that names the field, unless these values make sense together."""
        least = {"steps": 1, "batch_size": 1, "accumulate": 1, "keep": 1, "log_every": 1, "checkpoint_every": 1}
        least |= dict.fromkeys(("lr", "warmup", "weight_decay", "clip", "evaluate_every", "threads", "ema"), 0)
        for name, bound in least.items():
            if not bound <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of at least {bound}.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be from 0 to 2^63 - 1.")
        for name in ("ema", "beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be below 1.")
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup={self.warmup} must be less than steps={self.steps}: pass --warmup or train longer (--steps)."
            )
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate={self.accumulate} must not exceed batch_size={self.batch_size}.")


Config = TypeVar("Config", bound=LoopConfig)


def check_amount(given: Mapping[str, Any]) -> None:
    """Raise a ValueError unless options say once at most, and in a number above 0, how long to train."""
    if "steps" in given and "epochs" in given:
        raise ValueError("--steps and --epochs say the same thing: give one of them.")
    if "epochs" in given and not 0 < given["epochs"] < math.inf:
        raise ValueError(f"--epochs {given['epochs']:g} must be a number above 0.")


def steps_of(epochs: float, steps_per_epoch: float) -> int:
    """The number of steps of so many epochs, rounded as big_vision rounds it."""
    return max(1, round(epochs * steps_per_epoch))


def warmed_up(config: Config, given: Mapping[str, Any]) -> Config:
    """The configuration with the warm-up of its recipe, or a shorter one for few steps; a given one stays."""
    if "warmup" in given:
        return config
    return dataclasses.replace(config, warmup=min(config.warmup, config.steps // WARMUP))


def to_json(config: LoopConfig) -> str:
    """The configuration as config.json holds it."""
    return json.dumps(dataclasses.asdict(config), indent=1, ensure_ascii=False) + "\n"


def read(path: Path, kind: type[Config]) -> Config:
    """Read a config.json, strictly: an unknown or ill-typed field is a ValueError that names it."""
    from pydantic import TypeAdapter, ValidationError

    content = path.read_bytes()
    try:
        config = TypeAdapter(kind).validate_json(content)
        found = "" if "steps" in json.loads(content) else "steps: Field required"  # {} would be all defaults
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())
    if found:
        raise ValueError(
            f"{path} cannot be read as a {kind.__name__}: {found}. Restore it, or train in another folder."
        )
    return config


def differences(old: LoopConfig, new: LoopConfig) -> list[str]:
    """The fields, in words, that differ and would make another run of it."""
    before, after = _flat(dataclasses.asdict(old)), _flat(dataclasses.asdict(new))
    names = [name for name in [*before, *(after.keys() - before.keys())] if name.split(".")[0] not in old.MACHINE]
    missing = "nothing"
    return [
        f"{name}: {before.get(name, missing)!r} there, {after.get(name, missing)!r} now"
        for name in names
        if before.get(name, missing) != after.get(name, missing)
    ]


def digest(folder: Path, config: LoopConfig) -> str:
    """A hash of what makes this run the run it is, as its folder has it.

    The file counts, not the configuration made from it: a later version may know more fields, with defaults.
    """
    path = folder / "config.json"
    plain = json.loads(path.read_text() if path.exists() else to_json(config))
    chosen = {name: value for name, value in plain.items() if name not in config.MACHINE}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            # JSON knows no tuples; a file and a fresh configuration must compare equal.
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
