"""Inspect attention while it trains: row sums, size relative to the residual stream, gradients and scales.

diagnostics.jsonl in the run folder has a line for each recorded step, and each line an entry for every layer.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nomax import _files
from nomax.models import ViT
from nomax.models.vit import Block

FILE = "diagnostics.jsonl"
IMAGES = 8  # of the batch whose weights are looked at: means over heads and thousands of rows hardly vary


def steps_to_record(steps: int, number: int) -> frozenset[int]:
    """Return about that many steps, counted from 0, denser at the start, where attention changes fastest."""
    if number < 1:
        return frozenset()
    return frozenset((np.unique(np.geomspace(1, steps, number).round()) - 1).astype(int).tolist())


@torch.no_grad()
def diagnose(model: nn.Module, images: Tensor) -> list[dict[str, float]]:
    """Return statistics of attention in each layer, with the gradients that the parameters hold at the moment.

    row_sum, zeros: the mean sum of a query's weights, and the share of weights that are exactly zero.
    output, residual: root mean squares of what attention adds, and of the residual stream that it is added to.
    query, key, value, out: norms of the gradients of its four projections.
    scale: the product of the learned scales of queries and keys (mean over channels), with qk-norm.
    """
    if not isinstance(model, ViT):
        raise TypeError(f"diagnose=… looks into a ViT, not into {type(model).__name__}.")
    training = model.training
    model.eval()
    _, named = model(images[:IMAGES], intermediates=True)
    model.train(training)
    before = named["with_posemb"]
    if model.class_token is not None:
        before = torch.cat([model.class_token.expand(len(before), -1, -1), before], dim=1)
    entries = []
    for i, block in enumerate(model.blocks):
        name = f"encoder/block{i:02d}"
        entries.append(_layer(block, before, named[f"{name}/sa"]))
        before = named[f"{name}/+mlp"]
    return entries


def _layer(block: nn.Module, residual: Tensor, output: Tensor) -> dict[str, float]:
    assert isinstance(block, Block)
    attention = block.attention
    weights = attention.weights(block.attention_norm(residual)).float()
    gradient = attention.qkv.weight.grad
    parts = [] if gradient is None else gradient.split(attention.dim)
    entry = {
        "row_sum": float(weights.sum(-1).mean()),
        "zeros": float((weights == 0).float().mean()),
        "output": _rms(output),
        "residual": _rms(residual),
        **{name: float(part.norm()) for name, part in zip(("query", "key", "value"), parts, strict=False)},
    }
    if attention.out.weight.grad is not None:
        entry["out"] = float(attention.out.weight.grad.norm())
    if attention.query_norm is not None and attention.key_norm is not None:
        entry["scale"] = float((attention.query_norm.weight * attention.key_norm.weight).mean())
    return entry


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def write(folder: Path, step: int, layers: Sequence[dict[str, float]]) -> None:
    """Add the line of a step. Lines of this step and of later ones, written before an interruption, are replaced."""
    lines = [line for line in read(folder) if line["step"] < step]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": step, "layers": list(layers)}])
    _files.write(folder / FILE, text)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded steps of a run; none if it recorded nothing."""
    try:
        return [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{folder / FILE} is damaged: {error}. Remove it; the run itself does not need it.") from None
