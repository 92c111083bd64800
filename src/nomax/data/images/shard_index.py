"""The index of a tar shard: the place and label of each image, so that a single read gets any of them.

The index is made once and kept beside the shard, or in the cache if that folder cannot be written to. It holds for the
size and the modification time that the shard had.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nomax._files import atomic
from nomax.data import tar
from nomax.data.images import files
from nomax.data.images.files import Strings
from nomax.data.registry import cache_folder, make_folder
from nomax.data.source import DataError, npy_header

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


def index_of(shard: Path) -> Index:
    """Return the index of a tar file: the saved one if it still holds, else a new one, which is saved."""
    saved = saved_index(shard)
    if saved is not None:
        return saved
    with _open(shard) as file:
        stamp = _stamp(file)
        made = _build(shard, file, int(stamp[0]))
    _save(shard, made, stamp)
    return made


def saved_index(shard: Path) -> Index | None:
    """Return the saved index of a tar file; None if there is none that fits it."""
    with _open(shard) as file:
        stamp = _stamp(file)
    for path in _places(shard):
        try:
            arrays = _arrays(path, int(stamp[0]) + MOST_BEYOND_SHARD)
            if np.array_equal(arrays["stamp"], stamp):
                parts: dict[str, Any] = {name: arrays[name] for name in _NUMBERS}
                parts |= {name: Strings.of(arrays[name], arrays[f"{name}_ends"]) for name in _STRINGS}
                saved = Index(**parts)
                if _is_sound(saved, int(stamp[0])):
                    return saved
        except Exception:  # whatever is wrong with it, it is made anew
            continue
    return None


def _arrays(path: Path, most: int) -> dict[str, npt.NDArray[Any]]:
    """Read an .npz file as _save writes it: not compressed, and of at most `most` bytes."""
    arrays = {}
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > most:
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


def _open(shard: Path) -> BinaryIO:
    try:
        return shard.open("rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no shard {shard}.") from None
    except OSError as error:
        raise DataError(f"the shard {shard} cannot be read: {error.strerror}.") from error


def _stamp(file: BinaryIO) -> npt.NDArray[np.int64]:
    status = os.fstat(file.fileno())
    return np.array([status.st_size, status.st_mtime_ns, VERSION])


def _places(shard: Path) -> tuple[Path, Path]:
    digest = hashlib.sha256(os.fsencode(os.path.realpath(shard))).hexdigest()
    return shard.with_name(f"{shard.name}.index.npz"), cache_folder() / "indexes" / f"{digest}.npz"


def _save(shard: Path, made: Index, stamp: npt.NDArray[np.int64]) -> None:
    arrays: dict[str, Any] = {name: getattr(made, name) for name in _NUMBERS}
    for name in _STRINGS:
        arrays |= {name: getattr(made, name).joined, f"{name}_ends": getattr(made, name).ends}
    for place in _places(shard):
        try:
            make_folder(place.parent)
            with atomic(place) as file:
                os.fchmod(file.fileno(), 0o644)  # whoever can read the shard may use its index
                np.savez(file, stamp=stamp, **arrays)
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


def _build(shard: Path, file: BinaryIO, size: int) -> Index:
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
                text = _label(os.pread(file.fileno(), member.size, member.start), extension)
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


def _members(shard: Path, file: BinaryIO, size: int, problems: list[str]) -> Iterator[tar.Member]:
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
