"""Top-1 accuracy over all classes of the head, and over a subset of them, such as ImageNet-1k in ImageNet-21k."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nomax import _compat, data
from nomax.data import Source
from nomax.data.images.batches import evaluation_batches
from nomax.data.images.transforms import Evaluation
from nomax.data.source import listed
from nomax.models import ViT

Match = Literal["name", "order"]
Columns = Tensor | npt.NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True)
class Score:
    """The number of images, and of those classified correctly."""

    right: int
    images: int

    @property
    def accuracy(self) -> float:
        """The share of images classified correctly; NaN if there are none."""
        return self.right / self.images if self.images else float("nan")


@dataclass(frozen=True)
class LabelMap:
    """The column of a large head for each class of a smaller set; −1 if there is none."""

    name: str
    columns: npt.NDArray[np.int64]
    head: int
    """The number of columns of the head."""
    names: tuple[str, ...] = ()
    """The names of the classes, in the order of `columns`."""

    def __post_init__(self) -> None:
        known = self.columns[self.columns >= 0]
        if not len(known) or len(np.unique(known)) != len(known) or known.max() >= self.head:
            raise ValueError(f"the subset {self.name} must name different columns from 0 to {self.head - 1}.")

    @property
    def absent(self) -> list[int]:
        """The classes without a column in the head: their images count as wrong."""
        return [int(place) for place in np.flatnonzero(self.columns < 0)]


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
    """Return the score over the whole head and, if a subset is given, over the subset.

    Classes of the data set are matched with those of the head by name, if the model knows their names; names that
    differ are an error. match="order" matches them by number instead.

    If the data set has the head's classes, the subset's score counts only images of the subset's classes. If it has the
    subset's classes, as ImageNet-1k for a model of ImageNet-21k, the head's score counts an image as right if its class
    wins against all others of the head. Logits exist for one batch at a time.
    """
    matching = match_classes(model, source, subset, match)
    where = next(model.parameters())
    counts = np.zeros((2, 2), np.int64)  # the head and the subset; right and all
    with torch.inference_mode(), evaluation_batches(source, transform, batch_size, workers=workers) as batches:
        for images, labels in batches:
            logits = model(images.to(where)).float().cpu()
            wanted = matching.to_head[labels]
            counts[0] += (int((logits.argmax(1) == wanted).sum()), len(labels))
            if subset is not None:
                wanted = matching.to_subset[labels]
                inside = wanted >= 0
                predicted = subset_predictions(logits[inside], subset.columns)
                counts[1] += (int((predicted == wanted[inside]).sum()), int(inside.sum()))
            report(len(labels))
    of_head, of_subset = (Score(int(right), int(images)) for right, images in counts)
    return of_head, None if subset is None else of_subset


def subset_accuracy(logits: Tensor, labels: Tensor, columns: Columns) -> float:
    """Return the share of images whose class has the largest logit among the chosen columns.

    logits: [images, head]; columns: one column of the head per class, or −1; labels: places in `columns`.
    """
    if logits.ndim != 2 or len(logits) == 0 or labels.shape != logits.shape[:1]:
        shapes = f"{list(logits.shape)} and {list(labels.shape)}"
        raise ValueError(f"logits and labels have the shapes {shapes}; they must be [images, head] and [images].")
    return int((subset_predictions(logits, columns) == labels.to(logits.device)).sum()) / len(logits)


def subset_predictions(logits: Tensor, columns: Columns) -> Tensor:
    """Return the place in `columns` of each image's largest logit among them."""
    chosen = torch.as_tensor(columns, dtype=torch.int64, device=logits.device)
    if chosen.ndim != 1 or not len(chosen) or int(chosen.max()) >= logits.shape[1] or int(chosen.min()) < -1:
        raise ValueError(f"columns must hold numbers from 0 to {logits.shape[1] - 1}, or -1 for a class without one.")
    among = logits[:, chosen.clamp(min=0)]
    return among.masked_fill(chosen < 0, -torch.inf).argmax(1)


