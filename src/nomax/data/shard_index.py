"""The index of a tar shard: where each image lies in it and what its label is, so that any image is one read away.

The index is made once and kept beside the shard, or in the cache if that folder cannot be written to. It holds for the
size and the modification time that the shard had.
"""

import hashlib
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nomax.data import images
from nomax.data.images import DataError
from nomax.data.registry import cache_folder

VERSION = 1
LONGEST_NAME = 1024  # bytes of a member's name
LABELS = ("cls", "json")
LARGEST_LABEL = 1 << 20  # bytes of a .cls or .json member


@dataclass(frozen=True)
class Index:
    """The labelled images of one tar file, in the order in which they lie there, and what is wrong with the rest."""

    keys: npt.NDArray[np.bytes_]  # members' names of the images
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32]  # positions in texts
    texts: npt.NDArray[np.bytes_]  # the different labels, as they are written
    problems: npt.NDArray[np.str_]

    def key(self, number: int) -> str:
        """The name of an image in the tar file."""
        return os.fsdecode(bytes(self.keys[number]))


def index(tar: Path) -> Index:
    """The index of a tar file: the one that was saved, if it still holds; else it is made and saved."""
    saved = load(tar)
    if saved is not None:
        return saved
    with _open(tar) as file:
        stamp = _stamp(file)
        made = _build(tar, file, int(stamp[0]))
    _save(tar, made, stamp)
    return made


def load(tar: Path) -> Index | None:
    """The saved index of a tar file; None if there is none that fits it."""
    with _open(tar) as file:
        stamp = _stamp(file)
    for path in _places(tar):
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                if np.array_equal(arrays["stamp"], stamp):
                    found = Index(**{name: arrays[name] for name in Index.__dataclass_fields__})
                    if _is_sound(found, int(stamp[0])):
                        return found
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            continue  # it is made anew
    return None


def _open(tar: Path) -> BinaryIO:
    try:
        return tar.open("rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no shard {tar}.") from None
    except OSError as error:
        raise DataError(f"the shard {tar} cannot be read: {error.strerror}.") from error


def _stamp(file: BinaryIO) -> npt.NDArray[np.int64]:
    status = os.fstat(file.fileno())
    return np.array([status.st_size, status.st_mtime_ns, VERSION])


def _places(tar: Path) -> tuple[Path, Path]:
    digest = hashlib.sha256(os.fsencode(os.path.realpath(tar))).hexdigest()
    return tar.with_name(f"{tar.name}.index.npz"), cache_folder() / "indexes" / f"{digest}.npz"


def _save(tar: Path, made: Index, stamp: npt.NDArray[np.int64]) -> None:
    arrays: dict[str, Any] = {name: getattr(made, name) for name in Index.__dataclass_fields__}
    for place in _places(tar):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write(place, lambda file: np.savez(file, stamp=stamp, **arrays))
            return
        except OSError:
            continue  # without a saved index the next one to come makes it again


