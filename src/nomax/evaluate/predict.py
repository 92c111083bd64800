"""What a classifier says about image files: the most probable classes by name."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from nomax.data import images as files
from nomax.data.batches import floats
from nomax.data.images import DataError
from nomax.data.workers import CHUNK, Maker, Request, made_by

if TYPE_CHECKING:
    from nomax.evaluate.runs import Run

Picture = str | Path | Image.Image


class Guess(NamedTuple):
    """A class, and how probable the model holds it."""

    name: str
    """Its number, if the model does not say what its classes are called."""
    probability: float
    label: int


@dataclass(frozen=True)
class Prediction:
    """What a model says about an image."""

    image: str
    """Its path."""
    guesses: tuple[Guess, ...]
    """The most probable classes, the first one first; none if the image cannot be read."""
    error: str = ""
    """Why it cannot be read."""


def predict(
    run: "Run", images: Sequence[Picture], top: int = 5, *, batch_size: int = 64, workers: int = 0
) -> Iterator[Prediction]:
    """The most probable classes of images: files, or images of Pillow. They are prepared as evaluation prepares them.

    An image that cannot be read gets a prediction that says why. workers: processes that prepare images.
    """
    config = run.model.config
    if config.num_classes == 0:
        raise ValueError(f"{run.name} has no head (num_classes=0), so it knows no classes.")
    if top < 1 or batch_size < 1:
        raise ValueError(f"top={top} and batch_size={batch_size} must be at least 1.")
    maker = Maker(_Pictures(images), run.transform, 0, replace=False)
    return _predictions(run, maker, min(top, config.num_classes), min(batch_size, CHUNK), workers)


def _predictions(run: "Run", maker: Maker, top: int, size: int, workers: int) -> Iterator[Prediction]:
    source, names = maker.source, run.model.config.classes
    steps = [np.arange(start, min(start + size, len(source))) for start in range(0, len(source), size)]
    requests = (Request(step, numbers, numbers) for step, numbers in enumerate(steps))
    with closing(made_by(maker, requests, workers)) as batches:
        for numbers, made in zip(steps, batches, strict=True):
            if isinstance(made, DataError):
                raise made
            values, labels = _most_probable(run, floats(made.pixels, maker.transform.channels), top)
            found = dict(zip(made.labels.tolist(), zip(values, labels, strict=True), strict=True))
            for number in numbers.tolist():
                name = source.name(number)
                if number not in found:
                    yield Prediction(name, (), made.skipped[name])
                    continue
                pairs = zip(*found[number], strict=True)
                guesses = (Guess(str(label) if names is None else names[label], value, label) for value, label in pairs)
                yield Prediction(name, tuple(guesses))


def _most_probable(run: "Run", images: Tensor, top: int) -> tuple[list[list[float]], list[list[int]]]:
    """The largest probabilities of each image, and which classes they are of."""
    if not len(images):
        return [], []
    with torch.inference_mode():
        logits = run.model(images.to(next(run.model.parameters()))).float().cpu()
    if not torch.isfinite(logits).all():
        raise FloatingPointError(f"{run.name}: what the model computes is not finite.")
    # By logits, which tell apart what rounds to the same probability; of equal ones the first, as argmax has it.
    labels = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    shares = logits.sigmoid() if run.probabilities == "sigmoid" else logits.softmax(-1)
    return shares.gather(-1, labels).tolist(), labels.tolist()


class _Pictures:
    """Images as a source, in which the label of an image is its number."""

    on_error = "skip"
    classes: Sequence[str] = ()

    def __init__(self, images: Sequence[Picture]) -> None:
        self.images = images
        self.labels: npt.NDArray[np.int64] = np.arange(len(images))

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Image.Image:
        """The image with this number; of a file only the header is read here."""
        image = self.images[index]
        if isinstance(image, Image.Image):
            return image
        return files.opened(files.read(Path(image), self.name(index)), self.name(index))

    def name(self, index: int) -> str:
        """What an error calls this image."""
        image = self.images[index]
        return f"image {index}" if isinstance(image, Image.Image) else str(image)
