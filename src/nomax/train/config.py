"""Settings of the training loop, for any task; config.json in the run folder holds them."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from nomax.phi import ACTIVATIONS, ROW_MAPS, Phi

FORBID: Mapping[str, Any] = {"extra": "forbid"}  # pydantic would drop an unknown field, a misspelt one, in silence
WARMUP = 5  # by itself a warm-up takes at most one in so many steps; no recipe's own takes more


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the training loop, for any task. The texts below the fields are the help of the commands."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = FORBID

    # How the work is done. A run may be continued with other values: the result is the same, but for rounding.
    MACHINE: ClassVar[frozenset[str]] = frozenset(
        {
            *("accumulate", "activation_checkpointing", "compile", "distribute", "device", "threads", "workers"),
            *("checkpoint_every", "keep", "diagnose", "read_retries", "read_timeout"),
        }
    )
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *("lr", "warmup", "weight_decay", "beta1", "beta2", "eps"),
        *("clip", "evaluate_every", "threads", "ema"),
    )
    STAGES: ClassVar[tuple[str, ...]] = ("attention_l1",)  # numbers of at least 0
    EVALUATED: ClassVar[str] = "test"  # the split that is evaluated during training and at its end

    steps: int = 0
    """Number of steps, instead of epochs."""
    epochs: float = 0.0
    """Number of passes over the data, instead of steps."""
    batch_size: int = 4096
    """Units per step, over all ranks and accumulated parts: images, or tokens per side, including padding."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup: int = 10_000
    """Steps of linear warm-up; by default, at most a fifth of the steps."""
    weight_decay: float = 0.1
    """AdamW's weight decay, applied to kernels (matrices) only."""
    beta1: float = 0.9
    """Adam's decay rate for the mean of the gradients."""
    beta2: float = 0.999
    """Adam's decay rate for the mean of the squared gradients."""
    eps: float = 1e-8
    """Adam's ε."""
    clip: float = 1.0
    """Clip the gradient to this norm; 0 never clips."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast, with float32 weights."""
    ema: float = 0.0
    """Keep an exponential moving average of the weights with this decay, and evaluate and save it; 0 turns it off."""
    seed: int = 0
    """Seed of the initial weights, the order of the examples, augmentation and dropout."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""
    evaluate_every: int = 0
    """Steps between evaluations on the test split (for text, the validation split); 0 evaluates only at the end."""
    checkpoint_every: int = 1000
    """Steps between checkpoints. Can change on resume."""
    keep: int = 3
    """Number of checkpoints to keep. Can change on resume."""
    accumulate: int = 1
    """Compute each batch in this many parts, to save memory. Can change on resume."""
    activation_checkpointing: bool = False
    """Keep only the input of each block, and compute its activations again in the backward pass: much less memory,
    a third more computing, the same numbers. Can change on resume."""
    compile: bool = False
    """torch.compile each block: identical ones are compiled once. Can change on resume."""
    distribute: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun, every rank holds the whole model (ddp) or a shard of weights, gradients, optimiser and
    checkpoints (fsdp). Can change on resume."""
    device: str = "auto"
    """cpu, cuda, or auto to use a GPU if there is one. Can change on resume."""
    threads: int = 0
    """CPU threads; 0 lets torch choose. Can change on resume."""
    schedule: Literal["cosine", "inverse-sqrt"] = "cosine"
    """Decay of the learning rate after the warm-up: to 0 at the last step, or as 1/√step."""
    attention_l1: tuple[float, ...] = ()
    """Weights of an L1 penalty in the loss, the mean over rows of Σ|a_ij|, which makes more attention weights zero:
    the first is constant, each further one is reached along a sine, and these stages are equally long. Such as
    0.003 0.03; too much empties all rows. None: no penalty."""

    def check(self) -> None:
        """Raise a ValueError that names the field, unless these values make sense together."""
        least = {"steps": 1, "batch_size": 1, "accumulate": 1, "keep": 1, "log_every": 1, "checkpoint_every": 1}
        least |= dict.fromkeys(self.NOT_NEGATIVE, 0)
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
        for name in self.STAGES:
            if not all(0 <= weight < math.inf for weight in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be numbers of at least 0.")
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate={self.accumulate} must not exceed batch_size={self.batch_size}.")

    @property
    def presses_attention(self) -> bool:
        """Return whether the L1 penalty of attention weights is in the loss."""
        return any(self.attention_l1)

    def check_l1(self, phi: str) -> None:
        """Raise a ValueError if the L1 penalty of attention weights has no meaning for a model's φ."""
        parsed = Phi.parse(phi)
        normalises = parsed.activation in ROW_MAPS
        positive = not normalises and ACTIVATIONS[parsed.activation].nonnegative and parsed.gain >= 0
        if self.presses_attention and not positive:
            why = "rows that always sum to 1" if normalises else "weights below zero"
            raise ValueError(
                f"attention_l1={self.attention_l1}: phi={phi!r} has {why}, so a penalty on the sums of rows would not "
                "ask for zeros. Leave out --attention-l1, or use a φ such as relu/L."
            )


Config = TypeVar("Config", bound=LoopConfig)


def sine_stages(values: Sequence[float], step: int, steps: int) -> float:
    """Return ProSparse's λ at a step, counted from 0: the first value, then half a sine wave to each of the others.

    The stages are equally long, and the wave is flat at both of its ends.
    """
    stage, rest = divmod(step * len(values), steps)
    if stage == 0:
        return values[0]
    trough, peak = values[stage - 1], values[stage]
    return trough + (peak - trough) * (1 - math.cos(math.pi * rest / steps)) / 2


def settle(config: Config, steps_per_epoch: Callable[[], float], given: Collection[str] = ()) -> Config:
    """Return the config with its number of steps settled, and checked: a run can start with it.

    If steps are among the `given` names they win over epochs; otherwise epochs become steps. A warm-up that is not
    among them is cut to a fifth of the steps.
    """
    if "steps" in given:
        config = dataclasses.replace(config, epochs=0.0)
    elif config.epochs:
        config = dataclasses.replace(config, steps=count_steps(config.epochs, steps_per_epoch()))
    if "warmup" not in given:
        config = shorten_warmup(config)
    config.check()
    return config


def count_steps(epochs: float, steps_per_epoch: float) -> int:
    """Return the number of steps in some epochs, rounded as in big_vision."""
    return max(1, round(epochs * steps_per_epoch))


def shorten_warmup(config: Config) -> Config:
    """Return the config with its warm-up, shortened if there are few steps."""
    return dataclasses.replace(config, warmup=min(config.warmup, config.steps // WARMUP))


def to_json(config: LoopConfig) -> str:
    """Return the config as config.json holds it."""
    return json.dumps(dataclasses.asdict(config), indent=1, ensure_ascii=False) + "\n"


def read(path: Path, kind: type[Config]) -> Config:
    """Read a config.json, strictly: an unknown or ill-typed field is a ValueError that names it."""
    from pydantic import TypeAdapter, ValidationError

    content = path.read_bytes()
    try:
        config = TypeAdapter(kind).validate_json(content)
        trouble = "" if "steps" in json.loads(content) else "steps: Field required"  # {} would be all defaults
    except ValidationError as error:
        trouble = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())
    if trouble:
        raise ValueError(
            f"{path} cannot be read as a {kind.__name__}: {trouble}. Restore it, or train in another folder."
        )
    return config


def differences(old: LoopConfig, new: LoopConfig) -> list[str]:
    """List, in words, the fields that differ and would make it a different run."""
    before, after = _flat(dataclasses.asdict(old)), _flat(dataclasses.asdict(new))
    names = [name for name in [*before, *(after.keys() - before.keys())] if name.split(".")[0] not in old.MACHINE]
    missing = "nothing"
    return [
        f"{name}: {before.get(name, missing)!r} there, {after.get(name, missing)!r} now"
        for name in names
        if before.get(name, missing) != after.get(name, missing)
    ]


def digest(folder: Path, config: LoopConfig) -> str:
    """Return a hash of the run's identity, as config.json in its folder holds it.

    The file counts, not the config parsed from it: a later version may know more fields, with defaults.
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
            # JSON knows no tuples; a file and a fresh config must compare equal.
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
