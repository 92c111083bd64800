"""Members of a package, read into memory by name: nothing is unpacked onto the disk.

Every package has a known checksum, but readers are also run on packages that nobody vouches for. So what unpacks to far
more than data sets hold is an error before it is in memory: see the limits below.
"""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from nomax.data import tar

LARGEST_MEMBER = 1 << 28  # bytes; the largest that any entry of the registry reads has 50 MB
MOST_TIMES, MOST_SPARE = 64, 1 << 26  # all members may have so many times a package's size, and bytes; icons' have 5
LARGEST_DICTIONARY = 1 << 27  # bytes that xz may ask for; its strongest setting takes 65 MB

_MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\0": ".xz"}
_CHUNK = 1 << 16
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tar.DamagedTar)


def members(file: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the wanted regular files in an npm package or a .deb, in their order."""
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
                if member.size > LARGEST_MEMBER:
                    raise ValueError(
                        f"{file}: {name} has {member.size:,} bytes, more than the allowed {LARGEST_MEMBER:,}."
                    )
                content.seek(member.start)
                data = content.read(member.size)
                if len(data) < member.size:
                    raise EOFError(f"it ends inside of {name}")
                yield name, data
        except _BROKEN as error:
            raise ValueError(f"{file} cannot be read as a package: {error}.") from error


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
    """A file that is read in one direction, and not beyond a limit."""

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
