"""Sharded checkpoints: a folder step-00001000/ to which every rank writes its share, and which any number can read.

torch.distributed.checkpoint (DCP) writes and reads them, as safetensors: DCP's own format keeps a pickle beside the
tensors. state.json, written last, has the rest and a SHA-256 of each file; then the folder gets its name.
"""

import hashlib
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from nomax import _files
from nomax.train.distributed import World

STATE = "state.json"
FILES = "*.safetensors"

Tensors = dict[str, Tensor]


def tensors(model: nn.Module, optimiser: Optimizer, average: nn.Module | None) -> tuple[Tensors, dict[str, Any]]:
    """Return all tensors of a run's state, shards where they are sharded, by name, and the optimiser's whole state.

    The names are model/NAME, average/NAME, and optimiser/exp_avg/NAME and the like. Learning rates and other settings
    of the optimiser are not among them: they follow from the config.
    """
    flat: dict[str, Any] = {f"model/{name}": tensor for name, tensor in states.get_model_state_dict(model).items()}
    if average is not None:
        flat |= {f"average/{name}": tensor for name, tensor in states.get_model_state_dict(average).items()}
    of_optimiser: Any = states.get_optimizer_state_dict(model, optimiser)
    for name, moments in of_optimiser["state"].items():
        flat |= {f"optimiser/{kind}/{name}": tensor for kind, tensor in moments.items()}
    return flat, of_optimiser


def save(path: Path, state: Mapping[str, Any], tensors: Tensors, world: World) -> None:
    """Write a checkpoint; every rank takes part. On an error, which every rank gets, nothing has this name."""
    aside = world.from_leader(path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside"))
    try:
        aside.mkdir(parents=True, exist_ok=True)
        writer = HuggingFaceStorageWriter(str(aside), save_distributed=True)
        with _alone(world) as alone:
            state_dict_saver.save(tensors, storage_writer=writer, no_dist=alone)
    except CheckpointException as error:
        if world.leads:
            shutil.rmtree(aside, ignore_errors=True)
        raise _first_failure(error) from error
    mine = {file.name: _sha256(file) for file in aside.glob(f"shard-{world.rank + 1:05d}-{FILES}")}
    digests = {name: digest for each in world.gather(mine) for name, digest in each.items()}
    failure: OSError | None = None
    if world.leads:
        try:
            _files.write_json(aside / STATE, {**state, "sha256": digests})
            os.replace(aside, path)
            _files.sync_folder(path.parent)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            failure = error
    failure = world.from_leader(failure)
    if failure is not None:
        raise failure


def state_of(path: Path) -> dict[str, Any]:
    """Return what state.json says; a ValueError says what is damaged, in words."""
    try:
        state = _files.read_json(path / STATE, "")
    except FileNotFoundError:
        raise ValueError(f"it has no {STATE}") from None
    digests = state.pop("sha256", None) if isinstance(state, dict) else None
    if not isinstance(digests, dict):
        raise ValueError(f"its {STATE} has no hashes of its files")
    files = sorted(path.glob(FILES))
    if {file.name for file in files} != digests.keys():
        raise ValueError(f"it has other files than its {STATE} lists")
    with ThreadPoolExecutor() as pool:
        for file, digest in zip(files, pool.map(_sha256, files), strict=True):
            if digest != digests[file.name]:
                raise ValueError(f"the SHA-256 of {file.name} is not the one it was written with")
    return dict(state)


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a checkpoint, by name."""
    described = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: tuple(each.size) for name, each in described.items() if isinstance(each, TensorStorageMetadata)}


def load(path: Path, tensors: Tensors, world: World) -> None:
    """Fill these tensors, shards or whole ones, from a checkpoint of any number of ranks; every rank takes part.

    A ValueError says what it lacks.
    """
    try:
        with _alone(world) as alone:
            state_dict_loader.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)
    except CheckpointException as error:
        raise ValueError(str(_first_failure(error))) from error


def read(path: Path) -> dict[str, Any]:
    """Read a whole checkpoint in one process: "model", "average" if there is one, and the optimiser's moments."""
    described = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    whole = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in described.items()
        if isinstance(each, TensorStorageMetadata)
    }
    load(path, whole, World(torch.device("cpu")))
    parts: dict[str, Any] = {"model": {}, "optimiser": {"state": {}}, "average": {}}
    for name, tensor in whole.items():
        part, _, rest = name.partition("/")
        if part == "optimiser":
            kind, _, parameter = rest.partition("/")
            parts[part]["state"].setdefault(parameter, {})[kind] = tensor
        else:
            parts[part][rest] = tensor
    return {**parts, "average": parts["average"] or None}


@contextmanager
def _alone(world: World) -> Iterator[bool]:
    """Yield whether this process is alone. DCP warns that it then assumes so, even where it is told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield world.size == 1


def _first_failure(error: CheckpointException) -> Exception:
    first = next(iter(error.failures.values()))[0]
    return first if isinstance(first, OSError) else OSError(0, str(first))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
