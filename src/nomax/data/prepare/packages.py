"""The tools of a reader: members of its packages, and the job, which writes the prepared files.

Members are read into memory by name; nothing is unpacked onto the disk. Every package has a known checksum, but readers
are also run on untrusted packages, so one that unpacks to far more than data sets hold is an error.
"""

import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from nomax.data import tar
from nomax.data.registry import TEXT_SPLITS

if TYPE_CHECKING:
    from nomax.data.text.corpus import Document

LARGEST_MEMBER = 1 << 28  # bytes; the largest that any entry of the registry reads has 103 MB
MOST_TIMES, MOST_SPARE = 64, 1 << 26  # all members may have so many times a package's size, and bytes; icons' have 5
LARGEST_DICTIONARY = 1 << 27  # bytes that xz may ask for; its strongest setting takes 65 MB

_MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\0": ".xz"}
_CHUNK = 1 << 16
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tar.DamagedTar)


# Called with what is being done, how much of it is done, how much there is, and the unit: "bytes" or "images".
Report = Callable[[str, int, int, str], None]


def silent(step: str, done: int, total: int, unit: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Job:
    """The packages that a reader prepares, and the folders that it writes to."""

    name: str
    packages: Mapping[str, Path]
    """Verified package files, by package name."""
    folder: Path
    """The prepared files go here; the folder is new and empty."""
    scratch: Path
    """Files here survive a kill, so that the next attempt resumes from them."""
    report: Report = silent

    def write_images(self, images: npt.NDArray[np.uint8], labels: npt.ArrayLike) -> None:
        """Write the two arrays; images go to the disk a part at a time, so they may be mapped from a file."""
        target = np.lib.format.open_memmap(self.folder / "images.npy", "w+", np.uint8, images.shape)
        for start in range(0, len(images), 4096):
            target[start : start + 4096] = images[start : start + 4096]
        target.flush()
        np.save(self.folder / "labels.npy", np.asarray(labels, np.int64))

    def write_documents(
        self,
        documents: Iterable[tuple[str, "Document"]],
        languages: tuple[str, str],
        *,
        dropped: Mapping[str, int],
        rule: str,
    ) -> dict[str, Any]:
        """Write each document into the file of its split, and return what meta.json says about them.

        A split keeps the order in which its documents come. `dropped` counts what was left out, by reason; `rule` says
        how the documents were split.
        """
        from nomax.data.text.corpus import write_jsonl

        splits: dict[str, list[Document]] = {split: [] for split in TEXT_SPLITS}
        for split, document in documents:
            splits[split].append(document)
        for split, chosen in splits.items():
            if not chosen:
                raise ValueError(f"{self.name}: the packages hold no documents for the split {split!r}.")
            write_jsonl(self.folder / f"{split}.jsonl", chosen, languages)
        return {
            "languages": list(languages),
            "counts": {split: sum(len(document.pairs) for document in chosen) for split, chosen in splits.items()},
            "documents": {split: len(chosen) for split, chosen in splits.items()},
            "dropped": dict(dropped),
            "rule": rule,
        }


def members(file: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the wanted regular files in a package, in their order."""
    if file.suffix == ".whl":
        yield from _zipped(file, wanted)
        return
    with file.open("rb") as raw:
        limit = MOST_TIMES * file.stat().st_size + MOST_SPARE
        stream: BinaryIO = _deb_data(raw, file) if file.suffix == ".deb" else raw
        start = stream.read(6)
        stream.seek(0)
        suffix = next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")
        content = _Forward(_opened(stream, suffix), limit, str(file))
        try:
            for member in tar.members(content):
                name = member.name.removeprefix("./")
                if member.kind != "file" or not wanted(name):
                    continue
                _check_size(file, name, member.size)
                content.seek(member.start)
                data = content.read(member.size)
                if len(data) < member.size:
                    raise EOFError(f"it ends inside of {name}")
                yield name, data
        except _BROKEN as error:
            raise ValueError(f"{file} cannot be read as a package: {error}.") from error


def _zipped(file: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.is_dir() or not wanted(member.filename):
                    continue
                _check_size(file, member.filename, member.file_size)  # no more than that is read, whatever follows
                yield member.filename, archive.read(member)
    except (*_BROKEN, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{file} cannot be read as a package: {error}.") from error


def _check_size(file: Path, name: str, size: int) -> None:
    if size > LARGEST_MEMBER:
        raise ValueError(f"{file}: {name} has {size:,} bytes, more than the allowed {LARGEST_MEMBER:,}.")


def matching(file: Path, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], bytes]]:
    """Yield the contents of the members whose whole names match a pattern, with the matches."""
    for name, data in members(file, lambda name: pattern.fullmatch(name) is not None):
        if match := pattern.fullmatch(name):
            yield match, data


def unpack(data: bytes, suffix: str, title: str, most: int = LARGEST_MEMBER) -> bytes:
    """Unpack a member that is compressed itself, .gz or .xz; with another suffix it is returned as it is."""
    try:
        return _Forward(_opened(io.BytesIO(data), suffix), most, title).read(most + 1)
    except _BROKEN as error:
        raise ValueError(f"{title} cannot be read: {error}.") from error


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _opened(raw: BinaryIO, suffix: str) -> _Reader:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    return _XZ(raw) if suffix == ".xz" else raw


class _Forward:
    """A file that is read only forwards, up to a limit."""

    def __init__(self, file: _Reader, limit: int, title: str):
        self._file, self._limit, self._title = file, limit, title
        self._place = 0

    def read(self, size: int, /) -> bytes:
        parts = []
        while size and (part := self._file.read(min(size, 1 << 20))):
            parts.append(part)
            size -= len(part)
            self._place += len(part)
            if self._place > self._limit:
                raise ValueError(
                    f"{self._title} unpacks to more than {self._limit:,} bytes, far more than it should hold. "
                    "It may be made to exhaust the memory."
                )
        return b"".join(parts)

    def seek(self, offset: int, /) -> None:
        while self._place < offset and self.read(min(offset - self._place, 1 << 20)):
            pass


class _XZ:
    """An .xz file. (lzma's own has no limit on the dictionary, and a header may ask for 4 GB.)"""

    def __init__(self, raw: BinaryIO):
        self._raw = raw
        self._decoder = self._new()
        self._waiting = b""

    def read(self, size: int, /) -> bytes:
        output = b""
        while not output and not (self._decoder.eof and self._ended()):
            data = b""
            if self._decoder.needs_input:
                data, self._waiting = self._waiting or self._raw.read(_CHUNK), b""
                if not data:
                    raise EOFError("it is cut off")
            output = self._decoder.decompress(data, size)
        return output

    def _ended(self) -> bool:
        """Return whether no further stream follows; zeros may stand between streams."""
        rest = self._decoder.unused_data.lstrip(b"\0")
        while not rest:
            if not (more := self._raw.read(_CHUNK)):
                return True
            rest = more.lstrip(b"\0")
        self._decoder, self._waiting = self._new(), rest
        return False

    @staticmethod
    def _new() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, LARGEST_DICTIONARY)


def _deb_data(raw: BinaryIO, file: Path) -> BinaryIO:
    """Return the tar archive inside a .deb, which is an `ar` archive of three files."""
    if raw.read(8) != b"!<arch>\n":
        raise ValueError(f"{file} is not a Debian package.")
    while header := raw.read(60):
        name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), header[48:58].strip()
        if not size.isdigit() or int(size) > file.stat().st_size:
            raise ValueError(f"{file} is damaged: {name} has {size!r} bytes.")
        if name.startswith("data.tar"):
            if name.endswith(".zst"):
                raise ValueError(f"{file}: {name} is compressed with zstd, which this reader does not know.")
            return io.BytesIO(raw.read(int(size)))
        raw.seek(int(size) + int(size) % 2, io.SEEK_CUR)
    raise ValueError(f"{file} is a Debian package without data.")
