"""Losses on rows of weights: ReLUFormer's two, of their sums and entropies, and the L1 norm, which asks for zeros.

That norm is also one of the weights of memories.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nomax.nn.attention import Attention, KeyValueCache
from nomax.nn.inner_attention import SplitAttention
from nomax.nn.memory import Memory
from nomax.ops.problem import Rows

# relu(s) / (γ·√(L/2)) with γ = 1; Attention(..., learned_gain="head") learns √2/γ for each head.
RELUFORMER = "1.4142135623730951*relu/L^0.5"

# Below this row sum, |log Σ| continues along its tangent: a row of zeros has a finite penalty, a nearly empty one a
# finite gradient, and a row made negative by a negative gain is pulled back.
SMALLEST = 1e-4
_TANGENT_AT_ZERO = math.log(SMALLEST) - 1


class Penalties(NamedTuple):
    """The means over rows of |log Σ_j s_ij|, max(H(s_i) - C_i, 0) and Σ_j |s_ij|, to be weighted and put in a loss.

    memory_l1 is the last over the rows of memories. A model makes what it was asked for, and leaves the rest 0.
    """

    normalisation: Tensor
    entropy: Tensor
    l1: Tensor
    memory_l1: Tensor


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
    # Weights of a row have one sign, that of the gain, wherever these penalties are defined: the sum has their size.
    three = [_mean(each, seen, by_sequence) for each in (logarithm.abs(), above, sums.abs())]
    return Penalties(*[*three, torch.zeros_like(three[0])])


def _mean(values: Tensor, seen: Tensor, by_sequence: bool) -> Tensor:
    """Return the mean of what is seen, or that of each sequence."""
    kept = seen.flatten(1 if by_sequence else 0)
    return values.masked_fill(~seen, 0).reshape(kept.shape).sum(-1) / kept.sum(-1).clamp(min=1)


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


Wanted = bool | Literal["sequences"]
Found = tuple[list[Penalties], list[Tensor]]  # of attentions, and the L1 norms of memories


class Tally:
    """Call attentions and memories, and keep the penalties of those that are wanted.

    rows: whether those of attention are, with "sequences" for each sequence; memories: the same of memories.
    """

    def __init__(self, rows: Wanted, margin: float = 0.7, *, memories: Wanted = False) -> None:
        self.rows, self.margin, self.memories = rows, margin, memories
        self.found: Found = [], []

    @property
    def wanted(self) -> bool:
        """Return whether any penalties are wanted."""
        return bool(self.rows or self.memories)

    def empty(self) -> "Tally":
        """Return another one like this, for a layer: it may be run again, to save memory."""
        return Tally(self.rows, self.margin, memories=self.memories)

    def __call__(self, attention: Attention, x: Tensor, view: View) -> Tensor:
        how: Any = {"attn_mask": view.mask, "is_causal": view.is_causal, "cache": view.cache}
        if not self.rows or view.visible is None:
            plain: Tensor = attention(x, view.context, **how)
            return plain
        out, rows = attention(x, view.context, return_rows=True, **how)
        self.found[0].append(penalties(rows, view.visible, self.margin, by_sequence=self.rows == "sequences"))
        return out

    def look_up(self, memory: Memory, x: Tensor, view: View, split: SplitAttention | None = None) -> Tensor:
        """Call a memory with tokens x [B, L, dim]; the view is that of their own attention, and how it is split."""
        if not self.memories or view.visible is None:
            plain: Tensor = memory(x)
            return plain
        out, sizes = memory(x, return_l1=True)
        sizes = sizes if split is None else split.whole(sizes)
        seen = (view.visible.flatten(1) > 0).expand(sizes.shape)  # no padding
        self.found[1].append(_mean(sizes, seen, by_sequence=self.memories == "sequences"))
        return out

    def add(self, output: tuple[Tensor, Found]) -> Tensor:
        """Keep the penalties that a layer returns, and return its states."""
        states, found = output
        for mine, new in zip(self.found, found, strict=True):
            mine += new  # type: ignore[operator]
        return states

    def mean(self) -> Penalties:
        """Return the means over attentions, which count equally however many rows they have, and over memories."""
        rows, sizes = self.found
        means = [torch.stack(each).mean(0) for each in zip(*rows, strict=True)]
        if not sizes:
            return Penalties(*means)
        memories = torch.stack(sizes).mean(0)
        return Penalties(*[*(means[:-1] or [torch.zeros_like(memories)] * 3), memories])
