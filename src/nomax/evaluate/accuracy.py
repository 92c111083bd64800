"""Accuracy on a test set, over all of the head's classes and over a subset of them, a batch at a time."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from nomax.data import Source
from nomax.data.batches import evaluation_batches
from nomax.data.source import listed
from nomax.data.transforms import Evaluation
from nomax.evaluate.subset import LabelMap, subset_predictions
from nomax.models import ViT

Match = Literal["name", "order"]


@dataclass(frozen=True)
class Score:
    """How many images were recognised."""

    right: int
    images: int

    @property
    def accuracy(self) -> float:
        """The share of images that were recognised; NaN if there was none."""
        return self.right / self.images if self.images else float("nan")


def classify(
    model: ViT,
    source: Source,
    transform: Evaluation,
    subset: LabelMap | None = None,
    *,
    match: Match = "name",
    batch_size: int = 64,
    workers: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Score, Score | None]:
    """The score over the whole head and, if there is one, over the subset.

    Classes of the data set are found in the head by their names, where the model says them; names that differ are an
    error. With match="order" the numbers of the classes count instead.

    The data set may have the head's classes: then the subset's score counts the images of its classes only. Or it has
    the subset's classes, as ImageNet-1k for a model of ImageNet-21k: then the head's score counts an image as right if
    its class wins against all others of the head. Logits exist for one batch at a time.
    """
    found = match_classes(model, source, subset, match)
    where = next(model.parameters())
    counts = np.zeros((2, 2), np.int64)  # the head and the subset; right and all
    with torch.inference_mode(), evaluation_batches(source, transform, batch_size, workers=workers) as batches:
        for images, labels in batches:
            logits = model(images.to(where)).float().cpu()
            wanted = found.to_head[labels]
            counts[0] += (int((logits.argmax(1) == wanted).sum()), len(labels))
            if subset is not None:
                wanted = found.to_subset[labels]
                inside = wanted >= 0
                predicted = subset_predictions(logits[inside], subset.columns)
                counts[1] += (int((predicted == wanted[inside]).sum()), int(inside.sum()))
            report(len(labels))
    of_head, of_subset = (Score(int(right), int(images)) for right, images in counts)
    return of_head, None if subset is None else of_subset


class Matching(NamedTuple):
    """For each class of a data set its column in a head and its place in a subset, −1 where it has none."""

    to_head: torch.Tensor
    to_subset: torch.Tensor
    note: str = ""
    """What to tell about it."""


def match_classes(model: ViT, source: Source, subset: LabelMap | None = None, match: Match = "name") -> Matching:
    """Find the classes of a data set in a model's head and in a subset; a ValueError says which do not match."""
    head, classes = model.config.num_classes, len(source.classes)
    if head == 0:
        raise ValueError(
            "this model has no head (num_classes=0), so it has no accuracy; `nomax probe` takes its features."
        )
    if subset is None:
        to_head, note = _columns(model, source, match)
        return Matching(to_head, torch.empty(0), note)
    if subset.head != head:
        raise ValueError(
            f"the subset {subset.name} is of a head with {subset.head:,} classes; this model's has {head:,}."
        )
    columns = torch.from_numpy(subset.columns)
    if classes == head:
        places = torch.full((head,), -1)
        places[columns[columns >= 0]] = torch.arange(len(columns))[columns >= 0]
        to_head, note = _columns(model, source, match)
        return Matching(to_head, places[to_head], note)
    if classes == len(columns):
        places, note = _places(source, subset, match)
        return Matching(columns[places], places, note)
    raise ValueError(
        f"the data set has {classes:,} classes: neither the {head:,} of the head, nor the {len(columns):,} of the "
        f"subset {subset.name}."
    )


def _columns(model: ViT, source: Source, match: Match) -> tuple[torch.Tensor, str]:
    """For each class of a data set its column in the head, and how they were matched."""
    head, known, here = model.config.num_classes, model.config.classes, tuple(source.classes)
    order = torch.arange(len(here))
    if len(here) != head:
        foreign = [] if known is None else _without(here, known)
        unknown = f" No class of the model is called {listed(foreign)}." if foreign else ""
        raise ValueError(
            f"the model's head has {head:,} classes, the data set {len(here):,}.{unknown} Give the model's own data "
            "set, or --subset if the data set has some of its classes."
        )
    if known is None:
        return order, "The model does not say what its classes are called: those of the data set count in their order."
    if known == here:
        return order, ""
    column = {name: number for number, name in enumerate(known)}
    by_name = [column.get(name, -1) for name in here]
    if match == "name" and sorted(by_name) == order.tolist():
        return torch.tensor(by_name), "The data set has the model's classes in another order: they are matched by name."
    missing, foreign = _without(known, here), _without(here, known)
    differ = f"{listed(missing)} of the model, {listed(foreign)} of the data set" if foreign else "some are there twice"
    if match == "order":
        return order, f"Classes count in their order, not by their names, which differ: {differ}."
    raise ValueError(
        f"{len(foreign) or len(here):,} of {len(here):,} classes do not match: {differ}. Rename the data set's classes "
        f"as the model calls them (in its config.json){_OR_ORDER}"
    )


def _places(source: Source, subset: LabelMap, match: Match) -> tuple[torch.Tensor, str]:
    """For each class of a data set its place in the subset, and how they were matched."""
    place, here = {name: number for number, name in enumerate(subset.names)}, tuple(source.classes)
    if set(here) == set(place):
        return torch.tensor([place[name] for name in here]), ""
    order = torch.arange(len(here))
    if match == "order" or not place or here == tuple(map(str, range(len(here)))):
        return order, f"The data set's classes count in the order of the subset {subset.name}, not by their names."
    raise ValueError(
        f"the subset {subset.name} has the classes {listed(subset.names)}; {listed(_without(here, place))} of the data "
        f"set are none of them. Rename the data set's classes{_OR_ORDER}"
    )


_OR_ORDER = ", or, if they are the same classes in the same order under other names, pass --match-classes order."


def _without(names: Sequence[str], others: Collection[str]) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]
