"""The kinds of runs: a training with the measurements that follow it, or a measurement alone.

The key of a run is a hash of the settings that identify it.
"""

import dataclasses
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal

import torch

from nomax.models import ViT, ViTConfig
from nomax.phi import Phi
from nomax.study.engine.result import ImageResult, MeasurementResult, Numbers, Result, TextResult
from nomax.train import TextConfig, VisionConfig
from nomax.train.config import to_json
from nomax.train.console import Stop, display_name

ATTENTIONS = {"softmax": "softmax", "sparsemax": "sparsemax", "entmax15": "1.5-entmax"}
# ReLUFormer's φ with a learned gain, by which of its losses, of normalisation and of entropy, are in the training.
RELUFORMERS = {
    (True, True): "ReLUFormer",
    (True, False): "without the entropy loss",
    (False, True): "without the normalisation loss",
    (False, False): "the factor alone",
}


class Experiment(ABC):
    """One run of a grid, with all its settings."""

    alone: ClassVar[bool] = False
    """True for a run that takes times: no other may go on beside it."""
    result_type: ClassVar[Callable[..., Result]]

    @property
    def steps(self) -> int:
        """Steps that a progress bar shows."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of its process; 0: as many as the machine offers."""
        return 1

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating point operations, from which its time is estimated."""

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits, the same on every machine."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the settings that identify this run, as plain JSON, without those of the machine.

        Defaults of a configuration are left out, so that new fields do not change the keys of earlier runs. (To change
        a default changes them.)
        """

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The columns of its result that are known before the run."""

    def result(self, status: str, **measured: Any) -> Any:
        """Return its result from its status and the measured columns."""
        return self.result_type(status=status, **self.facts, **measured)

    @property
    def label(self) -> str:
        """The run in a few words: "relu/L, pico/4, seed 0"."""
        return str(self.result("failed").label)


@dataclass(frozen=True)
class TrainedExperiment(Experiment):
    """A configuration of a training, and the measurements that follow it."""

    config: VisionConfig | TextConfig

    def identity(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, and the measurements."""
        plain, usual = (json.loads(to_json(config)) for config in (self.config, type(self.config)()))
        config = {name: value for name, value in _unusual(plain, usual).items() if name not in self.config.MACHINE}
        others = {name.name: getattr(self, name.name) for name in dataclasses.fields(self) if name.name != "config"}
        if others.get("split") == "test":  # as in all runs before there was another
            del others["split"]
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in others.items()}
        return {"config": config, **listed}

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def threads(self) -> int:
        return self.config.threads

    @property
    def flops(self) -> int:
        """Floating point operations of the training: two per multiply-add, and backward is twice forward."""
        return 6 * self.macs * self.config.batch_size * self.config.steps

    @property
    @abstractmethod
    def macs(self) -> int:
        """Multiply-adds of the model for an image or a token."""

    @property
    @abstractmethod
    def particulars(self) -> dict[str, Any]:
        """The columns that results of this kind have beyond the common ones."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        config = self.config
        phi = Phi.parse(config.model.phi)
        return {
            "key": self.key,
            "phi": config.model.phi,
            "activation": phi.activation,
            "alpha": phi.alpha,
            "seed": config.seed,
            "data": config.data,
            "steps": config.steps,
            "batch_size": config.batch_size,
            "lr": config.lr,
            "macs": self.macs,
            "train_flops": self.flops,
            "learned_shift": config.model.learned_shift,
            "attention_l1": max(config.attention_l1[-1:], default=0.0),
            **self.particulars,
        }


@dataclass(frozen=True)
class ImageExperiment(TrainedExperiment):
    """A configuration of a vision transformer, and the measurements that follow the training."""

    result_type = ImageResult

    config: VisionConfig
    probes: tuple[str, ...] = ()
    """Data sets of the ten-shot probe, as `nomax probe --on` takes them."""
    subset: str | None = None
    """Measure accuracy among some labels, too: imagenet1k, icons, or a file."""
    probe_images: int = 0
    """Test images of each probe's data set to look at, spread evenly; 0: all of them."""
    measures: tuple[str, ...] = ()
    """What else is measured, by its names in nomax.study.engine.measures.IMAGE_MEASURES."""

    def identity(self) -> dict[str, Any]:
        settings = super().identity()
        if not self.measures:  # as in all runs before there were any
            del settings["measures"]
        return settings

    @cached_property
    def macs(self) -> int:
        """Multiply-adds of the encoder per image."""
        return vit_macs(self.config.model)

    @property
    def particulars(self) -> dict[str, Any]:
        """The columns that results of images have beyond the common ones."""
        model = self.config.model
        return {
            "variant": model.variant,
            "size": model.variant.partition("/")[0],
            "patch": model.patch,
            "tokens": model.tokens,
            "qk_norm": model.qk_norm,
            "gate": model.gate,
            "classes": model.num_classes,
            "held_out": self.config.held_out,
        }


