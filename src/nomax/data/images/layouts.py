"""Data sets as they are published: recognised by their files, and read where they are.

ImageNet, Tiny-ImageNet, and the sets of Wortsman et al.'s few-shot evaluation. CIFAR is in cifar.py. Lists in these
folders are read as text, and no name in them may lead out of the folder.
"""

import csv
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from nomax.data.images import cifar
from nomax.data.images.files import FileSource, FolderSource, Problems, image_names
from nomax.data.source import DataError, Source, part

LARGEST_LIST = 1 << 26  # bytes
PER_CLASS = 30  # training images of Caltech-101, which has no splits of its own
CALTECH = "caltech-101/101_ObjectCategories"  # as its archives unpack
TEST = ("test", "val", "validation")  # the names of a held-out split, where there is only one

_WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Layout:
    """A published data set: the files and folders (NAME/) that are its signs, and the function that reads a split."""

    title: str
    signs: tuple[str, ...]
    read: Callable[[Path, str, str], Source]
    inside: tuple[str, ...] = ()
    """Folders of an archive that people keep around the signs, or take away."""

    def place(self, folder: Path) -> Path | None:
        """Return where in a folder the data set lies, if it does."""
        for place in (folder, *(folder / name for name in self.inside)):
            if all((place / sign).is_dir() if sign[-1] == "/" else (place / sign).is_file() for sign in self.signs):
                return place
        return None


def recognised(folder: Path, split: str, on_error: str = "raise") -> Source | None:
    """Read a split of a data set in the layout in which it is published; None if the folder has none of these."""
    for layout in LAYOUTS:
        place = layout.place(folder)
        if place is None:
            continue
        # A folder of classes is nothing special, even if they have WordNet's numbers.
        if layout.read is not imagenet or (_has_wnids(place / "train") and not _has_wnids(place / "test")):
            return layout.read(place, split, on_error)
    return None


def imagenet(folder: Path, split: str, on_error: str) -> Source:
    """ImageNet: train/WNID/*.JPEG, and val/WNID/*.JPEG or val/*.JPEG with a list of their classes."""
    if _split(split, "ImageNet", ("train", "val")) == "train":
        return FolderSource(folder, "train", on_error)
    if _has_wnids(folder / "val"):
        return FolderSource(folder, "val", on_error)
    classes = sorted(entry.name for entry in os.scandir(folder / "train") if entry.is_dir() and entry.name[0] != ".")
    listing, labels = _imagenet_labels(folder, classes)
    names = image_names(folder / "val")
    if len(names) != len(labels):
        raise DataError(f"{folder / 'val'} has {len(names):,} images, but {listing} lists {len(labels):,}.")
    pairs = [(f"val/{name}", labels.get(Path(name).stem, "not listed")) for name in names]
    return _labelled(folder, pairs, classes, listing, on_error)


def _imagenet_labels(folder: Path, classes: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """Return whichever list is there, and the class of each validation image, by its name without extension."""
    around = [folder, *list(folder.parents)[:3]]
    listing = _first(around, "LOC_val_solution.csv")  # Kaggle's
    if listing is not None:
        rows = csv.DictReader(_lines(listing))
        return listing, {row["ImageId"]: (row.get("PredictionString") or " ").split(" ")[0] for row in rows}
    listing = _first(around, "val.txt")  # Caffe's; classes are counted in the order of their names
    if listing is not None:
        pairs = _table(listing, 2)
        return listing, {Path(name).stem: _at(classes, int(label)) for name, label, *_ in pairs if label.isdigit()}
    listing = _first(around, "imagenet_2012_validation_synset_labels.txt")
    if listing is not None:
        return listing, _in_order(_lines(listing))
    devkit = [*(place / "ILSVRC2012_devkit_t12" / "data" for place in around), *around]
    listing, about = _first(devkit, "ILSVRC2012_validation_ground_truth.txt"), _first(devkit, "meta.mat")
    if listing is not None and about is not None:
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in _matlab(about, "synsets")}
        return listing, _in_order([wnids.get(int(line), line) if line.isdigit() else line for line in _lines(listing)])
    raise DataError(
        f"{folder / 'val'} has images without folders of classes, and no list says what they show. Put one of these "
        f"into {folder}: LOC_val_solution.csv, val.txt, imagenet_2012_validation_synset_labels.txt, or the folder "
        "ILSVRC2012_devkit_t12."
    )


def tiny_imagenet(folder: Path, split: str, on_error: str) -> Source:
    """Tiny-ImageNet: train/WNID/images/*, and val/images/* with val_annotations.txt. Its test images have no labels."""
    if _split(split, "Tiny-ImageNet", ("train", "val")) == "train":
        return FolderSource(folder, "train", on_error)
    listing = folder / "val" / "val_annotations.txt"
    pairs = [(f"val/images/{name}", wnid) for name, wnid, *_ in _table(listing, 2, "\t")]
    return _labelled(folder, pairs, sorted(_lines(folder / "wnids.txt")), listing, on_error)


