"""Losses on rows of weights: ReLUFormer's two, of their sums and entropies, and the L1 norm, which asks for zeros."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nomax.nn.attention import Attention, KeyValueCache
from nomax.ops.problem import Rows

# relu(s) / (γ·√(L/2)) with γ = 1; Attention(..., learned_gain="head") learns √2/γ for each head.
RELUFORMER = "1.4142135623730951*relu/L^0.5"

# Below this row sum, |log Σ| continues along its tangent: a row of zeros has a finite penalty, a nearly empty one a
# finite gradient, and a row made negative by a negative gain is pulled back.
SMALLEST = 1e-4
_TANGENT_AT_ZERO = math.log(SMALLEST) - 1


class Penalties(NamedTuple):
    """The means over rows of |log Σ_j s_ij|, max(H(s_i) - C_i, 0) and Σ_j |s_ij|, to be weighted and put in a loss."""

    normalisation: Tensor
    entropy: Tensor
    l1: Tensor


def penalties(
    rows: Rows, visible: Tensor, margin: float = 0.7, *, normalized: bool = False, by_sequence: bool = False
) -> Penalties:
    """Penalise rows of weights for sums other than 1, for entropies above margin · log(visible keys), and for sizes.

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
    # Weights of a row have one sign, that of the gain, wherever these penalties are defined: the sum has their size.
    each_row = (logarithm.abs(), above, sums.abs())
    return Penalties(*(each.masked_fill(~seen, 0).reshape(kept.shape).sum(-1) / count for each in each_row))


@dataclass(frozen=True)
class View:
    """The keys that an attention may see: those of a context or x itself, a mask or causality, and a cache."""

    context: Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    cache: KeyValueCache | None = None
    # For penalties: the number of keys each query sees, broadcasting to [B, heads, queries], and 0 for padding, whose
    # rows do not count.
    visible: Tensor | None = None


class Tally:
    """Call attention, and keep the penalties of its rows if wanted."""

    def __init__(self, wanted: bool | Literal["sequences"], margin: float = 0.7) -> None:
        self.wanted, self.margin = wanted, margin
        self.penalties: list[Penalties] = []

    def __call__(self, attention: Attention, x: Tensor, view: View) -> Tensor:
        how: Any = {"attn_mask": view.mask, "is_causal": view.is_causal, "cache": view.cache}
        if not self.wanted or view.visible is None:
            plain: Tensor = attention(x, view.context, **how)
            return plain
        out, rows = attention(x, view.context, return_rows=True, **how)
        self.penalties.append(penalties(rows, view.visible, self.margin, by_sequence=self.wanted == "sequences"))
        return out

    def add(self, output: tuple[Tensor, list[Penalties]]) -> Tensor:
        """Keep the penalties that a layer returns, and return its states."""
        states, penalties = output
        self.penalties += penalties
        return states

    def mean(self) -> Penalties:
        """Return the mean over attentions, which count equally however many rows they have."""
        return Penalties(*(torch.stack(each).mean(0) for each in zip(*self.penalties, strict=True)))
