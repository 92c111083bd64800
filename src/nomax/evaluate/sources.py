"""The data sets that a probe is asked about: by name, by place, and the eight of Wortsman et al."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nomax import data
from nomax.data import Source
from nomax.data.source import part


@dataclass(frozen=True)
class PaperSet:
    """One of the eight: what it is, where it comes from unless told otherwise, and how it is split."""

    title: str
    place: str | None = None
    cut: int | None = None
    """Without a test split of its own: so many images are for training, the others for the test."""


PAPER = {
    "birds": PaperSet("Caltech-UCSD Birds 200-2011"),
    "caltech101": PaperSet("Caltech-101 (30 training images per class)"),
    "cars": PaperSet("Stanford Cars", "torchvision:StanfordCars"),
    "cifar100": PaperSet("CIFAR-100", "torchvision:CIFAR100"),
    "dtd": PaperSet("Describable Textures", "torchvision:DTD"),
    "col_hist": PaperSet("Colorectal Histology, 5,000 images", cut=2000),
    "pets": PaperSet("Oxford-IIIT Pets", "torchvision:OxfordIIITPet"),
    "uc_merced": PaperSet("UC Merced land use, 2,100 images", cut=1000),
}


def probe_sets(wanted: Sequence[str]) -> dict[str, tuple[Source, Source]]:
    """The train and test images of data sets given as "NAME" or "NAME=PLACE", where a place is what data.load takes."""
    found: dict[str, tuple[Source, Source]] = {}
    for text in wanted:
        name, _, place = text.partition("=")
        if name in found:
            raise ValueError(f"--on names {name!r} twice.")
        found[name] = _load(name, place)
    return found


def _load(name: str, place: str) -> tuple[Source, Source]:
    known = PAPER.get(name)
    if known is None:
        return _both(name, place or name)
    place = place or known.place or ""
    if not place:
        inside = "PATH/CLASS/*" if known.cut else "PATH/train/CLASS/* and PATH/test/CLASS/*"
        raise ValueError(
            f"{name} ({known.title}) has no source of its own. Give its folder: --on {name}=PATH ({inside})."
        )
    if known.cut is None:
        return _both(name, place)
    # The papers cut the order of TensorFlow Datasets; a folder is in the order of its classes, so it is shuffled first.
    whole = data.load(place, "train")
    order = np.random.default_rng(0).permutation(len(whole))
    if len(order) <= known.cut:
        raise ValueError(
            f"{name} has {len(order)} images in {place}; {known.cut} for training leave none for the test."
        )
    return part(whole, order[: known.cut]), part(whole, order[known.cut :])


def _both(name: str, place: str) -> tuple[Source, Source]:
    train, test = data.load(place, "train"), data.load(place, "test")
    if tuple(train.classes) != tuple(test.classes):
        odd = sorted(set(train.classes) ^ set(test.classes))[:5]
        raise ValueError(f"{name}: its train and test images have different classes: {', '.join(odd) or 'in order'}.")
    return train, test


def first_of_each(source: Source, classes: int, images: int) -> Source:
    """The first images of the first classes: enough to try whether something works."""
    places = [np.flatnonzero(source.labels == label)[:images] for label in range(classes)]
    return part(source, np.concatenate(places))
