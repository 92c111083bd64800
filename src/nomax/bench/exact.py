"""The operation and its gradients in float64, from closed forms, and the error that float32 arithmetic may make.

The rule, for every number that the kernels return. Let ε = 2^-24, one rounding in float32, and k(n) = 4·(1 + √n).

- A score, scale·Σ q·k + bias + shift over D dimensions, may be off by k(D)·ε times the sum of the magnitudes of its
  terms. Its weight and its slope follow: they are taken at both ends of that interval.
- A sum of n terms may be off by k(n)·ε times the sum of their magnitudes, on top of the errors of its terms.
- In bfloat16, on CPUs that multiply pairs of it, each weight and each gradient of a score is rounded to it once.
- The result is rounded to its dtype.

So a result that is tiny because large terms cancel may have a large relative error, as in any order of summation, and a
gradient at the kink of a relu may have either slope. Nothing here is shared with the library except the definition.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 2.0**-24
PAIR = 2.0**-8  # one rounding to bfloat16
FUNCTION = 4.0  # roundings of an elementary function, or of a few factors
HOPELESS = 1e300  # the ratio of what is not even finite, as a number that JSON has
SMALLEST = 2.0**-125  # a weight below this may have become zero
UNDERFLOW = 2.0**-120  # what is lost where single precision ends

# Exact results in float64, the most that they may be off by before they are rounded, and what pairs of bfloat16 add.
Bounded = tuple[Tensor, Tensor, Tensor | float]


def _sigmoid(x: Tensor) -> Tensor:
    e = torch.exp(-x.abs())
    return torch.where(x > 0, 1, e) / (1 + e)


def _normal(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x * math.sqrt(0.5))


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) * (0.5 / math.pi) ** 0.5


def _terms_of_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    s = _sigmoid(x)
    return s, x * s * (1 - s)


# Each h, and the terms of which its derivative is the sum: where they cancel, its rounding error does not.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "relu": (lambda x: x.clamp(min=0), lambda x: ((x > 0).double(),)),
    "relu2": (lambda x: x.clamp(min=0) ** 2, lambda x: (2 * x.clamp(min=0),)),
    "gelu": (lambda x: x * _normal(x), lambda x: (_normal(x), x * _density(x))),
    "softplus": (lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())), lambda x: (_sigmoid(x),)),
    "identity": (lambda x: x, lambda x: (torch.ones_like(x),)),
    "relu6": (lambda x: x.clamp(0, 6), lambda x: ((x > 0) & (x < 6)).double()[None].unbind(0)),
    "sigmoid": (_sigmoid, lambda x: (_sigmoid(x) * _sigmoid(-x),)),
    "silu": (lambda x: x * _sigmoid(x), _terms_of_silu),
    "cube": (lambda x: x**3, lambda x: (3 * x * x,)),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A call in float64, [B, H, Lq, D] with as many key heads as query heads, and the gradients of its results."""

    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor  # [B, H, Lq, Lk]
    bias: Tensor  # the same, finite; of hidden keys it does not matter
    activation: str
    scale: float
    gain: Tensor  # broadcast to [B, H, Lq, 1]; φ's gain · L^-alpha
    shift: Tensor
    coins: Tensor  # [B, H, Lq, Lk]: 0 where dropout drops a weight, else its factor
    group: int  # heads that share a key head
    pairs: bool  # whether to say what pairs of bfloat16 add
    grad: Tensor | None = None  # [B, H, Lq, Dv]
    grad_sum: Tensor | None = None  # [B, H, Lq, 1], of the rows
    grad_entropy: Tensor | None = None


def allowance(n: int) -> float:
    """Return k(n)·ε."""
    return 4 * (1 + math.sqrt(n)) * EPSILON


