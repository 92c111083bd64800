"""One run of a study: what is trained, and what is measured afterwards. Its key is a hash of all of that."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from nomax.models import ViT, ViTConfig
from nomax.phi import Phi
from nomax.train import VisionConfig, loop_config


@dataclass(frozen=True)
class Run:
    """A configuration in which every number is settled, and the measurements that follow the training."""

    config: VisionConfig
    probes: tuple[str, ...] = ()
    """Data sets of the ten-shot probe, as `nomax probe --on` takes them."""
    subset: str | None = None
    """Measure accuracy among some labels, too: imagenet1k, icons, or a file."""
    probe_images: int = 0
    """How many test images of each probe's data set to look at, spread evenly; 0: all of them."""

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits that are the same wherever and however this run is done."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    def identity(self) -> dict[str, Any]:
        """What makes this run the run it is, as JSON holds it: not how the machine does the work.

        Settings that are as a configuration has them by itself are left out, so that the runs of today are still
        known when configurations have new fields. (Whoever changes what is there by itself makes other runs of them.)
        """
        plain, usual = (json.loads(loop_config.to_json(config)) for config in (self.config, type(self.config)()))
        config = {name: value for name, value in _unusual(plain, usual).items() if name not in self.config.MACHINE}
        others = {name.name: getattr(self, name.name) for name in dataclasses.fields(self) if name.name != "config"}
        return {"config": config, **others, "probes": list(self.probes)}

    @property
    def label(self) -> str:
        """The run in a few words: "relu/L, pico/4, seed 0"."""
        model = self.config.model
        return label(model.phi, model.variant, model.qk_norm, model.gate, self.config.seed)

    @cached_property
    def macs(self) -> int:
        """Multiply-adds of the encoder per image."""
        return macs(self.config.model)

    @property
    def train_flops(self) -> int:
        """Floating point operations of the training: two per multiply-add, and backward is twice forward."""
        return 6 * self.macs * self.config.batch_size * self.config.steps

    @property
    def facts(self) -> dict[str, Any]:
        """The columns of a row of results that are known before the run."""
        config, model = self.config, self.config.model
        phi = Phi.parse(model.phi)
        return {
            "key": self.key,
            "phi": model.phi,
            "activation": phi.activation,
            "alpha": phi.alpha,
            "variant": model.variant,
            "size": model.variant.partition("/")[0],
            "patch": model.patch,
            "tokens": model.tokens,
            "qk_norm": model.qk_norm,
            "gate": model.gate,
            "seed": config.seed,
            "data": config.data,
            "classes": model.num_classes,
            "steps": config.steps,
            "batch_size": config.batch_size,
            "lr": config.lr,
            "macs": self.macs,
            "train_flops": self.train_flops,
        }


def _unusual(settings: dict[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not as usual."""
    found = {}
    for name, value in settings.items():
        other = usual.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            value = _unusual(value, other)
            if value:
                found[name] = value
        elif name not in usual or value != other:
            found[name] = value
    return found


def label(phi: str, variant: str, qk_norm: bool, gate: str | None, seed: int) -> str:
    """A run in a few words; qk-norm is what the paper's runs have, so its absence is what is said."""
    words = [phi, variant, *([] if qk_norm else ["no qk-norm"]), *([f"{gate} gate"] if gate else []), f"seed {seed}"]
    return ", ".join(words)


def macs(config: ViTConfig) -> int:
    """Multiply-adds of a model that is not made: only its shapes are."""
    return _macs(replace(config, phi="softmax"))  # whatever φ is, it is not counted


@lru_cache(maxsize=256)
def _macs(config: ViTConfig) -> int:
    with torch.device("meta"):
        return ViT.from_config(config).macs()
