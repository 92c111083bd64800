"""Mixup as in the paper's configurations: one λ for a whole step, and the previous image of the batch as partner."""

import numpy as np
import torch
from torch import Tensor


def weight(p: float, seed: int, step: int) -> float:
    """How much of an image stays: max(λ, 1 - λ) with λ ~ Beta(p, p), a pure function of seed and step."""
    drawn = float(np.random.default_rng((seed, step)).beta(p, p))
    return max(drawn, 1 - drawn)


def mix(values: Tensor, kept: float) -> Tensor:
    """Each of values[1:] mixed with the one before it: images, or targets as rows over the classes."""
    # Two products and a sum, each rounded by itself: a fused form would round differently from one layout to another.
    return values[1:].mul(kept).add_(values[:-1].mul(1 - kept))


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """A row for each label, 1 at its class and 0 elsewhere, in float32."""
    rows = torch.zeros(len(labels), num_classes, device=labels.device)
    return rows.scatter_(1, labels[:, None], 1.0)
