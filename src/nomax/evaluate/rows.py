"""How the weights of a model's attention are spread over the keys, layer by layer and head by head."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nomax.data.text import Example
from nomax.evaluate.watch import looks, watch
from nomax.models import ReLUFormer, ViT
from nomax.phi import ACTIVATIONS, ROW_MAPS, Phi

PARTS = ("encoder", "decoder", "source")


@dataclass(frozen=True)
class HeadRows:
    """Statistics of one head's weights a_ij, over all queries i of some images or texts."""

    layer: int
    head: int
    length: float
    """L, the number of keys that a query sees; of text the mean over queries."""
    mean_weight: float
    """E[a]; 1/L in softmax."""
    row_sum: float
    """The mean of Σ_j a_ij. With one L for all i it is L·E[a]: how large weights are against softmax's 1/L."""
    row_sum_sd: float
    """The standard deviation of Σ_j a_ij."""
    zeros: float
    """The share of weights that are exactly zero, of keys that the query sees."""
    empty: float
    """The share of queries whose weights are all zero; entropy and effective_keys leave them out."""
    entropy: float
    """The mean entropy, in nats, of a_ij / Σ_j a_ij: at most log L; NaN where weights may be negative."""
    effective_keys: float
    """The mean of (Σ_j |a_ij|)² / Σ_j a_ij²: L if all weights are equal, 1 if one alone is not zero."""
    part: str = ""
    """Of text, which attention: encoder; decoder, to the text before; source, the decoder's to the source."""


def row_statistics(
    model: ViT, images: Iterable[Tensor], report: Callable[[int], None] = lambda done: None
) -> list[HeadRows]:
    """Measure every head of a model on images, each [C, height, width] in [−1, 1].

    One image and one layer at a time, so the memory needed is that of one layer's weights of one image.
    report: called with 1 after every image.
    """
    sums = [_Sums() for _ in model.blocks]
    for image in images:
        watch(model, image, lambda layer, weights: sums[layer].add(weights))
        report(1)
    if not sums or not sums[0].rows:
        raise ValueError("row statistics need a model with layers, and at least one image.")
    signed = _signed(model.config.phi)
    return [row for layer, found in enumerate(sums) for row in found.result("", layer, signed)]


def text_row_statistics(
    model: ReLUFormer, examples: Iterable[Example], report: Callable[[int], None] = lambda done: None
) -> list[HeadRows]:
    """Measure every head of every attention of a model of text on examples, as `nomax.data.text` makes them.

    A translation is shown with its reference, which the decoder reads as in training. One example and one attention at
    a time. report: called with 1 after every example.
    """
    sums: dict[tuple[str, int], _Sums] = {}
    for example in examples:
        for look in looks(model, example):
            sums.setdefault((look.part, look.layer), _Sums()).add(look.weights, look.visible)
        report(1)
    if not sums:
        raise ValueError("row statistics need a model with layers, and at least one text.")
    signed = _signed(model.config.phi)
    order = sorted(sums, key=lambda place: (PARTS.index(place[0]), place[1]))
    return [row for part, layer in order for row in sums[part, layer].result(part, layer, signed)]


def _signed(phi: str) -> bool:
    """Whether weights may be negative."""
    activation = Phi.parse(phi).activation
    return activation not in ROW_MAPS and not ACTIVATIONS[activation].nonnegative


class _Sums:
    """Running sums over queries and images, one entry per head."""

    def __init__(self) -> None:
        self.rows, self.seen = 0, 0  # queries, and keys that they saw together
        self.sums: dict[str, Tensor] = {}
        self.spread: float | Tensor = 0.0  # Σ (row sum − mean row sum)²

    def add(self, weights: Tensor, visible: Tensor | None = None) -> None:
        """Take in the weights [heads, queries, keys] of one image or text; visible [queries, keys]: all, if None."""
        a = weights.double()
        zero = a == 0 if visible is None else (a == 0) & visible
        row_sum, size = a.sum(2), a.abs().sum(2)
        some = size > 0
        share = a / torch.where(some, row_sum, 1).unsqueeze(2)
        new = {
            "row_sum": row_sum.sum(1),
            "zeros": zero.sum((1, 2)),
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
        self.rows = before + now
        self.seen += a[0].numel() if visible is None else int(visible.sum())

    def result(self, part: str, layer: int, signed: bool) -> list[HeadRows]:
        """What was found, head by head."""
        sums, rows, seen = self.sums, self.rows, self.seen
        length = seen / rows if seen % rows else seen // rows
        entropy = sums["entropy"] / sums["some"]
        found = {
            "mean_weight": sums["row_sum"] / seen,
            "row_sum": sums["row_sum"] / rows,
            "row_sum_sd": torch.as_tensor(self.spread / rows).sqrt(),
            "zeros": sums["zeros"] / seen,
            "empty": 1 - sums["some"] / rows,
            "entropy": torch.full_like(entropy, math.nan) if signed else entropy,
            "effective_keys": sums["effective_keys"] / sums["some"],
        }
        by_head = zip(*(values.tolist() for values in found.values()), strict=True)
        return [
            HeadRows(layer, head, length, **dict(zip(found, values, strict=True)), part=part)
            for head, values in enumerate(by_head)
        ]