def results(p: Problem, rows: bool) -> dict[str, Bounded]:
    """Return the output and, on request, rows and gradients; those of key and value still with a head per query head.

    "scores" is the gradient of the scores, which sums up to those of biases.
    """
    h_of, slope_of = ACTIVATIONS[p.activation]
    keys, queries = p.key.shape[2], p.query.shape[2] * p.group
    size = p.query.abs() @ p.key.abs().mT * abs(p.scale) + p.bias.abs() + p.shift.abs()
    x = p.query @ p.key.mT * p.scale + p.bias + p.shift
    stray = allowance(p.query.shape[3]) * size
    points = torch.stack([x, x + stray, x - stray])  # the exact score, and the ends of its interval
    weights = torch.where(p.seen, h_of(points), 0)
    weight = weights[0]
    off = (weights[1:] - weight).abs().amax(0) + FUNCTION * EPSILON * weight.abs()
    # identity without a mask is summed in another order, so that what counts are the terms of its scores.
    terms = torch.where(p.seen, size, 0) if p.activation == "identity" else weight.abs()
    gain = p.gain.abs()
    lost = UNDERFLOW * (1 + keys + queries)
    largest = lost * (1 + _most(weight)) * (1 + _most(gain)) * (1 + _most(x))

    kept, value = weight * p.coins, p.value.abs()
    error = (off + allowance(keys) * terms) * p.coins
    bounded: dict[str, Bounded] = {
        "out": (
            p.gain * (kept @ p.value),
            gain * (error @ value) + largest * (1 + _most(value)),
            gain * PAIR * (kept.abs() @ value) if p.pairs else 0.0,
        )
    }
    logarithms = torch.where(weights > 0, weights, 1).log()
    log_gain = torch.where(p.gain > 0, p.gain, 1).log()
    if rows:
        logs = weights * logarithms
        log_off = (logs[1:] - logs[0]).abs().amax(0) + (logarithms[0].abs() + 1) * FUNCTION * EPSILON * weight
        log_off = log_off + allowance(keys) * logs[0].abs()
        sum_off = (off + allowance(keys) * weight).sum(-1, keepdim=True)
        total, entropy = weight.sum(-1, keepdim=True), -(logs[0] + log_gain * weight).sum(-1, keepdim=True)
        bounded["sum"] = p.gain * total, gain * sum_off + largest, 0.0
        bounded["entropy"] = (
            p.gain * entropy,
            gain * (log_off.sum(-1, keepdim=True) + log_gain.abs() * (sum_off + FUNCTION * EPSILON * total))
            + 200 * largest,
            0.0,
        )
    if p.grad is None:
        return bounded

    # The gradients of the weights, of the scores, and of what the scores are made of.
    slope_terms = [torch.where(p.seen, term, 0) for term in slope_of(points)]
    slopes = sum(slope_terms[1:], slope_terms[0])
    steep = sum(term[0].abs() for term in slope_terms) + (slopes[1:] - slopes[0]).abs().amax(0)
    grad, grad_size = p.grad @ p.value.mT * p.gain * p.coins, p.grad.abs() @ value.mT * gain * p.coins
    grad_off = allowance(p.value.shape[3]) * grad_size
    of_weights = grad[None]
    if p.grad_sum is not None and p.grad_entropy is not None:
        of_rows = p.gain * (p.grad_sum - p.grad_entropy * (log_gain + logarithms + 1))
        of_weights = grad + torch.where(weights > 0, of_rows, 0)
        of_log = gain * p.grad_entropy.abs()
        row_size = gain * p.grad_sum.abs() + of_log * (log_gain.abs() + logarithms.abs().amax(0) + 1)
        grad_off = grad_off + FUNCTION * EPSILON * row_size
        # A weight that may be zero or not: its logarithm may be that of anything down to the end of single precision.
        doubtful = (weights > 0).any(0) & ~(weights > SMALLEST).all(0)
        grad_off = grad_off + torch.where(doubtful, row_size + 100 * of_log, 0)
        grad_size = grad_size + row_size
    of_scores = of_weights * slopes
    score_grad = of_scores[0]
    score_off = (of_scores - score_grad).abs().amax(0) + grad_off * steep + grad_size * steep * FUNCTION * EPSILON
    score_terms = grad_size * steep
    rounded = PAIR * abs(p.scale) * score_grad.abs()
    steepest = largest * (1 + _most(grad_size)) * (1 + _most(steep)) * (1 + abs(p.scale))

    error = score_off + allowance(keys) * score_terms
    bounded["query"] = (
        p.scale * (score_grad @ p.key),
        abs(p.scale) * (error @ p.key.abs()) + steepest * (1 + _most(p.key)),
        rounded @ p.key.abs() if p.pairs else 0.0,
    )
    error = score_off + allowance(queries) * score_terms
    bounded["key"] = (
        p.scale * (score_grad.mT @ p.query),
        abs(p.scale) * (error.mT @ p.query.abs()) + steepest * (1 + _most(p.query)),
        rounded.mT @ p.query.abs() if p.pairs else 0.0,
    )
    error = gain * p.coins * (off + allowance(queries) * terms)
    bounded["value"] = (
        (p.gain * kept).mT @ p.grad,
        error.mT @ p.grad.abs() + largest * (1 + _most(p.grad)),
        (gain * PAIR * kept.abs()).mT @ p.grad.abs() if p.pairs else 0.0,
    )
    # A bias's gradient is summed in float64, but for what comes from several blocks of keys.
    bounded["scores"] = score_grad, score_off + allowance(1 + keys // 64) * score_terms + steepest, 0.0
    return bounded


def worst(got: Tensor, exact: Tensor, bound: Tensor) -> Tensor:
    """Return the actual error divided by the allowed one, number by number: above 1 the rule is broken.

    The final rounding, half a unit in the last place, is first subtracted from the error.
    """
    limits = torch.finfo(got.dtype)
    exponent = torch.frexp(exact.abs() + bound).exponent
    rounding = torch.ldexp(torch.full_like(exact, limits.eps / 4), exponent).clamp(min=limits.tiny * limits.eps / 2)
    excess = ((got.double() - exact).abs() - rounding).clamp(min=0)
    ratio = torch.where(excess == 0, 0, excess / bound)
    # Beyond the largest number lies infinity; as long as that is where the exact result lies, or may lie, it is right.
    beyond = got.isinf() & (exact.abs() + bound + rounding >= limits.max) & ((exact > 0) == (got > 0))
    return torch.where(beyond, 0, ratio.nan_to_num(nan=HOPELESS, posinf=HOPELESS))


def _most(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
