"""The index of a tar shard: the place and label of each image, so that a single read gets any of them.

The index is made once and kept beside the shard, or in the cache if that folder cannot be written to. It holds for the
size and the modification time that the shard had. A table of all images of many shards is kept in the same way: to open
a thousand indexes takes seconds.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nomax._files import atomic
from nomax.data import storage, tar
from nomax.data.images import files
from nomax.data.images.files import Strings
from nomax.data.registry import cache_folder, make_folder
from nomax.data.source import DataError, npy_header
from nomax.data.storage import Place, RemotePath

VERSION = 2
LONGEST_NAME = 1024  # bytes of a member's name
LABELS = ("cls", "json")
LARGEST_LABEL = 1 << 20  # bytes of a .cls or .json member
MOST_PROBLEMS = 1000  # of a shard that are told one by one
# An index says less than the shard holds of every image: 28 bytes and a name, of two headers of 512. Then problems.
MOST_BEYOND_SHARD = 1 << 24

_STRINGS, _NUMBERS = ("names", "texts", "problems"), ("offsets", "sizes", "labels")


@dataclass(frozen=True)
class Index:
    """The labelled images of one tar file, in the order of the file, and the problems with the rest."""

    names: Strings  # of the images, as the tar file has them
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32]  # positions in texts
    texts: Strings  # the different labels, as they are written
    problems: Strings


@dataclass(frozen=True)
class Table:
    """All labelled images of many shards, shard after shard."""

    counts: npt.NDArray[np.int64]  # of images, per shard
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]  # numbers of classes
    classes: int

    def is_sound(self, shard_sizes: npt.NDArray[np.int64]) -> bool:
        """Return whether a table that came from a file stays inside its shards and classes."""
        count = len(self.labels)
        if not (len(self.counts) == len(shard_sizes) and count == len(self.offsets) == len(self.sizes)):
            return False
        if not count or self.counts.min() < 0 or self.counts.sum() != count:
            return False
        return bool(
            min(self.offsets.min(), self.sizes.min(), self.labels.min()) >= 0
            and self.sizes.max() <= files.MOST_BYTES
            and (self.offsets + self.sizes <= np.repeat(shard_sizes, self.counts)).all()
            and self.labels.max() < self.classes
        )


def saved_table(shards: Sequence[Place], stamps: Sequence[tuple[int, int]], classes: str) -> Table | None:
    """Return the saved table of shards with these stamps and of classes with this digest; None if none fits them."""
    stamp = _table_stamp(shards, stamps, classes)
    most = sum(size for size, _ in stamps) + MOST_BEYOND_SHARD
    for path in _table_places(shards):
        try:
            arrays = _arrays(path, most)
            if np.array_equal(arrays.pop("stamp"), stamp):
                table = Table(**{**arrays, "classes": int(arrays["classes"][0])})  # type: ignore[arg-type]
                if table.is_sound(np.array([size for size, _ in stamps], np.int64)):
                    return table
        except Exception:  # whatever is wrong with it, it is made anew
            continue
    return None


def save_table(shards: Sequence[Place], stamps: Sequence[tuple[int, int]], classes: str, table: Table) -> None:
    """Keep a table for the next time."""
    arrays = {**vars(table), "classes": np.array([table.classes]), "stamp": _table_stamp(shards, stamps, classes)}
    _write(_table_places(shards), arrays)


def _table_stamp(shards: Sequence[Place], stamps: Sequence[tuple[int, int]], classes: str) -> npt.NDArray[np.uint8]:
    named = [(shard.name, *stamp) for shard, stamp in zip(shards, stamps, strict=True)]
    return np.frombuffer(hashlib.sha256(repr((VERSION, classes, named)).encode()).digest(), np.uint8)


def _table_places(shards: Sequence[Place]) -> list[Path]:
    first = shards[0].with_name(f"{shards[0].name}-and-{len(shards) - 1}-more")
    return [place for place in _places(first) if isinstance(place, Path)]


def index_of(shard: Place) -> Index:
    """Return the index of a tar file: the saved one if it still holds, else a new one, which is saved."""
    saved = saved_index(shard)
    if saved is not None:
        return saved
    with _open(shard) as file:
        stamp = _stamp(shard, file)
        made = _build(shard, file, int(stamp[0]))
    _save(shard, made, stamp)
    return made


def saved_index(shard: Place) -> Index | None:
    """Return the saved index of a tar file; None if there is none that fits it."""
    if isinstance(shard, RemotePath):
        stamp = _stamp(shard)
    else:
        with _open(shard) as file:
            stamp = _stamp(shard, file)
    for path in _places(shard):
        try:
            arrays = _arrays(path, int(stamp[0]) + MOST_BEYOND_SHARD)
            if isinstance(path, RemotePath):  # an upload has a modification time of its own
                arrays["stamp"] = np.array([arrays["stamp"][0], stamp[1], arrays["stamp"][2]])
            if np.array_equal(arrays["stamp"], stamp):
                parts: dict[str, Any] = {name: arrays[name] for name in _NUMBERS}
                parts |= {name: Strings.of(arrays[name], arrays[f"{name}_ends"]) for name in _STRINGS}
                saved = Index(**parts)
                if _is_sound(saved, int(stamp[0])):
                    return saved
        except Exception:  # whatever is wrong with it, it is made anew
            continue
    return None


def _arrays(path: Place, most: int) -> dict[str, npt.NDArray[Any]]:
    """Read an .npz file as _write writes it: not compressed, and of at most `most` bytes."""
    arrays = {}
    with io.BytesIO(path.read_bytes(most)) if isinstance(path, RemotePath) else path.open("rb") as file:
        if file.seek(0, os.SEEK_END) > most:
            raise ValueError(f"{path} is larger than {most:,} bytes")
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or max(entry.file_size, entry.compress_size) > most:
                    raise ValueError(f"{path} unpacks to more than it holds")
                arrays[entry.filename.removesuffix(".npy")] = _array(archive.read(entry))
    return arrays


def _array(data: bytes) -> npt.NDArray[Any]:
    """Return the 1-D array of integers in an .npy file. (numpy's reader allocates what the header claims.)"""
    file = io.BytesIO(data)
    shape, kind = npy_header(file, len(data), "the array")
    if kind.kind not in "iu" or len(shape) != 1:
        raise ValueError(f"an array of {kind} and shape {shape}")
    return np.frombuffer(data, kind, offset=file.tell())


def _open(shard: Place) -> BinaryIO:
    try:
        return shard.open(sequential=True) if isinstance(shard, RemotePath) else shard.open("rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no shard {shard}.") from None
    except OSError as error:
        raise DataError(f"the shard {shard} cannot be read: {error.strerror}.") from error


def _stamp(shard: Place, file: BinaryIO | None = None) -> npt.NDArray[np.int64]:
    if isinstance(shard, RemotePath) or file is None:
        return np.array([*storage.stamps([shard])[0], VERSION])
    status = os.fstat(file.fileno())
    return np.array([status.st_size, status.st_mtime_ns, VERSION])


def _places(shard: Place) -> tuple[Place, Path]:
    name = shard.url if isinstance(shard, RemotePath) else os.path.realpath(shard)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()
    return shard.with_name(f"{shard.name}.index.npz"), cache_folder() / "indexes" / f"{digest}.npz"


def _save(shard: Place, made: Index, stamp: npt.NDArray[np.int64]) -> None:
    arrays: dict[str, Any] = {name: getattr(made, name) for name in _NUMBERS}
    for name in _STRINGS:
        arrays |= {name: getattr(made, name).joined, f"{name}_ends": getattr(made, name).ends}
    _write([place for place in _places(shard) if isinstance(place, Path)], {**arrays, "stamp": stamp})


def _write(places: Sequence[Path], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write an .npz file to the first of these places that can be written to."""
    for place in places:
        try:
            make_folder(place.parent)
            with atomic(place) as file:
                os.fchmod(file.fileno(), 0o644)  # whoever can read the shard may use its index
                np.savez(file, **dict(arrays))  # type: ignore[arg-type]
            return
        except OSError:
            continue  # without a saved index the next one to come makes it again


def _is_sound(index: Index, size: int) -> bool:
    """Return whether an index that came from a file stays inside the shard."""
    count = len(index.names)
    if not len(index.offsets) == len(index.sizes) == len(index.labels) == count:
        return False
    if not count:
        return True
    return bool(
        index.offsets.min() >= 0
        and index.offsets.max() <= size
        and index.sizes.min() >= 0
        and index.sizes.max() <= files.MOST_BYTES
        and (index.sizes <= size - index.offsets).all()
        and index.labels.min() >= 0
        and index.labels.max() < len(index.texts)
    )


@dataclass
class _Sample:
    """One image, as the members with the same key describe it."""

    name: str | None = None
    offset: int = 0
    size: int = 0
    labels: dict[str, str] = field(default_factory=dict)  # by the extension that held them


class _Problems(list[str]):
    """The first problems only, so that a shard full of them does not fill the memory."""

    more = 0

    def append(self, text: str) -> None:
        if len(self) < MOST_PROBLEMS:
            super().append(text)
        else:
            self.more += 1


def _build(shard: Place, file: BinaryIO, size: int) -> Index:
    samples: dict[str, _Sample] = {}
    problems = _Problems()
    for member in _members(shard, file, size, problems):
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")  # WebDataset's keys end at the first dot
        extension = extension.lower()
        if reason := _refusal(member, extension):
            problems.append(f"{shard}: the member {_short(member.name)} at offset {member.header:,} {reason}")
            continue
        if member.kind == "folder" or not stem or not (extension in files.EXTENSIONS or extension in LABELS):
            continue
        key = f"{folder}/{stem}" if folder else stem
        sample = samples.setdefault(key, _Sample())
        if extension in files.EXTENSIONS:
            if sample.name is not None:
                problems.append(
                    f"{shard}: the key {key} has two images, {sample.name} and {member.name}; one is allowed."
                )
                continue
            sample.name, sample.offset, sample.size = member.name, member.start, member.size
        else:
            try:
                text = _label(_at(shard, file, member.start, member.size), extension)
            except (ValueError, RecursionError) as error:
                problems.append(f"{shard}: {member.name} holds no label: {error}.")
                continue
            if extension in sample.labels:
                problems.append(f"{shard}: the key {key} has two labels in .{extension}; one is allowed.")
            elif text is not None:
                sample.labels[extension] = text

    kept: list[tuple[_Sample, str]] = []
    for key, sample in samples.items():
        label = sample.labels.get("cls", sample.labels.get("json"))
        if sample.name is not None and label is not None:
            kept.append((sample, label))
        elif sample.name is not None:
            problems.append(
                f'{shard}: {sample.name} has no label; {key}.cls or {key}.json with a "label" must hold it.'
            )
        elif "cls" in sample.labels:
            problems.append(f"{shard}: {key}.cls is a label without an image.")
    texts = {text: position for position, text in enumerate(sorted({label for _, label in kept}))}
    more = [f"{shard}: {problems.more:,} more members have problems."] if problems.more else []
    return Index(
        names=Strings([sample.name or "" for sample, _ in kept]),
        offsets=np.array([sample.offset for sample, _ in kept], np.int64),
        sizes=np.array([sample.size for sample, _ in kept], np.int64),
        labels=np.array([texts[label] for _, label in kept], np.int32),
        texts=Strings(list(texts)),
        problems=Strings([*problems, *more]),
    )


def _at(shard: Place, file: BinaryIO, offset: int, size: int) -> bytes:
    if not isinstance(shard, RemotePath):
        return os.pread(file.fileno(), size, offset)
    file.seek(offset)
    return file.read(size)


def _members(shard: Place, file: BinaryIO, size: int, problems: list[str]) -> Iterator[tar.Member]:
    """Yield the members whose data is complete. A tar file ends in blocks of zeros; without them, it was cut off."""
    end, reason = 0, ""
    try:
        for member in tar.members(file):
            if member.start + member.size > size:
                break
            yield member
            end = member.end
    except tar.DamagedTar as error:
        reason = f": {error}"
    file.seek(end)
    if reason or size == 0 or file.read(tar.BLOCK).strip(b"\0") or file.tell() - end < tar.BLOCK:
        compressed = " Compressed tar files cannot be read at random: unpack them." if end == 0 and size else ""
        problems.append(f"{shard} is truncated or damaged at offset {end:,} of {size:,} bytes{reason}.{compressed}")


def _refusal(member: tar.Member, extension: str) -> str | None:
    """Return why a member is not used, or None. Nothing is ever unpacked, but such names would harm whoever does."""
    if len(os.fsencode(member.name)) > LONGEST_NAME:
        return f"has a name of more than {LONGEST_NAME} bytes."
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "has a name that leads out of its folder."
    if member.kind == "folder" or not (extension in files.EXTENSIONS or extension in LABELS):
        return None
    most = LARGEST_LABEL if extension in LABELS else files.MOST_BYTES
    if member.size > most:
        return f"has {member.size:,} bytes, more than the limit of {most:,}."
    return None if member.kind == "file" else "is not a regular file."


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:60]}…{name[-19:]}")


def _label(data: bytes, extension: str) -> str | None:
    """Return the label in a .cls or .json member as text: a number or a class name; a .json may have none."""
    if extension == "cls":
        text = data.decode("utf-8").strip()
    else:
        value = json.loads(data)
        label = value.get("label") if isinstance(value, dict) else None
        if label is None:
            return None
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise ValueError(f'"label" is {str(label)[:40]}, neither a whole number nor a class name')
        text = str(label).strip()
    if not text or "\0" in text or len(text) > LONGEST_NAME:
        raise ValueError("it must be a number or a class name")
    os.fsencode(text)  # raises ValueError for half a character, which JSON can spell
    return text
