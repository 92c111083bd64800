"""data.load: from a name or a path to a source of images."""

import hashlib
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax._files import did_you_mean
from nomax.data import draws
from nomax.data.arrays import is_prepared, open_prepared, read_meta
from nomax.data.registry import ENTRIES, Entry, TextEntry, cache_folder
from nomax.data.source import DataError, Source, part
from nomax.data.text.entries import TEXTS
from nomax.data.text.load import paths


def load(
    name_or_path: str | os.PathLike[str],
    split: str = "train",
    *,
    root: Path | None = None,
    on_error: str = "raise",
    held_out: float = 0.0,
) -> Source:
    """One split of a data set.

    `name_or_path` is a name (`nomax data list` shows them); a folder of images (PATH/train/CLASS/…, or PATH/CLASS/…
    without splits); shards (a folder of .tar files, or a pattern such as "train-{000000..000009}.tar"); a folder that
    was prepared as the named sets are; "torchvision:NAME", a class of torchvision.datasets; or "hf:NAME", a data set
    of Hugging Face's hub or saved on disk, "hf:NAME#image,label" to name its columns. Where a name is also a folder,
    the name wins: write ./NAME.

    `root` is where named sets are kept, data.cache_folder() if not given. `on_error="skip"` leaves out images of a
    folder or of shards that cannot be read, instead of raising.

    `held_out` is for data without a test split: this share of the training images becomes the split "test", and is
    left out of "train". Whether an image is held out depends on its path in the folder alone (elsewhere on its number),
    not on a seed or on the other images, but for one: each class keeps an image to train on.
    """
    text = os.fspath(name_or_path)
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}.")
    if held_out:
        return _cut(text, split, root, on_error, held_out)
    if text in ENTRIES:
        return _named(ENTRIES[text], split, root)
    if text.startswith(("hf:", "torchvision:")):
        from nomax.data import hub

        kind, _, name = text.partition(":")
        if kind == "hf":
            return hub.huggingface(name, split)
        return hub.torchvision(name, split, (root or cache_folder()) / "torchvision")
    if text in TEXTS:
        raise ValueError(f"{text} is text, not images: nomax.data.text.load({text!r}) reads it.")
    path = Path(text).expanduser()
    if _is_shards(path):
        from nomax.data.shards import ShardSource

        return ShardSource(str(path), split, on_error)
    if is_prepared(path):
        return open_prepared(path, split)
    if path.is_dir():
        from nomax.data.folders import FolderSource

        return FolderSource(path, split, on_error)
    if path.is_file():
        raise ValueError(
            f"{text} is a file. Images are in a folder (PATH/train/CLASS/*.jpg) or in shards (.tar); text is in JSONL "
            "documents (.jsonl) or in two files, FILE,FILE."
        )
    raise FileNotFoundError(_unknown(text))


def located(name_or_path: str) -> str:
    """What `load` or text.load takes, so that it is found from every working directory: paths become absolute.

    Names, "torchvision:NAME" and data sets of the hub stay as they are.
    """
    if name_or_path in ENTRIES or name_or_path in TEXTS or name_or_path.startswith("torchvision:"):
        return name_or_path
    if name_or_path.startswith("hf:"):
        folder, mark, columns = name_or_path[3:].partition("#")
        return f"hf:{_absolute(folder)}{mark}{columns}" if Path(folder).is_dir() else name_or_path
    halves = paths(name_or_path)  # of "FILE,FILE"
    files = halves if all(Path(half).expanduser().is_file() for half in halves) else [name_or_path]
    return ",".join(map(_absolute, files))


def _absolute(text: str) -> str:
    path = Path(text).expanduser().absolute()
    plain = os.path.normpath(path)  # without "..", which is another place where a link is before it
    return plain if os.path.realpath(plain) == os.path.realpath(path) else str(path)


def meta(name: str, root: Path | None = None) -> Mapping[str, Any]:
    """What is known about a fetched data set: classes, splits, licence, packages, checksums, and its own particulars.

    Those of icons are "subset", the labels of the classes with at least 30 images, and "sets", their authors; those of
    text "dropped", what was left out and why, and "rule", by which it was split.
    """
    return read_meta(_folder(entry(name), root))


def entry(name: str) -> Entry | TextEntry:
    """The entry of a data set of images or of text."""
    return ENTRIES.get(name) or TEXTS[known(name)]


def known(name: str) -> str:
    """The name, if there is a data set with it."""
    if name not in ENTRIES and name not in TEXTS:
        names = [*ENTRIES, *TEXTS]
        raise ValueError(f"there is no data set {name!r}{did_you_mean(name, names)} There are {', '.join(names)}.")
    return name


def _cut(text: str, split: str, root: Path | None, on_error: str, share: float) -> Source:
    """What a share holds out of the training images, or what it leaves."""
    if not 0 < share < 1:
        raise ValueError(f"held_out is {share}; it must be a share of the images, above 0 and below 1.")
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: with a held-out share there are 'train' and 'test'.")
    whole = load(text, "train", root=root, on_error=on_error)
    try:
        load(text, "test", root=root, on_error=on_error)
    except DataError:
        raise
    except (ValueError, FileNotFoundError):
        chosen = _held_out(whole, share)
    else:
        raise ValueError(f"{text} has a test split of its own: no share of its training images needs to be held out.")
    if not chosen.any():
        raise ValueError(f"held_out is {share:g}, which holds out none of the {len(whole):,} images of {text}.")
    return part(whole, np.flatnonzero(chosen if split == "test" else ~chosen))


def _held_out(source: Source, share: float) -> npt.NDArray[np.bool_]:
    """Which images are held out: a hash of each decides, so that it stays where it is when others come."""
    if key := getattr(source, "key", None):
        digests = b"".join(hashlib.sha256(os.fsencode(key(i))).digest()[:8] for i in range(len(source)))
        places = np.frombuffer(digests, ">u8") / 2.0**64
    else:
        places = draws.uniform(0, draws.HELD_OUT, np.arange(len(source)))
    last = np.full(len(source.classes), -1.0)
    np.maximum.at(last, source.labels, places)
    found: npt.NDArray[np.bool_] = (places < share) & (places < last[source.labels])
    return found


def _named(entry: Entry, split: str, root: Path | None) -> Source:
    if split not in entry.counts:
        raise ValueError(f"split {split!r}: {entry.name} has the splits {', '.join(entry.counts)}.")
    if entry.packages:
        return open_prepared(_folder(entry, root), split)
    source: Source = import_module(entry.reader).load(split)
    return source


def _folder(entry: Entry | TextEntry, root: Path | None) -> Path:
    folder = (root or cache_folder()) / entry.name
    if not entry.is_prepared(folder):
        raise FileNotFoundError(
            f"{entry.name} is not in {folder.parent} yet. To fetch it ({entry.download / 1e6:,.0f} MB): "
            f"nomax data get {entry.name}"
        )
    return folder


def _is_shards(path: Path) -> bool:
    folders = [path, *(path / split for split in ("train", "val", "validation", "test"))]
    return path.suffix == ".tar" or any(any(folder.glob("*.tar")) for folder in folders)


def _unknown(text: str) -> str:
    hint = did_you_mean(text, [*ENTRIES, *TEXTS])
    return f"{text!r} is neither a file or folder nor the name of a data set{hint} To see the names: nomax data list"
