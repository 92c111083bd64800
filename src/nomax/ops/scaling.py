"""The scale of the scores, φ's L for each query, and the factor gain · L^-alpha and the shift that follow from it."""

import math

import torch
from torch import Tensor

from nomax.ops import visible
from nomax.phi import MINUS_LOG_L, Phi


def default_scale(query: Tensor) -> float:
    """1 / sqrt(head dimension), which keeps the scores of independent unit normals at unit variance."""
    dimension: int = query.shape[3]
    return dimension**-0.5 if dimension else 1.0


def length(
    phi: Phi,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    diagonal: int | None,
    query_offsets: Tensor | None,
    key_offsets: Tensor | None,
) -> int | Tensor:
    """L as φ counts it: one number, or a floating-point tensor with dimensions 1 or those of [B, H, Lq]."""
    if phi.length == "keys":
        mask = diagonal = None
    elif phi.length != "visible":
        return phi.length
    if query_offsets is None or key_offsets is None:
        return visible.count(query, key, mask, diagonal)
    # Packed, the "keys" of a query are those of its own sequence: what they would be in a call of its own.
    return visible.count_packed(query, query_offsets, key_offsets, diagonal)


def factors(
    phi: Phi,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    diagonal: int | None,
    query_offsets: Tensor | None,
    key_offsets: Tensor | None,
) -> tuple[float, float, Tensor | None, Tensor | None]:
    """Return gain and shift as numbers, and as tensors [B, H, Lq] in their place where they differ between queries."""
    shift = 0.0 if phi.shift == MINUS_LOG_L else phi.shift
    if phi.alpha == 0 and phi.shift != MINUS_LOG_L:
        return phi.gain, shift, None, None
    n = length(phi, query, key, mask, diagonal, query_offsets, key_offsets)
    # A query that sees no key has nothing to scale: with 1 for its L, its row of zeros stays one.
    if type(n) is int and not torch.compiler.is_compiling():
        n = max(n, 1)
        try:
            gain = phi.gain * n**-phi.alpha
        except OverflowError:
            raise ValueError(
                f"phi={str(phi)!r} asks for {n}^{-phi.alpha:g}, which is too large for a number."
            ) from None
        return gain, -math.log(n) if phi.shift == MINUS_LOG_L else shift, None, None
    # A size that torch.compile keeps symbolic must stay in its graph, as a tensor; a Python number would not.
    if not isinstance(n, Tensor):
        n = torch.full((1, 1, 1), n, dtype=visible.wide(query), device=query.device)
    n = n.clamp_min(1)
    row_gain = n.pow(-phi.alpha) if phi.alpha != 0 else None
    if row_gain is not None and phi.gain != 1:
        row_gain = row_gain * phi.gain
    return phi.gain, shift, row_gain, -n.log() if phi.shift == MINUS_LOG_L else None
