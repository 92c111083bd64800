"""`nomax predict`: predict the most probable classes of image files."""

import csv
import io
import json
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import tyro
from PIL import Image
from rich.text import Text
from torch import Tensor

from nomax._files import atomic
from nomax.console import Console, Table, counting
from nomax.data.images import files
from nomax.data.images.batches import floats
from nomax.data.images.files import EXTENSIONS
from nomax.data.images.workers import CHUNK, Maker, Request, made_by
from nomax.data.source import DataError
from nomax.evaluate import terminal
from nomax.evaluate.runs import TrainedImageModel, load

SHOWN = 20  # images in the table if a file gets all of them

Picture = str | Path | Image.Image


class Guess(NamedTuple):
    """A class and its probability according to the model."""

    name: str
    """Its number, if the model does not say what its classes are called."""
    probability: float
    label: int


@dataclass(frozen=True)
class Prediction:
    """The answer of a model to an image."""

    image: str
    """Its path."""
    guesses: tuple[Guess, ...]
    """The classes, most probable first; none if the image cannot be read."""
    error: str = ""
    """Why it cannot be read."""


def predict(
    trained: TrainedImageModel, images: Sequence[Picture], top: int = 5, *, batch_size: int = 64, workers: int = 0
) -> Generator[Prediction]:
    """Predict the most probable classes of images, files or images of Pillow, prepared as for evaluation.

    The prediction of an image that cannot be read says why. workers: processes that prepare images.
    """
    config = trained.model.config
    if config.num_classes == 0:
        raise ValueError(f"{trained.name} has no head (num_classes=0), so it knows no classes.")
    if top < 1 or batch_size < 1:
        raise ValueError(f"top={top} and batch_size={batch_size} must be at least 1.")
    maker = Maker(Pictures(images), trained.transform, 0, replace=False)
    return _predictions(trained, maker, min(top, config.num_classes), min(batch_size, CHUNK), workers)


def _predictions(trained: TrainedImageModel, maker: Maker, top: int, size: int, workers: int) -> Generator[Prediction]:
    source, names = maker.source, trained.model.config.classes
    steps = [np.arange(start, min(start + size, len(source))) for start in range(0, len(source), size)]
    requests = (Request(step, numbers, numbers) for step, numbers in enumerate(steps))
    with closing(made_by(maker, requests, workers)) as batches:
        for numbers, made in zip(steps, batches, strict=True):
            if isinstance(made, DataError):
                raise made
            values, labels = _most_probable(trained, floats(made.pixels, maker.transform.channels), top)
            likeliest = dict(zip(made.labels.tolist(), zip(values, labels, strict=True), strict=True))
            for number in numbers.tolist():
                name = source.name(number)
                if number not in likeliest:
                    yield Prediction(name, (), made.skipped[name])
                    continue
                pairs = zip(*likeliest[number], strict=True)
                guesses = (Guess(str(label) if names is None else names[label], value, label) for value, label in pairs)
                yield Prediction(name, tuple(guesses))


