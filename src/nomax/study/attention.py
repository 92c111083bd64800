"""How chosen runs of a study attend: row statistics and attention maps, for the results folder."""

import dataclasses
import math
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import numpy as np
import torch

from nomax import data
from nomax.data.batches import evaluation_batches
from nomax.data.source import part
from nomax.evaluate import Run as Trained
from nomax.evaluate import attention_maps, load, maps_figure, row_statistics
from nomax.phi import SOFTMAX
from nomax.study.row import ImageRow
from nomax.study.store import Store

IMAGES = 8  # for row statistics
INDEX = 0  # the test image of the maps
MOST = 6  # runs, so that their maps fit on a page
LAYERS = 4


def chosen(rows: Sequence[ImageRow]) -> list[ImageRow]:
    """The runs to look into: of the first seed, the middle length and one size, softmax and the others at α = 1."""
    done = [row for row in rows if row.status == "done"]
    if not done:
        return []
    tokens = median_low(sorted({row.tokens for row in done}))
    first = min(row.seed for row in done)
    near = [row for row in done if row.seed == first and row.tokens == tokens]
    near = [row for row in near if row.size == near[0].size]
    return [row for row in near if row.activation == SOFTMAX or math.isclose(row.alpha, 1)][:MOST]


def statistics(rows: Sequence[ImageRow], store: Store) -> list[dict[str, Any]]:
    """The entries of rows_statistics.json: every head of every layer."""
    found = []
    for row in rows:
        trained = load(store.folder(row.key))
        heads = row_statistics(trained.model, _images(trained, row, IMAGES))
        found.append({"label": row.label, "layers": [dataclasses.asdict(head) for head in heads]})
    return found


def maps(rows: Sequence[ImageRow], store: Store) -> bytes:
    """The picture of where they look, as SVG, whose letters and background turn dark."""
    shown, image = {}, torch.empty(0)
    for row in rows:
        trained = load(store.folder(row.key))
        image = _images(trained, row, 1)[0]
        # In units of 1/L, and over all heads.
        shown[row.label.replace(", ", "\n")] = attention_maps(trained.model, image).mean(1) * row.tokens
    depth = min(len(layers) for layers in shown.values())
    layers = torch.linspace(0, depth - 1, min(depth, LAYERS)).round().int().tolist()
    return maps_figure.draw(image, shown, layers, "Where the mean patch looks (mean over heads)", ".svg")


def _images(trained: Trained, row: ImageRow, number: int) -> list[torch.Tensor]:
    """So many test images as the model sees them, from the first on, spread evenly."""
    source = data.load(row.data, "test", on_error=trained.config.on_error if trained.config else "raise")
    places = np.linspace(INDEX, len(source) - 1, number).round().astype(np.int64)
    with evaluation_batches(part(source, places), trained.transform, 8) as batches:
        return [image for batch, _ in batches for image in batch]
