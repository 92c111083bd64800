"""`Problem`, one call of the operation in canonical form, the `Rows` it may return, and helpers of all backends."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One call of the operation, as every backend takes it: the twin of `Problem` in csrc/problem.h.

    out_i = gain_i · Σ_j h(q_i·k_j·scale + mask_ij + shift_i)·v_j over the keys j that query i may see

    B batches, H query heads, Hk key heads (H is a multiple of Hk), Lq queries, Lk keys, D and Dv dimensions of a head.
    """

    query: Tensor  # [B, H, Lq, D]
    key: Tensor  # [B, Hk, Lk, D]
    value: Tensor  # [B, Hk, Lk, Dv]
    mask: Tensor | None = None  # boolean or float, each dimension 1 or that of [B, H, Lq, Lk]
    diagonal: int | None = None  # query i sees key j only if j <= i + diagonal
    query_offsets: Tensor | None = None  # [n + 1], the bounds of n packed sequences: then B = 1 and there is no mask
    key_offsets: Tensor | None = None

    activation: str = "relu"  # h, or the name of a row map
    scale: float = 1.0
    gain: float = 1.0
    shift: float = 0.0
    row_gain: Tensor | None = None  # each dimension 1 or that of [B, H, Lq]; takes the place of gain
    row_shift: Tensor | None = None  # likewise, of shift

    dropout: float = 0.0
    seed: Tensor | None = None  # one int64, where a backend tosses dropout's coins
    rows: bool = False  # return also each row's Σ_j h_ij and Σ_j h_ij·log h_ij
    # Where these tensors begin in a larger problem, as (batch, query, key): dropout's coins are those of that one.
    origin: tuple[int, int, int] = (0, 0, 0)

    def part(self, queries: tuple[int, int], keys: tuple[int, int]) -> "Problem":
        """Return the problem of the queries and keys within two pairs of bounds, with the factors of the whole.

        Outputs and sums of parts that share their queries add up to those of the whole: no weight depends on another.
        """
        (q0, q1), (k0, k1) = queries, keys
        batch, first_query, first_key = self.origin
        return replace(
            self,
            query=self.query[:, :, q0:q1],
            key=self.key[:, :, k0:k1],
            value=self.value[:, :, k0:k1],
            mask=_cut(_cut(self.mask, 2, queries), 3, keys),
            diagonal=None if self.diagonal is None else self.diagonal + q0 - k0,
            row_gain=_cut(self.row_gain, 2, queries),
            row_shift=_cut(self.row_shift, 2, queries),
            origin=(batch, first_query + q0, first_key + k0),
        )

    def sequences(self) -> "list[Problem]":
        """Return each of several packed sequences as a problem of its own; none if this is one batch already."""
        if self.query_offsets is None or self.key_offsets is None or len(self.query_offsets) <= 2:
            return []
        bounds = zip(pairwise(self.query_offsets.tolist()), pairwise(self.key_offsets.tolist()), strict=True)
        return [
            replace(
                self.part(queries, keys),
                diagonal=self.diagonal,  # each sequence is causal from its own beginning
                query_offsets=None,
                key_offsets=None,
                origin=(sequence, 0, 0),
            )
            for sequence, (queries, keys) in enumerate(bounds)
        ]


class Rows(NamedTuple):
    """Each query's Σ_j a_ij and entropy -Σ_j a_ij·log a_ij, before dropout; both zero where no key is visible."""

    sum: Tensor
    entropy: Tensor

    @property
    def normalized_entropy(self) -> Tensor:
        """Return the entropy of a_ij / Σ_j a_ij, and zero where all weights are zero."""
        any_weight = self.sum > 0
        total = torch.where(any_weight, self.sum, 1)
        return torch.where(any_weight, self.entropy / total + total.log(), 0)


def from_sums(row_sum: Tensor, row_log: Tensor, gain: float | Tensor) -> Rows:
    """Return the rows of the weights gain·h from Σ_j h_ij and Σ_j h_ij·log h_ij."""
    # A gain of zero leaves weights of zero, whose a·log a is zero.
    if isinstance(gain, Tensor):
        log_gain: float | Tensor = torch.where(gain > 0, gain, 1).log()
    else:
        log_gain = math.log(gain) if gain > 0 else 0.0
    return Rows(gain * row_sum, gain * (-log_gain * row_sum - row_log))


def hidden(mask: Tensor) -> Tensor:
    """Return True where a mask hides a key: False in a boolean mask, -inf or the dtype's minimum in a float mask."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


def below(diagonal: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return [queries, keys], True where query i may see key j: j <= i + diagonal."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal)


def wide(query: Tensor) -> torch.dtype:
    """Return the dtype of what is computed once per query: at least float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def autocasts(device: str) -> bool:
    """Return whether autocast is on for a type of device."""
    # Asking for a device that autocast does not know, such as meta, is an error.
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def as_it_is(tensor: Tensor) -> AbstractContextManager[object]:
    """Compute products in the precision of their inputs, also under autocast."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def _cut(x: Tensor | None, dim: int, bounds: tuple[int, int]) -> Tensor | None:
    """Return what lies within the bounds in one dimension; one entry there serves all."""
    return x if x is None or x.shape[dim] == 1 else x.narrow(dim, bounds[0], bounds[1] - bounds[0])
