"""How large a study is: the data, the models, the number of steps. All numbers that trade time for certainty are here.

default   the bundled images and a reduced grid: minutes
hour      one to two hours for a study on two cores
smoke     seconds: shows only that it works
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from nomax.data import Source
from nomax.data import load as load_data
from nomax.study.engine.experiment import ImageExperiment
from nomax.train.config import settle
from nomax.train.vision.config import for_images, image_side

SEVEN = ("relu", "relu2", "gelu", "softplus", "identity", "relu6", "sigmoid")  # the h of the paper

# Three patches for images of each size, and so three lengths of sequences, each about four times the one before.
PATCHES = {16: (8, 4, 2), 28: (7, 4, 2), 32: (8, 4, 2), 224: (32, 16, 8)}


@dataclass(frozen=True)
class Setup:
    """What all runs of a study share, and how large its grid is. Zero steps, batch, rate or warm-up: the recipe's."""

    name: str
    data: str = "fashion-mnist-small"
    recipe: Literal["small", "i1k", "i21k"] = "small"
    models: tuple[str, ...] = ("pico",)
    """Sizes for studies over sizes. Studies of one size take the first."""
    patches: tuple[int, ...] = (7, 4, 2)
    """Pixels on a side of a patch, the largest first: each gives a length of sequences."""
    image_size: int = 28
    activations: tuple[str, ...] = SEVEN
    """The h that studies of all h compare."""
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 600
    batch_size: int = 16
    """Small: with as many images seen, more and smaller steps come further (see docs/decisions.md)."""
    lr: float = 2e-3
    warmup: int = 60
    scaling_steps: int = 0
    """Steps of the study over sizes, whose larger models need more of them to be the better ones; 0: as many."""
    scaling_patches: tuple[int, ...] = ()
    """Patches of that study; none: all."""
    gate_models: tuple[str, ...] = ()
    """Models of 224-pixel images whose gate is timed; none: the first of the set-up, with every patch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    augment: bool = False
    """Move and flip small images. Runs that see each image about once learn less from it, so they do without; images
    that have another size than image_size are resized."""
    probes: tuple[str, ...] = ()
    """Data sets of ten-shot probes, for studies that have them."""
    probe_images: int = 0
    """Test images of each probe; 0: all."""
    subset: str | None = None
    """Labels whose accuracy is measured by itself, for studies that do: icons, imagenet1k or a file."""
    test_images: int = 0
    """Images of the test split that are looked at; 0: all."""
    device: str = "auto"

    def length(self, patch: int) -> int:
        """L, the number of patches of an image."""
        return (self.image_size // patch) ** 2

    def run(
        self,
        phi: str,
        *,
        model: str | None = None,
        patch: int | None = None,
        seed: int = 0,
        qk_norm: bool = True,
        gate: Literal["silu", "sigmoid", "identity"] | None = None,
        measure: bool = False,
    ) -> ImageExperiment:
        """A run of this set-up, of its first model and patch if not told otherwise.

        measure: do the ten-shot probes and the label subset, too.
        """
        variant = f"{model or self.models[0]}/{patch or self.patches[0]}"
        images = source(self.data)
        config = for_images(
            self.recipe,
            images,
            data=self.data,
            variant=variant,
            phi=phi,
            image_size=self.image_size,
            qk_norm=qk_norm,
            gate=gate,
        )
        numbers: dict[str, Any] = {
            name: value for name in ("steps", "batch_size", "lr", "warmup") if (value := getattr(self, name))
        }
        config = replace(
            config,
            precision=self.precision,
            evaluate_every=0,
            keep=1,
            seed=seed,
            device=self.device,
            test_images=self.test_images,
            **numbers,
        )
        config = settle(config, lambda: len(images) / config.batch_size, numbers)
        # One checkpoint in five parts of a run: an interruption costs little, and so do they.
        often = min(1000, max(1, config.steps // 5))
        config = replace(config, checkpoint_every=often)
        if self.recipe == "small" and not self.augment:
            crop: Literal["none", "resize"] = "none" if image_side(images) == self.image_size else "resize"
            config = replace(config, augment=replace(config.augment, crop=crop, flip=False))
        if not measure:
            return ImageExperiment(config)
        return ImageExperiment(config, self.probes, self.subset, self.probe_images if self.probes else 0)


SETUPS = {
    setup.name: setup
    for setup in (
        Setup(
            "default",
            patches=(7, 4),
            activations=("relu", "identity"),
            alphas=(0.0, 1.0, 2.0),
            seeds=(0, 1),
            steps=200,
            warmup=20,
            probes=("digits",),
        ),
        Setup(
            "hour",
            models=("pico", "mu", "nano"),
            probes=("digits",),
            scaling_steps=2400,
            scaling_patches=(14, 7, 4),
            gate_models=("S/32", "S/16", "S/8"),
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
            test_images=40,
            probes=("digits",),
            probe_images=20,
        ),
    )
}


def named(name: str) -> Setup:
    """A set-up by its name."""
    if name not in SETUPS:
        nearest = get_close_matches(name, SETUPS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        raise ValueError(f"there is no set-up {name!r}{hint} There are {', '.join(SETUPS)}.")
    return SETUPS[name]


def adapted(setup: Setup, **given: Any) -> Setup:
    """The set-up with other values, and whatever follows from them; None is not a value.

    Models may name their patch ("S/16"): then only these patches are used. Other data bring their own image size, and
    an image size brings its patches. A recipe other than `small` brings its own steps, batch, rate and warm-up.
    """
    given = {name: value for name, value in given.items() if value is not None}
    models = given.get("models", ())
    patches = tuple(dict.fromkeys(_patch(model) for model in models if "/" in model))
    if patches and "patches" in given:
        raise ValueError(f"--model {' '.join(models)} and --patches both name patches: give one of them.")
    if models:
        given["models"] = tuple(dict.fromkeys(model.partition("/")[0] for model in models))
    if patches:
        given["patches"] = tuple(sorted(patches, reverse=True))
    if given.get("recipe", "small") != "small":
        given = {"steps": 0, "batch_size": 0, "lr": 0.0, "warmup": 0, **given}
    if "data" in given and "image_size" not in given:
        given["image_size"] = image_side(source(given["data"])) or 224
    if given.get("image_size", setup.image_size) != setup.image_size and "patches" not in given:
        size = given["image_size"]
        if size not in PATCHES:
            raise ValueError(f"images of {size} pixels need --patches: sizes of patches that divide it, such as 8 4 2.")
        given["patches"] = PATCHES[size]
    if "steps" in given and 0 < given["steps"] <= given.get("warmup", setup.warmup) and "warmup" not in given:
        given["warmup"] = max(1, given["steps"] // 5)
    if "steps" in given:
        given["scaling_steps"] = 0
    if "patches" in given:
        given["scaling_patches"] = ()
    return replace(setup, **given)


@lru_cache(maxsize=4)
def source(name: str) -> Source:
    """The training images, loaded once for a whole grid."""
    return load_data(name, "train")


def _patch(model: str) -> int:
    """The patch of a model's name, "S/16"."""
    _, _, patch = model.partition("/")
    if not (patch.isdecimal() and int(patch) > 0):
        raise ValueError(f"--model {model} must be a size, or a size and its patch, such as S or S/16.")
    return int(patch)
