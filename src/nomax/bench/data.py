"""`nomax bench data`: images per second of our input pipeline, against torchvision's on the same files."""

import dataclasses
import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from PIL import Image, ImageDraw
from rich.console import RenderableType
from torch.utils.data import DataLoader, Dataset

from nomax import _compat
from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, run_bench
from nomax.bench.results import CannotMeasureError, Case, Goal, Results
from nomax.console import Console
from nomax.data.commands import pack
from nomax.data.images.batches import batches
from nomax.data.images.files import Box, FolderSource
from nomax.data.images.shards import ShardSource
from nomax.data.images.transforms import Augment
from nomax.data.order import CROP, FLIP, Order, bits, uniform
from nomax.data.source import ArraySource, Source

PEER, FOLDER, SHARDS, ARRAY = "torchvision", "folder", "shards", "array"
PHOTOS, ARRAYS, LOADING = "JPEG files", "32×32 arrays", "loading"
LARGEST_DIFFERENCE = 0.01  # mean over pixels in [-1, 1]; two ways to resize may round differently
WIDTH, HEIGHT, QUALITY = 500, 375, 90  # the most common size in ImageNet
GOALS = (Goal("from files, every number of workers", "speedup", 1.2, LOADING, PEER, (PHOTOS,), ours=(FOLDER, SHARDS)),)
COLUMNS = ("input", "workers", "pipeline", "images/s", "per worker", f"vs {PEER}")

Sampler = Callable[[], float]


