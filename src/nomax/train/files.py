"""Files that are complete or not there: written aside, synced to the disk, renamed."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

# Files of this module, of vocabularies, and the folders in which models are made.
_LEFTOVER = re.compile(r"\..*\.aside|\.vocabulary\.model\.\d+|\.saving-.*")


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


def read_json(path: Path, advice: str) -> Any:
    """What a JSON file holds; one that cannot be read is a ValueError that names it, and ends with advice."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. {advice}") from error
    except RecursionError:
        raise ValueError(f"{path} is damaged: it is nested too deeply. {advice}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {advice}") from None


def remove_leftovers(folder: Path) -> None:
    """Remove what writing left unfinished in a folder when it was killed. Nobody else may be writing there."""
    for path in folder.glob(".*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last, even if the power goes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
