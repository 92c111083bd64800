"""A feed-forward layer as a memory of learned slots: φ(x·Kᵀ)·V.

n tokens (all leading dimensions of x flattened) and S slots, each `dim` wide.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nomax.nn.layers import SLOW, LayerNorm
from nomax.ops import cpu, length
from nomax.ops.api import attention
from nomax.ops.problem import as_it_is, autocasts, wide
from nomax.phi import ACTIVATIONS, ROW_MAPS, SOFTMAX, Phi

# Up to this many weights (32 MB in float32) are kept for the backward pass, as in any feed-forward layer. More are
# recomputed there, block by block, which takes seven products of n × S × dim instead of six.
KEPT = 2**23
# Weights in a block: the work between its products then stays in the CPU cache, which pays for most of the seventh.
# Blocks narrower than this would slow the products down.
BLOCK, NARROWEST = 2**20, 512
# In inference, up to this many tokens are looked up by the kernel of attention: it reads keys and values once, and not
# those values whose weights are zero for every token. Its work is cut into parts, for threads to share.
FEW, PARTS = 6, 8
WITH_ZEROS = ("relu", "relu2", "relu6")


class Memory(nn.Module):
    """Look tokens up in a memory of learned keys and values: φ(x·Kᵀ)·V, with no 1/√dim on the scores.

    phi: "relu" is the ordinary feed-forward layer, Linear–ReLU–Linear without biases; "softmax" is the classic memory.
        Any pointwise φ works; its L is the number of slots.
    norm: LayerNorm of the result.
    block: the number of slots to compute at a time; None chooses blocks that use little memory.

    keys and values, [slots, dim] each, start Xavier-uniform, as the two matrices of a feed-forward layer do.
    """

    def __init__(
        self, dim: int, slots: int, *, phi: str | Phi = "relu", norm: bool = False, block: int | None = None
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("slots", slots), ("block", 1 if block is None else block)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        self.dim, self.slots, self.phi, self.block = dim, slots, Phi.parse(phi), block
        if self.phi.activation in ROW_MAPS and self.phi.activation != SOFTMAX:
            raise ValueError(
                f'phi="{self.phi}" needs all slots at once, which a memory never has. Use "softmax", or a pointwise φ '
                'such as "relu".'
            )
        self.keys = nn.Parameter(torch.empty(slots, dim))
        self.values = nn.Parameter(torch.empty(slots, dim))
        self.norm = LayerNorm(dim) if norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise keys and values Xavier-uniform, and the norm to scale 1 and bias 0."""
        nn.init.xavier_uniform_(self.keys)
        nn.init.xavier_uniform_(self.values)
        if self.norm is not None:
            self.norm.reset_parameters()

    def extra_repr(self) -> str:
        block = "" if self.block is None else f", block={self.block}"
        return f"{self.dim}, slots={self.slots}, phi={str(self.phi)!r}{block}"

    def forward(self, x: Tensor) -> Tensor:
        """Look up x [..., dim], and return [..., dim]."""
        self._check(x)
        given, dtype = self._precisions(x)
        with as_it_is(x):
            tokens, keys, values = (y.to(dtype) for y in (x.reshape(-1, self.dim), self.keys, self.values))
            out = self._look_up(tokens, keys, values).to(given).reshape(x.shape)
        return out if self.norm is None else self.norm(out.to(self.norm.weight.dtype)).to(given)

    def weights(self, x: Tensor) -> Tensor:
        """Return the weights φ(x·Kᵀ), [..., slots], for inspection: all at once, so only for a few tokens."""
        self._check(x)
        given, dtype = self._precisions(x)
        factor, shift = length.constants(self.phi, self.slots)
        with as_it_is(x):
            return (factor * _weights(x.to(dtype), self.keys.to(dtype), self.phi.activation, shift)).to(given)

    def _look_up(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        block, activation = self._block(x.shape[0]), self.phi.activation
        factor, shift = length.constants(self.phi, self.slots)
        if self.block is None and activation in WITH_ZEROS and _are_few(x, keys, values):
            out = _read_few(x, keys, values, Phi(activation, shift=shift))
        elif block >= self.slots or _transformed():
            out = _at_once(x, keys, values, activation, shift)
        elif activation == SOFTMAX:
            out = _Softmax.apply(x, keys, values, block)
        else:
            out = _Pointwise.apply(x, keys, values, block, activation, shift)
        return out if factor == 1 else out * factor

    def _block(self, tokens: int) -> int:
        if self.block is not None:
            return self.block
        return self.slots if tokens * self.slots < KEPT else max(BLOCK // tokens, NARROWEST)

    def _precisions(self, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the result, and the one to compute in."""
        device = x.device.type
        casts = autocasts(device) and x.dtype != torch.float64
        given = torch.get_autocast_dtype(device) if casts else x.dtype
        slow = x.is_cpu and given in SLOW
        # A sum over all slots may overflow float16 before φ's factor, such as 1/L, makes it small.
        overflows = given == torch.float16 and length.constants(self.phi, self.slots)[0] != 1
        return given, torch.float32 if slow or overflows else given

    def _check(self, x: Tensor) -> None:
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be [..., {self.dim}], got {list(x.shape)}.")
        if not x.is_floating_point():
            raise ValueError(f"x must be of floating point numbers, got {x.dtype}.")


class _Pointwise(torch.autograd.Function):
    """h(x·Kᵀ + shift)·V in blocks of slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, values: Tensor, block: int, activation: str, shift: float) -> Tensor:
        ctx.save_for_backward(x, keys, values)
        ctx.settings = block, activation, shift
        out = torch.zeros_like(x, dtype=wide(x))
        for key, value in zip(keys.split(block), values.split(block), strict=True):
            _add_product(out, ACTIVATIONS[activation].value(_scores(x, key, shift)).to(x.dtype), value)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, keys, values = ctx.saved_tensors
        block, activation, shift = ctx.settings
        if torch.is_grad_enabled():
            return *_with_graph(x, keys, values, grad, activation, shift), None, None, None
        h = ACTIVATIONS[activation]

        def step(scores: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor]:
            return h.value(scores), grad_weights.mul_(h.derivative(scores))

        return *_gradients(x, keys, values, grad, block=block, shift=shift, step=step), None, None, None


class _Softmax(torch.autograd.Function):
    """softmax(x·Kᵀ)·V in blocks of slots: keep a running maximum and sum, and rescale the result as they change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, values: Tensor, block: int) -> Tensor:
        out = torch.zeros_like(x, dtype=wide(x))
        total = out.new_zeros(x.shape[0], 1)
        # Not -inf: scores that are all -inf, minus their maximum, would be NaN.
        highest = torch.full_like(total, torch.finfo(total.dtype).min)
        for key, value in zip(keys.split(block), values.split(block), strict=True):
            scores = _scores(x, key)
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = scores.sub_(higher).exp_()
            rescale = (highest - higher).exp_()
            total = total * rescale + weights.sum(-1, keepdim=True)
            _add_product(out.mul_(rescale), weights.to(x.dtype), value)
            highest = higher
        out /= total
        ctx.save_for_backward(x, keys, values, out, highest, total)
        ctx.block = block
        return out.to(x.dtype, copy=True)  # the caller may modify it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, keys, values, out, highest, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_with_graph(x, keys, values, grad, SOFTMAX, 0.0), None
        mean = (grad * out).sum(-1, keepdim=True)  # of the weights' gradients, which softmax's derivative subtracts

        def step(scores: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor]:
            # Not exp(scores - log of the sum): the rounding of that logarithm would affect all weights of a row alike.
            weights = scores.sub_(highest).exp_().div_(total)
            return weights, grad_weights.sub_(mean).mul_(weights)

        return *_gradients(x, keys, values, grad, block=ctx.block, shift=0.0, step=step), None


def _gradients(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    grad: Tensor,
    *,
    block: int,
    shift: float,
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, keys and values, recomputing the scores block by block.

    step: maps the scores and the gradients of the weights to the weights and the gradients of the scores.
    """
    grad = grad.contiguous()  # one copy instead of several per block, if it is an expanded number
    grad_x = torch.zeros_like(x, dtype=wide(x))
    grad_keys, grad_values = torch.empty_like(keys), torch.empty_like(values)
    for start in range(0, len(keys), block):
        part = slice(start, start + block)
        key, value = keys[part], values[part]
        both = step(_scores(x, key, shift), (grad @ value.T).to(wide(x)))
        weights, grad_scores = (each.to(x.dtype) for each in both)
        torch.mm(weights.T, grad, out=grad_values[part])
        torch.mm(grad_scores.T, x, out=grad_keys[part])
        _add_product(grad_x, grad_scores, key)
    return grad_x.to(x.dtype), grad_keys, grad_values


def _with_graph(
    x: Tensor, keys: Tensor, values: Tensor, grad: Tensor, activation: str, shift: float
) -> list[Tensor | None]:
    """Return differentiable gradients of x, keys and values (create_graph=True), with all weights at once."""
    inputs = (x, keys, values)
    wanted = [each for each in inputs if each.requires_grad]
    grads = iter(torch.autograd.grad(_at_once(*inputs, activation, shift), wanted, grad, create_graph=True))
    return [next(grads) if each.requires_grad else None for each in inputs]


def _are_few(x: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether these are a few tokens in inference, and the kernel of attention serves them."""
    if torch.compiler.is_compiling():  # which must not learn that there are few
        return False
    learns = torch.is_grad_enabled() and (x.requires_grad or keys.requires_grad or values.requires_grad)
    fits = 1 <= x.shape[0] <= FEW and x.dtype in (torch.float32, torch.bfloat16)
    return fits and not learns and cpu.serves(keys.detach())


def _read_few(x: Tensor, keys: Tensor, values: Tensor, phi: Phi) -> Tensor:
    parts = math.gcd(len(keys), PARTS)
    key, value = (each.view(1, parts, -1, each.shape[1]) for each in (keys, values))
    out = attention(x.expand(1, parts, *x.shape), key, value, scale=1.0, phi=phi)
    return out.to(torch.float32).sum(1)[0].to(x.dtype)


def _at_once(x: Tensor, keys: Tensor, values: Tensor, activation: str, shift: float) -> Tensor:
    return _weights(x, keys, activation, shift).to(x.dtype) @ values


def _weights(x: Tensor, keys: Tensor, activation: str, shift: float) -> Tensor:
    if activation == "relu" and not shift:  # which rounds nothing, so half precision needs no float32 in between
        return torch.relu_(x @ keys.T)
    scores = _scores(x, keys, shift)
    return scores.softmax(-1) if activation == SOFTMAX else ACTIVATIONS[activation].value(scores)


def _transformed() -> bool:
    """Return whether torch.func transforms this call, which needs plain operations, and so all weights at once."""
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def _scores(x: Tensor, keys: Tensor, shift: float = 0.0) -> Tensor:
    scores = (x @ keys.T).to(wide(x))
    return scores + shift if shift else scores


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:  # half precision, summed in float32
        total += left @ right
