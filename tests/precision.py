"""Tolerances of tests: twice the error of plain PyTorch in the same precision, and standard errors of samples."""

import copy
import math

import torch
from torch import Tensor, nn

EPSILON = torch.finfo(torch.float32).eps
# The relative difference of float32 sums of hundreds of terms, through a few layers, that are taken in another order:
# in slices, on two ranks, with or without padding. It is about 1e-5; a wrong term or factor makes more than 1e-3.
REORDERED = 80 * EPSILON


def assert_precise(actual: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Check the error of `actual` against that of `plain`, which PyTorch computed in the same precision.

    It may be at most twice as large, measured as a norm over the tensor, plus one rounding of `exact`, the result in
    float64.
    """
    assert actual.shape == plain.shape == exact.shape
    assert (actual.dtype, exact.dtype) == (plain.dtype, torch.float64)
    error, usual, rounding = (
        float(torch.linalg.vector_norm(x.detach().double() - exact.detach()))
        for x in (actual, plain, exact.to(actual.dtype))
    )
    assert error <= 2 * usual + rounding, f"the error is {error:.3e}, that of plain PyTorch {usual:.3e}"


def assert_rounded(actual: Tensor, exact: Tensor, roundings: float) -> None:
    """Check that the difference is so many roundings of actual's precision, relative to the largest number."""
    largest = float(exact.detach().abs().max()) if exact.numel() else 0.0
    allowed = roundings * torch.finfo(actual.dtype).eps * largest
    torch.testing.assert_close(actual.double(), exact.double(), rtol=0, atol=allowed)


def doubled(module: nn.Module) -> nn.Module:
    """Return a copy of a module in float64."""
    return copy.deepcopy(module).double()


def five_errors(number: int) -> float:
    """Return five relative standard errors of the standard deviation of so many normal numbers."""
    return 5 / math.sqrt(2 * number)
