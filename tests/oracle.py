"""The operation once more, one weight at a time, sharing nothing with the library but the definition."""

import math

import torch
from torch import Tensor


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


H = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    "identity": lambda x: x,
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "cube": lambda x: x**3,
}


def attention(
    query: Tensor,  # [B, H, Lq, D]
    key: Tensor,  # [B, Hk, Lk, D]
    value: Tensor,  # [B, Hk, Lk, Dv]
    seen: Tensor | None = None,  # broadcasts to [B, H, Lq, Lk]: True where query i may see key j
    bias: Tensor | None = None,
    *,
    activation: str = "relu",
    alpha: float = 1.0,
    gain: float = 1.0,
    shift: float | str = 0.0,
    length: int | str = "visible",
    threshold: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float64 output, and each row's sum and entropy of weights (NaN if a weight is negative)."""
    (B, Hq, Lq, D), (Hk, Lk), Dv = query.shape, key.shape[1:3], value.shape[3]
    q, k, v = query.double(), key.double(), value.double()
    seen = torch.ones(1, dtype=torch.bool) if seen is None else seen
    seen = seen.expand(B, Hq, Lq, Lk)
    bias = torch.zeros(1) if bias is None else bias
    bias = bias.double().expand(B, Hq, Lq, Lk)
    scale = 1 / math.sqrt(D) if scale is None else scale
    out, sums, entropies = q.new_zeros(B, Hq, Lq, Dv), q.new_zeros(B, Hq, Lq), q.new_zeros(B, Hq, Lq)
    for b in range(B):
        for h in range(Hq):
            g = h // (Hq // Hk)
            for i in range(Lq):
                visible = [j for j in range(Lk) if seen[b, h, i, j]]
                n = {"visible": len(visible), "keys": Lk}.get(length, length)
                for j in visible:
                    score = float(q[b, h, i] @ k[b, g, j]) * scale + float(bias[b, h, i, j])
                    score += -math.log(n) if shift == "-log L" else shift
                    score -= threshold * math.sqrt(2 * math.log(n))
                    weight = gain * n**-alpha * H[activation](score)
                    out[b, h, i] += weight * v[b, g, j]
                    sums[b, h, i] += weight
                    if weight != 0:
                        entropies[b, h, i] -= weight * (math.log(weight) if weight > 0 else math.nan)
    return out, sums, entropies
