"""Maps of whole rows of scores, for comparison: PyTorch's own softmax attention, and the maps of the entmax package."""

from collections.abc import Callable
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from nomax.ops.problem import Problem, Rows, as_it_is, below, hidden, wide
from nomax.phi import SOFTMAX

SHORT = 256  # keys, up to which PyTorch's backward on a CPU is faster in float32 than in half precision


def attend(problem: Problem) -> tuple[Tensor, Rows | None]:
    """Attend with a row map; packed sequences one after the other."""
    if parts := problem.sequences():
        outs, statistics = zip(*map(attend, parts), strict=True)
        joined = Rows(*(torch.cat(each, dim=2) for each in zip(*statistics, strict=True))) if problem.rows else None
        return torch.cat(outs, dim=2), joined
    query, value = problem.query, problem.value
    if problem.activation == SOFTMAX:
        return _softmax(problem), rows(problem) if problem.rows else None
    weights = _weights(problem)
    # The matrix is there anyway, and so is float32, which costs less than half precision does on most CPUs.
    with as_it_is(query):
        wider = value.to(weights.dtype).repeat_interleave(query.shape[1] // max(value.shape[1], 1), dim=1)
        out = F.dropout(weights, problem.dropout) @ wider
    return out.to(query.dtype), _statistics(weights) if problem.rows else None


def trains_in_float32(problem: Problem) -> bool:
    """Return whether softmax is computed in float32 because that is faster: short sequences in training on a CPU."""
    query, key, value = problem.query, problem.key, problem.value
    return (
        query.is_cpu
        and query.dtype in (torch.float16, torch.bfloat16)
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
        and not torch.compiler.is_compiling()
        and key.shape[2] <= SHORT
    )


def _softmax(problem: Problem) -> Tensor:
    """Return PyTorch's own attention."""
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    if trains_in_float32(problem):
        query, key, value = query.float(), key.float(), value.float()
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    with as_it_is(query):
        out = F.scaled_dot_product_attention(
            query, key, value, mask, problem.dropout, problem.diagonal is not None,
            scale=problem.scale, enable_gqa=True,
        )  # fmt: skip
    return out.to(problem.query.dtype)


def rows(problem: Problem) -> Rows:
    """Return the sum and the entropy of each row of weights."""
    return _statistics(_weights(problem))


def row_map(name: str) -> Callable[[Tensor], Tensor]:
    """Return the map from rows of scores, -inf where a key is hidden, to rows of weights."""
    if name == SOFTMAX:
        return lambda scores: scores.softmax(-1)
    try:
        # The package calls its functions as φ does: sparsemax, entmax15.
        return getattr(import_module("entmax"), name)
    except ImportError as error:
        raise ImportError(f"phi={name!r} needs the entmax package: pip install entmax") from error


def runs_on(name: str) -> str:
    """Return the name of what computes the map."""
    return "PyTorch's scaled_dot_product_attention" if name == SOFTMAX else f"the entmax package's {name}"


def _weights(problem: Problem) -> Tensor:
    """Return the whole matrix of weights [B, H, Lq, Lk], in at least float32; zero where a query sees no key."""
    query, mask, name = problem.query, problem.mask, problem.activation
    key = problem.key.repeat_interleave(query.shape[1] // max(problem.key.shape[1], 1), dim=1)
    with as_it_is(query):
        scores = query.to(wide(query)) @ key.to(wide(query)).transpose(-2, -1) * problem.scale
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            # PyTorch's softmax hides a key with -inf alone; ours, as everywhere, with the dtype's minimum too.
            scores = scores + (mask if name == SOFTMAX else mask.masked_fill(hidden(mask), -torch.inf))
    if problem.diagonal is not None:
        seen = below(problem.diagonal, scores.shape[-2], scores.shape[-1], scores.device)
        scores = scores.masked_fill(~seen, -torch.inf)
    # PyTorch's operation returns zero, not NaN, for a query that sees no key; so do the others and the statistics.
    sees_none = scores.isneginf().all(-1, keepdim=True)
    if not scores.numel():
        return scores
    return row_map(name)(scores.masked_fill(sees_none, 0)).masked_fill(sees_none, 0)


def _statistics(weights: Tensor) -> Rows:
    positive = torch.where(weights > 0, weights, 1)
    return Rows(weights.sum(-1), -(positive * positive.log()).sum(-1))