@dataclass(frozen=True)
class Options(harness.Options):
    """Measure the input pipeline in images per second, against torchvision's ImageFolder and DataLoader.

    Both sides read the same files, decode whole JPEGs, crop as RandomResizedCrop does, resize with antialiasing, flip,
    and scale to [-1, 1]. First, a check makes sure that the same crop gives the same image. Then they take turns, round
    after round, and the best round of each counts. The JPEGs are made from noise and shapes, unless you name your own
    folder. A second race is on 32×32 arrays, shifted by up to 4 pixels and flipped. Ctrl-C stops it and keeps the
    measurements so far.

    Writes data.json (every sample, machine, versions) and data.md (a table).
    """

    folder: Path | None = None
    """Your own images (FOLDER/train/CLASS/…) instead of generated JPEGs of 500×375 pixels."""
    photos: int = 512
    """JPEGs to generate. They are read repeatedly, so they come from memory rather than from the disk."""
    images: int = 1024
    """Images per sample."""
    size: int = 224
    """Size of the crops."""
    batch_size: int = 64
    """Images per batch."""
    workers: tuple[int, ...] = (0, 1, 2) if (os.cpu_count() or 1) > 1 else (0, 1)
    """Numbers of worker processes to measure with, one after the other; 0: the main process does everything."""
    rounds: int = 5
    """Samples of every participant; the best counts."""

    def validate(self) -> None:
        _compat.torchvision()

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), photos=12, images=16, size=64, batch_size=4, workers=(0, 1))


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    run.note_versions("torchvision", "pillow")
    run.expect(3 + 2 * len(options.workers))
    with tempfile.TemporaryDirectory(prefix="nomax-bench-") as scratch:
        folder = options.folder or Path(scratch, "photos")
        with run.step("preparing"):
            try:
                sources = _prepare(options, folder, Path(scratch, "shards"))
            except (ValueError, OSError) as error:
                raise CannotMeasureError(str(error)) from error
            files = sources[FOLDER]
            run.results.facts["mean_bytes"] = float(np.mean([len(files.read(i)) for i in range(len(files))]))
        augment = SameCrops(options.size, draft=False)
        for name, source in sources.items():
            with run.checking(PHOTOS, "float32", name) as check:
                check.bound("mean of the pixels", difference(source, augment), LARGEST_DIFFERENCE)
        if run.results.wrong():
            return
        for workers in options.workers:
            loading = Loading(max(options.images // options.batch_size, 1), options.batch_size, workers)
            samplers = {PEER: image_folder(folder, options.size, loading)}
            samplers |= {name: ours(source, augment, loading) for name, source in sources.items()}
            run.take_turns(loading.case(PHOTOS, (FOLDER, SHARDS)), samplers)
        yield _table(run.results, PHOTOS)
    arrays = random_arrays()
    for workers in options.workers:
        loading = Loading(max(4 * options.images // options.batch_size, 1), 4 * options.batch_size, workers)
        samplers = {PEER: array_set(arrays, loading), ARRAY: ours(arrays, Augment(32, "pad"), loading)}
        run.take_turns(loading.case(ARRAYS, (ARRAY,)), samplers)
    yield _table(run.results, ARRAYS)


def _prepare(options: Options, folder: Path, shards: Path) -> dict[str, Any]:
    if options.folder is None:
        write_photos(folder, options.photos)
    files = FolderSource(folder)
    if len(files) < options.batch_size:
        raise ValueError(f"there are {len(files)} images, fewer than --batch-size {options.batch_size}.")
    pack.pack(pack.Options(folder, shards), Console(file=io.StringIO()))
    return {FOLDER: files, SHARDS: ShardSource(shards)}


def write_photos(folder: Path, count: int, classes: int = 4) -> None:
    """Write photos into FOLDER/train/CLASS/…."""
    for number in range(count):
        place = folder / "train" / f"class{number % classes}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06d}.jpg").write_bytes(photo(number))


def photo(number: int) -> bytes:
    """Return a JPEG about as hard to decode as a photograph, made from noise and shapes; the same every time.

    Smooth noise of several sizes, as clouds and foliage have it, with edges and some grain.
    """
    random = np.random.default_rng(number)
    canvas = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for cells in (2, 4, 8, 16, 32, 64, 128, 256):
        coarse = random.standard_normal((cells * 3 // 4 + 1, cells, 3)).astype(np.float32)
        layers = [Image.fromarray(coarse[:, :, c]).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for c in range(3)]
        canvas += 60 / cells**0.5 * np.stack([np.asarray(layer) for layer in layers], axis=2)
    canvas += 128 + random.normal(0, 11, (HEIGHT, WIDTH, 1))
    image = Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(8):
        x, y = int(random.integers(WIDTH)), int(random.integers(HEIGHT))
        w, h = (int(length) for length in random.integers(10, 120, 2))
        colour = tuple(int(value) for value in random.integers(0, 256, 3))
        shape = draw.ellipse if random.random() < 0.5 else draw.rectangle
        shape((x, y, x + w, y + h), outline=colour, fill=colour if random.random() < 0.3 else None, width=2)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def random_arrays(count: int = 4096, size: int = 32) -> ArraySource:
    """Return images of noise: their contents do not matter, as nothing is decoded."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return ArraySource(pixels, random.integers(0, 10, count), [str(n) for n in range(10)], "noise")


@dataclass(frozen=True)
class SameCrops(Augment):
    """Our pipeline with crops drawn as RandomResizedCrop draws them, so that both sides resize as many pixels."""

    def box(self, width: int, height: int, seed: int, position: int) -> Box:
        """Draw an area uniform in [0.08, 1], an aspect log-uniform in [3/4, 4/3]."""
        for attempt in range(10):
            a, b, c, d = uniform(seed, CROP, position, attempt, np.arange(4)).tolist()
            area, aspect = width * height * (0.08 + 0.92 * a), math.exp((2 * b - 1) * math.log(4 / 3))
            wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < wide <= width and 0 < tall <= height:
                left, top = int(c * (width - wide + 1)), int(d * (height - tall + 1))
                return left, top, left + wide, top + tall
        return 0, 0, width, height


def difference(source: Source, augment: Augment, count: int = 16) -> float:
    """Return the mean difference of our pixels, in [-1, 1], from torchvision's with the same crops and flips."""
    from torchvision.transforms import functional

    count = min(count, len(source))
    with batches(source, Order(len(source), count, shuffle=False), augment) as made:
        mine = next(made).images
    flips = bits(0, FLIP, np.arange(count)) % np.uint64(2) == 1
    theirs = []
    for index in range(count):
        image = source.image(index).convert("RGB")
        left, top, right, bottom = (int(value) for value in augment.box(*image.size, 0, index))
        image = functional.resized_crop(image, top, left, bottom - top, right - left, [augment.size, augment.size])
        pixels = functional.to_tensor(functional.hflip(image) if flips[index] else image)
        theirs.append(functional.normalize(pixels, [0.5] * 3, [0.5] * 3))
    return float((mine - torch.stack(theirs)).abs().mean())


@dataclass(frozen=True)
class Loading:
    """The number of images that a sample loads, and of its worker processes."""

    steps: int
    batch_size: int
    workers: int

    def case(self, shape: str, ours: tuple[str, ...]) -> Case:
        """Return the case to measure; workers have one thread each, and so does the main process, for comparison."""
        items = self.steps * self.batch_size
        return Case(shape, "float32", LOADING, 1, ours=ours, items=items, workers=self.workers)

    def seconds(self, made: Iterator[Any]) -> float:
        """Time the batches after the first: starting processes does not count, on either side."""
        next(made)
        start = perf_counter()
        for _ in range(self.steps):
            next(made)
        return perf_counter() - start


def ours(source: Source, augment: Augment, loading: Loading) -> Sampler:
    """Return a sampler of nomax.data.images.batches."""

    def sample() -> float:
        order = Order(len(source), loading.batch_size)
        with batches(source, order, augment, workers=loading.workers) as made:
            return loading.seconds(made)

    return sample


def image_folder(folder: Path, size: int, loading: Loading) -> Sampler:
    """Return a sampler of torchvision's ImageFolder with torch's DataLoader."""
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *_tensor(transforms)]
    place = folder / "train" if (folder / "train").is_dir() else folder
    return _loader(datasets.ImageFolder(place, transforms.Compose(steps)), loading)


def array_set(source: ArraySource, loading: Loading) -> Sampler:
    """Return a sampler of a data set like torchvision's CIFAR10, with the usual transforms."""
    from torchvision import transforms

    size = source.images.shape[1]
    crop = transforms.RandomCrop(size, padding=size // 8, padding_mode="reflect")
    steps = [crop, transforms.RandomHorizontalFlip(), *_tensor(transforms)]
    return _loader(_ArraySet(source, transforms.Compose(steps)), loading)


class _ArraySet(Dataset[Any]):
    def __init__(self, source: ArraySource, transform: Callable[[Any], Any]):
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.source.image(index)), int(self.source.labels[index])


def _tensor(transforms: Any) -> list[Any]:
    return [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]


def _loader(dataset: Any, loading: Loading) -> Sampler:
    def passes(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def sample() -> float:
        settings: dict[str, Any] = {"num_workers": loading.workers, "persistent_workers": loading.workers > 0}
        loader: Any = DataLoader(dataset, loading.batch_size, shuffle=True, drop_last=True, **settings)
        return loading.seconds(passes(loader))

    return sample


def _rows(results: Results, shape: str | None = None) -> list[list[str]]:
    rows = []
    for case in results.cases:
        for name in case.samples if shape in (None, case.shape) else ():
            speed, workers = case.per_second(name), case.workers or 0
            each = render.number(speed / workers if speed and workers else None)
            speedup = "" if name == PEER else render.times(case.speedup(name, PEER))
            rows.append([case.shape, str(workers), name, render.number(speed), each, speedup])
    return rows


def _table(results: Results, shape: str) -> RenderableType:
    return render.terminal_table(COLUMNS, _rows(results, shape), words=3)


def report(results: Results) -> list[str]:
    """Return the table for the README, with the conditions of the measurement."""
    options, size = results.options, f"{WIDTH}×{HEIGHT}"
    files = options["folder"] or f"{options['photos']} JPEGs of {size} pixels made from noise and shapes"
    text = (
        f"{render.measured_on(results, 'torchvision', 'pillow')}. Files: {files}, "
        f"{results.facts.get('mean_bytes', 0.0) / 1e3:.0f} kB on average, read from memory; decoded whole, cropped as "
        f"RandomResizedCrop does to {options['size']} pixels, flipped, scaled to [-1, 1], in batches of "
        f"{options['batch_size']}. torchvision: ImageFolder and DataLoader. 0 workers: one process does it all, in one "
        "thread. With workers, ours send bytes, and the main process makes floats of them. “vs” is its time divided "
        f"by ours, each the best of {options['rounds']} interleaved rounds."
    )
    return [text, render.markdown_table(COLUMNS, _rows(results))]


BENCH = Bench("data", _measure, report, GOALS)
run = partial(run_bench, BENCH)
