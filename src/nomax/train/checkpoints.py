"""Checkpoints: step-00001000.pt with its SHA-256 beside it. A damaged one is reported, and the one before it used.

A folder step-00001000 is a sharded checkpoint, which nomax.train.sharded writes and reads.
"""

import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch

from nomax import _files

_NAME = re.compile(r"step-(\d{8,})(\.pt)?")

# What the training loop writes; "average" is None where no average of the weights is kept.
_FIELDS = {"step": int, "units": int, "seconds": float, "config": str, "model": dict, "optimiser": dict}


class _Hashing:
    """A file that hashes what is written to it. It holds errors back until torch.save, which cannot take any, ends."""

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
    """Write a checkpoint, then remove all but the newest `keep`. On an error the older ones stay as they were."""
    path = folder / name(step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _files.atomic(path) as file:
            hashing = _Hashing(file)
            torch.save(dict(state), hashing)  # type: ignore[arg-type]
            if hashing.error is not None:
                raise hashing.error
            # The hash comes first: once a checkpoint has its name, it can be verified.
            _files.write(_hash_file(path), f"{hashing.sha256.hexdigest()}  {path.name}\n")
    except OSError as error:
        if not path.exists():
            _hash_file(path).unlink(missing_ok=True)
        raise not_written(path, error) from error
    prune(folder, keep)
    return path


def not_written(path: Path, error: OSError) -> OSError:
    """Return the error of a checkpoint that could not be written, with what to do."""
    return OSError(
        error.errno,
        f"the checkpoint {path} could not be written: {error.strerror or error}. The checkpoints before it are intact; "
        "make room, and run the same command again to continue from the newest",
    )


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`."""
    for old in _all(folder)[:-keep]:
        if not _is_sharded(old):
            for each in (old, _hash_file(old)):
                if not each.is_dir():  # a folder is none of ours
                    each.unlink(missing_ok=True)
        elif not old.is_symlink():
            # It loses its name first: a kill in between must not leave half a checkpoint with a name.
            shutil.rmtree(old.rename(old.with_name(f".{old.name}.{secrets.token_hex(4)}.aside")))


def name(step: int, sharded: bool = False) -> str:
    """Return the name of the checkpoint of a step: a file, or a folder of shards."""
    return f"step-{step:08}" + ("" if sharded else ".pt")


def newest(folder: Path, *, with_shards: bool = True) -> dict[str, Any] | None:
    """Load the newest intact checkpoint, naming damaged ones on stderr. Return None if there is no checkpoint.

    Its "path" is added. Of a sharded one, the tensors are read only `with_shards`: ranks read their own.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; it must be the folder of a run's checkpoints. Move it away.")
    paths = _all(folder)
    for path in reversed(paths):
        trouble = None if _is_sharded(path) else _trouble(path)
        if trouble is None:
            try:
                state = _loaded(path, with_shards)
                trouble = _oddity(state, _step(path))
            except Exception as error:  # the hash fits, so it was written like this: by something else
                trouble = f"it cannot be read ({error})"
        if trouble is None:
            return {**state, "path": path}
        print(f"nomax: the checkpoint {path} is damaged: {trouble}. Trying the one before it.", file=sys.stderr)
    if paths:
        raise ValueError(
            f"no checkpoint in {folder} is whole. Remove the folder of this run to start again from step 0."
        )
    return None


def tidy(folder: Path, step: int) -> None:
    """Move later checkpoints, which are damaged, aside before a run resumes from a step."""
    for path in _all(folder):
        if _step(path) > step:
            for each in [path] if _is_sharded(path) else [path, _hash_file(path)]:
                if os.path.lexists(each):
                    each.rename(_free(each.with_name(each.name + ".damaged")))


def _is_sharded(path: Path) -> bool:
    return path.suffix != ".pt"


def _loaded(path: Path, with_shards: bool) -> Any:
    if not _is_sharded(path):
        return torch.load(path, map_location="cpu", weights_only=True)
    from nomax.train import sharded  # it brings in all of torch.distributed

    state = sharded.state_of(path)  # its hashes come first
    tensors = sharded.read(path) if with_shards else {"model": {}, "optimiser": {}, "average": None}
    return {**state, **tensors}


def _trouble(path: Path) -> str | None:
    try:
        wanted = _hash_file(path).read_bytes().split()[0]
    except (OSError, IndexError):
        return f"its hash {_hash_file(path).name} is missing or cannot be read"
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None if digest.encode() == wanted else "its SHA-256 is not the one it was written with"


def _oddity(state: Any, step: int) -> str | None:
    """Return what an undamaged checkpoint lacks, in words, if anything: then something else wrote it."""
    if not isinstance(state, dict):
        return f"it holds a {type(state).__name__}, not the state of a run"
    for field, kind in _FIELDS.items():
        if not isinstance(state.get(field), kind) or isinstance(state[field], bool):
            return f"it has no {field!r}, or one of another kind"
    weights = [state["model"], state.get("average") or {}]
    if not all(isinstance(each, dict) and all(map(torch.is_tensor, each.values())) for each in weights):
        return "its weights are no tensors"
    return None if state["step"] == step else f"it says that it is of step {state['step']}"


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _free(path: Path) -> Path:
    """Return the path itself, or a similar one that does not exist yet."""
    names = (path.with_name(f"{path.name}{number or ''}") for number in count())
    return next(name for name in names if not os.path.lexists(name))


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _all(folder: Path) -> list[Path]:
    """List every checkpoint, oldest first."""
    numbered = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]