def birds(folder: Path, split: str, on_error: str) -> Source:
    """Caltech-UCSD Birds 200-2011: four lists, by the number of the image."""
    wanted = {"train": "1", "test": "0"}[_split(split, "Caltech-UCSD Birds", ("train", "test"))]
    names, labels, splits = (
        dict(_table(folder / f"{listing}.txt", 2)) for listing in ("images", "image_class_labels", "train_test_split")
    )
    classes = dict(_table(folder / "classes.txt", 2))
    chosen = [number for number in names if splits.get(number) == wanted]
    pairs = [(f"images/{names[number]}", classes.get(labels.get(number, ""), "")) for number in chosen]
    return _labelled(folder, pairs, list(classes.values()), folder / "image_class_labels.txt", on_error)


def birds_2010(folder: Path, split: str, on_error: str) -> Source:
    """Caltech-UCSD Birds 200, of 2010: lists of the files of each split, in folders named after their classes."""
    listing = folder / "lists" / f"{_split(split, 'Caltech-UCSD Birds', ('train', 'test'))}.txt"
    classes = sorted(entry.name for entry in os.scandir(folder / "images") if entry.is_dir() and entry.name[0] != ".")
    pairs = [(f"images/{name}", name.partition("/")[0]) for name in _lines(listing)]
    return _labelled(folder, pairs, classes, listing, on_error)


def caltech101(folder: Path, split: str, on_error: str) -> Source:
    """Caltech-101: folders of classes. A hash of its name puts 30 images of each class into train, the rest into test.

    The usual splits have as many, but draw them at random.
    """
    wanted = _split(split, "Caltech-101", ("train", "test"))
    whole = FolderSource(folder, "train", on_error)
    keys = [hashlib.sha256(os.fsencode(whole.key(index))).digest() for index in range(len(whole))]
    order = np.array(sorted(range(len(whole)), key=lambda index: (whole.labels[index], keys[index])))
    starts = np.searchsorted(whole.labels[order], np.arange(len(whole.classes)))
    places = np.arange(len(order)) - starts[whole.labels[order]]
    return part(whole, np.sort(order[(places < PER_CLASS) == (wanted == "train")]))


def cars(folder: Path, split: str, on_error: str) -> Source:
    """Stanford Cars: cars_train/*.jpg and cars_test/*.jpg, with MATLAB files that say what they show."""
    wanted = _split(split, "Stanford Cars", ("train", "test"))
    name = "cars_train_annos.mat" if wanted == "train" else "cars_test_annos_withlabels.mat"
    listing = _first([folder / "devkit", folder], name)
    if listing is None:
        raise DataError(f"{folder} has neither devkit/{name} nor {name}, which says what the images show.")
    classes = [str(each) for each in np.atleast_1d(_matlab(folder / "devkit" / "cars_meta.mat", "class_names"))]
    rows = np.atleast_1d(_matlab(listing, "annotations"))
    pairs = [(f"cars_{wanted}/{row['fname']}", _at(classes, int(row["class"]) - 1)) for row in rows]
    return _labelled(folder, pairs, classes, listing, on_error)


def dtd(folder: Path, split: str, on_error: str) -> Source:
    """Describable Textures: images/CLASS/*, and lists of the first of its ten splits."""
    listing = folder / "labels" / f"{_split(split, 'DTD', ('train', 'val', 'test'))}1.txt"
    pairs = [(f"images/{name}", name.partition("/")[0]) for name in _lines(listing)]
    classes = sorted(entry.name for entry in os.scandir(folder / "images") if entry.is_dir() and entry.name[0] != ".")
    return _labelled(folder, pairs, classes, listing, on_error)


def pets(folder: Path, split: str, on_error: str) -> Source:
    """Oxford-IIIT Pets: images/NAME_1.jpg, and lists of names and classes."""
    wanted = {"train": "trainval", "test": "test"}[_split(split, "Oxford-IIIT Pets", ("train", "test"))]
    rows = {each: list(_table(folder / "annotations" / f"{each}.txt", 2)) for each in ("trainval", "test")}
    names = {int(label): name.rpartition("_")[0] for each in rows.values() for name, label, *_ in each}
    classes = [names[number] for number in sorted(names)]
    pairs = [(f"images/{name}.jpg", names[int(label)]) for name, label, *_ in rows[wanted]]
    return _labelled(folder, pairs, classes, folder / "annotations" / f"{wanted}.txt", on_error)


def class_folders(folder: Path, split: str, on_error: str) -> Source:
    """Colorectal Histology and UC Merced: folders of classes without splits, all of them "train"."""
    return FolderSource(folder, split, on_error)


