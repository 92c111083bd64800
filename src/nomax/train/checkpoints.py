"""Checkpoints: step-00001000.pt with its SHA-256 beside it. A damaged one is named, and the one before it serves."""

import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from nomax.train import files

_NAME = re.compile(r"step-(\d{8,})\.pt")


class _Hashing:
    """A file that hashes what is written to it. An error waits until torch.save is done, which does not survive one."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256 = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self.file.write(data)
                self.sha256.update(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        if self.error is None:
            try:
                self.file.flush()
            except OSError as error:
                self.error = error


def save(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`. On an error the older ones are as they were."""
    path = folder / f"step-{step:08}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.aside(path) as file:
            hashing = _Hashing(file)
            torch.save(dict(state), hashing)  # type: ignore[arg-type]
            if hashing.error is not None:
                raise hashing.error
            # The hash comes first: once a checkpoint has its name, it can be verified.
            files.write(_hash_file(path), f"{hashing.sha256.hexdigest()}  {path.name}\n")
    except OSError as error:
        if not path.exists():
            _hash_file(path).unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"the checkpoint {path} could not be written: {error.strerror}. The checkpoints before it are intact; "
            "make room, and run the same command again to continue from the newest",
        ) from error
    for old in _all(folder)[:-keep]:
        old.unlink()
        _hash_file(old).unlink(missing_ok=True)
    return path


def newest(folder: Path) -> dict[str, Any] | None:
    """Load the newest checkpoint that is whole, naming on stderr each one that is not. None: there is no checkpoint."""
    found = _all(folder)
    for path in reversed(found):
        trouble = _trouble(path)
        if trouble is None:
            try:
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                return state
            except Exception as error:  # the hash fits, so it was written like this: by something else
                trouble = f"it cannot be read ({error})"
        print(f"nomax: the checkpoint {path} is damaged: {trouble}. Trying the one before it.", file=sys.stderr)
    if found:
        raise ValueError(
            f"no checkpoint in {folder} is whole. Remove the folder of this run to start again from step 0."
        )
    return None


def tidy(folder: Path, step: int) -> None:
    """Before a run goes on from a step: half-written files go, and later checkpoints, which are damaged, step aside."""
    for rest in folder.glob(".step-*.aside"):
        rest.unlink()
    for path in _all(folder):
        if int(path.stem.removeprefix("step-")) > step:
            path.rename(path.with_name(path.name + ".damaged"))
            _hash_file(path).unlink(missing_ok=True)


def _trouble(path: Path) -> str | None:
    try:
        wanted = _hash_file(path).read_text().split()[0]
    except (OSError, IndexError):
        return f"its hash {_hash_file(path).name} is missing"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == wanted else "its SHA-256 is not the one it was written with"


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _all(folder: Path) -> list[Path]:
    """Every checkpoint, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]
