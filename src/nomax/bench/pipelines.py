"""The input pipelines that `nomax bench data` races: ours, and torchvision's as everybody writes it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from nomax import _compat
from nomax.data import draws
from nomax.data.batches import batches
from nomax.data.images import Box
from nomax.data.order import Order
from nomax.data.source import ArraySource, Source
from nomax.data.transforms import Augment

Sample = Callable[[], float]


@dataclass(frozen=True)
class SameCrops(Augment):
    """Our pipeline with crops drawn as RandomResizedCrop draws them, so that both sides resize as many pixels."""

    def box(self, width: int, height: int, seed: int, position: int) -> Box:
        """An area uniform in [0.08, 1], an aspect log-uniform in [3/4, 4/3]."""
        for attempt in range(10):
            a, b, c, d = draws.uniform(seed, draws.CROP, position, attempt, np.arange(4)).tolist()
            area, aspect = width * height * (0.08 + 0.92 * a), math.exp((2 * b - 1) * math.log(4 / 3))
            wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < wide <= width and 0 < tall <= height:
                left, top = int(c * (width - wide + 1)), int(d * (height - tall + 1))
                return left, top, left + wide, top + tall
        return 0, 0, width, height


def ours(source: Source, augment: Augment, images: int, batch_size: int, workers: int) -> Sample:
    """Images a second of nomax.data.batches."""

    def sample() -> float:
        order = Order(len(source), batch_size)
        with batches(source, order, augment, workers=workers) as made:
            return _speed(made, images, batch_size)

    return sample


def image_folder(folder: Path, size: int, images: int, batch_size: int, workers: int) -> Sample:
    """Images a second of torchvision's ImageFolder with torch's DataLoader."""
    _compat.torchvision()
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *_tensor(transforms)]
    place = folder / "train" if (folder / "train").is_dir() else folder
    return _loader(datasets.ImageFolder(place, transforms.Compose(steps)), images, batch_size, workers)


def array_set(source: ArraySource, images: int, batch_size: int, workers: int) -> Sample:
    """Images a second of a data set like torchvision's CIFAR10, with the usual transforms."""
    _compat.torchvision()
    from torchvision import transforms

    size = source.images.shape[1]
    crop = transforms.RandomCrop(size, padding=size // 8, padding_mode="reflect")
    steps = [crop, transforms.RandomHorizontalFlip(), *_tensor(transforms)]
    return _loader(_ArraySet(source, transforms.Compose(steps)), images, batch_size, workers)


def difference(source: Source, augment: Augment, count: int = 16) -> float:
    """How far our images are from torchvision's, with the same crops and flips: the mean over pixels in [-1, 1]."""
    _compat.torchvision()
    from torchvision.transforms import functional

    count = min(count, len(source))
    with batches(source, Order(len(source), count, shuffle=False), augment) as made:
        mine = next(made).images
    flips = draws.bits(0, draws.FLIP, np.arange(count)) % np.uint64(2) == 1
    theirs = []
    for index in range(count):
        image = source.image(index).convert("RGB")
        left, top, right, bottom = (int(value) for value in augment.box(*image.size, 0, index))
        image = functional.resized_crop(image, top, left, bottom - top, right - left, [augment.size, augment.size])
        pixels = functional.to_tensor(functional.hflip(image) if flips[index] else image)
        theirs.append(functional.normalize(pixels, [0.5] * 3, [0.5] * 3))
    return float((mine - torch.stack(theirs)).abs().mean())


def random_arrays(count: int = 4096, size: int = 32) -> ArraySource:
    """Images of noise: what is in them does not matter, as nothing is decoded."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return ArraySource(pixels, random.integers(0, 10, count), [str(n) for n in range(10)], "noise")


class _ArraySet(Dataset[Any]):
    def __init__(self, source: ArraySource, transform: Callable[[Any], Any]):
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.source.image(index)), int(self.source.labels[index])


def _tensor(transforms: Any) -> list[Any]:
    return [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]


def _loader(dataset: Any, images: int, batch_size: int, workers: int) -> Sample:
    def passes(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def sample() -> float:
        loader: Any = DataLoader(
            dataset, batch_size, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
        )
        return _speed(passes(loader), images, batch_size)

    return sample


def _speed(made: Iterator[Any], images: int, batch_size: int) -> float:
    """Images a second after the first batch: starting processes does not count, on either side."""
    steps = max(images // batch_size, 1)
    next(made)
    start = perf_counter()
    for _ in range(steps):
        next(made)
    return steps * batch_size / (perf_counter() - start)
