"""Files that are complete or not there: written aside, synced to the disk, renamed."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def aside(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that takes its place at the end, if nothing went wrong; otherwise what was there stays."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")  # others may write the same file just now
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(path: Path, content: str | bytes) -> None:
    """Write a file that is complete or not there."""
    with aside(path) as file:
        # What is not UTF-8, such as parts of paths, is spelled as JSON spells it.
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last, even if the power goes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
