"""Who takes part: our operation, and the peers that it is compared with.

Each of these returns a call without arguments that does the whole work once. What a peer can prepare beforehand
(masks, padded copies, compilation) it prepares here, outside the measured time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nomax
from nomax.bench import peak
from nomax.bench.shapes import BACKWARD, FORWARD, INFERENCE, Inputs
from nomax.phi import ACTIVATIONS, Phi

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """A peer: how to prepare its call, what it can do, and whether it computes relu/L (so that it can be checked)."""

    prepare: Callable[[Inputs, str, str], Call]  # inputs, mode, torch.compile's backend
    note: str
    modes: tuple[str, ...] = (FORWARD, BACKWARD, INFERENCE)
    computes_relu: bool = False


def ours(inputs: Inputs, phi: str) -> Attention:
    """Our operation through its public door, on the backend that is under test."""
    # Looked up now and not at import: a test replaces it.
    return partial(nomax.attention, attn_mask=inputs.mask, is_causal=inputs.causal, phi=phi, backend="cpu")


def sdpa(inputs: Inputs) -> Attention:
    """PyTorch's softmax attention."""
    return partial(F.scaled_dot_product_attention, attn_mask=inputs.mask, is_causal=inputs.causal)


def eager(inputs: Inputs, phi: str = "relu/L") -> Attention:
    """The formula as one would write it in PyTorch: also the judge of correctness, in float64."""
    activation = ACTIVATIONS[Phi.parse(phi).activation].value
    hidden, visible, scale = inputs.hidden, inputs.visible, inputs.query.shape[-1] ** -0.5

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = activation(query @ key.mT * scale)
        if hidden is not None:
            weights = weights.masked_fill(hidden, 0)
        return (weights @ value / visible).to(query.dtype)

    return attention


def step(attention: Attention, inputs: Inputs, mode: str) -> Call:
    """The call that is timed: the output alone, or with the gradients of query, key and value."""
    tensors = (inputs.query, inputs.key, inputs.value)
    if mode != BACKWARD:
        return lambda: attention(*tensors)
    leaves = [x.detach().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(attention(*leaves), leaves, inputs.grad)


def _sdpa(inputs: Inputs, mode: str, compiler: str) -> Call:
    return step(sdpa(inputs), inputs, mode)


def _eager(inputs: Inputs, mode: str, compiler: str) -> Call:
    return step(eager(inputs), inputs, mode)


def _compiled(inputs: Inputs, mode: str, compiler: str) -> Call:
    return step(torch.compile(eager(inputs), backend=compiler, dynamic=False, fullgraph=True), inputs, mode)


def _flex(inputs: Inputs, mode: str, compiler: str) -> Call:
    """FlexAttention in log space: its softmax of log(relu(score)) has relu as numerator.

    To undo the denominator one needs the log-sum-exp, which FlexAttention does not return on CPUs. So a first key of
    weight 1 is put before the others, and a value column that is 1 there and 0 elsewhere: that column of the output is
    1 / denominator. The padded copies are made outside the measured time.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, _, queries, dimension = inputs.query.shape
    keys, visible, lengths = inputs.key.shape[2], inputs.visible, inputs.lengths
    key = F.pad(inputs.key, (0, 0, 1, 0))
    value = F.pad(inputs.value, (0, 16, 1, 0))  # one column would do, but its kernel is faster on a multiple of 16
    value[:, :, 0, dimension] = 1

    def log_relu(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j == 0, 0.0, torch.log(torch.relu(score)))

    blocks: Any = None
    if inputs.causal:
        blocks = create_block_mask(lambda b, h, i, j: j <= i + 1, None, None, queries, keys + 1, device="cpu")
    elif lengths is not None:
        blocks = create_block_mask(lambda b, h, i, j: j <= lengths[b], batch, None, queries, keys + 1, device="cpu")

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flex_attention(query, key, value, score_mod=log_relu, block_mask=blocks)
        return (out[..., :dimension] / (out[..., dimension : dimension + 1] * visible)).to(query.dtype)

    return partial(torch.compile(attention, backend=compiler, dynamic=False), inputs.query, key, value)


def _peak(inputs: Inputs, mode: str, compiler: str) -> Call:
    return peak.call()


PEERS = {
    "sdpa": Peer(_sdpa, "PyTorch's softmax attention"),
    "eager": Peer(_eager, "relu(q @ k.mT * scale) @ v / L in PyTorch", computes_relu=True),
    "compiled": Peer(_compiled, "the same through torch.compile", computes_relu=True),
    "flex": Peer(_flex, "FlexAttention in log space (forward only)", (FORWARD,), computes_relu=True),
    "peak": Peer(_peak, "nothing but fused multiply-adds in float32, on one core", (FORWARD,)),
}
