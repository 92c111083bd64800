"""The prepared form of a data set: a folder with images.npy, labels.npy and meta.json."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax.data.source import ArraySource

# Called with what is being done, how much of it is done, how much there is, and the unit: "bytes" or "images".
Report = Callable[[str, int, int, str], None]


def silent(step: str, done: int, total: int, unit: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Job:
    """What a reader gets: packages to read, and where its arrays go."""

    name: str
    packages: Mapping[str, Path]
    """Verified package files, by package name."""
    folder: Path
    """images.npy and labels.npy go here; the folder is new and empty."""
    work: Path
    """What is put here survives being killed, for the next attempt to go on from."""
    report: Report = silent

    def write(self, images: npt.NDArray[np.uint8], labels: npt.ArrayLike) -> None:
        """Write the two arrays; images go to the disk a part at a time, so they may be mapped from a file."""
        target = np.lib.format.open_memmap(self.folder / "images.npy", "w+", np.uint8, images.shape)
        for start in range(0, len(images), 4096):
            target[start : start + 4096] = images[start : start + 4096]
        target.flush()
        np.save(self.folder / "labels.npy", np.asarray(labels, np.int64))


def open_prepared(folder: Path, split: str) -> ArraySource:
    """One split of the data set in `folder`, its images mapped from the file."""
    meta = read_meta(folder)
    title = f"{meta['name']} ({split})"
    again = f"Remove that folder, then fetch it again: nomax data get {meta['name']}."
    splits = meta.get("splits")
    if not isinstance(splits, dict) or not isinstance(meta.get("classes"), list):
        raise ValueError(f"the data set in {folder} is damaged: its meta.json lacks splits or classes. {again}")
    if split not in splits:
        raise ValueError(f"split {split!r}: {meta['name']} has the splits {', '.join(splits)}.")
    try:
        start, stop = map(int, splits[split])
        images, labels = _mapped(folder / "images.npy"), _mapped(folder / "labels.npy")
        if not len(images) == len(labels) == max(end for _, end in splits.values()):
            raise ValueError(f"images.npy has {len(images)} images, labels.npy {len(labels)} labels")
        return ArraySource(images[start:stop].view(np.ndarray), np.array(labels[start:stop]), meta["classes"], title)
    except (OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"the data set in {folder} is damaged: {error}. {again}") from error


def _mapped(path: Path) -> npt.NDArray[Any]:
    """The array in a file: numpy would allocate what the header claims, however long the file is."""
    with path.open("rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path.name} is not in the format that numpy writes")
        shape, _, kind = np.lib.format.read_array_header_1_0(file)
        if math.prod(shape) * kind.itemsize != os.fstat(file.fileno()).st_size - file.tell():
            raise ValueError(f"{path.name} holds another number of bytes than its header says")
    # Copy on write: torch wants arrays it could write to, and the file stays as it is whatever it does.
    mapped: npt.NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    return mapped


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds a prepared data set."""
    return (folder / "meta.json").is_file() and (folder / "images.npy").is_file()


def read_meta(folder: Path) -> dict[str, Any]:
    """All that meta.json says: name, classes, splits, licence, packages, checksums and the set's own particulars."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or "name" not in meta:
            raise ValueError("it lacks a name")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / 'meta.json'} is damaged: {error}. Remove {folder} and fetch it again.") from error
    return meta


def write_text(path: Path, text: str) -> None:
    """Write a small text file through to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sha256(path: Path, report: Callable[[int], None] = lambda done: None) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            report(done)
    return digest.hexdigest()
