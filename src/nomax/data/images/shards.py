"""WebDataset tar shards with random access, for data sets of many millions of images."""

import hashlib
import json
import math
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nomax.console import Console, counting
from nomax.data import storage
from nomax.data.images import files, shard_index
from nomax.data.images.files import KNOWN, Problems, split_names
from nomax.data.images.shard_index import Index, Table
from nomax.data.order import Integers
from nomax.data.source import DataError
from nomax.data.storage import PATIENCE, OpenFiles, Patience, Place, RemotePath

MOST_SHARDS = 1_000_000
MOST_NUMBERED = 100_000  # classes without a list of their names: every number up to the largest label is one
LARGEST_LIST = 1 << 26  # bytes of a list of classes
WORTH_PROCESSES = 8  # shards without an index; fewer are read sooner than processes start
WORTH_TABLE = 16  # shards whose indexes are also kept together: each takes some milliseconds to open

_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")


class ShardSource:
    """Images in tar files, as WebDataset writes them: KEY.jpg beside KEY.cls, or beside KEY.json with a "label".

    Shards are all *.tar of a folder, or a pattern such as "train-{000000..000146}.tar". In a folder, a split is a
    subfolder or the beginning of the file names. A label is a number, or a name from classes.json (a list) or
    classes.txt (one a line), which lies beside the shards or one folder above.
    """

    def __init__(
        self,
        shards: str | Path,
        split: str = "train",
        on_error: str = "raise",
        patience: Patience = PATIENCE,
    ):
        self.problems = Problems(on_error)
        self.on_error = on_error
        self.tars = find_shards(shards, split, patience)
        self.title = str(shards)
        names = _read_classes(self.tars[0].parent) or _read_classes(self.tars[0].parent.parent)
        stamps, digest = storage.stamps(self.tars), hashlib.sha256(json.dumps(names).encode()).hexdigest()
        worth_table = len(self.tars) >= WORTH_TABLE
        table = shard_index.saved_table(self.tars, stamps, digest) if worth_table else None
        if table is None:
            table = self._table(names)
            if worth_table and not self.problems.left_out:
                shard_index.save_table(self.tars, stamps, digest, table)
        self.classes: Sequence[str] = names or tuple(str(number) for number in range(table.classes))
        self.labels: Integers = table.labels
        self._starts: list[int] = (np.cumsum(table.counts) - table.counts).tolist()
        self._offsets, self._sizes = table.offsets, table.sizes
        self._files = OpenFiles(patience)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """Read the image file with this number, as it lies in its shard."""
        size = int(self._sizes[index])
        try:
            data = self._files.read(self.tars[self._shard(index)], int(self._offsets[index]), size)
        except OSError as error:
            raise DataError(f"{self.name(index)} cannot be read: {error.strerror or error}.") from error
        if len(data) < size:
            raise DataError(f"{self.name(index)} is cut off: the shard became shorter after it was indexed.")
        return data

    def image(self, index: int) -> Image.Image:
        """Return the image with this number, decoded."""
        return files.decode(self.read(index), files.LazyName(self.name, index))

    def name(self, index: int) -> str:
        """Return the name of this image in errors: its shard and its name there."""
        tar, offset = self.tars[self._shard(index)], int(self._offsets[index])
        try:
            saved = shard_index.saved_index(tar)  # millions of names stay on the disk until one is needed
        except (OSError, DataError):
            saved = None
        numbers = np.flatnonzero(saved.offsets == offset).tolist() if saved else []
        return f"{tar}: {saved.names[numbers[0]]}" if saved and numbers else f"{tar}: the image at offset {offset:,}"

    def __repr__(self) -> str:
        return f"ShardSource({self.title}: {len(self):,} images, {len(self.classes):,} classes)"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": OpenFiles(self._files.patience)}  # another process opens its own

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self._files.close()

    def _shard(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1

    def _table(self, names: Sequence[str] | None) -> Table:
        """Put the indexes of all shards together."""
        indexes = _indexes(self.tars)
        for tar, index in zip(self.tars, indexes, strict=True):
            for number, problem in enumerate(index.problems):
                self.problems.add(f"{tar}, {number}", str(problem))
        classes = names or _numbers(self.tars, indexes)
        by_name = {name: label for label, name in enumerate(classes)}
        chosen = [self._usable(tar, index, by_name) for tar, index in zip(self.tars, indexes, strict=True)]
        labels = np.concatenate([labels for _, labels in chosen])
        if not len(labels):
            raise DataError(f"{self.title}: no labelled images in {len(self.tars)} shards (KEY.jpg and KEY.cls).")
        return Table(
            counts=np.array([len(labels) for _, labels in chosen], np.int64),
            offsets=np.concatenate([i.offsets[numbers] for i, (numbers, _) in zip(indexes, chosen, strict=True)]),
            sizes=np.concatenate([i.sizes[numbers] for i, (numbers, _) in zip(indexes, chosen, strict=True)]),
            labels=labels,
            classes=len(classes),
        )

    def _usable(self, tar: Place, index: Index, by_name: dict[str, int]) -> tuple[Integers, Integers]:
        """Return the images of a shard whose labels are classes, by number, and those labels."""
        table = np.full(len(index.texts) + 1, -1, np.int64)
        for position, text in enumerate(index.texts):
            label = int(text) if _is_number(text) else by_name.get(text, -1)
            table[position] = label if 0 <= label < len(by_name) else -1
        labels = table[index.labels]
        for number in np.flatnonzero(labels < 0).tolist():
            text, name = index.texts[index.labels[number]], f"{tar}: {index.names[number]}"
            self.problems.add(
                name,
                f"{name} has the label {text[:80]!r}, which is none of the "
                f"{len(by_name):,} classes of the classes.json or classes.txt there.",
            )
        numbers = np.flatnonzero(labels >= 0)
        return numbers, labels[numbers]


def find_shards(shards: str | Path, split: str, patience: Patience = PATIENCE) -> list[Place]:
    """Return the tar files of a split: those of a folder, or those that a pattern with {000..123} names."""
    names = split_names(split)
    place = storage.place(str(shards), patience)
    if place.suffix == ".tar" or not place.is_dir():
        return _expand(place, names, patience)
    for name in names:
        if (place / name).is_dir() and (of_split := _tars(place / name)):
            return of_split
    tars = _tars(place)
    for name in names:
        if of_split := [tar for tar in tars if _split_of(tar.name) == name]:
            return of_split
    there = sorted({_split_of(tar.name) for tar in tars} - {""})
    there += [name for name in KNOWN if (place / name).is_dir() and _tars(place / name)]
    if not there and tars and split == "train":
        return tars
    has = f"it has {', '.join(there)}" if there else "its shards name no split" if tars else "there are no *.tar"
    raise FileNotFoundError(
        f"{place} has no shards of the split {split!r}: {has}. Expected: {place / names[0]}/*.tar or {names[0]}-*.tar."
    )


def _tars(folder: Place) -> list[Place]:
    return sorted(folder.glob("*.tar"), key=str)


def _expand(pattern: Place, names: Sequence[str], patience: Patience) -> list[Place]:
    text = str(pattern)
    pieces = _RANGE.split(text)
    ranges = []
    for first, last in zip(pieces[1::3], pieces[2::3], strict=True):
        if int(last) < int(first) or int(last) - int(first) >= MOST_SHARDS:
            raise ValueError(f"{text}: {{{first}..{last}}} must count up, over at most {MOST_SHARDS:,} shards.")
        ranges.append(range(int(first), int(last) + 1))
    if math.prod(map(len, ranges)) > MOST_SHARDS:
        raise ValueError(f"{text} names {math.prod(map(len, ranges)):,} shards; at most {MOST_SHARDS:,} are allowed.")
    numbers = [
        [f"{number:0{len(first)}d}" for number in chosen] for first, chosen in zip(pieces[1::3], ranges, strict=True)
    ]
    literals = pieces[0::3]
    tars = [
        storage.place("".join(part for pair in zip(literals, (*chosen, ""), strict=True) for part in pair), patience)
        for chosen in product(*numbers)
    ]
    # Of remote ones, the first to be asked for its size says so.
    if missing := [tar for tar in tars if isinstance(tar, Path) and not tar.is_file()]:
        raise FileNotFoundError(f"there is no shard {missing[0]} ({len(missing)} of {len(tars)} are missing).")
    split = _split_of(tars[0].name) or "train"
    if split not in names:
        raise FileNotFoundError(
            f"{text} names shards of the split {split!r}, not of {names[0]!r}. Give their folder instead."
        )
    return tars


def _split_of(name: str) -> str:
    """Return the split with which a shard's name begins, if any: train-000000.tar."""
    start = re.split(r"[-_.]", name, maxsplit=1)[0]
    return start if start in KNOWN else ""


def _indexes(tars: Sequence[Place]) -> list[Index]:
    """Return the index of every shard, from the disk or made now, with a bar, on all cores if there are many."""
    indexes = {tar: saved for tar in tars if (saved := shard_index.saved_index(tar)) is not None}
    missing = [tar for tar in tars if tar not in indexes]
    if missing:
        with counting(Console(stderr=True)) as progress:
            task = progress.add_task(f"Indexing {len(missing):,} shards", total=len(missing))
            for tar, index in zip(missing, _build(missing), strict=True):
                indexes[tar] = index
                progress.advance(task)
    return [indexes[tar] for tar in tars]


def _build(tars: Sequence[Place]) -> Iterator[Index]:
    if isinstance(tars[0], RemotePath):  # it is the network that takes the time
        with ThreadPoolExecutor(storage.CONNECTIONS) as threads:
            yield from threads.map(shard_index.index_of, tars)
        return
    processes = min(os.cpu_count() or 1, len(tars) // WORTH_PROCESSES)
    # Other ways to start a process would import the user's script in it again.
    if processes < 2 or "fork" not in get_all_start_methods():
        yield from map(shard_index.index_of, tars)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        try:
            yield from pool.map(shard_index.index_of, tars)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _read_classes(folder: Place) -> tuple[str, ...] | None:
    path = next((place for name in ("classes.json", "classes.txt") if (place := folder / name).is_file()), None)
    if path is None:
        return None
    try:
        if storage.stamps([path])[0][0] > LARGEST_LIST:
            raise ValueError(f"it has more than {LARGEST_LIST:,} bytes")
        data = path.read_bytes(LARGEST_LIST) if isinstance(path, RemotePath) else path.read_bytes()
        text = data.decode("utf-8")
        names = json.loads(text) if path.suffix == ".json" else [n.rstrip("\r") for n in text.split("\n")]
        if path.suffix == ".txt" and names[-1] == "":
            names.pop()
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{path} must hold a list of class names, in the order of their labels.")
    if len(set(names)) < len(names):
        raise DataError(f"{path} names a class twice: {Counter(names).most_common(1)[0][0]!r}.")
    return tuple(names)


def _numbers(tars: Sequence[Place], indexes: Sequence[Index]) -> tuple[str, ...]:
    """Name the classes after their labels, which must all be numbers if there is no list of classes."""
    largest = -1
    for tar, index in zip(tars, indexes, strict=True):
        for text in index.texts:
            if _is_number(text) and int(text) >= MOST_NUMBERED:
                raise DataError(
                    f"{tar}: the label {text} would make {int(text) + 1:,} classes; without a classes.json (a list of "
                    f"names) or classes.txt (one a line) beside the shards there may be {MOST_NUMBERED:,}."
                )
            if not _is_number(text):
                raise DataError(
                    f"{tar}: the label {text[:80]!r} is not a number of a class, and there is no classes.json "
                    "(a list of names) or classes.txt (one a line) beside the shards."
                )
            largest = max(largest, int(text))
    return tuple(str(number) for number in range(largest + 1))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19
