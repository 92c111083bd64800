"""`nomax bench data`: how many images a second our input pipeline makes, against torchvision's on the same files."""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from io import StringIO
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from nomax import _compat
from nomax.bench import photos, pipelines
from nomax.bench.data_results import ARRAYS, PEER, PHOTOS, Case, Results, markdown, table
from nomax.bench.machine import load, machine, versions
from nomax.bench.results import write
from nomax.console import Console, Progress
from nomax.data import pack
from nomax.data.folders import FolderSource
from nomax.data.shards import ShardSource
from nomax.data.source import Source
from nomax.data.transforms import Augment


@dataclass(frozen=True)
class Options:
    """Measure the input pipeline: images a second, against torchvision's ImageFolder and DataLoader on the same files.

    Both sides decode whole JPEGs, crop as RandomResizedCrop does, resize with antialiasing, flip, and scale to [-1, 1].
    It is checked first that the same crop gives the same image. Then they take turns, round after round, and the best
    round of each counts. The JPEGs are made from noise and shapes, unless you name a folder of yours. A second race
    is on 32×32 arrays, moved by up to 4 pixels and flipped. Ctrl-C stops it and keeps what was measured.

    Writes data.json (every sample, machine, versions) and data.md (a table).
    """

    folder: Path | None = None
    """Your own images (FOLDER/train/CLASS/…) instead of generated JPEGs of 500×375 pixels."""
    photos: int = 512
    """JPEGs to generate. They are read again and again, and so from memory rather than from the disk."""
    images: int = 1024
    """Images of one sample."""
    size: int = 224
    """Size of the crops."""
    batch_size: int = 64
    """Images in a batch."""
    workers: tuple[int, ...] = (0, 1, 2) if (os.cpu_count() or 1) > 1 else (0, 1)
    """Numbers of worker processes to measure with, one after the other; 0: the main process does it all."""
    rounds: int = 5
    """Samples of every participant; the best counts."""
    output: Path | None = None
    """Folder for the results; if not given, benchmarks/results where that exists, else the current folder."""
    load_limit: float = 0.5
    """Refuse to start while the machine is busier than this (its load average over the last minute)."""
    smoke: bool = False
    """Try it on a few images, in seconds: shows only that it works."""


def run(options: Options) -> int:
    """Return 0 if all is right, 1 if our images are wrong, 2 if the options cannot be served, 130 if it was stopped."""
    if options.smoke:
        small = {"photos": 12, "images": 16, "size": 64, "batch_size": 4, "rounds": 2, "workers": (0, 1)}
        options = dataclasses.replace(options, **small)  # type: ignore[arg-type]
    console = Console()
    usual = Path("benchmarks/results")
    output = options.output or (usual if usual.is_dir() else Path())
    shown = dataclasses.asdict(options) | {"output": None, "folder": options.folder and "a folder of the user's"}
    results = Results(shown, machine(), versions(), _now(), options.smoke, load())
    stopped = False
    try:
        _check(options)
        results.versions |= {name: version(name) for name in ("torchvision", "pillow")}
        with tempfile.TemporaryDirectory(prefix="nomax-bench-") as scratch:
            _measure(options, Path(scratch), results, console)
        results.finished = _now()
    except KeyboardInterrupt:
        stopped = True
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax bench data: {error}", file=sys.stderr)
        return 2
    results.load_after = load()
    write(output / "data.json", results.json())
    write(output / "data.md", markdown(results))
    console.print(table(results))
    console.print(f"Written: {output / 'data.json'}, {output / 'data.md'}")
    if results.wrong():
        console.print(f"WRONG: our images differ from torchvision's by {results.differences}.", style="bold red")
        return 1
    return 130 if stopped else 0


def _measure(options: Options, scratch: Path, results: Results, console: Console) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _one_thread(), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing", total=2 * len(options.workers) * options.rounds)
        folder = options.folder or scratch / "photos"
        if options.folder is None:
            photos.write(folder, options.photos)
        files = FolderSource(folder)
        if len(files) < options.batch_size:
            raise ValueError(f"there are {len(files)} images, fewer than --batch-size {options.batch_size}.")
        results.mean_bytes = float(np.mean([len(files.read(index)) for index in range(len(files))]))
        pack.pack(pack.Options(folder, scratch / "shards"), Console(file=StringIO()))
        sources: dict[str, Source] = {"folder": files, "shards": ShardSource(scratch / "shards")}
        augment = pipelines.SameCrops(options.size, draft=False)
        results.differences = {name: pipelines.difference(source, augment) for name, source in sources.items()}
        if results.wrong():
            return  # no speed of a wrong result
        arrays, moved = pipelines.random_arrays(), Augment(32, "pad")
        for what, workers in product((PHOTOS, ARRAYS), options.workers):
            progress.update(task, description=f"{what}, {workers} worker{'s' * (workers != 1)}")
            if what == PHOTOS:
                setting = (options.images, options.batch_size, workers)
                runs = {PEER: pipelines.image_folder(folder, options.size, *setting)}
                runs |= {name: pipelines.ours(source, augment, *setting) for name, source in sources.items()}
            else:
                setting = (16 * options.images, 4 * options.batch_size, workers)
                runs = {PEER: pipelines.array_set(arrays, *setting), "array": pipelines.ours(arrays, moved, *setting)}
            case = Case(what, workers, {name: [] for name in runs})
            results.cases.append(case)
            for number in range(options.rounds):
                # There and back again: a machine that slows down or speeds up favours nobody.
                for name in list(runs) if number % 2 == 0 else reversed(list(runs)):
                    case.samples[name].append(runs[name]())
                progress.advance(task)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Workers have one thread each, and so has the main process, to compare with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(options: Options) -> None:
    counts = (options.photos, options.images, options.size, options.batch_size, options.rounds)
    if min(counts) < 1 or not options.workers or min(options.workers) < 0:
        raise ValueError("--photos, --images, --size, --batch-size and --rounds must be at least 1, --workers 0.")
    busy = load()
    if busy > options.load_limit and not options.smoke:
        raise ValueError(
            f"the machine is busy: its load average is {busy:.2f}, the limit is {options.load_limit:g}. Wait until it "
            "is quiet, or raise --load-limit to measure nevertheless; the load is recorded."
        )
    _compat.torchvision()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
