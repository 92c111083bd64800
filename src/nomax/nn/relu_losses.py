"""ReLUFormer's φ and its two losses, which keep the sum of each row of weights near 1 and its entropy low."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nomax.ops.problem import Rows

# relu(s) / (γ·√(L/2)) with γ = 1; Attention(..., learned_gain="head") learns √2/γ for each head.
RELUFORMER = "1.4142135623730951*relu/L^0.5"

# Below this row sum, |log Σ| continues along its tangent: a row of zeros has a finite penalty, a nearly empty one a
# finite gradient, and a row made negative by a negative gain is pulled back.
SMALLEST = 1e-4
_TANGENT_AT_ZERO = math.log(SMALLEST) - 1


class Penalties(NamedTuple):
    """The mean over rows of |log Σ_j s_ij| and of max(H(s_i) - C_i, 0), to be weighted and added to a loss."""

    normalisation: Tensor
    entropy: Tensor


def penalties(
    rows: Rows, visible: Tensor, margin: float = 0.7, *, normalized: bool = False, by_sequence: bool = False
) -> Penalties:
    """Penalise rows of weights for sums other than 1 and for entropies above margin · log(visible keys).

    rows: as returned by attention(..., return_rows=True).
    visible: the number of keys each query may see, broadcasting to the rows: nomax.visible_keys, or Attention.visible.
        Rows without a visible key do not count.
    by_sequence: average over each sequence separately, [batch], instead of over all rows.
    normalized: use the entropy of the weights divided by their sum, instead of -Σ_j s_ij·log s_ij.
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
