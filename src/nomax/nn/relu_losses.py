"""ReLUFormer's φ, and its two losses, the penalties that keep rows of weights near a sum of 1 and below an entropy."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nomax.ops.rows import Rows

# relu(s) / (γ·√(L/2)) with γ = 1; Attention(..., learned_gain="head") learns √2/γ for each head.
RELUFORMER = "1.4142135623730951*relu/L^0.5"

# Below this sum of a row, |log Σ| goes on along its tangent: a row of zeros has a finite penalty, a nearly empty one a
# finite gradient, and a row that a negative gain turned over is pulled back.
SMALLEST = 1e-4
_TANGENT_AT_ZERO = math.log(SMALLEST) - 1


class Penalties(NamedTuple):
    """The mean over rows of |log Σ_j s_ij| and of max(H(s_i) - C_i, 0), to be weighted and added to a loss."""

    normalisation: Tensor
    entropy: Tensor


def penalties(
    rows: Rows, visible: Tensor, margin: float = 0.7, *, normalized: bool = False, by_sequence: bool = False
) -> Penalties:
    """Measure how far rows of weights are from summing to 1 and from an entropy of at most margin · log(visible keys).

    rows: what attention(..., return_rows=True) returns.
    visible: how many keys each query may see, broadcasting to the rows: nomax.visible_keys, or Attention.visible.
        Rows without a visible key do not count.
    by_sequence: the means of each sequence by itself, [batch], instead of all rows.
    normalized: take the entropy of the weights divided by their sum, instead of -Σ_j s_ij·log s_ij as they are.
    """
    seen = (visible > 0).expand(rows.sum.shape)
    sums = rows.sum
    logarithm = torch.where(sums > SMALLEST, sums.clamp(min=SMALLEST).log(), sums / SMALLEST + _TANGENT_AT_ZERO)
    entropy = rows.normalized_entropy if normalized else rows.entropy
    above = (entropy - margin * visible.clamp(min=1).to(entropy.dtype).log()).clamp(min=0)
    kept = seen.flatten(1 if by_sequence else 0)
    count = kept.sum(-1).clamp(min=1)
    both = (each.masked_fill(~seen, 0).reshape(kept.shape).sum(-1) / count for each in (logarithm.abs(), above))
    return Penalties(*both)
