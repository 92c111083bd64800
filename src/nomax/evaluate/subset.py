"""Label-subset accuracy: a head with many classes, asked about a few of them (ImageNet-1k from ImageNet-21k)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nomax import _compat, data

Columns = Tensor | npt.NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True)
class LabelMap:
    """Which column of a large head stands for each class of a smaller set; −1 where none does."""

    name: str
    columns: npt.NDArray[np.int64]
    head: int
    """How many columns the head has."""
    names: tuple[str, ...] = ()
    """What the classes are called, in the order of `columns`."""

    def __post_init__(self) -> None:
        known = self.columns[self.columns >= 0]
        if not len(known) or len(np.unique(known)) != len(known) or known.max() >= self.head:
            raise ValueError(f"the subset {self.name} must name different columns from 0 to {self.head - 1}.")

    @property
    def absent(self) -> list[int]:
        """The classes that the head has no column for: their images count as wrong."""
        return [int(place) for place in np.flatnonzero(self.columns < 0)]


def subset_accuracy(logits: Tensor, labels: Tensor, columns: Columns) -> float:
    """The share of images whose class has the largest logit among the chosen columns.

    logits: [images, head]; columns: one column of the head per class, or −1; labels: places in `columns`.
    """
    if logits.ndim != 2 or len(logits) == 0 or labels.shape != logits.shape[:1]:
        shapes = f"{list(logits.shape)} and {list(labels.shape)}"
        raise ValueError(f"logits and labels have the shapes {shapes}; they must be [images, head] and [images].")
    return int((subset_predictions(logits, columns) == labels.to(logits.device)).sum()) / len(logits)


def subset_predictions(logits: Tensor, columns: Columns) -> Tensor:
    """The place in `columns` of each image's largest logit among them."""
    chosen = torch.as_tensor(columns, dtype=torch.int64, device=logits.device)
    if chosen.ndim != 1 or not len(chosen) or int(chosen.max()) >= logits.shape[1] or int(chosen.min()) < -1:
        raise ValueError(f"columns must hold numbers from 0 to {logits.shape[1] - 1}, or -1 for a class without one.")
    among = logits[:, chosen.clamp(min=0)]
    return among.masked_fill(chosen < 0, -torch.inf).argmax(1)


def named(name: str, classes: Sequence[str]) -> LabelMap:
    """A subset by its name, imagenet1k or icons, or from a file about the classes of a data set."""
    if name in NAMED:
        return NAMED[name]()
    if not Path(name).is_file():
        raise FileNotFoundError(f"--subset {name}: no such file, nor one of the subsets {', '.join(NAMED)}.")
    return from_file(Path(name), classes)


def imagenet_1k_in_21k() -> LabelMap:
    """The 1,000 classes of ImageNet-1k as columns of ImageNet-21k's 21,843, by the WordNet ids that timm carries.

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


def icons() -> LabelMap:
    """The icons' classes with at least 30 drawings, as columns of all of them."""
    meta = data.meta("icons")
    columns = np.array(meta["subset"], np.int64)
    return LabelMap("icons", columns, len(meta["classes"]), tuple(meta["classes"][column] for column in columns))


NAMED = {"imagenet1k": imagenet_1k_in_21k, "icons": icons}


def from_file(path: Path, classes: Sequence[str]) -> LabelMap:
    """A subset in a file: a JSON list, or one per line, of columns or of names of `classes`; # begins a comment."""
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