class Matching(NamedTuple):
    """The column in a head and the place in a subset of each class of a data set, −1 if it has none."""

    to_head: Tensor
    to_subset: Tensor
    note: str = ""
    """A remark for the user."""


def match_classes(model: ViT, source: Source, subset: LabelMap | None = None, match: Match = "name") -> Matching:
    """Match the classes of a data set with a model's head and a subset; a ValueError names those that do not match."""
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


def _columns(model: ViT, source: Source, match: Match) -> tuple[Tensor, str]:
    """Return the column in the head of each class of a data set, and a note on how they were matched."""
    head, known, here = model.config.num_classes, model.config.classes, tuple(source.classes)
    order = torch.arange(len(here))
    if len(here) != head:
        others = [] if known is None else _without(here, known)
        unknown = f" No class of the model is called {listed(others)}." if others else ""
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
    missing, others = _without(known, here), _without(here, known)
    differ = f"{listed(missing)} of the model, {listed(others)} of the data set" if others else "some are there twice"
    if match == "order":
        return order, f"Classes count in their order, not by their names, which differ: {differ}."
    raise ValueError(
        f"{len(others) or len(here):,} of {len(here):,} classes do not match: {differ}. Rename the data set's classes "
        f"as the model calls them (in its config.json){_OR_ORDER}"
    )


def _places(source: Source, subset: LabelMap, match: Match) -> tuple[Tensor, str]:
    """Return the place in the subset of each class of a data set, and a note on how they were matched."""
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


def load_subset(name: str, classes: Sequence[str]) -> LabelMap:
    """Load a subset of the classes by its name, imagenet1k or icons, or from a file."""
    if name in SUBSETS:
        return SUBSETS[name]()
    if not Path(name).is_file():
        raise FileNotFoundError(f"--subset {name}: no such file, nor one of the subsets {', '.join(SUBSETS)}.")
    return read_subset(Path(name), classes)


def imagenet_1k_in_21k() -> LabelMap:
    """Map the 1,000 classes of ImageNet-1k to columns of ImageNet-21k's 21,843, by the WordNet ids that timm carries.

    999 of them have one: ImageNet-21k has no n04399382, the teddy bear.
    """
    _compat.timm()
    folder = resources.files("timm.data") / "_info"
    large, small = (
        (folder / name).read_text(encoding="utf-8").split()
        for name in ("imagenet21k_goog_synsets.txt", "imagenet_synsets.txt")
    )
    if (len(large), len(small)) != (21_843, 1_000):
        raise ValueError(
            f"timm's synset lists have {len(large)} and {len(small)} entries instead of 21,843 and 1,000: "
            "install another version of timm."
        )
    place = {synset: column for column, synset in enumerate(large)}
    return LabelMap("imagenet1k", np.array([place.get(synset, -1) for synset in small]), len(large), tuple(small))


def frequent_icons() -> LabelMap:
    """Map the classes of icons with at least 30 drawings to columns of all classes."""
    meta = data.meta("icons")
    columns = np.array(meta["subset"], np.int64)
    return LabelMap("icons", columns, len(meta["classes"]), tuple(meta["classes"][column] for column in columns))


SUBSETS = {"imagenet1k": imagenet_1k_in_21k, "icons": frequent_icons}


def read_subset(path: Path, classes: Sequence[str]) -> LabelMap:
    """Read columns or names of `classes` from a file: a JSON list, or one per line; # begins a comment."""
    text = path.read_text(encoding="utf-8")
    entries = json.loads(text) if text.lstrip().startswith("[") else [line.strip() for line in text.splitlines()]
    place = {name: column for column, name in enumerate(classes)}
    columns = []
    for entry in entries:
        if entry == "" or str(entry).startswith("#"):
            continue
        if entry in place:
            columns.append(place[entry])
        elif str(entry).isdecimal() and int(entry) < len(classes):
            columns.append(int(entry))
        else:
            raise ValueError(f"{path}: {entry!r} is neither one of the {len(classes)} classes nor the column of one.")
    return LabelMap(path.name, np.array(columns, np.int64), len(classes), tuple(classes[column] for column in columns))
