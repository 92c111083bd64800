"""The attention weights of a model on an image or a text, and statistics of how they spread over the keys."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from nomax.data.text import Example
from nomax.data.text.batches import pad
from nomax.models import ReLUFormer, ViT
from nomax.phi import ACTIVATIONS, ROW_MAPS, Phi

PARTS = ("", "encoder", "decoder", "source")


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one attention for one image or text."""

    part: str
    """For images ""; for text "encoder", "decoder" (to the text so far) or "source" (the decoder's to the source)."""
    layer: int
    weights: Tensor
    """[heads, queries, keys]"""
    visible: Tensor
    """[queries, keys]: True for the keys that a query may see."""


@torch.inference_mode()
def attention_weights(model: ViT | ReLUFormer, example: Tensor | Example) -> Iterator[AttentionWeights]:
    """Pass one image or text through a model, and yield the weights of each attention, one at a time.

    An image is [C, height, width] in [−1, 1]; a text that a model is to translate comes with its source.
    """
    modules: dict[tuple[str, int], nn.Module] = {}
    if isinstance(model, ViT):
        modules |= {("", layer): block.get_submodule("attention") for layer, block in enumerate(model.blocks)}
        inputs: list[Tensor] = [cast(Tensor, example).unsqueeze(0).to(next(model.parameters()))]
    else:
        text, device = cast(Example, example), model.embedding.weight.device
        inputs = [pad([[model.config.begin, *text.target]], device)]
        if model.encoder:
            inputs.insert(0, pad([[*text.source, model.config.end]], device))
        modules |= {("encoder", layer): block.get_submodule("attention") for layer, block in enumerate(model.encoder)}
        for layer, block in enumerate(model.decoder):
            modules["decoder", layer] = block.get_submodule("attention")
            if model.encoder:
                modules["source", layer] = block.get_submodule("source_attention")
    calls: list[tuple[str, int, Any, Any, dict[str, Any]]] = []

    def hook(part: str, layer: int) -> Callable[[Any, Any, dict[str, Any]], None]:
        return lambda attention, arguments, settings: calls.append((part, layer, attention, arguments, settings))

    with ExitStack() as stack:
        for place, attention in modules.items():
            stack.callback(attention.register_forward_pre_hook(hook(*place), with_kwargs=True).remove)
        model(*inputs)
    # The weights are computed again, from the inputs of each attention.
    for part, layer, attention, arguments, settings in calls:
        masking = {name: settings[name] for name in ("attn_mask", "is_causal") if name in settings}
        weights = attention.weights(*arguments, **masking)[0]
        visible = torch.ones(weights.shape[1:], dtype=torch.bool, device=weights.device)
        yield AttentionWeights(part, layer, weights, visible.tril() if masking.get("is_causal") else visible)


@dataclass(frozen=True)
class HeadRows:
    """Statistics of one head's weights a_ij, over all queries i of some images or texts."""

    layer: int
    head: int
    length: float
    """L, the number of keys that a query sees; for text, its mean over queries."""
    mean_weight: float
    """E[a]; 1/L for softmax."""
    row_sum: float
    """The mean of Σ_j a_ij. If all i have the same L, it is L·E[a]: the mean weight relative to softmax's 1/L."""
    row_sum_sd: float
    """The standard deviation of Σ_j a_ij."""
    zeros: float
    """The share of weights that are exactly zero, among the keys that the query sees."""
    empty: float
    """The share of queries whose weights are all zero; entropy and effective_keys exclude them."""
    entropy: float
    """The mean entropy, in nats, of a_ij / Σ_j a_ij: at most log L; NaN if weights may be negative."""
    effective_keys: float
    """The mean of (Σ_j |a_ij|)² / Σ_j a_ij²: L if all weights are equal, 1 if only one is nonzero."""
    part: str = ""
    """The attention of a text model: encoder; decoder, to the text so far; source, the decoder's to the source."""


def row_statistics(
    model: ViT | ReLUFormer,
    examples: Iterable[Tensor] | Iterable[Example],
    report: Callable[[int], None] = lambda done: None,
) -> list[HeadRows]:
    """Measure every head of a model on images, each [C, height, width] in [−1, 1], or on texts of `nomax.data.text`.

    A translation is shown with its reference, which the decoder reads as in training. Only one attention's weights of
    one image or text are in memory at a time. report: called with 1 after each image or text.
    """
    sums: dict[tuple[str, int], _Sums] = {}
    for example in examples:
        for attention in attention_weights(model, example):
            sums.setdefault((attention.part, attention.layer), _Sums()).add(attention.weights, attention.visible)
        report(1)
    if not sums:
        raise ValueError("row statistics need a model with layers, and at least one image or text.")
    activation = Phi.parse(model.config.phi).activation
    signed = activation not in ROW_MAPS and not ACTIVATIONS[activation].nonnegative
    order = sorted(sums, key=lambda place: (PARTS.index(place[0]), place[1]))
    return [row for part, layer in order for row in sums[part, layer].result(part, layer, signed)]


class _Sums:
    """Running sums over queries and images, one entry per head."""

    def __init__(self) -> None:
        self.rows, self.seen = 0, 0  # queries, and the sum of the keys that they see
        self.sums: dict[str, Tensor] = {}
        self.spread: float | Tensor = 0.0  # Σ (row sum − mean row sum)²

    def add(self, weights: Tensor, visible: Tensor) -> None:
        """Add the weights [heads, queries, keys] of one image or text; visible: [queries, keys]."""
        a = weights.double()
        zero = (a == 0) & visible
        row_sum, size = a.sum(2), a.abs().sum(2)
        some = size > 0
        share = a / torch.where(some, row_sum, 1).unsqueeze(2)
        new = {
            "row_sum": row_sum.sum(1),
            "zeros": zero.sum((1, 2)),
            "some": some.sum(1),
            "effective_keys": (size.square() / torch.where(some, a.square().sum(2), 1)).sum(1),
            # A negative weight has no logarithm, so its head has no entropy.
            "entropy": torch.special.entr(share).sum((1, 2)).where((a >= 0).all(2).all(1), math.nan),
        }
        # Squares of differences from the mean: nothing cancels where all rows have the same sum, as in softmax.
        before, now, mean = self.rows, a.shape[1], row_sum.mean(1)
        self.spread = self.spread + (row_sum - mean.unsqueeze(1)).square().sum(1)
        if before:
            apart = mean - self.sums["row_sum"] / before
            self.spread = self.spread + apart.square() * (before * now / (before + now))
        self.sums = {name: value + self.sums.get(name, 0) for name, value in new.items()}
        self.rows = before + now
        self.seen += int(visible.sum())

    def result(self, part: str, layer: int, signed: bool) -> list[HeadRows]:
        """Return the statistics, head by head. signed: weights may be negative."""
        sums, rows, seen = self.sums, self.rows, self.seen
        length = seen / rows if seen % rows else seen // rows
        entropy = sums["entropy"] / sums["some"]
        statistics = {
            "mean_weight": sums["row_sum"] / seen,
            "row_sum": sums["row_sum"] / rows,
            "row_sum_sd": torch.as_tensor(self.spread / rows).sqrt(),
            "zeros": sums["zeros"] / seen,
            "empty": 1 - sums["some"] / rows,
            "entropy": torch.full_like(entropy, math.nan) if signed else entropy,
            "effective_keys": sums["effective_keys"] / sums["some"],
        }
        by_head = zip(*(values.tolist() for values in statistics.values()), strict=True)
        return [
            HeadRows(layer, head, length, **dict(zip(statistics, values, strict=True)), part=part)
            for head, values in enumerate(by_head)
        ]
