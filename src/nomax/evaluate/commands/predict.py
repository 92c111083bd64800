"""`nomax predict`: what a trained image model says about image files."""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.text import Text

from nomax.console import Console, Table
from nomax.data.images import EXTENSIONS
from nomax.evaluate.commands import terminal
from nomax.evaluate.predict import Prediction, predict
from nomax.evaluate.runs import Run, load
from nomax.train.files import aside

SHOWN = 20  # images that are in the table where a file gets them all

Write = Callable[[Prediction], None]


@dataclass(frozen=True)
class Options:
    """Say what images show: the most probable classes of each, as a table and, with --output, as JSON or CSV.

    For example: nomax predict runs/mine photo.jpg more-photos --top 3. Images are prepared as in evaluation, which the
    model itself says. Probabilities are those that the loss of its training speaks of: sigmoids, each class by itself,
    or a softmax. An image that cannot be read is named, the others go on, and the exit code is 1.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """A run folder that `nomax train vit` wrote, a saved model, or a model of the hub."""
    images: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="IMAGE [IMAGE ...]", help_behavior_hint="(at least one)")]
    ]
    """Image files, or folders: all image files below them."""
    top: int = 5
    """How many classes of each image, the most probable first."""
    batch_size: int = 64
    """Images that pass through the model at a time, at most 256."""
    workers: int = 0
    """Processes that prepare images."""
    device: str | None = None
    """cpu, cuda, …; if not given, a GPU if there is one."""
    output: Path | None = None
    """Write all predictions into this file, too: .json, or .csv with a row for each class of each image."""


def run(options: Options) -> int:
    """Return 0, 1 if images cannot be read or results cannot be written, or 2 if the options cannot be served."""
    console = Console()
    shown: list[Prediction] = []
    done = broken = 0
    try:
        _check_output(options.output)
        files = _files(options.images)
        one = load(options.run, options.device)
        found = predict(one, files, options.top, batch_size=options.batch_size, workers=options.workers)
        with terminal.progress(console) as progress, _writing(options.output, one) as write:
            report = terminal.advancing(progress, one.title, len(files))
            for prediction in found:
                done += 1
                write(prediction)
                report(1)
                if prediction.error:
                    broken += 1
                    print(f"nomax predict: {_printable(prediction.error)}", file=sys.stderr)
                elif options.output is None or len(shown) < SHOWN:
                    shown.append(prediction)
    except terminal.EXPECTED as error:
        terminal.tell("predict", error)
        return 1 if done else 2
    if shown:
        console.print(_table(shown))
    for text in _unknown(one):
        console.print(text, highlight=False, soft_wrap=True)
    if options.output is not None:
        more = f" The table has the first {len(shown)}." if done - broken > len(shown) else ""
        console.print(f"Written: {options.output}.{more}")
    if broken:
        print(f"nomax predict: {broken:,} of {done:,} images could not be read.", file=sys.stderr)
    return 1 if broken else 0


def _files(given: Sequence[str]) -> list[str]:
    """The files, and those below folders, in the order of their names."""
    if not given:
        raise ValueError("give at least one image, or a folder of images, after the run.")
    found: list[str] = []
    for path in given:
        if not os.path.isdir(path):
            found.append(path)
            continue
        inside = list(_below(path))
        if not inside:
            raise ValueError(f"{path} has no image files ({', '.join(sorted(EXTENSIONS))}).")
        found += inside
    return found


def _below(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and name.rpartition(".")[2].lower() in EXTENSIONS:
                yield os.path.join(place, name)


def _check_output(path: Path | None) -> None:
    terminal.check_output(path)
    if path is not None and path.suffix.lower() not in (".json", ".csv"):
        raise ValueError(f"--output {path} must end in .json or .csv.")


@contextmanager
def _writing(path: Path | None, one: Run) -> Iterator[Write]:
    """A function that writes each prediction as it comes: however many there are, none is kept in memory."""
    if path is None:
        yield lambda prediction: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # A path that is not UTF-8 is spelled as JSON spells it.
    with aside(path) as raw:
        file = io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="")
        try:
            if path.suffix.lower() == ".csv":
                yield _csv(file)
            else:
                yield from _json(file, one)
        finally:
            file.detach()


def _csv(file: io.TextIOWrapper) -> Write:
    rows = csv.writer(file)
    rows.writerow(["image", "rank", "class", "label", "probability", "error"])

    def write(found: Prediction) -> None:
        for rank, guess in enumerate(found.guesses, 1):
            rows.writerow([found.image, rank, guess.name, guess.label, f"{guess.probability:.6g}", ""])
        if found.error:
            rows.writerow([found.image, "", "", "", "", found.error])

    return write


def _json(file: io.TextIOWrapper, one: Run) -> Iterator[Write]:
    about = {"run": one.title, "phi": one.model.config.phi, "probabilities": one.probabilities or "softmax"}
    file.write(json.dumps(about, ensure_ascii=False)[:-1] + ', "results": [')
    separator = "\n"

    def write(found: Prediction) -> None:
        nonlocal separator
        guesses = [{"class": g.name, "label": g.label, "probability": g.probability} for g in found.guesses]
        entry: dict[str, Any] = {"image": found.image, "guesses": guesses}
        entry |= {"error": found.error} if found.error else {}
        file.write(separator + json.dumps(entry, ensure_ascii=False))
        separator = ",\n"

    yield write
    file.write("\n]}\n")


def _table(shown: Sequence[Prediction]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    for prediction in shown:
        for rank, guess in enumerate(prediction.guesses):
            image = "" if rank else _printable(prediction.image)
            table.add_row(Text(image), Text(_printable(guess.name)), f"{guess.probability:.2%}")
        table.add_section()
    return table


def _unknown(one: Run) -> list[str]:
    """What the model does not say about itself, if it comes from elsewhere or is old."""
    config = one.model.config
    told = []
    if config.classes is None:
        told.append("The model does not say what its classes are called: these are their numbers.")
    if config.preprocessing is None and one.config is None:
        told.append(f"The model does not say how it wants images: they were prepared as {one.transform}.")
    if one.probabilities is None:
        told.append("The model does not say which loss it was trained with: probabilities are a softmax.")
    return told


def _printable(text: str) -> str:
    """The text without characters that could act on the terminal."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