LAYOUTS = (
    Layout("Tiny-ImageNet", ("wnids.txt", "train/", "val/val_annotations.txt"), tiny_imagenet, ("tiny-imagenet-200",)),
    Layout("ImageNet", ("train/", "val/"), imagenet, ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")),
    *(Layout(each.title, each.signs, each.read, each.inside) for each in cifar.KINDS),
    Layout("Birds", ("images.txt", "image_class_labels.txt", "train_test_split.txt"), birds, ("CUB_200_2011",)),
    Layout("Birds of 2010", ("images/", "lists/train.txt", "lists/test.txt"), birds_2010),
    Layout("Caltech-101", ("accordion/", "yin_yang/"), caltech101, ("101_ObjectCategories", CALTECH)),
    Layout("Stanford Cars", ("cars_train/", "devkit/cars_meta.mat"), cars, ("stanford_cars",)),
    Layout("DTD", ("images/", "labels/train1.txt"), dtd, ("dtd",)),
    Layout("Pets", ("images/", "annotations/trainval.txt"), pets, ("oxford-iiit-pet",)),
    Layout("Colorectal Histology", ("01_TUMOR/",), class_folders, ("Kather_texture_2016_image_tiles_5000",)),
    Layout("UC Merced", ("agricultural/", "tenniscourt/"), class_folders, ("Images", "UCMerced_LandUse/Images")),
)


def _split(split: str, title: str, there: tuple[str, ...]) -> str:
    """Return the split's own name. The one that is held out may be called test or val, where there is only one."""
    if split in there:
        return split
    held_out = [name for name in there if name in TEST]
    if split in TEST and len(held_out) == 1:
        return held_out[0]
    raise ValueError(f"split {split!r}: {title} has the splits {', '.join(there)}.")


def _labelled(
    folder: Path, pairs: Sequence[tuple[str, str]], classes: Sequence[str], listing: Path, on_error: str
) -> FileSource:
    """Return the images that a list names, each with its class; what is wrong with them is told by name."""
    numbers, problems = {name: number for number, name in enumerate(classes)}, Problems(on_error)
    root = os.path.realpath(folder)
    names: list[str] = []
    labels: list[int] = []
    for name, label in pairs:
        path = folder / name
        if os.path.isabs(name) or ".." in Path(name).parts:
            problems.add(name, f"{listing} names {name!r}, which leads out of {folder}.")
        elif label not in numbers:
            problems.add(name, f"{listing}: {name} has the class {label!r}, which is none of the {len(classes)} there.")
        elif not path.is_file():
            problems.add(name, f"{listing} names {name}, but there is no file {path}.")
        elif path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            problems.add(name, f"{path} is a symbolic link that leads out of {folder}.")
        else:
            names.append(name)
            labels.append(numbers[label])
    if not names:
        raise DataError(f"{listing} names no images that are in {folder}.")
    source = FileSource(folder, names, labels, classes, on_error)
    source.problems.left_out |= problems.left_out
    return source


def _lines(path: Path) -> list[str]:
    """Return the lines of a list that are not empty."""
    try:
        if path.stat().st_size > LARGEST_LIST:
            raise DataError(f"{path} has more than {LARGEST_LIST:,} bytes.")
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise DataError(f"{path} is missing, which says what the images show.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text: {error}.") from error


def _table(path: Path, columns: int, separator: str | None = None) -> Iterator[Any]:
    """Yield the fields of each line of a list; "#" begins a comment."""
    for number, line in enumerate(_lines(path), 1):
        fields = line.split(separator)
        if line.startswith("#"):
            continue
        if len(fields) < columns:
            raise DataError(f"{path}, line {number}: {line[:80]!r} has {len(fields)} fields; {columns} are expected.")
        yield fields


def _matlab(path: Path, name: str) -> Any:
    """Return a variable of a MATLAB file."""
    try:
        loadmat = import_module("scipy.io").loadmat
    except ImportError as error:
        raise ImportError(f"{path} is a MATLAB file; to read it: pip install scipy") from error
    try:
        return loadmat(str(path), squeeze_me=True, variable_names=[name])[name]
    except FileNotFoundError:
        raise DataError(f"{path} is missing, which says what the images show.") from None
    except Exception as error:  # a damaged one may raise anything
        raise DataError(f"{path} cannot be read: {error}.") from error


def _first(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _in_order(wnids: Sequence[str]) -> dict[str, str]:
    return {f"ILSVRC2012_val_{number:08d}": wnid for number, wnid in enumerate(wnids, 1)}


def _at(classes: Sequence[str], number: int) -> str:
    return classes[number] if 0 <= number < len(classes) else str(number)


def _has_wnids(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(_WNID.fullmatch(entry.name) and entry.is_dir() for entry in entries)
