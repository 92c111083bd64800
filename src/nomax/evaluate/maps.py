"""`nomax maps`: draw attention weights over an image, one column per run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nomax import _figures
from nomax._files import write
from nomax.console import Console
from nomax.data import Source
from nomax.data.images import files
from nomax.data.images.batches import evaluation_batches
from nomax.data.source import part
from nomax.evaluate import terminal
from nomax.evaluate.attention_weights import attention_weights
from nomax.evaluate.predict import Pictures
from nomax.evaluate.runs import TrainedImageModel, load, load_all
from nomax.models import ViT

MARK = " looks ("  # in the title, which is in the file, too
MOST_LAYERS = 6  # shown by default
SIDE = 1.6  # inches of a map
LEGEND = (
    "Above each map: its least and largest weight, in units of 1/L.\nDark is 0 and bright the largest; blue is below 0."
)

Query = Literal["class", "mean"] | tuple[int, int]


def attention_maps(model: ViT, image: Tensor, query: Query | None = None) -> Tensor:
    """Return the weights of the patches: [layers, heads, rows of patches, columns of patches].

    image: [C, height, width] in [−1, 1]. query: "class", the class token; "mean", the mean over all patches; (row,
    column), one patch; None, the token that the model pools, or the mean if it pools that.
    """
    config = model.config
    first, (rows, columns) = int(config.has_class_token), config.grid
    if query is None:
        pooled: dict[str, Query] = {"tok": "class", "gap": "mean", "0": (0, 0)}
        query = pooled[config.pool]
    if query == "mean":
        queries = slice(first, None)
    elif query == "class":
        if not first:
            raise ValueError('query="class": this model has no class token; use "mean" or a patch (row, column).')
        queries = slice(0, 1)
    else:
        row, column = query
        if not (0 <= row < rows and 0 <= column < columns):
            raise ValueError(f"query={query}: the image has {rows} rows and {columns} columns of patches, from (0, 0).")
        place = first + row * columns + column
        queries = slice(place, place + 1)
    maps = [attention.weights[:, queries, first:].float().mean(1) for attention in attention_weights(model, image)]
    return torch.stack(maps).unflatten(2, (rows, columns)).cpu()


@dataclass(frozen=True)
class Options:
    """Draw the attention weights of image models over one image, layer by layer, one column per run.

    For example: nomax maps runs/softmax runs/relu --data cifar10 --index 7. Each map has its own colour scale; the
    range above it is in units of 1/L, the mean weight of softmax. Weights below zero are blue. For text models, see
    `nomax rows`.
    """

    runs: terminal.Runs
    image: Path | None = None
    """An image file."""
    data: str | None = None
    """Instead of a file, the data set of a test image; if neither is given, the first run's own."""
    index: int = 0
    """Number of the test image, from 0."""
    layers: tuple[int, ...] = ()
    """Layers to show, from 1; if not given, six of them from the first to the last."""
    heads: tuple[int, ...] = ()
    """Heads to average over, from 1; all if not given."""
    query: tuple[int, int] | None = None
    """Row and column, from 1, of the query patch; if not given, what the model pools: the class token, the mean over
    patches, or the first patch."""
    output: Path | None = None
    """The picture, .png or .svg; if not given, maps-INDEX.png, or maps-NAME.png for an image file, in the folder of the
    first run."""
    device: terminal.Device = None
    smoke: bool = False
    """Try it: draw the first layer only."""


def run(options: Options) -> int:
    """Write the picture."""
    _figures.require()
    if options.output is not None:
        _figures.check_format(options.output)
    loaded = load_all(options.runs, options.device, load)
    output = options.output or terminal.default_folder(options.runs) / _name(options)
    replaced = terminal.check_replaceable("maps", output, MARK)
    source, index = _source(options, loaded[0])
    layers = _layers(options, loaded)
    shown = [_shown(source, index, trained) for trained in loaded]
    maps = {trained.title: _maps(trained, image, options) for trained, image in zip(loaded, shown, strict=True)}
    sharpest = max(shown, key=Tensor.numel)
    write(output, draw(sharpest, maps, layers, _title(options, loaded), output.suffix.lower()))
    Console().print(terminal.written(replaced), f"{output} ({options.image or source.name(index)})")
    return 0


def _name(options: Options) -> str:
    return f"maps-{options.index if options.image is None else options.image.stem}.png"


def _source(options: Options, first: TrainedImageModel) -> tuple[Source, int]:
    if options.image is None:
        source = first.images("test", options.data)
        if not 0 <= options.index < len(source):
            raise ValueError(f"--index {options.index}: the test split has the images 0 to {len(source) - 1}.")
        return source, options.index
    if options.data is not None:
        raise ValueError("--image and --data: give one of them.")
    what = f"--image {options.image}"
    return Pictures([files.decode(files.read_file(options.image, what), what)]), 0


