"""The leaf below every layer: atomic files, plain JSON, and suggestions for misspelt names."""

import dataclasses
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

# Unfinished files of this module and of earlier versions, and folders in which models were assembled.
_LEFTOVER = re.compile(r"\..*\.aside|\.vocabulary\.model\.\d+|\.saving-.*")


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` when the block ends well; otherwise what was there stays.

    The content is synced to the disk before the rename, so that a power cut leaves the old file or the new one.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")  # others may be writing the same file
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
    """Write a file atomically, and create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        # What is not UTF-8, such as parts of paths, is spelled as JSON spells it.
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left unfinished in a folder. Nobody else may be writing there."""
    for path in folder.glob(".*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def to_json(content: Any) -> str:
    """Return plain data and dataclasses as JSON. Numbers that are not finite, which JSON lacks, become null."""
    return json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; see `to_json`."""
    write(path, to_json(content))


def read_json(path: Path, advice: str) -> Any:
    """Read a JSON file; if it is damaged, a ValueError names it and ends with the advice."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. {advice}") from error
    except RecursionError:
        raise ValueError(f"{path} is damaged: it is nested too deeply. {advice}") from None
    except ValueError as error:  # also what is not UTF-8
        raise ValueError(f"{path} is damaged: {error}. {advice}") from None


def did_you_mean(name: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a sentence: "; did you mean NAME?" with the nearest name, or "." if none is near."""
    folded = {known.casefold(): known for known in names}
    nearest = get_close_matches(str(name).casefold(), folded, n=1, cutoff=cutoff)
    return f"; did you mean {folded[nearest[0]]}?" if nearest else "."


def _plain(content: Any) -> Any:
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        return _plain({field.name: getattr(content, field.name) for field in dataclasses.fields(content)})
    if isinstance(content, Mapping):
        return {str(name): _plain(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
