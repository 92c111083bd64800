"""Read an untrusted tar file: whatever a header says is checked before it is used.

Python's tarfile loops for ever on a negative size, reads an extended header of any size into memory, and raises
undocumented errors (IndexError, RecursionError) on other damage.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

BLOCK = 512
LARGEST_HEADER = 1 << 16  # bytes of an extended header; those of a long name have a few hundred

_FILES, _FOLDER, _WITHOUT_DATA = (b"0", b"\0", b"7"), b"5", (b"1", b"2", b"3", b"4", b"5", b"6")
_LONG_NAME, _LONG_LINK, _PAX, _OF_ALL, _SPARSE = b"L", b"K", (b"x", b"X"), b"g", b"S"


class Readable(Protocol):
    """A binary file, perhaps readable only forwards."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, fewer only at the end."""

    def seek(self, offset: int, /) -> object:
        """Move forwards to a place."""


class DamagedTar(ValueError):
    """A header is damaged, so that what follows cannot be located."""


@dataclass(frozen=True)
class Member:
    """One member: its name and kind, and where its header and its data begin."""

    name: str
    kind: Literal["file", "folder", "other"]
    size: int
    header: int
    start: int

    @property
    def end(self) -> int:
        """The place of the next header."""
        return self.start + _blocks(self.size)


def members(file: Readable) -> Iterator[Member]:
    """Yield the members in their order, up to the first block of zeros or the end of the file.

    Their data may be missing, if the file is cut off. Raises DamagedTar at a damaged header.
    """
    place = header = 0
    name: bytes | None = None
    records: dict[bytes, bytes] = {}
    while len(block := _read(file, place, BLOCK)) == BLOCK and block.strip(b"\0"):
        if _number(block[148:156]) not in _checksums(block):
            raise DamagedTar("a header has another checksum than it says")
        kind, size, place = block[156:157], _number(block[124:136]), place + BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, *_PAX, _OF_ALL):
            if size > LARGEST_HEADER:
                raise DamagedTar(f"an extended header has {size:,} bytes, more than the limit of {LARGEST_HEADER:,}")
            data = _read(file, place, size)
            if kind == _LONG_NAME:
                name = data.partition(b"\0")[0]
            elif kind in _PAX:
                records = _records(data)
            place += _blocks(size)
            continue
        if kind == _SPARSE:
            extended = block[482]
            while extended:
                more = _read(file, place, BLOCK)
                extended = more[504] if len(more) == BLOCK else 0
                place += BLOCK
        if b"size" in records:
            size = _decimal(records[b"size"])
        if kind in _WITHOUT_DATA:
            size = 0
        path = records.get(b"path", name if name is not None else _path(block))
        sparse = any(key.startswith(b"GNU.sparse") for key in records)
        folder = kind == _FOLDER or (kind == b"\0" and path.endswith(b"/"))
        what: Literal["file", "folder", "other"] = "folder" if folder else "file" if kind in _FILES else "other"
        member = Member(os.fsdecode(path.rstrip(b"/")), "other" if sparse else what, size, header, place)
        yield member
        place = header = member.end
        name, records = None, {}


def _read(file: Readable, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _path(block: bytes) -> bytes:
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    # GNU's own format has other fields where POSIX has the prefix.
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _checksums(block: bytes) -> tuple[int, int]:
    """Return the sum of a header's bytes, its own field taken for spaces; some writers took the bytes for signed."""
    others = block[:148] + b" " * 8 + block[156:]
    total = sum(others)
    return total, total - 256 * sum(byte > 127 for byte in others)


def _number(field: bytes) -> int:
    """Read a number in octal digits, or, if the first bit is set, in binary."""
    if field[0] & 0x80:
        if field[0] & 0x40:
            raise DamagedTar("a header has a negative number")
        number = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        if number >= 1 << 62:
            raise DamagedTar(f"a header has the number {number:,}")
        return number
    text = field.partition(b"\0")[0].strip()
    if text.strip(b"01234567"):
        raise DamagedTar(f"a header has the number {text!r}")
    return int(text or b"0", 8)


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 18:
        raise DamagedTar(f"a header has the size {text[:40]!r}")
    return int(text)


def _records(data: bytes) -> dict[bytes, bytes]:
    """Read the records of a pax header: a length in bytes, which counts the whole record, a key and a value."""
    records, place = {}, 0
    while place < len(data):
        length, space, _ = data[place : place + 12].partition(b" ")
        size = _decimal(length)
        record = data[place + len(length) + 1 : place + size]
        key, equals, value = record.partition(b"=")
        if not space or not equals or len(record) != size - len(length) - 1 or not value.endswith(b"\n"):
            raise DamagedTar("an extended header holds something else than records")
        records[key] = value[:-1]
        place += size
    return records
