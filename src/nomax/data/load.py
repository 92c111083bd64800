"""data.load: from a name or a path to a source of images."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax._files import did_you_mean
from nomax.data.order import HELD_OUT, uniform
from nomax.data.registry import IMAGES, TEXTS, Entry, cache_folder, entry
from nomax.data.source import Source, is_prepared, open_prepared, part, read_meta
from nomax.data.storage import PATIENCE, Patience, RemotePath, is_url, place

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def load(
    name_or_path: str | os.PathLike[str],
    split: str = "train",
    *,
    root: Path | None = None,
    on_error: str = "raise",
    held_out: float = 0.0,
    patience: Patience = PATIENCE,
) -> Source:
    """Load one split of a data set.

    `name_or_path` is a name (`nomax data list` shows them); a folder of images (PATH/train/CLASS/…, or PATH/CLASS/…
    without splits, or the layout in which ImageNet, CIFAR and others are published: docs/data.md lists them); shards (a
    folder of .tar files, or a pattern such as "train-{000000..000009}.tar", or a URL of either that fsspec can read); a
    folder that was prepared as the named sets are; "torchvision:NAME", a class of torchvision.datasets; or "hf:NAME", a
    data set of Hugging Face's hub or saved on disk, "hf:NAME#image,label" to name its columns. Where a name is also a
    folder, the name wins: write ./NAME.

    `root` is where named sets are kept, data.cache_folder() if not given. `on_error="skip"` leaves out images of a
    folder or of shards that cannot be read, instead of raising.

    `held_out` makes this share of the training images the split "test", and leaves it out of "train": for data without
    a test split, or as a validation split that keeps the real one unseen while something is chosen. Whether an image
    is held out depends on its path in the folder alone (elsewhere on its number), not on a seed or on the other images,
    with one exception: each class keeps an image to train on.

    `patience` says how often a read from a shard is tried before it is an error.
    """
    text = os.fspath(name_or_path)
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}.")
    if held_out:
        return _hold_out(text, split, root, on_error, held_out, patience)
    if text in IMAGES:
        return _named(IMAGES[text], split, root)
    if text.startswith(("hf:", "torchvision:")):
        from nomax.data.images import hub

        kind, _, name = text.partition(":")
        if kind == "hf":
            return hub.huggingface(name, split)
        return hub.torchvision(name, split, (root or cache_folder()) / "torchvision")
    if text in TEXTS:
        raise ValueError(f"{text} is text, not images: nomax.data.text.load({text!r}) reads it.")
    path = place(text, patience)
    if isinstance(path, RemotePath) or _is_shards(path):
        from nomax.data.images.shards import ShardSource

        return ShardSource(str(path), split, on_error, patience)
    if is_prepared(path):
        return open_prepared(path, split)
    if path.is_dir():
        from nomax.data.images import layouts
        from nomax.data.images.files import FolderSource

        return layouts.recognised(path, split, on_error) or FolderSource(path, split, on_error)
    if path.is_file():
        raise ValueError(
            f"{text} is a file. Images are in a folder (PATH/train/CLASS/*.jpg) or in shards (.tar); text is in JSONL "
            "documents (.jsonl) or in two files, FILE,FILE."
        )
    raise FileNotFoundError(_unknown(text))


def located(name_or_path: str) -> str:
    """Make a name or path that `load` or text.load takes valid in every working directory: paths become absolute.

    Names, URLs, "torchvision:NAME" and data sets of the hub stay as they are.
    """
    if name_or_path in IMAGES or name_or_path in TEXTS or name_or_path.startswith("torchvision:"):
        return name_or_path
    if is_url(name_or_path):
        return name_or_path
    if name_or_path.startswith("hf:"):
        folder, mark, columns = name_or_path[3:].partition("#")
        return f"hf:{_absolute(folder)}{mark}{columns}" if Path(folder).is_dir() else name_or_path
    halves = paths_of(name_or_path)  # of "FILE,FILE"
    files = halves if all(Path(half).expanduser().is_file() for half in halves) else [name_or_path]
    return ",".join(map(_absolute, files))


def paths_of(given: Paths) -> list[str]:
    """Return a name or path as it is, and a pair of text files, "FILE,FILE", as two paths."""
    if isinstance(given, str | os.PathLike):
        text = os.fspath(given)
        if text in TEXTS or Path(text).expanduser().exists():
            return [text]
        parts = text.split(",")
        # A path may itself have commas: it is cut where both sides are files.
        pairs = [[",".join(parts[:place]), ",".join(parts[place:])] for place in range(1, len(parts))]
        files = [pair for pair in pairs if all(Path(path).expanduser().is_file() for path in pair)]
        return (files or [parts if len(parts) == 2 else [text]])[0]
    several = [os.fspath(path) for path in given]
    if len(several) not in (1, 2):
        raise ValueError(
            f"{len(several)} paths were given; one (a name, a folder or JSONL) or two (text files) are needed."
        )
    return several


def _absolute(text: str) -> str:
    path = Path(text).expanduser().absolute()
    plain = os.path.normpath(path)  # without "..", which leads elsewhere after a symbolic link
    return plain if os.path.realpath(plain) == os.path.realpath(path) else str(path)


def meta(name: str, root: Path | None = None) -> Mapping[str, Any]:
    """Return the facts about a fetched data set: classes, splits, licence, packages, checksums, and its particulars.

    The particulars of icons are "subset", the labels of the classes with at least 30 images, and "sets", their authors;
    those of text are "dropped", what was left out and why, and "rule", by which it was split.
    """
    return read_meta(entry(name).prepared_folder(root))


def _hold_out(text: str, split: str, root: Path | None, on_error: str, share: float, patience: Patience) -> Source:
    """Return the held-out share of the training images (split "test"), or the rest (split "train")."""
    if not 0 < share < 1:
        raise ValueError(f"held_out is {share}; it must be a share of the images, above 0 and below 1.")
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: with a held-out share there are 'train' and 'test'.")
    whole = load(text, "train", root=root, on_error=on_error, patience=patience)
    chosen = _is_held_out(whole, share)
    if not chosen.any():
        raise ValueError(f"held_out is {share:g}, which holds out none of the {len(whole):,} images of {text}.")
    return part(whole, np.flatnonzero(chosen if split == "test" else ~chosen))


def _is_held_out(source: Source, share: float) -> npt.NDArray[np.bool_]:
    """Choose the held-out images: a hash of each decides, so that it stays where it is when others are added."""
    if key := getattr(source, "key", None):
        digests = b"".join(hashlib.sha256(os.fsencode(key(i))).digest()[:8] for i in range(len(source)))
        places = np.frombuffer(digests, ">u8") / 2.0**64
    else:
        places = uniform(0, HELD_OUT, np.arange(len(source)))
    last = np.full(len(source.classes), -1.0)
    np.maximum.at(last, source.labels, places)
    held_out: npt.NDArray[np.bool_] = (places < share) & (places < last[source.labels])
    return held_out


def _named(entry: Entry, split: str, root: Path | None) -> Source:
    if split not in entry.counts:
        raise ValueError(f"split {split!r}: {entry.name} has the splits {', '.join(entry.counts)}.")
    if entry.packages:
        return open_prepared(entry.prepared_folder(root), split)
    source: Source = entry.read(split)
    return source


def _is_shards(path: Path) -> bool:
    folders = [path, *(path / split for split in ("train", "val", "validation", "test"))]
    return path.suffix == ".tar" or any(any(folder.glob("*.tar")) for folder in folders)


def _unknown(text: str) -> str:
    hint = did_you_mean(text, [*IMAGES, *TEXTS])
    return f"{text!r} is neither a file or folder nor the name of a data set{hint} To see the names: nomax data list"