def _layers(options: Options, loaded: Sequence[TrainedImageModel]) -> list[int]:
    shallowest = min(loaded, key=lambda trained: trained.model.config.size.depth)
    depth = shallowest.model.config.size.depth
    _check("layers", options.layers, depth, shallowest)
    spread = torch.linspace(0, depth - 1, min(depth, MOST_LAYERS)).round().int().tolist()
    return ([layer - 1 for layer in options.layers] or spread)[: 1 if options.smoke else None]


def _maps(trained: TrainedImageModel, image: Tensor, options: Options) -> Tensor:
    """Return the mean over the chosen heads, in units of 1/L: [layers, rows, columns]."""
    query: Query | None = None if options.query is None else (options.query[0] - 1, options.query[1] - 1)
    maps = attention_maps(trained.model, image, query)
    _check("heads", options.heads, maps.shape[1], trained)
    heads = [head - 1 for head in options.heads] or slice(None)
    return maps[:, heads].mean(1) * trained.model.config.tokens


def _check(name: str, wanted: Sequence[int], number: int, trained: TrainedImageModel) -> None:
    for value in wanted:
        if not 1 <= value <= number:
            raise ValueError(f"--{name} {value}: {trained.title} has the {name} 1 to {number}.")


def _shown(source: Source, index: int, trained: TrainedImageModel) -> Tensor:
    """Return the image as the model sees it, [C, height, width]."""
    with evaluation_batches(part(source, np.array([index])), trained.transform, 1) as batches:
        for images, _ in batches:
            return images[0]
    raise ValueError(f"{source.name(index)} is a broken image: choose another one with --index.")


def _title(options: Options, loaded: Sequence[TrainedImageModel]) -> str:
    pools = {trained.model.config.pool for trained in loaded}
    if options.query is not None:
        who = f"the patch in row {options.query[0]}, column {options.query[1]}"
    else:
        pooled = {"tok": "the class token", "gap": "the mean patch", "0": "the first patch"}
        who = "the model" if len(pools) > 1 else pooled[pools.pop()]
    heads = f"heads {', '.join(map(str, options.heads))}" if options.heads else "mean over heads"
    return f"Where {who}{MARK}{heads})"


def draw(image: Tensor, maps: Mapping[str, Tensor], layers: Sequence[int], title: str, suffix: str = ".png") -> bytes:
    """Draw an image, [C, height, width] in [−1, 1], and the maps of runs, by title.

    Maps are [layers, rows, columns] in units of 1/L, the mean weight of softmax.
    """
    matplotlib = _figures.require()
    from matplotlib.figure import Figure

    pixels = ((image + 1) / 2).clamp(0, 1).permute(1, 2, 0).numpy()
    grey = pixels.mean(2)
    with matplotlib.rc_context(_figures.STYLE):
        size = (max(SIDE * (1 + len(maps)) + 0.4, 5.2), (SIDE + 0.2) * len(layers) + 1.2)
        figure = Figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(h_pad=0.09, w_pad=0.04)  # type: ignore[union-attr, call-arg]
        axes = figure.subplots(len(layers), 1 + len(maps), squeeze=False)
        for axis in axes.flat:
            axis.set_axis_off()
        axes[0, 0].imshow(pixels if pixels.shape[2] == 3 else grey, cmap="gray", vmin=0, vmax=1)
        axes[0, 0].set_title("image", fontsize=8.5)
        for column, (name, of_run) in enumerate(maps.items(), 1):
            for row, layer in enumerate(layers):
                weights = of_run[layer]
                _panel(axes[row, column], grey, weights)
                label = f"layer {layer + 1}: {weights.min():.2g} … {weights.max():.2g}"
                heading = f"{name}\n{label}" if row == 0 else label
                axes[row, column].set_title(heading, fontsize=8.5, pad=3)
        figure.suptitle(title, fontsize=11, fontweight="bold")
        figure.supxlabel(LEGEND, fontsize=8)
        return _figures.rendered(figure, suffix, title, _describe(maps, layers, title))


def _panel(axis: Any, grey: Any, weights: Tensor) -> None:
    spread = F.interpolate(weights[None, None], grey.shape, mode="bilinear", align_corners=False)[0, 0].numpy()
    signed = float(weights.min()) < 0
    bound = float(weights.abs().max()) or 1.0
    axis.imshow(grey, cmap="gray", vmin=-1, vmax=2)  # pale, for orientation
    colours = {"cmap": "RdBu_r", "vmin": -bound} if signed else {"cmap": "inferno", "vmin": 0}
    axis.imshow(spread, vmax=bound, alpha=0.8, **colours)


def _describe(maps: Mapping[str, Tensor], layers: Sequence[int], title: str) -> str:
    """Describe in words where each map is strongest."""
    sentences = [f"{title}. Rows and columns of patches count from 1 at the top left; weights are in units of 1/L."]
    for name, of_run in maps.items():
        for layer in layers:
            row, column = np.unravel_index(int(of_run[layer].argmax()), of_run[layer].shape)
            place = f"row {row + 1}, column {column + 1}, {of_run[layer].max():.2g}"
            sentences.append(f"{name}, layer {layer + 1}: strongest at {place}.")
    return " ".join(sentences)
