"""Accuracy on a test set, over all of the head's classes and over a subset of them, a batch at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nomax.data import Source
from nomax.data.batches import evaluation_batches
from nomax.data.transforms import Evaluation
from nomax.evaluate.subset import LabelMap, subset_predictions
from nomax.models import ViT


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
    batch_size: int = 64,
    workers: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Score, Score | None]:
    """The score over the whole head and, if there is one, over the subset.

    The data set may have the head's classes: then the subset's score counts the images of its classes only. Or it has
    the subset's classes, as ImageNet-1k for a model of ImageNet-21k: then the head's score counts an image as right if
    its class wins against all others of the head. Logits exist for one batch at a time.
    """
    head = model.config.num_classes
    to_head, to_subset = _numberings(head, source, subset)
    where = next(model.parameters())
    counts = np.zeros((2, 2), np.int64)  # the head and the subset; right and all
    with torch.inference_mode(), evaluation_batches(source, transform, batch_size, workers=workers) as batches:
        for images, labels in batches:
            logits = model(images.to(where)).float().cpu()
            wanted = to_head[labels]
            counts[0] += (int((logits.argmax(1) == wanted).sum()), len(labels))
            if subset is not None:
                wanted = to_subset[labels]
                inside = wanted >= 0
                predicted = subset_predictions(logits[inside], subset.columns)
                counts[1] += (int((predicted == wanted[inside]).sum()), int(inside.sum()))
            report(len(labels))
    of_head, of_subset = (Score(int(right), int(images)) for right, images in counts)
    return of_head, None if subset is None else of_subset


def _numberings(head: int, source: Source, subset: LabelMap | None) -> tuple[torch.Tensor, torch.Tensor]:
    """For each class of the data set its column in the head and its place in the subset; −1 where it has none."""
    classes = len(source.classes)
    if head == 0:
        raise ValueError(
            "this model has no head (num_classes=0), so it has no accuracy; `nomax probe` takes its features."
        )
    if subset is None:
        if classes != head:
            raise ValueError(
                f"the model's head has {head:,} classes, the data set {classes:,}. Give the model's own data set, or "
                "--subset if the data set has some of its classes."
            )
        return torch.arange(head), torch.empty(0)
    if subset.head != head:
        raise ValueError(
            f"the subset {subset.name} is of a head with {subset.head:,} classes; this model's has {head:,}."
        )
    columns = torch.from_numpy(subset.columns)
    if classes == head:
        places = torch.full((head,), -1)
        places[columns[columns >= 0]] = torch.arange(len(columns))[columns >= 0]
        return torch.arange(head), places
    if classes == len(columns):
        places = _order_by_name(source, subset)
        return columns[places], places
    raise ValueError(
        f"the data set has {classes:,} classes: neither the {head:,} of the head, nor the {len(columns):,} of the "
        f"subset {subset.name}."
    )


def _order_by_name(source: Source, subset: LabelMap) -> torch.Tensor:
    """The place in the subset of each class of the data set: by name if the names are the same, else in order."""
    place = {name: number for number, name in enumerate(subset.names)}
    if set(source.classes) == set(place):
        return torch.tensor([place[name] for name in source.classes])
    return torch.arange(len(subset.columns))
