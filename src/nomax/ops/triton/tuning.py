"""How a kernel cuts its work: a short list of tiles, and which of them is the fastest on this GPU.

The first call of its kind times the candidates. What it chose is kept in NOMAX_CACHE (or ~/.cache/nomax), in one file
for each GPU, version of triton and source of the kernels, so that later processes neither time nor differ.
"""

import hashlib
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nomax._files import write_json
from nomax.ops.build import BuildError, cache_folder
from nomax.ops.registration import Arguments

SOURCES = ("call.py", "tile.py", "forward.py", "backward.py", "tuning.py")


class Config(NamedTuple):
    """How a kernel cuts its work: rows and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


SPREAD = (Config(32, 32, 8, 1),)  # wide heads of float32 over more threads, where registers would spill


def candidates(kernel: str, dtype: torch.dtype, width: int) -> list[Config]:
    """Return how a kernel may cut its work, the likely best first; what does not fit a GPU's memory is passed over.

    A program holds a tile of sums in registers, as wide as the head, and streams the other side through shared memory:
    the wider the head and the number, the smaller the tile. The gradients hold twice as much, so their tiles are half
    as large. Warps own 16 or 32 rows each.
    """
    half = dtype != torch.float32
    if kernel == "forward":
        if half:
            if width <= 64:
                return [Config(128, 64, 4, 3), Config(128, 128, 8, 3), Config(64, 64, 4, 3)]
            if width <= 128:
                return [Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(64, 64, 4, 2)]
            return [Config(128, 64, 8, 2), Config(64, 32, 4, 2)]
        return [Config(64, 64, 4, 2), Config(64, 32, 4, 2)] if width <= 64 else [Config(32, 32, 4, 2), *SPREAD]
    if not half:
        if width <= 64:
            return [Config(32, 32, 4, 1), *SPREAD]
        # Half as much of what passes by: ordinary units keep both factors of a product in registers.
        return [Config(16, 32, 8, 1) if kernel == "key_gradients" else Config(32, 16, 8, 1), Config(32, 32, 4, 1)]
    if width > 128:  # 64 of what a program owns, since the tensor instructions of newer GPUs take no less
        if kernel == "key_gradients":
            return [Config(32, 64, 8, 2), Config(32, 64, 8, 1), Config(32, 32, 4, 1)]
        return [Config(64, 32, 8, 2), Config(32, 32, 4, 1)]
    if width > 64:
        return [Config(64, 64, 8, 1), Config(64, 32, 4, 2), Config(64, 64, 4, 1)]
    if kernel == "key_gradients":
        return [Config(64, 64, 4, 2), Config(32, 128, 4, 2), Config(64, 128, 8, 1)]
    return [Config(64, 64, 4, 2), Config(128, 64, 8, 2), Config(128, 32, 4, 2)]


def tuned(kernel: str, call: Arguments, variant: tuple[Any, ...], launch: Callable[[Config], None]) -> None:
    """Launch a kernel with the candidate that was fastest in the first call like this one."""
    if call.query.is_cpu:
        # Interpreted, a tile takes its time whatever its size; small ones have small tests meet several.
        rows, keys = call.query.shape[2], call.key.shape[2]
        return launch(Config(16 if rows <= 1024 else 256, 32 if keys <= 1024 else 256, 4, 1))
    width = max(call.query.shape[3], call.value.shape[3])
    # The best cut depends on lengths only while there are few blocks.
    lengths = tuple(min(x.shape[2], 4096).bit_length() for x in (call.query, call.key))
    kind = repr((kernel, str(call.query.dtype)[6:], width, *lengths, *variant))
    choices = candidates(kernel, call.query.dtype, width)
    chosen = known(_place(call.query.device))
    if chosen.get(kind) in choices:
        return launch(chosen[kind])
    if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
        return _first(choices, launch, _misfit())  # nothing can be timed within a graph
    from triton.testing import do_bench

    config = fastest(choices, launch, lambda call: do_bench(call, warmup=5, rep=20), _misfit())
    if config is None:
        raise RuntimeError(
            f"none of nomax's Triton kernels fits {call.query.device} for head dimensions of {width} in "
            f'{str(call.query.dtype)[6:]}. Call attention(..., backend="reference"), and please tell us.'
        )
    remember(_place(call.query.device), kind, config)
    return launch(config)


def fastest(
    choices: list[Config],
    launch: Callable[[Config], None],
    time: Callable[[Callable[[], None]], float],
    misfit: type[Exception],
) -> Config | None:
    """Return the candidate whose launch takes the least time; None if all of them raise `misfit`."""
    times: dict[Config, float] = {}
    for config in choices:
        try:
            launch(config)
            times[config] = time(lambda config=config: launch(config))  # type: ignore[misc]
        except misfit:
            continue
    return min(times, key=lambda config: times[config], default=None)


def _first(choices: list[Config], launch: Callable[[Config], None], misfit: type[Exception]) -> None:
    """Launch the first candidate that fits."""
    for config in choices[:-1]:
        try:
            return launch(config)
        except misfit:
            continue
    return launch(choices[-1])


def _misfit() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    return OutOfResources


@cache
def _place(device: torch.device) -> Path | None:
    """Return the file of a GPU's choices, None if there is no folder for it."""
    import triton

    return place(torch.get_device_module(device).get_device_name(device), triton.__version__)


def place(gpu: str, version: str) -> Path | None:
    """Return the file of the choices for a GPU and a version of triton; its name tells the kernels' source, too."""
    digest = hashlib.sha256(f"{gpu}\n{version}\n".encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    try:
        return cache_folder() / f"triton-tiles-{digest.hexdigest()[:16]}.json"
    except BuildError:
        return None


@cache
def known(path: Path | None) -> dict[str, Config]:
    """Return the choices of earlier processes, by kind of call; none, with a warning, if their file is damaged."""
    try:
        text = path.read_text() if path is not None else "{}"
    except OSError:
        return {}
    try:
        chosen = {str(kind): Config(*map(int, numbers)) for kind, numbers in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        warnings.warn(
            f"nomax ignores {path}, its choices of tiles for this GPU, which is damaged ({error}), and will write it "
            "again.",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}
    return chosen


def remember(path: Path | None, kind: str, config: Config) -> None:
    """Keep a choice for this process and for later ones. Of two that write at once, one may have to time again."""
    chosen = known(path)
    chosen[kind] = config
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(path, {kind: list(config) for kind, config in chosen.items()})
    except OSError:  # timing again in the next process does no harm
        return
