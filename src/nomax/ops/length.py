"""Everything about L, the number of keys in "relu/L": what it counts for each query, and the factors that follow.

φ's `length` says what is counted: "visible", the keys that a query may see; "keys", all of them, of packed sequences
those of the query's own; or nothing, where L is a fixed integer. A query that sees no key has nothing to scale: with 1
for its L, its row of zeros stays one.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from nomax.ops.arguments import canonical
from nomax.ops.problem import Problem, below, hidden, wide
from nomax.phi import MINUS_LOG_L, Phi


def visible_keys(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Count the keys that each query may see: the L of "relu/L", for a model that learns its own power or gain of it.

    The counts are int64 and broadcast to the result's [..., heads, queries]; a mask that is the same for all heads or
    queries gives counts of size 1 there. To scale every row by a learned power of L, with h alone as φ:

        out = attention(q, k, v, mask, phi="relu") * visible_keys(q, k, mask).clamp(min=1).unsqueeze(-1) ** -alpha
    """
    problem, leading = canonical(query, key, key, attn_mask, is_causal, enable_gqa)
    counts = _visible(problem)
    leading = (*problem.query.shape[:2],) if leading is None else leading
    if not isinstance(counts, Tensor):
        return torch.full((1,) * (len(leading) + 1), counts, device=query.device)
    batch = leading[:-1] if counts.shape[0] != 1 else (1,) * len(leading[:-1])
    return counts.long().reshape(*batch, *counts.shape[1:]) if leading else counts.long().reshape(counts.shape[2])


