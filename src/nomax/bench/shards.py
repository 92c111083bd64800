"""`nomax bench shards`: a million small images in shards, how soon they are open, in how much memory, how fast read."""

import dataclasses
import io
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Self

import numpy as np
from PIL import Image
from rich.console import RenderableType

from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, run_bench
from nomax.bench.results import CannotMeasureError, Case, Goal, PeakMemory, Results
from nomax.data.images.shards import ShardSource

OPENING, RANDOM = "opening", "random access"
OPEN, READ, DECODE = "open", "read", "decode"
SIDE, PICTURES, CLASSES = 8, 64, 1000  # pixels of an image, different images, classes
GOALS = (
    Goal("time to open", "seconds", 1.0, OPENING, ours=(OPEN,)),
    Goal("memory to open", "bytes", 100e6, OPENING, ours=(OPEN,)),
    Goal("images read per second", "per second", 5000, RANDOM, ours=(READ,)),
)


@dataclass(frozen=True)
class Options(harness.Options):
    """Measure shards of a large data set: the time and memory to open them, and random access to their images.

    Writes a million small images in a thousand tar files (2 GB, below the folder for temporary files), and indexes them
    once, which takes minutes. Then it opens them again and again, each time in a new process, and reads images in
    random order in one process: their bytes as they are, and decoded. The files were just written, so they come from
    memory rather than from the disk. First, a check makes sure that the right bytes and labels are read.

    Writes shards.json (every sample, machine, versions) and shards.md (a table).
    """

    samples: int = 1_000_000
    """Images in all."""
    shard_size: int = 1000
    """Images per shard."""
    reads: int = 20_000
    """Images per sample of random access."""

    def validate(self) -> None:
        if sys.platform != "linux":
            raise ValueError("peak memory can be measured on Linux only.")

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), samples=320, shard_size=10, reads=100)


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    run.note_versions("pillow")
    run.expect(6)
    shape = f"{options.samples:,} images"
    with tempfile.TemporaryDirectory(prefix="nomax-bench-") as scratch:
        with run.step(f"writing {shape}"):
            run.results.facts["bytes"] = write_shards(Path(scratch), options.samples, options.shard_size)
        with run.step("indexing, once"):
            began = perf_counter()
            source = ShardSource(scratch)
            run.results.facts["indexing_seconds"] = perf_counter() - began
        chosen = np.random.default_rng(0).integers(0, options.samples, options.reads).tolist()
        with run.checking(shape, "bytes", READ) as check:
            pictures = make_pictures()
            wrong = sum(source.read(n) != pictures[n % PICTURES] or source.labels[n] != n % CLASSES for n in chosen)
            check.bound("images", wrong, 0)
        if run.results.wrong():
            return
        with run.step(f"{shape}: memory to open"):
            size = harness.bytes_in_a_fresh_process(opening_bytes, scratch)
            known = {"failure": size} if isinstance(size, str) else {"bytes": size}
            run.results.memory.append(PeakMemory(OPEN, OPENING, options.samples, unit="images", **known))
        opening = Case(shape, "index", OPENING, 1, ours=(OPEN,), items=options.samples)
        run.take_turns(opening, {OPEN: lambda: _opening_seconds(scratch)})
        reading = Case(shape, "PNG", RANDOM, 1, ours=(READ, DECODE), items=options.reads)
        run.take_turns(
            reading, {READ: lambda: _timed(source.read, chosen), DECODE: lambda: _timed(source.image, chosen)}
        )
    yield render.terminal_table(("", "", "time", "per second"), _rows(run.results))


def make_pictures() -> list[bytes]:
    """Return small PNG files of noise."""
    random = np.random.default_rng(0)
    files = []
    for _ in range(PICTURES):
        data = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(data, "PNG")
        files.append(data.getvalue())
    return files


def write_shards(folder: Path, samples: int, per_shard: int) -> int:
    """Write the shards, and return their size in bytes. Image n is picture n % 64 with the label n % 1000."""
    pictures, total = make_pictures(), 0
    for shard, start in enumerate(range(0, samples, per_shard)):
        parts: list[bytes] = []
        for number in range(start, min(start + per_shard, samples)):
            parts += _member(f"{number:09d}.png", pictures[number % PICTURES])
            parts += _member(f"{number:09d}.cls", str(number % CLASSES).encode())
        data = b"".join([*parts, bytes(2 * tarfile.BLOCKSIZE)])
        (folder / f"train-{shard:06d}.tar").write_bytes(data)
        total += len(data)
    return total


def _member(name: str, data: bytes) -> tuple[bytes, bytes, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % tarfile.BLOCKSIZE)


def opening_bytes(folder: str) -> int:
    """Return how much memory opening the shards adds to this process at its peak."""
    return harness.peak_bytes(lambda: ShardSource(folder))


def opening_nanoseconds(folder: str) -> int:
    """Return how long opening the shards takes in this process."""
    began = perf_counter_ns()
    ShardSource(folder)
    return perf_counter_ns() - began


def _opening_seconds(folder: str) -> float:
    nanoseconds = harness.bytes_in_a_fresh_process(opening_nanoseconds, folder)
    if isinstance(nanoseconds, str):
        raise CannotMeasureError(f"the shards could not be opened: {nanoseconds}")
    return nanoseconds / 1e9


def _timed(read: object, chosen: list[int]) -> float:
    assert callable(read)
    began = perf_counter()
    for number in chosen:
        read(number)
    return perf_counter() - began


def _rows(results: Results) -> list[list[str]]:
    rows = []
    for case in results.cases:
        for name in case.samples:
            speed = "" if name == OPEN else render.number(case.per_second(name))
            each = case.best(name) if name == OPEN else 1 / (case.per_second(name) or 1)
            rows.append([case.shape, name, render.seconds(each), speed])
    for memory in results.memory:
        size = f"{memory.bytes / 1e6:.0f} MB" if memory.bytes is not None else memory.failure or "–"
        rows.append([f"{memory.length:,} {memory.unit}", "open, memory", size, ""])
    return rows


def report(results: Results) -> list[str]:
    """Return the table, with the conditions of the measurement."""
    options, facts = results.options, results.facts
    text = (
        f"{render.measured_on(results, 'pillow')}. {options['samples']:,} PNG files of {SIDE}×{SIDE} pixels in shards "
        f"of {options['shard_size']:,}, {facts.get('bytes', 0) / 1e9:.1f} GB, read from memory; indexing them took "
        f"{facts.get('indexing_seconds', 0.0):.0f} s, once. Opening is in a new process each time, after its imports; "
        "its memory is the peak above what the process had before. Random access is in one process and one thread: "
        f"{options['reads']:,} images in random order, as bytes or decoded. Times are the best of "
        f"{options['rounds']} rounds."
    )
    return [text, render.markdown_table(("", "", "time", "per second"), _rows(results))]


BENCH = Bench("shards", _measure, report, GOALS)
run = partial(run_bench, BENCH)
