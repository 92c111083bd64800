"""Set-ups of image studies: the data, the models, the number of steps; everything that trades time for certainty.

default   the bundled images, a few runs that learn: about five minutes on two cores
day       models that have learned, and enough seeds to decide: hours, the largest questions first (see --budget)
hour      smaller and shorter runs of everything: one to two hours per study on two cores
smoke     seconds, only to check that it works

A study can modify a set-up for itself: see CHANGES in its module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Self

import torch

from nomax.data import Source
from nomax.data import load as load_data
from nomax.evaluate.accuracy import load_subset
from nomax.evaluate.probe import probe_sets
from nomax.nn.layers import SLOW
from nomax.phi import Phi
from nomax.study.engine.experiment import ImageExperiment
from nomax.train.config import settle
from nomax.train.vision.config import for_images, image_side

SEVEN = ("relu", "relu2", "gelu", "softplus", "identity", "relu6", "sigmoid")  # the h of the paper

# Three patches for images of each size, and so three lengths of sequences, each about four times the one before.
PATCHES = {16: (8, 4, 2), 28: (7, 4, 2), 32: (8, 4, 2), 224: (32, 16, 8)}

HELD_OUT = 0.1  # of the training images, on which trials are judged: the test split chooses nothing
TRIAL_SEED = 9  # of trials, which no verdict uses

Powers = tuple[tuple[str, tuple[float, ...]], ...]  # every h with its α


@dataclass(frozen=True)
class Length:
    """A sequence length of the studies over α: the patch that gives it, and the runs at that length."""

    patch: int
    steps: int = 0
    """0: as many as the set-up has."""
    data: str = ""
    """Empty: the set-up's."""
    powers: Powers = ()
    """Empty: every h of the set-up with every α."""
    seeds: int = 0
    """At most so many; 0: all of the set-up."""


