"""One run of a study: what is trained, and what is measured afterwards. Its key is a hash of all of that."""

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nomax.phi import Phi
from nomax.study.row import Row
from nomax.train import loop_config
from nomax.train.kinds import RunConfig


@dataclass(frozen=True)
class Run(ABC):
    """A configuration in which every number is settled, and the measurements that follow the training."""

    config: RunConfig

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
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in others.items()}
        return {"config": config, **listed}

    @property
    @abstractmethod
    def row(self) -> type[Row]:
        """What its results are written into."""

    @property
    @abstractmethod
    def macs(self) -> int:
        """Multiply-adds of the model for an image or a token."""

    @property
    @abstractmethod
    def particulars(self) -> dict[str, Any]:
        """The columns that rows of this kind have beyond the common ones."""

    @property
    def label(self) -> str:
        """The run in a few words: "relu/L, pico/4, seed 0"."""
        return self.row.of(self, "failed").label

    @property
    def train_flops(self) -> int:
        """Floating point operations of the training: two per multiply-add, and backward is twice forward."""
        return 6 * self.macs * self.config.batch_size * self.config.steps

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The columns of a row of results that are known before the run."""
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
            "train_flops": self.train_flops,
            **self.particulars,
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
