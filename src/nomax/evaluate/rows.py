"""How the weights of a model's attention are spread over the keys, layer by layer and head by head."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nomax.evaluate.watch import watch
from nomax.models import ViT
from nomax.phi import ACTIVATIONS, ROW_MAPS, Phi


@dataclass(frozen=True)
class HeadRows:
    """Statistics of one head's weights a_ij, over all queries i of some images."""

    layer: int
    head: int
    length: int
    """L, the number of keys."""
    mean_weight: float
    """E[a]; 1/L in softmax."""
    row_sum: float
    """The mean of Σ_j a_ij. That is L·E[a]: how large weights are against softmax's 1/L."""
    row_sum_sd: float
    """The standard deviation of Σ_j a_ij."""
    zeros: float
    """The share of weights that are exactly zero."""
    empty: float
    """The share of queries whose weights are all zero; entropy and effective_keys leave them out."""
    entropy: float
    """The mean entropy, in nats, of a_ij / Σ_j a_ij: at most log L; NaN where weights may be negative."""
    effective_keys: float
    """The mean of (Σ_j |a_ij|)² / Σ_j a_ij²: L if all weights are equal, 1 if one alone is not zero."""


def row_statistics(
    model: ViT, images: Iterable[Tensor], report: Callable[[int], None] = lambda done: None
) -> list[HeadRows]:
    """Measure every head of a model on images, each [C, height, width] in [−1, 1].

    One image and one layer at a time, so the memory needed is that of one layer's weights of one image.
    report: called with 1 after every image.
    """
    phi = Phi.parse(model.config.phi)
    sums = [_Sums() for _ in model.blocks]
    for image in images:
        watch(model, image, lambda layer, weights: sums[layer].add(weights))
        report(1)
    if not sums or not sums[0].rows:
        raise ValueError("row statistics need a model with layers, and at least one image.")
    signed = phi.activation not in ROW_MAPS and not ACTIVATIONS[phi.activation].nonnegative
    return [row for layer, found in enumerate(sums) for row in found.result(layer, signed)]


class _Sums:
    """Running sums over queries and images, one entry per head."""

    def __init__(self) -> None:
        self.rows, self.length = 0, 0
        self.sums: dict[str, Tensor] = {}
        self.spread: float | Tensor = 0.0  # Σ (row sum − mean row sum)²

    def add(self, weights: Tensor) -> None:
        """Take in the weights [heads, queries, keys] of one image."""
        a = weights.double()
        row_sum, size = a.sum(2), a.abs().sum(2)
        some = size > 0
        share = a / torch.where(some, row_sum, 1).unsqueeze(2)
        new = {
            "row_sum": row_sum.sum(1),
            "zeros": (a == 0).sum((1, 2)),
            "some": some.sum(1),
            "effective_keys": (size.square() / torch.where(some, a.square().sum(2), 1)).sum(1),
            # A negative weight has no logarithm: that head has no entropy.
            "entropy": torch.special.entr(share).sum((1, 2)).where((a >= 0).all(2).all(1), math.nan),
        }
        # Squares count from the mean so far: nothing cancels where all rows have one sum, as in softmax.
        before, now, mean = self.rows, a.shape[1], row_sum.mean(1)
        self.spread = self.spread + (row_sum - mean.unsqueeze(1)).square().sum(1)
        if before:
            apart = mean - self.sums["row_sum"] / before
            self.spread = self.spread + apart.square() * (before * now / (before + now))
        self.sums = {name: value + self.sums.get(name, 0) for name, value in new.items()}
        self.rows, self.length = before + now, a.shape[2]

    def result(self, layer: int, signed: bool) -> list[HeadRows]:
        """What was found, head by head."""
        sums, rows, length = self.sums, self.rows, self.length
        entropy = sums["entropy"] / sums["some"]
        found = {
            "mean_weight": sums["row_sum"] / (rows * length),
            "row_sum": sums["row_sum"] / rows,
            "row_sum_sd": torch.as_tensor(self.spread / rows).sqrt(),
            "zeros": sums["zeros"] / (rows * length),
            "empty": 1 - sums["some"] / rows,
            "entropy": torch.full_like(entropy, math.nan) if signed else entropy,
            "effective_keys": sums["effective_keys"] / sums["some"],
        }
        by_head = zip(*(values.tolist() for values in found.values()), strict=True)
        return [
            HeadRows(layer, head, length, **dict(zip(found, values, strict=True)))
            for head, values in enumerate(by_head)
        ]