@dataclass(frozen=True)
class Setup:
    """Common settings of a study's runs, and the size of its grid. Zero steps, batch, rate or warm-up: the recipe's."""

    name: str
    data: str = "fashion-mnist-small"
    recipe: Literal["small", "i1k", "i21k"] = "small"
    models: tuple[str, ...] = ("pico",)
    """Sizes for studies over sizes. Studies of one size use the first."""
    patches: tuple[int, ...] = (7, 4, 2)
    """Patch sizes in pixels, the largest first: each gives a sequence length."""
    lengths: tuple[Length, ...] = ()
    """The lengths of studies over α if they differ in more than the patch; empty: one for each patch."""
    image_size: int = 28
    activations: tuple[str, ...] = SEVEN
    """The h that studies of all h compare."""
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 600
    batch_size: int = 16
    """Small: for the same number of images, more and smaller steps get further (see docs/decisions.md)."""
    lr: float = 2e-3
    """Softmax's best rate, used for every φ, as in the paper."""
    own_rates: tuple[tuple[str, float], ...] = ()
    """The φ with a different best learning rate, chosen on held-out images by the study `rate`."""
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    """The learning rates that the study `rate` tries."""
    tried: tuple[str, ...] = ("softmax",)
    """The φ that it tries them with."""
    warmup: int = 60
    gate_models: tuple[str, ...] = ()
    """Models of 224-pixel images whose gate is timed; empty: the first of the set-up, with every patch."""
    precision: Literal["fp32", "bf16", "fast"] = "fp32"
    """fast: bf16 if this machine can multiply it, fp32 otherwise."""
    augment: bool = False
    """Shift and flip small images. Runs that see each image a few times learn less with it, so they do without; images
    of a size other than image_size are resized."""
    probes: tuple[str, ...] = ()
    """Data sets for ten-shot probes, for studies that have them."""
    probe_images: int = 0
    """Test images per probe; 0: all."""
    subset: str | None = None
    """Labels to measure accuracy on separately, for studies that do so: icons, imagenet1k or a file."""
    test_images: int = 0
    """Images of the test split to evaluate on; 0: all."""
    diagnose: int = 0
    """Steps of each run at which attention is inspected."""
    device: str = "auto"

    def length(self, patch: int) -> int:
        """Return L, the number of patches of an image."""
        return (self.image_size // patch) ** 2

    def every_length(self) -> tuple[Length, ...]:
        """Return the lengths of studies over α."""
        return self.lengths or tuple(map(Length, self.patches))

    def phis(self, length: Length) -> list[str]:
        """Return every h with every α that is trained at a length."""
        powers = length.powers or tuple((name, self.alphas) for name in self.activations)
        return [str(Phi(name, alpha)) for name, alphas in powers for alpha in alphas]

    def own_rate(self, phi: str) -> float:
        """Return the best learning rate of a φ, as far as it was tried."""
        return dict(self.own_rates).get(str(Phi.parse(phi)), self.lr)

    def trial(self, phi: str, lr: float, length: Length) -> ImageExperiment:
        """Return a run for choosing a learning rate: judged on held-out images, with a separate seed."""
        return self.run(phi, length=length, lr=lr, seed=TRIAL_SEED, held_out=HELD_OUT)

    def run(
        self,
        phi: str,
        *,
        model: str | None = None,
        patch: int | None = None,
        length: Length | None = None,
        seed: int = 0,
        lr: float | None = None,
        qk_norm: bool = True,
        gate: Literal["silu", "sigmoid", "identity"] | None = None,
        held_out: float = 0.0,
        measure: bool = False,
    ) -> ImageExperiment:
        """Return a run of this set-up, by default of its first model and patch.

        measure: also do the ten-shot probes and the label subset.
        """
        length = length or Length(patch or self.patches[0])
        data = length.data or self.data
        images = source(data)
        image_size = self.image_size if data == self.data else image_side(images) or 224
        config = for_images(
            self.recipe,
            images,
            data=data,
            variant=f"{model or self.models[0]}/{length.patch}",
            phi=phi,
            image_size=image_size,
            qk_norm=qk_norm,
            gate=gate,
        )
        wanted = {
            "steps": length.steps or self.steps,
            "batch_size": self.batch_size,
            "lr": lr or self.lr,
            "warmup": self.warmup,
        }
        numbers: dict[str, Any] = {name: value for name, value in wanted.items() if value}
        config = replace(
            config,
            precision=fast_precision() if self.precision == "fast" else self.precision,
            evaluate_every=0,
            keep=1,
            seed=seed,
            device=self.device,
            test_images=self.test_images,
            held_out=held_out,
            diagnose=self.diagnose,
            **numbers,
        )
        config = settle(config, lambda: len(images) / config.batch_size, numbers)
        # One checkpoint in five parts of a run, or more: an interruption costs little, and so do they.
        often = min(500, max(1, config.steps // 5))
        config = replace(config, checkpoint_every=often)
        if self.recipe == "small" and not self.augment:
            crop: Literal["none", "resize"] = "none" if image_side(images) == image_size else "resize"
            config = replace(config, augment=replace(config.augment, crop=crop, flip=False))
        if not measure:
            return ImageExperiment(config)
        return ImageExperiment(config, self.probes, self.subset, self.probe_images if self.probes else 0)

    def adapted(self, *, model: tuple[str, ...] | None = None, **given: Any) -> Self:
        """Return the set-up with other values, and everything that follows from them; None leaves a value as it is.

        Models may name their patch ("S/16"): then only these patches are used. Other data brings its own image size,
        and an image size its patches. A recipe other than `small` brings its own steps, batch, rate and warm-up.
        """
        given = {name: value for name, value in given.items() if value is not None}
        if model:
            given["models"] = tuple(dict.fromkeys(name.partition("/")[0] for name in model))
        if patches := {_patch(name) for name in model or () if "/" in name}:
            if "patches" in given:
                raise ValueError(f"--model {' '.join(model or ())} and --patches both name patches: give one of them.")
            given["patches"] = tuple(sorted(patches, reverse=True))
        if given.get("recipe", "small") != "small":
            given = {"steps": 0, "batch_size": 0, "lr": 0.0, "warmup": 0, **given}
        if "data" in given and "image_size" not in given:
            given["image_size"] = image_side(source(given["data"])) or 224
        size = given.get("image_size", self.image_size)
        if size != self.image_size and "patches" not in given:
            if size not in PATCHES:
                raise ValueError(
                    f"images of {size} pixels need --patches: sizes of patches that divide it, such as 8 4 2."
                )
            given["patches"] = PATCHES[size]
        if 0 < given.get("steps", 0) <= given.get("warmup", self.warmup) and "warmup" not in given:
            given["warmup"] = max(1, given["steps"] // 5)
        if {"patches", "data", "activations", "alphas", "steps", "recipe"} & given.keys():
            given.setdefault("lengths", ())  # which were made for what has been changed
        return replace(self, **given)


RELU_POWERS = (0.0, 0.5, 1.0, 1.5, 2.0)
# All h with α to 1½, and relu, whose curve decides, to 2.
ALL_POWERS: Powers = (("relu", RELU_POWERS), *((name, RELU_POWERS[:4]) for name in SEVEN if name != "relu"))
SOME_POWERS: Powers = (("relu", RELU_POWERS), ("identity", (0.0, 1.0)), ("relu2", (0.0, 1.0)))
RELU_ONLY: Powers = (("relu", (0.0, 0.5, 1.0)),)

SETUPS = {
    setup.name: setup
    for setup in (
        Setup(
            "default",
            patches=(4,),
            activations=("relu",),
            alphas=(0.0, 1.0),
            seeds=(0, 1),
            steps=2000,
            batch_size=64,
            lr=4e-3,
            rates=(2e-3, 4e-3, 8e-3),
            warmup=200,
            precision="fast",
            probes=("digits",),
            diagnose=24,
        ),
        Setup(
            "hour",
            models=("pico", "mu", "nano"),
            probes=("digits",),
            gate_models=("S/32", "S/16", "S/8"),
        ),
        Setup(
            "day",
            data="fashion-mnist",
            steps=3750,
            batch_size=64,
            lr=4e-3,
            warmup=200,
            precision="bf16",
            lengths=(
                Length(4, powers=ALL_POWERS),
                Length(7, powers=ALL_POWERS),
                Length(2, steps=1875, powers=SOME_POWERS),
                Length(4, data="cifar10", powers=RELU_ONLY),
                Length(2, steps=1875, data="cifar10", powers=RELU_ONLY),
                Length(1, steps=940, data="cifar10", powers=(("relu", (0.0, 1.0)),), seeds=2),
            ),
            rates=(2e-3, 4e-3, 1e-3, 8e-3),
            tried=("softmax", "relu/L", "relu", "relu/L^0.5", "relu/L^2", "identity/L", "identity"),
            probes=("digits", "mnist"),
            gate_models=("S/32", "S/16", "S/8"),
            diagnose=24,
        ),
        Setup(
            "smoke",
            models=("mu",),
            patches=(14, 7),
            activations=("relu", "identity"),
            alphas=(0.0, 1.0),
            seeds=(0, 1),
            steps=3,
            batch_size=8,
            warmup=1,
            rates=(1e-3, 2e-3),
            test_images=40,
            probes=("digits",),
            probe_images=20,
        ),
    )
}


def fast_precision() -> Literal["fp32", "bf16"]:
    """Return the precision in which this machine trains fastest."""
    return "bf16" if torch.cuda.is_available() or torch.bfloat16 not in SLOW else "fp32"


@lru_cache(maxsize=4)
def source(name: str) -> Source:
    """Return the training images, loaded once for a whole grid."""
    return load_data(name, "train")


def check(runs: Sequence[ImageExperiment], probes: Sequence[str]) -> None:
    """Raise now, rather than after an hour, if images that runs need are missing."""
    for name in dict.fromkeys(run.config.data for run in runs):
        for split in (source(name), load_data(name, "test")):
            split.image(0)
    try:
        probe_sets(list(dict.fromkeys([*probes, *(name for run in runs for name in run.probes)])))
    except (ValueError, OSError) as error:
        raise ValueError(f"--probes: {error}") from error
    for subset, name in {(run.subset, run.config.data) for run in runs}:
        if subset is not None:
            load_subset(subset, source(name).classes)


def _patch(model: str) -> int:
    """Return the patch in a model's name, "S/16"."""
    _, _, patch = model.partition("/")
    if not (patch.isdecimal() and int(patch) > 0):
        raise ValueError(f"--model {model} must be a size, or a size and its patch, such as S or S/16.")
    return int(patch)
