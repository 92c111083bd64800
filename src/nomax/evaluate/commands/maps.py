"""`nomax maps`: attention maps of one image, runs side by side, as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nomax import data
from nomax.console import Console
from nomax.data import Source, images
from nomax.data.batches import evaluation_batches
from nomax.evaluate import figures, maps_figure
from nomax.evaluate.commands import terminal
from nomax.evaluate.maps import Query, attention_maps
from nomax.evaluate.runs import Run, load_all
from nomax.evaluate.sources import part

if TYPE_CHECKING:
    from PIL import Image

MOST_LAYERS = 6  # that are shown without being asked for


@dataclass(frozen=True)
class Options:
    """Draw where models look: the attention weights of one image, layer by layer, one column per run.

    For example: nomax maps runs/softmax runs/relu --data cifar10 --index 7. A map has its own colour scale; the range
    above it is in units of 1/L, which is what softmax gives a key in the mean. Weights below zero are blue.
    """

    runs: terminal.Runs
    """Run folders that `nomax train` wrote, saved models, or models of the hub."""
    image: Path | None = None
    """An image file."""
    data: str | None = None
    """Instead of a file: the data set of a test image; if neither is given, the first run's own."""
    index: int = 0
    """Which of its test images."""
    layers: tuple[int, ...] = ()
    """Layers to show, from 1; if not given, six of them from the first to the last."""
    heads: tuple[int, ...] = ()
    """Heads to take the mean over, from 1; all if not given."""
    query: tuple[int, int] | None = None
    """Row and column, from 1, of the patch that looks; if not given, the class token, or the mean over patches."""
    output: Path = Path("maps.png")
    """The picture, .png or .svg."""
    device: str | None = None
    """cpu, cuda, …; if not given, a GPU if there is one."""
    smoke: bool = False
    """Try it: draw the first layer only."""


def run(options: Options) -> int:
    """Return 0, or 2 if the options cannot be served."""
    try:
        figures.require()
        output = figures.check_format(options.output)
        runs = load_all(options.runs, options.device)
        source, index = _source(options, runs[0])
        layers = _layers(options, runs)
        shown = [_shown(source, index, one) for one in runs]
        found = {one.title: _maps(one, image, options) for one, image in zip(runs, shown, strict=True)}
        sharpest = max(shown, key=Tensor.numel)
        terminal.write(output, maps_figure.draw(sharpest, found, layers, _title(options, runs), output.suffix.lower()))
    except terminal.EXPECTED as error:
        return terminal.tell("maps", error)
    Console().print(f"Written: {output} ({source.name(index)})")
    return 0


def _source(options: Options, first: Run) -> tuple[Source, int]:
    if options.image is None:
        source = data.load(options.data or first.data, "test")
        if not 0 <= options.index < len(source):
            raise ValueError(f"--index {options.index}: the test split has the images 0 to {len(source) - 1}.")
        return source, options.index
    if options.data is not None:
        raise ValueError("--image and --data: give one of them.")
    return OneImage(options.image), 0


def _layers(options: Options, runs: Sequence[Run]) -> list[int]:
    shallowest = min(runs, key=lambda one: one.model.config.size.depth)
    depth = shallowest.model.config.size.depth
    _check("layers", options.layers, depth, shallowest)
    spread = torch.linspace(0, depth - 1, min(depth, MOST_LAYERS)).round().int().tolist()
    return ([layer - 1 for layer in options.layers] or spread)[: 1 if options.smoke else None]


def _maps(one: Run, image: Tensor, options: Options) -> Tensor:
    """The mean over the chosen heads, in units of 1/L: [layers, rows, columns]."""
    query: Query | None = None if options.query is None else (options.query[0] - 1, options.query[1] - 1)
    maps = attention_maps(one.model, image, query)
    _check("heads", options.heads, maps.shape[1], one)
    heads = [head - 1 for head in options.heads] or slice(None)
    return maps[:, heads].mean(1) * one.model.config.tokens


def _check(name: str, wanted: Sequence[int], number: int, one: Run) -> None:
    for value in wanted:
        if not 1 <= value <= number:
            raise ValueError(f"--{name} {value}: {one.title} has the {name} 1 to {number}.")


def _shown(source: Source, index: int, one: Run) -> Tensor:
    """The image as the model sees it, [C, height, width]."""
    with evaluation_batches(part(source, np.array([index])), one.transform, 1) as batches:
        return next(batches)[0][0]


def _title(options: Options, runs: Sequence[Run]) -> str:
    pools = {one.model.config.pool for one in runs}
    if options.query is not None:
        who = f"the patch in row {options.query[0]}, column {options.query[1]}"
    else:
        who = "the model" if len(pools) > 1 else "the class token" if pools == {"tok"} else "the mean patch"
    heads = f"heads {', '.join(map(str, options.heads))}" if options.heads else "mean over heads"
    return f"Where {who} looks ({heads})"


class OneImage:
    """An image file as a source of one image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.classes: Sequence[str] = ("?",)
        self.labels = np.zeros(1, np.int64)
        self._image = images.decode(images.read(path, f"--image {path}"), f"--image {path}")

    def __len__(self) -> int:
        return 1

    def image(self, index: int) -> "Image.Image":
        """The image."""
        return self._image

    def name(self, index: int) -> str:
        """What an error calls it."""
        return str(self.path)
