"""Where a model looks: its attention weights, laid back over the image."""

from typing import Literal

import torch
from torch import Tensor

from nomax.evaluate.watch import watch
from nomax.models import ViT

Query = Literal["class", "mean"] | tuple[int, int]


def attention_maps(model: ViT, image: Tensor, query: Query | None = None) -> Tensor:
    """The weights that patches get, for every layer and head: [layers, heads, rows of patches, columns of patches].

    image: [C, height, width] in [−1, 1]. query: who looks: "class", the class token; "mean", all patches, of which the
    mean is taken; (row, column), one patch. None: the one that the model pools, or the mean if it pools that.
    """
    config = model.config
    first, (rows, columns) = int(config.has_class_token), config.grid
    if query is None:
        pooled: dict[str, Query] = {"tok": "class", "gap": "mean", "0": (0, 0)}
        query = pooled[config.pool]
    if query == "mean":
        lookers = slice(first, None)
    elif query == "class":
        if not first:
            raise ValueError('query="class": this model has no class token; use "mean" or a patch (row, column).')
        lookers = slice(0, 1)
    else:
        row, column = query
        if not (0 <= row < rows and 0 <= column < columns):
            raise ValueError(f"query={query}: the image has {rows} rows and {columns} columns of patches, from (0, 0).")
        place = first + row * columns + column
        lookers = slice(place, place + 1)
    found: list[Tensor] = []

    def look(layer: int, weights: Tensor) -> None:
        seen = weights[:, lookers, first:].float().mean(1)
        found.append(seen.unflatten(1, (rows, columns)).cpu())

    watch(model, image, look)
    return torch.stack(found)