def _most_probable(trained: TrainedImageModel, images: Tensor, top: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return the largest probabilities of each image, and their classes."""
    if not len(images):
        return [], []
    with torch.inference_mode():
        logits = trained.model(images.to(next(trained.model.parameters()))).float().cpu()
    if not torch.isfinite(logits).all():
        raise FloatingPointError(f"{trained.name}: the model's logits are not finite.")
    # Sorted by logits, which differ where probabilities round to the same number; ties go to the first, as in argmax.
    labels = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    shares = logits.sigmoid() if trained.probabilities == "sigmoid" else logits.softmax(-1)
    return shares.gather(-1, labels).tolist(), labels.tolist()


def predict_one(trained: TrainedImageModel, image: Picture, top: int = 5) -> tuple[Guess, ...]:
    """Return the most probable classes of one image, or raise if it cannot be read."""
    (prediction,) = predict(trained, [image], top)
    if prediction.error:
        raise DataError(prediction.error)
    return prediction.guesses


class Pictures:
    """A source of images in which the label of an image is its number."""

    on_error = "skip"
    classes: Sequence[str] = ()

    def __init__(self, images: Sequence[Picture]) -> None:
        self.images = images
        self.labels: npt.NDArray[np.int64] = np.arange(len(images))

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Image.Image:
        """Return the image with this number; only the header of a file is read here."""
        image = self.images[index]
        if isinstance(image, Image.Image):
            return image
        return files.open_header(files.read_file(Path(image), self.name(index)), self.name(index))

    def name(self, index: int) -> str:
        """Return the name of this image in errors."""
        image = self.images[index]
        return f"image {index}" if isinstance(image, Image.Image) else str(image)


@dataclass(frozen=True)
class Options:
    """Predict the most probable classes of images, as a table and, with --output, as JSON or CSV.

    For example: nomax predict runs/mine photo.jpg more-photos --top 3. Images are prepared as for evaluation; the model
    says how. Probabilities follow from the loss that it was trained with: a sigmoid for each class, or a softmax. If an
    image cannot be read, it is named, the others go on, and the exit code is 1.
    """

    run: terminal.OneRun
    """A run folder that `nomax train vit` wrote, a saved model, or a model on the hub."""
    images: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="IMAGE [IMAGE ...]", help_behavior_hint="(at least one)")]
    ]
    """Image files, or folders, which stand for all image files below them."""
    top: int = 5
    """Number of classes to show for each image, most probable first."""
    batch_size: int = 64
    """Images that pass through the model at a time, at most 256."""
    workers: terminal.Workers = 0
    device: terminal.Device = None
    output: Path | None = None
    """Also write all predictions to this file: .json, or .csv with a row for each class of each image."""


def run(options: Options) -> int:
    """Print the predictions and write them. Return 0, or 1 if images cannot be read or results cannot be written."""
    console = Console()
    shown: list[Prediction] = []
    done = broken = 0
    try:
        terminal.check_output(options.output)
        if options.output is not None and options.output.suffix.lower() not in (".json", ".csv"):
            raise ValueError(f"--output {options.output} must end in .json or .csv.")
        paths = _image_files(options.images)
        trained = load(options.run, options.device)
        predictions = predict(trained, paths, options.top, batch_size=options.batch_size, workers=options.workers)
        if options.output is not None:
            predictions = _written(predictions, options.output, trained)
        with counting(console) as progress, closing(predictions):
            report = terminal.add_bar(progress, trained.title, len(paths))
            for prediction in predictions:
                done += 1
                report(1)
                if prediction.error:
                    broken += 1
                    print(f"nomax predict: {_printable(prediction.error)}", file=sys.stderr)
                elif options.output is None or len(shown) < SHOWN:
                    shown.append(prediction)
    except (ValueError, OSError, FloatingPointError) as error:
        if not done:
            raise
        return terminal.failed("predict", error)
    if shown:
        console.print(_table(shown))
    for text in _notes(trained):
        console.print(text)
    if options.output is not None:
        more = f" The table has the first {len(shown)}." if done - broken > len(shown) else ""
        console.print(f"Written: {options.output}.{more}")
    if broken:
        print(f"nomax predict: {broken:,} of {done:,} images could not be read.", file=sys.stderr)
    return 1 if broken else 0


def _image_files(given: Sequence[str]) -> list[str]:
    """Return the files given and those below the folders given, sorted within each folder."""
    if not given:
        raise ValueError("give at least one image, or a folder of images, after the run.")
    paths: list[str] = []
    for path in given:
        if not os.path.isdir(path):
            paths.append(path)
            continue
        inside = list(_below(path))
        if not inside:
            raise ValueError(f"{path} has no image files ({', '.join(sorted(EXTENSIONS))}).")
        paths += inside
    return paths


def _below(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and name.rpartition(".")[2].lower() in EXTENSIONS:
                yield os.path.join(place, name)


def _written(predictions: Iterator[Prediction], path: Path, trained: TrainedImageModel) -> Generator[Prediction]:
    """Pass predictions on, and write each to a file as it comes: however many there are, none is kept in memory."""
    about = {"run": trained.title, "phi": trained.model.config.phi, "probabilities": trained.probabilities or "softmax"}
    first = json.dumps(about, ensure_ascii=False)[:-1] + ', "results": [\n'
    text, separator, last = _as_json, ",\n", "\n]}\n"
    if path.suffix.lower() == ".csv":
        text, first, separator, last = _as_csv, "image,rank,class,label,probability,error\r\n", "", ""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        before = first
        for prediction in predictions:
            # A path that is not UTF-8 is spelled as JSON spells it.
            file.write((before + text(prediction)).encode(errors="backslashreplace"))
            before = separator
            yield prediction
        file.write(last.encode())


def _as_json(prediction: Prediction) -> str:
    guesses = [{"class": g.name, "label": g.label, "probability": g.probability} for g in prediction.guesses]
    entry: dict[str, Any] = {"image": prediction.image, "guesses": guesses}
    return json.dumps(entry | ({"error": prediction.error} if prediction.error else {}), ensure_ascii=False)


def _as_csv(prediction: Prediction) -> str:
    text = io.StringIO()
    rows: list[list[object]] = [
        [prediction.image, rank, guess.name, guess.label, f"{guess.probability:.6g}", ""]
        for rank, guess in enumerate(prediction.guesses, 1)
    ]
    csv.writer(text).writerows(rows or [[prediction.image, "", "", "", "", prediction.error]])
    return text.getvalue()


def _table(shown: Sequence[Prediction]) -> Table:
    table = terminal.results_table("", None, ("image", "class"), ("probability",))
    for prediction in shown:
        for rank, guess in enumerate(prediction.guesses):
            image = "" if rank else _printable(prediction.image)
            table.add_row(Text(image), Text(_printable(guess.name)), f"{guess.probability:.2%}")
        table.add_section()
    return table


def _notes(trained: TrainedImageModel) -> list[str]:
    """Return notes on what the model does not say about itself, if it comes from elsewhere or is old."""
    config = trained.model.config
    notes = []
    if config.classes is None:
        notes.append("The model does not say what its classes are called: these are their numbers.")
    if config.preprocessing is None and trained.config is None:
        notes.append(f"The model does not say how it wants images: they were prepared as {trained.transform}.")
    if trained.probabilities is None:
        notes.append("The model does not say which loss it was trained with: probabilities are a softmax.")
    return notes


def _printable(text: str) -> str:
    """Escape characters that could act on the terminal."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
