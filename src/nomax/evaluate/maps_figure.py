"""Attention maps as a picture: the image, then layers from top to bottom and runs from left to right."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from nomax.evaluate import figures

SIDE = 1.6  # inches of a map
LEGEND = (
    "Above each map: its least and largest weight, in units of 1/L.\nDark is 0 and bright the largest; blue is below 0."
)


def draw(image: Tensor, found: Mapping[str, Tensor], layers: Sequence[int], title: str, kind: str = ".png") -> bytes:
    """The picture of an image, [C, height, width] in [−1, 1], and of the maps of some runs, by their titles.

    Maps are [layers, rows, columns] in units of 1/L, which is what softmax gives a key in the mean.
    """
    matplotlib = figures.require()
    from matplotlib.figure import Figure

    pixels = ((image + 1) / 2).clamp(0, 1).permute(1, 2, 0).numpy()
    grey = pixels.mean(2)
    with matplotlib.rc_context(figures.STYLE):
        size = (max(SIDE * (1 + len(found)) + 0.4, 5.2), (SIDE + 0.2) * len(layers) + 1.2)
        figure = Figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(h_pad=0.09, w_pad=0.04)  # type: ignore[union-attr, call-arg]
        axes = figure.subplots(len(layers), 1 + len(found), squeeze=False)
        for axis in axes.flat:
            axis.set_axis_off()
        axes[0, 0].imshow(pixels if pixels.shape[2] == 3 else grey, cmap="gray", vmin=0, vmax=1)
        axes[0, 0].set_title("image", fontsize=8.5)
        for column, (name, maps) in enumerate(found.items(), 1):
            for row, layer in enumerate(layers):
                _panel(axes[row, column], grey, maps[layer])
                label = f"layer {layer + 1}: {maps[layer].min():.2g} … {maps[layer].max():.2g}"
                heading = f"{name}\n{label}" if row == 0 else label
                axes[row, column].set_title(heading, fontsize=8.5, pad=3)
        figure.suptitle(title, fontsize=11, fontweight="bold")
        figure.supxlabel(LEGEND, fontsize=8)
        return figures.rendered(figure, kind, title, describe(found, layers, title))


def _panel(axis: Any, grey: Any, weights: Tensor) -> None:
    spread = F.interpolate(weights[None, None], grey.shape, mode="bilinear", align_corners=False)[0, 0].numpy()
    signed = float(weights.min()) < 0
    bound = float(weights.abs().max()) or 1.0
    axis.imshow(grey, cmap="gray", vmin=-1, vmax=2)  # pale: it is there for orientation
    colours = {"cmap": "RdBu_r", "vmin": -bound} if signed else {"cmap": "inferno", "vmin": 0}
    axis.imshow(spread, vmax=bound, alpha=0.8, **colours)


def describe(found: Mapping[str, Tensor], layers: Sequence[int], title: str) -> str:
    """The picture in words: where each map is strongest."""
    sentences = [f"{title}. Rows and columns of patches count from 1 at the top left; weights are in units of 1/L."]
    for name, maps in found.items():
        for layer in layers:
            row, column = np.unravel_index(int(maps[layer].argmax()), maps[layer].shape)
            place = f"row {row + 1}, column {column + 1}, {maps[layer].max():.2g}"
            sentences.append(f"{name}, layer {layer + 1}: strongest at {place}.")
    return " ".join(sentences)
