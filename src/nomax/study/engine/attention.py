"""A look into trained image models for the results folder: row statistics by head, and maps of where they look."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch

from nomax import data
from nomax._files import write, write_json
from nomax.data.images.batches import evaluation_batches
from nomax.data.source import part
from nomax.evaluate import TrainedImageModel, attention_maps, load, maps, row_statistics
from nomax.phi import SOFTMAX
from nomax.study.engine.publication import Publication
from nomax.study.engine.result import ImageResult, Result, finals
from nomax.study.engine.store import Store

IMAGES = 8  # for row statistics
INDEX = 0  # the test image of the maps
MOST = 6  # runs, so that their maps fit on a page
LAYERS = 4


def write_attention(rows: Sequence[Result], store: Store, out: Path, before: Publication) -> None:
    """Write row statistics and attention maps of a few image runs whose models are in the store.

    If a model is not there, and its run was part of the publication before, the pictures of that stay.
    """
    images = [row for row in finals(rows) if isinstance(row, ImageResult)]
    looked = worth_a_look(images)
    chosen = [row for row in looked if (store.folder(row.key) / "model").is_dir()]
    if any(row.key in before.rows for row in looked if row not in chosen):
        return
    for name in ("rows_statistics.json", "maps.svg", "maps.png"):  # the last as it was called before
        (out / name).unlink(missing_ok=True)
    if chosen:
        write_json(out / "rows_statistics.json", _row_statistics(chosen, store))
        write(out / "maps.svg", _attention_maps(chosen, store))


def worth_a_look(rows: Sequence[ImageResult]) -> list[ImageResult]:
    """Choose the runs to look into: of the first seed, middle length and one size, softmax and others at α = 1."""
    done = [row for row in rows if row.status == "done"]
    if not done:
        return []
    tokens = median_low(sorted({row.tokens for row in done}))
    first = min(row.seed for row in done)
    near = [row for row in done if row.seed == first and row.tokens == tokens]
    near = [row for row in near if row.size == near[0].size]
    return [row for row in near if row.activation == SOFTMAX or math.isclose(row.alpha, 1)][:MOST]


def _row_statistics(rows: Sequence[ImageResult], store: Store) -> list[dict[str, Any]]:
    """Return the entries of rows_statistics.json: every head of every layer."""
    found = []
    for row in rows:
        trained = load(store.folder(row.key))
        heads = row_statistics(trained.model, _images(trained, row, IMAGES))
        found.append({"label": row.label, "layers": [dataclasses.asdict(head) for head in heads]})
    return found


def _attention_maps(rows: Sequence[ImageResult], store: Store) -> bytes:
    """Draw where the models look, as SVG, whose letters and background turn dark."""
    shown, image = {}, torch.empty(0)
    for row in rows:
        trained = load(store.folder(row.key))
        image = _images(trained, row, 1)[0]
        # In units of 1/L, and over all heads.
        shown[row.label.replace(", ", "\n")] = attention_maps(trained.model, image).mean(1) * row.tokens
    depth = min(len(layers) for layers in shown.values())
    layers = torch.linspace(0, depth - 1, min(depth, LAYERS)).round().int().tolist()
    return maps.draw(image, shown, layers, "Where the mean patch looks (mean over heads)", ".svg")


def _images(trained: TrainedImageModel, row: ImageResult, number: int) -> list[torch.Tensor]:
    """Return so many test images as the model sees them, from the first on, spread evenly."""
    source = data.load(row.data, "test", on_error=trained.config.on_error if trained.config else "raise")
    places = np.linspace(INDEX, len(source) - 1, number).round().astype(np.int64)
    with evaluation_batches(part(source, places), trained.transform, 8) as batches:
        return [image for batch, _ in batches for image in batch]