@dataclass(frozen=True)
class TextExperiment(TrainedExperiment):
    """A configuration of a ReLUFormer, and the measurements that follow the training. The test loss is always one."""

    result_type = TextResult

    config: TextConfig
    measures: tuple[str, ...] = ()
    """The others, by their names in nomax.study.engine.measures.TEXT_MEASURES."""
    test_pairs: int = 0
    """Pairs of the split that they look at, in whole documents from the first; 0: all of them."""
    split: Literal["test", "valid"] = "test"
    """The split that is measured: trials, which choose settings, look at the validation split."""

    @property
    def macs(self) -> int:
        """Multiply-adds for a token of each side, in sequences of the greatest length."""
        return self.config.model.macs

    @property
    def particulars(self) -> dict[str, Any]:
        """The columns that results of text have beyond the common ones."""
        model = self.config.model
        return {
            "variant": f"{model.dim} wide, {model.encoder_layers}+{model.decoder_layers} layers, {model.slots} slots",
            "tokens": model.max_length,
            "task": self.config.task,
            "attention": attention_name(self.config),
            "memory": f"{display_name(model.memory_phi)}{' + LN' if model.memory_norm else ''}",
            "slots": model.slots,
            "documents": self.config.documents,
            "vocabulary": model.vocabulary,
            "split": self.split,
            "gamma": model.gamma,
            "penalty": max(self.config.normalisation_penalty, self.config.entropy_penalty),
            "warmup": self.config.warmup,
        }


@dataclass(frozen=True)
class Measurement(Experiment):
    """Something measured of models that are not trained. Its fields are its settings, and make its key.

    A study defines a subclass in a module that can be imported, because runs are done in other processes.
    """

    result_type = MeasurementResult
    kind: ClassVar[str]
    """The name of what is measured: "gate-cost"."""

    @abstractmethod
    def measure(self, stop: Stop) -> Numbers | None:
        """Return the raw numbers by name; None if asked to stop."""

    @property
    @abstractmethod
    def variant(self) -> str:
        """The model, in a word."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The length of sequences."""

    def identity(self) -> dict[str, Any]:
        """Return its settings; of a model's configuration, those that differ from the defaults."""
        settings = {field.name: _settings(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"measurement": self.kind, **settings}

    @property
    def facts(self) -> dict[str, Any]:
        settings = {name: value for name, value in _flat(self.identity()).items() if name != "measurement"}
        names = {"key": self.key, "measurement": self.kind, "variant": self.variant, "tokens": self.tokens}
        return {**names, "settings": settings}


@dataclass(frozen=True)
class ViTMeasurement(Measurement):
    """Something measured of vision transformers that are not trained."""

    model: ViTConfig

    @property
    def variant(self) -> str:
        return self.model.variant

    @property
    def tokens(self) -> int:
        return self.model.tokens


def cpu_seconds(calls: Mapping[str, Callable[[], object]], rounds: int, stop: Stop) -> Numbers | None:
    """Return the CPU time of each call in each round; None if asked to stop. A first round warms up and is left out.

    The calls take turns, so whatever else the machine does meets all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            if stop.asked:
                return None
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    return {name: tuple(times[1:]) for name, times in seconds.items()}


def attention_name(config: TextConfig) -> str:
    """Return the kind of attention, by the paper's name if it has one."""
    model, phi = config.model, Phi.parse(config.model.phi)
    if phi.activation in ATTENTIONS:
        return ATTENTIONS[phi.activation]
    if model.joined_norm == "rela":
        return "ReLA"
    if model.learned_gain is None:
        return display_name(model.phi)
    return RELUFORMERS[config.normalisation_penalty > 0, config.entropy_penalty > 0]


def vit_macs(config: ViTConfig) -> int:
    """Return the multiply-adds of a model, from its shapes alone."""
    return _vit_macs(replace(config, phi="relu"))  # whatever φ is, it is not counted, and this one may learn a shift


@lru_cache(maxsize=256)
def _vit_macs(config: ViTConfig) -> int:
    with torch.device("meta"):
        return ViT.from_config(config).macs()


def _unusual(settings: dict[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    kept = {}
    for name, value in settings.items():
        other = usual.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            value = _unusual(value, other)
            if value:
                kept[name] = value
        elif name not in usual or value != other:
            kept[name] = value
    return kept


def _settings(value: Any) -> Any:
    """Return a value as JSON holds it; of a configuration, what differs from its defaults."""
    if not dataclasses.is_dataclass(value):
        return list(value) if isinstance(value, tuple) else value
    values = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {name: _settings(own) for name, (own, usual) in values.items() if own != usual}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool | None]:
    """Return nested settings side by side: "model.patch"; a list as its entries, joined."""
    flat: dict[str, str | int | float | bool | None] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return flat
