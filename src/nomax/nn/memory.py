"""A feed-forward layer as a memory of learned slots: φ(x·Kᵀ)·V, or with a gate (φ(x·Gᵀ) ∘ x·Kᵀ)·V.

n tokens (all leading dimensions of x flattened) and S slots, each `dim` wide.
"""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from nomax.nn.layers import SLOW, LayerNorm
from nomax.ops import length
from nomax.ops.look_up import look_up, serves
from nomax.ops.problem import as_it_is, autocasts, wide
from nomax.phi import ACTIVATIONS, ROW_MAPS, SOFTMAX, Phi

# Up to this many weights (32 MB in float32) are kept for the backward pass, as in any feed-forward layer. More are
# recomputed there, block by block, which takes seven products of n × S × dim instead of six.
KEPT = 2**23
# Weights in a block: the work between its products then stays in the CPU cache, which pays for most of the seventh.
# Blocks narrower than this would slow the products down.
BLOCK, NARROWEST = 2**20, 512


class Memory(nn.Module):
    """Look tokens up in a memory of learned keys and values: φ(x·Kᵀ)·V, with no 1/√dim on the scores.

    phi: "relu" is the ordinary feed-forward layer, Linear–ReLU–Linear without biases; "softmax" is the classic memory.
        Any pointwise φ works; its L is the number of slots.
    norm: LayerNorm of the result.
    block: the number of slots to compute at a time; None chooses blocks that use little memory.
    gated: give every slot a gate beside its key, (φ(x·Gᵀ) ∘ x·Kᵀ)·V: with "relu" that is ReGLU without biases, with
        "gelu" GEGLU, with "silu" SwiGLU. φ must be pointwise, and there are no blocks: all weights are made at once.

    keys, values and gates, [slots, dim] each, start Xavier-uniform, as the matrices of a feed-forward layer do. In
    inference on a CPU, up to six tokens read only the rows of values, and if gated of keys, that φ is not zero for.
    """

    def __init__(
        self,
        dim: int,
        slots: int,
        *,
        phi: str | Phi = "relu",
        norm: bool = False,
        block: int | None = None,
        gated: bool = False,
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
        if gated and (block is not None or self.phi.activation == SOFTMAX):
            wrong = f'phi="{self.phi}"' if block is None else f"block={block}"
            raise ValueError(
                f"{wrong} does not go with gated=True, which takes a pointwise φ and makes all weights at once. "
                "Leave out either."
            )
        self.keys = nn.Parameter(torch.empty(slots, dim))
        self.values = nn.Parameter(torch.empty(slots, dim))
        self.gates = nn.Parameter(torch.empty(slots, dim)) if gated else None
        self.norm = LayerNorm(dim) if norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise keys, values and gates Xavier-uniform, and the norm to scale 1 and bias 0."""
        for matrix in self._matrices():
            nn.init.xavier_uniform_(matrix)
        if self.norm is not None:
            self.norm.reset_parameters()

    def extra_repr(self) -> str:
        block, gated = "" if self.block is None else f", block={self.block}", ", gated=True" * (self.gates is not None)
        return f"{self.dim}, slots={self.slots}, phi={str(self.phi)!r}{block}{gated}"

    @overload
    def forward(self, x: Tensor, *, return_l1: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, *, return_l1: Literal[True]) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, *, return_l1: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Look up x [..., dim], and return [..., dim].

        return_l1: return also the sum of the sizes of each token's weights, [...], to press on in a loss. All weights
            are then made at once.
        """
        self._check(x)
        given, dtype = self._precisions(x)
        tokens, (activation, (factor, shift)) = x.reshape(-1, self.dim), self._activation()
        sizes = None
        with as_it_is(x):
            if return_l1:
                tokens, keys, values, *gates = (y.to(dtype) for y in (tokens, *self._matrices()))
                weights = _weights(tokens, keys, activation, shift, *gates)
                sizes = abs(factor) * weights.abs().sum(-1, dtype=wide(x)).reshape(x.shape[:-1])
                out = weights.to(dtype) @ values
            elif self.block is None and serves(tokens, self._matrices(), given, activation):
                tokens, *matrices = (y.to(given) for y in (tokens, *self._matrices()))
                out = look_up(tokens, *matrices, activation=activation, shift=shift)
            else:
                tokens, *matrices = (y.to(dtype) for y in (tokens, *self._matrices()))
                out = self._look_up(tokens, *matrices, activation=activation, shift=shift)
            out = (out if factor == 1 else out * factor).to(given).reshape(x.shape)
        out = out if self.norm is None else self.norm(out.to(self.norm.weight.dtype)).to(given)
        return out if sizes is None else (out, sizes)

    def weights(self, x: Tensor) -> Tensor:
        """Return the weights of the values, [..., slots], for inspection: all at once, so only for a few tokens."""
        self._check(x)
        given, dtype = self._precisions(x)
        activation, (factor, shift) = self._activation()
        keys, _, *gates = (y.to(dtype) for y in self._matrices())
        with as_it_is(x):
            return (factor * _weights(x.to(dtype), keys, activation, shift, *gates)).to(given)

    def _matrices(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values) if self.gates is None else (self.keys, self.values, self.gates)

    def _activation(self) -> tuple[str, tuple[float, float]]:
        """Return h, φ's factor, and the shift of the scores."""
        return self.phi.activation, length.constants(self.phi, self.slots)

    def _look_up(
        self, x: Tensor, keys: Tensor, values: Tensor, gates: Tensor | None = None, *, activation: str, shift: float
    ) -> Tensor:
        block = self._block(x.shape[0])
        if block >= self.slots or gates is not None or _transformed():
            return _at_once(x, keys, values, activation, shift, gates)
        if activation == SOFTMAX:
            return _Softmax.apply(x, keys, values, block)
        return _Pointwise.apply(x, keys, values, block, activation, shift)

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


def _at_once(
    x: Tensor, keys: Tensor, values: Tensor, activation: str, shift: float, gates: Tensor | None = None
) -> Tensor:
    return _weights(x, keys, activation, shift, gates).to(x.dtype) @ values


def _weights(x: Tensor, keys: Tensor, activation: str, shift: float, gates: Tensor | None = None) -> Tensor:
    if gates is not None:
        return _weights(x, gates, activation, shift) * (x @ keys.T)
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
