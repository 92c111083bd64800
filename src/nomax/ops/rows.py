"""Per-query statistics of the attention weights a_ij, from which ReLUFormer's two losses come."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


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