def write(path: Path, fill: Any) -> None:
    """Write a file that is complete or not there: `fill` is called with a binary file that becomes it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            fill(file)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # a temporary file is for its owner only
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _is_sound(found: Index, size: int) -> bool:
    """Whether an index that came from a file cannot lead outside of the shard."""
    count = len(found.keys)
    arrays = (found.offsets, found.sizes, found.labels)
    if any(array.shape != (count,) or array.dtype.kind != "i" for array in arrays):
        return False
    if not count:
        return True
    return bool(
        found.offsets.min() >= 0
        and found.sizes.min() >= 0
        and (found.offsets + found.sizes).max() <= size
        and found.labels.min() >= 0
        and found.labels.max() < len(found.texts)
    )


@dataclass
class _Sample:
    """What members with the same key say about one image."""

    name: str | None = None
    offset: int = 0
    size: int = 0
    labels: dict[str, str] = field(default_factory=dict)  # by the extension that held them


def _build(tar: Path, file: BinaryIO, size: int) -> Index:
    samples: dict[str, _Sample] = {}
    problems: list[str] = []
    for member in _members(tar, file, size, problems):
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")  # WebDataset's keys end at the first dot
        extension = extension.lower()
        if reason := _refusal(member, extension):
            problems.append(f"{tar}: the member {_short(member.name)} at offset {member.offset:,} {reason}")
            continue
        if member.isdir() or not stem or not (extension in images.EXTENSIONS or extension in LABELS):
            continue
        key = f"{folder}/{stem}" if folder else stem
        sample = samples.setdefault(key, _Sample())
        if extension in images.EXTENSIONS:
            if sample.name is not None:
                problems.append(
                    f"{tar}: the key {key} has two images, {sample.name} and {member.name}; one is allowed."
                )
                continue
            sample.name, sample.offset, sample.size = member.name, member.offset_data, member.size
        else:
            try:
                text = _label(os.pread(file.fileno(), member.size, member.offset_data), extension)
            except (ValueError, RecursionError) as error:
                problems.append(f"{tar}: {member.name} holds no label: {error}.")
                continue
            if extension in sample.labels:
                problems.append(f"{tar}: the key {key} has two labels in .{extension}; one is allowed.")
            elif text is not None:
                sample.labels[extension] = text

    kept: list[tuple[_Sample, str]] = []
    for key, sample in samples.items():
        label = sample.labels.get("cls", sample.labels.get("json"))
        if sample.name is not None and label is not None:
            kept.append((sample, label))
        elif sample.name is not None:
            problems.append(f'{tar}: {sample.name} has no label; {key}.cls or {key}.json with a "label" must hold it.')
        elif "cls" in sample.labels:
            problems.append(f"{tar}: {key}.cls is a label without an image.")
    texts, labels = np.unique(np.array([os.fsencode(label) for _, label in kept], "S"), return_inverse=True)
    return Index(
        keys=np.array([os.fsencode(sample.name or "") for sample, _ in kept], "S"),
        offsets=np.array([sample.offset for sample, _ in kept], np.int64),
        sizes=np.array([sample.size for sample, _ in kept], np.int64),
        labels=labels.astype(np.int32),
        texts=texts,
        problems=np.array(problems, "U"),
    )


def _members(tar: Path, file: BinaryIO, size: int, problems: list[str]) -> Iterator[tarfile.TarInfo]:
    """The members whose data is complete. A tar file ends in blocks of zeros: if they are missing, it was cut off."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would remember millions of them
                if member.isreg() and member.offset_data + member.size > size:
                    break
                end = archive.offset
                yield member
    except tarfile.TarError:
        pass  # the next check finds where
    file.seek(end)
    if size == 0 or file.read(512).strip(b"\0") or file.tell() - end < 512:
        compressed = " Compressed tar files cannot be read at random: unpack them." if end == 0 and size else ""
        problems.append(f"{tar} is truncated or damaged at offset {end:,} of {size:,} bytes.{compressed}")


def _refusal(member: tarfile.TarInfo, extension: str) -> str | None:
    """Why a member is not used. Nothing is ever unpacked, but such names mean harm to whoever would."""
    if len(os.fsencode(member.name)) > LONGEST_NAME:
        return f"has a name of more than {LONGEST_NAME} bytes."
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "has a name that leads out of its folder."
    if member.isdir() or not (extension in images.EXTENSIONS or extension in LABELS):
        return None
    most = LARGEST_LABEL if extension in LABELS else images.MOST_BYTES
    if member.size > most:
        return f"has {member.size:,} bytes, more than the limit of {most:,}."
    return None if member.isreg() else "is not a regular file."


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:60]}…{name[-19:]}")


def _label(data: bytes, extension: str) -> str | None:
    """The label that a .cls or .json member holds, as text: a number or a class name; a .json may have none."""
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
    return text
