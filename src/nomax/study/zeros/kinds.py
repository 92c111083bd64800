"""The kinds of attention that the study of zeros compares, their runs, and their scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import ImageExperiment, TextExperiment, TrainedExperiment
from nomax.study.engine.result import ImageResult, Result, TrainedResult
from nomax.study.engine.statistics import accuracy
from nomax.study.images.setup import SETUPS as IMAGES
from nomax.study.images.setup import Setup
from nomax.study.text.setup import TextSetup

# Beside the set-up of images of the same name: data that learns enough, and one precision for all machines.
OF_IMAGES: Mapping[str, Mapping[str, Any]] = {
    "default": {"data": "fashion-mnist", "precision": "fp32", "steps": 1000, "warmup": 100}
}
PATCH = 4

PAYS = 1.3  # a gain in time worth a kernel and a cache of its own


@dataclass(frozen=True)
class Kind:
    """A kind of attention: its φ, what else is different, and the line of a figure that it is on."""

    name: str
    line: str
    mark: str
    """What tells it from others on the line."""
    phi: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the configuration of the model."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Changes to that of the training."""
    long: bool = False
    """Whether half a million keys are looked at, too."""

    @property
    def level(self) -> bool:
        """True for those to compare with: softmax, and a model without attention."""
        return self.phi in (SOFTMAX, "0*relu/L")

    def __hash__(self) -> int:
        return hash(self.name)


BASE = Kind("relu/L", "fixed shift", "0", "relu/L", long=True)
NONE = Kind("no attention", "no attention", "", "0*relu/L")
KINDS = (
    BASE,
    Kind("relu(x-1)/L", "fixed shift", "−1", "relu(x-1)/L", long=True),
    Kind("relu(x-2)/L", "fixed shift", "−2", "relu(x-2)/L", long=True),
    Kind(SOFTMAX, SOFTMAX, "", SOFTMAX),
    NONE,
    Kind("L1 to 0.03", "L1 penalty", "0.03", "relu/L", training={"attention_l1": (0.003, 0.03)}),
    Kind("relu, β = 1", "relu, threshold", "1", "relu(x-sqrt(2 log L))"),
    Kind("learned shift", "learned shift", "", "relu/L", model={"learned_shift": "head"}),
    Kind("relu2, β = ½", "relu2, threshold", "½", "relu2(x-0.5*sqrt(2 log L))"),
    Kind("L1 to 0.1", "L1 penalty", "0.1", "relu/L", training={"attention_l1": (0.01, 0.1)}),
    Kind("relu2/L", "relu2", "", "relu2/L"),
    Kind("relu2, β = 1", "relu2, threshold", "1", "relu2(x-sqrt(2 log L))"),
)
Found = Mapping[Kind, Sequence[Any]]
ASKED = 5  # kinds that come first


def every_run(setup: TextSetup, seeds: Sequence[int]) -> list[tuple[Kind, TrainedExperiment]]:
    makes: tuple[Callable[..., TrainedExperiment], ...] = (_text, _image)
    parts = (KINDS[:ASKED], KINDS[ASKED:])
    return [(kind, make(setup, kind, seed)) for seed in seeds for part in parts for make in makes for kind in part]


def _text(setup: TextSetup, kind: Kind, seed: int) -> TextExperiment:
    long = kind.long and setup.name != "smoke"
    looks = () if kind.level else ("blocks", "long-blocks") if long else ("blocks",)
    run = setup.run(kind.phi, task="language", documents=setup.text_length, seed=seed, measures=("rows", *looks))
    return replace(run, config=_changed(run.config, kind))


def _image(setup: TextSetup, kind: Kind, seed: int) -> ImageExperiment:
    of_images = image_setup(setup)
    patch = PATCH if PATCH in of_images.patches else min(of_images.patches)
    run = of_images.run(kind.phi, patch=patch, seed=seed)
    measures = ("rows",) if kind.level else ("rows", "blocks")
    return replace(run, config=_changed(run.config, kind), measures=measures)


def image_setup(setup: TextSetup) -> Setup:
    return replace(IMAGES[setup.name], device=setup.device, **OF_IMAGES.get(setup.name, {}))


def _changed(config: Any, kind: Kind) -> Any:
    return replace(config, model=replace(config.model, **kind.model), **kind.training)


def by_kind(results: Sequence[Result], setup: TextSetup) -> tuple[Found, Found]:
    """Return the results of text and of images by kind, in the order of the kinds."""
    kinds = {run.key: kind for kind, run in every_run(setup, setup.seeds)}
    both: tuple[dict[Kind, list[Any]], dict[Kind, list[Any]]] = ({}, {})
    for result in sorted(results, key=lambda result: KINDS.index(kinds.get(result.key, BASE))):
        if result.key in kinds:
            both[isinstance(result, ImageResult)].setdefault(kinds[result.key], []).append(result)
    return both


# Scores of a result; None where the run did not get there.


def error(result: ImageResult) -> float | None:
    """Return the share of test images that are wrong."""
    right = accuracy(result)
    return None if right is None else 1 - right


def measured(name: str) -> Callable[[TrainedResult], float | None]:
    """Return a score: what was measured under this name."""
    return lambda result: getattr(result, "measured", {}).get(name)


def gain(order: str, keys: int, left: str = "left") -> Callable[[TrainedResult], float | None]:
    """Return a score: the time over all keys, divided by that of the bound and of attention over what it leaves.

    left: "left" if these blocks lie together, "copied" if they are copied together first.
    """

    def score(result: TrainedResult) -> float | None:
        names = ("dense_seconds", f"{order} bound_seconds", f"{order} {left}_seconds")
        dense, bound, rest = (measured(f"{name} {keys}")(result) for name in names)
        return None if dense is None or bound is None or rest is None else dense / (bound + rest)

    return score


def values_of(results: Sequence[Any], score: Callable[[Any], float | None]) -> list[float]:
    return [value for result in results if (value := score(result)) is not None]


def mean_of(results: Sequence[Any], score: Callable[[Any], float | None]) -> float | None:
    values = values_of(results, score)
    return fmean(values) if values else None


def lengths_of(found: Found) -> list[int]:
    """Return the numbers of keys whose blocks were looked at."""
    names = {name for results in found.values() for result in results for name in result.measured}
    return sorted(int(name.split()[1]) for name in names if name.startswith("dense_seconds "))