def per_query(phi: Phi, query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return φ's L for each query, at least 1 and broadcasting to [B, H, Lq], for models that learn a power of L."""
    if phi.length == "visible":
        return visible_keys(query, key, attn_mask, is_causal).clamp(min=1)
    return torch.tensor(max(_unmasked(phi, key.shape[2]), 1), device=query.device)


def scaled(phi: Phi, problem: Problem, length: int | Tensor | None = None) -> Problem:
    """Return the problem with φ's gain · L^-alpha and shift: numbers, or tensors where queries differ.

    length: L, where it is known from outside: a part of the keys has the factors that follow from all of them.
    """
    shift = 0.0 if phi.shift == MINUS_LOG_L else phi.shift
    if not phi.depends_on_length:
        return replace(problem, gain=phi.gain, shift=shift)
    n = of(phi, problem) if length is None else length
    if type(n) is int and not torch.compiler.is_compiling():
        gain, shift = _factors(phi, n)
        return replace(problem, gain=gain, shift=shift)
    # A size that torch.compile keeps symbolic must stay in its graph, as a tensor; a Python number would not.
    if not isinstance(n, Tensor):
        n = torch.full((1, 1, 1), n, dtype=wide(problem.query), device=problem.query.device)
    n = n.clamp_min(1)
    row_gain = n.pow(-phi.alpha) if phi.alpha != 0 else None
    if row_gain is not None and phi.gain != 1:
        row_gain = row_gain * phi.gain
    row_shift = _row_shift(phi, n) if phi.shifts_by_length else None
    return replace(problem, gain=phi.gain, shift=shift, row_gain=row_gain, row_shift=row_shift)


def per_head(problem: Problem, gain: Tensor | None, shift: Tensor | None) -> Problem:
    """Return a problem that has its factors with one more factor and one more shift for each head, [H] each.

    They are part of the kernels' rows, so they cost nothing; but they get no gradients there.
    """
    dtype = wide(problem.query)
    if gain is not None:
        factor = problem.gain if problem.row_gain is None else problem.row_gain
        problem = replace(problem, row_gain=gain.detach().to(dtype).view(1, -1, 1) * factor)
    if shift is not None:
        added = problem.shift if problem.row_shift is None else problem.row_shift
        problem = replace(problem, row_shift=shift.detach().to(dtype).view(1, -1, 1) + added)
    return problem


def constants(phi: Phi, keys: int) -> tuple[float, float]:
    """Return gain · L^-alpha and the shift where every query sees all of `keys` keys."""
    return _factors(phi, _unmasked(phi, keys))


def in_words(phi: Phi, problem: Problem) -> str:
    """Describe in words which keys are summed over, and what L is."""
    seen = _visible(problem)
    keys = f"the {_range(seen)} keys that query i may see" if isinstance(seen, Tensor) else f"all {seen} keys"
    if not phi.depends_on_length:
        return f"j runs over {keys}"
    if phi.length == "visible":
        return f"j runs over {keys}, and L is their number"
    which = "all key positions" if phi.length == "keys" else "fixed by φ"
    return f"j runs over {keys}; L = {_unmasked(phi, problem.key.shape[2])}, {which}"


def of(phi: Phi, problem: Problem) -> int | Tensor:
    """Return L: one number, or a floating-point tensor with dimensions 1 or those of [B, H, Lq]."""
    if phi.length == "visible":
        return _visible(problem)
    if phi.length == "keys" and problem.query_offsets is not None:
        return _visible(replace(problem, diagonal=None))
    return _unmasked(phi, problem.key.shape[2])


def _unmasked(phi: Phi, keys: int) -> int:
    """Return L where every query sees all of `keys` keys, or where φ counts them whether seen or not."""
    return phi.length if isinstance(phi.length, int) else keys


def _factors(phi: Phi, n: int) -> tuple[float, float]:
    """Return gain · L^-alpha and the shift for an L of n."""
    n = max(n, 1)
    shift = -math.log(n) if phi.shift == MINUS_LOG_L else phi.shift
    try:
        return phi.gain * n**-phi.alpha, shift - phi.threshold * math.sqrt(2 * math.log(n))
    except OverflowError:
        raise ValueError(f"phi={str(phi)!r} asks for {n}^{-phi.alpha:g}, which is too large for a number.") from None


def _row_shift(phi: Phi, n: Tensor) -> Tensor:
    """Return the shifts for each L of n."""
    if phi.threshold == 0:
        return -n.log()
    # In float64, as for an L that is one number: shift and threshold may cancel, and their roundings would remain.
    logarithm = n.double().log()
    shift = -logarithm if phi.shift == MINUS_LOG_L else phi.shift
    return (shift - phi.threshold * (2 * logarithm).sqrt()).to(n.dtype)


def _visible(problem: Problem) -> int | Tensor:
    """Count the keys that each query may see: one integer, or a tensor with dimensions 1 or those of [B, H, Lq].

    The mask is counted at its own size: one of [B, 1, 1, Lk] gives counts of [B, 1, 1]. Tensors of counts are
    floating-point, for the powers of L that follow; float32 holds them exactly as far as 2^24.
    """
    query, mask, diagonal = problem.query, problem.mask, problem.diagonal
    keys: int = problem.key.shape[2]
    if problem.query_offsets is not None and problem.key_offsets is not None:
        position = torch.arange(query.shape[2], device=query.device)
        sequence = torch.bucketize(position, problem.query_offsets[1:].to(position), right=True)
        seen = problem.key_offsets.diff()[sequence]
        if diagonal is not None:
            seen = torch.minimum(seen, (position - problem.query_offsets[sequence] + diagonal + 1).clamp_min(0))
        return seen.to(wide(query)).view(1, 1, -1)
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else ~hidden(mask)
        if diagonal is not None:
            seen = seen & below(diagonal, query.shape[2], keys, query.device)
        counts = seen.sum(-1, dtype=wide(query))
        return counts if seen.shape[3] == keys else counts * keys
    if diagonal is not None:
        counts = torch.arange(diagonal + 1, diagonal + 1 + query.shape[2], dtype=wide(query), device=query.device)
        return counts.clamp_(0, keys).view(1, 1, -1)
    return keys


def _range(counts: Tensor) -> str:
    if counts.is_meta:
        return "(uncounted)"
    if counts.numel() == 0:
        return "0"
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low} to {high}"
