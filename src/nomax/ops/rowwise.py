"""LayerNorm, GELU, dropout and cross-entropy on the CPU kernels: PyTorch's functions, several times faster."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nomax.ops import cpu

WIDEST = 4096  # row that the kernel of LayerNorm takes: MOST_NORMED in csrc/problem.h


def gelu(
    x: Tensor, bias: Tensor | None = None, approximate: Literal["none", "tanh"] = "none", *, spent: bool = False
) -> Tensor:
    """Compute F.gelu(x + bias), by our kernels wherever they serve: on the CPU, eagerly, to the first derivative.

    bias: [x's last dimension], as a linear layer has it: adding it here saves that layer a pass over its result.
    spent: nobody needs x afterwards, so the result may take its place. (It does if no gradient is wanted.)
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate={approximate!r} must be "none" or "tanh".')
    if not cpu.serves(x):
        return F.gelu(x if bias is None else (x + bias).to(x.dtype), approximate=approximate)
    tanh = approximate == "tanh"
    rows, bias = x.contiguous().reshape(-1, x.shape[-1]), None if bias is None else bias.float()
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        out: Tensor = _Gelu.apply(rows, bias, tanh)
    elif spent:
        torch.ops.nomax.gelu_(rows, bias, tanh)
        out = rows
    else:
        out = torch.ops.nomax.gelu(rows, bias, tanh)
    return out.view(x.shape)


def dropout(x: Tensor, share: float, onto: Tensor | None = None) -> Tensor:
    """Compute F.dropout(x, share), or with `onto`, of the same shape, onto + F.dropout(x, share), in one pass.

    Our kernel hashes a seed, drawn from PyTorch's generator, with the place of each number. So the backward pass tosses
    the same coins again, and nothing is kept for it. They are not the coins of F.dropout, which takes over where the
    kernel does not serve.
    """
    if not (cpu.serves(x) and (onto is None or (cpu.serves(onto) and onto.shape == x.shape))):
        thinned = F.dropout(x, share)
        return thinned if onto is None else onto + thinned
    dtype = x.dtype if onto is None else torch.promote_types(x.dtype, onto.dtype)
    seed = int(torch.randint(2**63 - 1, ()))
    out: Tensor = _Dropout.apply(x, onto, share, seed, dtype)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Compute F.layer_norm over the last dimension, by our kernel wherever it serves.

    x may be a strided view, such as the queries in a joint projection: they are not copied.
    dtype: of the result; None for that of x.
    """
    if not (cpu.serves(x) and x.dim() >= 2 and x.stride(-1) == 1 and x.shape[-1] <= WIDEST and _are_rows(weight, bias)):
        out = F.layer_norm(x, weight.shape, weight, bias, eps)
        return out if dtype is None else out.to(dtype)
    dtype = x.dtype if dtype is None else dtype
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        normed: Tensor = _LayerNorm.apply(x, weight, bias, eps, dtype)
        return normed
    return torch.ops.nomax.layer_norm(_in_three(x), weight, bias, eps, cpu.DTYPES.index(dtype))[0].view(x.shape)


def add_layer_norm_(
    x: Tensor,
    added: Tensor,
    added_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Make x the sum x + added + added_bias, and return F.layer_norm of it in this dtype, in one pass; no gradients."""
    served = cpu.serves(x) and x.dtype == torch.float32 and x.is_contiguous() and x.shape == added.shape
    width, halves = x.shape[-1], {added.dtype, dtype}
    if (
        served
        and width <= WIDEST
        and width % 16 == 0  # whole vectors of any instruction set
        and halves <= {torch.float32, torch.bfloat16}
        and _are_rows(added_bias, weight, bias)
    ):
        code = cpu.DTYPES.index(dtype)
        sums = x.view(1, -1, width), added.contiguous().view(1, -1, width)
        out: Tensor = torch.ops.nomax.add_layer_norm_(*sums, added_bias, weight, bias, eps, code)
        return out.view(x.shape)
    x += added if added_bias is None else added + added_bias
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for logits [..., classes] and labels [...], losses, losses without smoothing, and which are right.

    A share `smoothing` of each label is spread evenly over all classes. The second and third are for metrics and have
    no gradient; a label is right where torch.argmax of the logits names it. The results are float32 and, for the third,
    boolean; in half precision the logits are not copied to float32.
    """
    if cpu.serves(logits):
        rows = logits.reshape(-1, logits.shape[-1]).contiguous()
        loss, nll, right = _CrossEntropy.apply(rows, labels.reshape(-1), smoothing)
    else:
        loss, nll = _PlainCrossEntropy.apply(logits.float(), labels, smoothing)
        right = logits.argmax(-1) == labels
    return loss.view(labels.shape), nll.view(labels.shape), right.view(labels.shape).bool()


def _are_rows(*parameters: Tensor | None) -> bool:
    plain = (Tensor, torch.nn.Parameter)
    return all(x is None or (type(x) in plain and x.dtype == torch.float32 and x.is_contiguous()) for x in parameters)


def _in_three(x: Tensor) -> Tensor:
    """Return x as [outer, inner, width], a view where its strides allow it."""
    return x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return torch.ops.nomax.gelu(x, bias, tanh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        bias_wanted = bias is not None and ctx.needs_input_grad[1]
        if torch.is_grad_enabled():  # somebody wants the second derivative
            inner = x if bias is None else (x + bias).to(x.dtype)
            slope = torch.ops.aten.gelu_backward(grad, inner, approximate="tanh" if ctx.tanh else "none")
            return slope, slope.sum(0, dtype=bias.dtype) if bias_wanted else None, None
        slope, total = torch.ops.nomax.gelu_backward(grad.contiguous(), x, bias, ctx.tanh, bias_wanted)
        return slope, total if bias_wanted else None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, onto: Tensor | None, share: float, seed: int, dtype: torch.dtype) -> Tensor:
        ctx.share, ctx.seed, ctx.dtype, ctx.onto_dtype = share, seed, x.dtype, None if onto is None else onto.dtype
        rows, below = (None if y is None else y.contiguous().view(-1, x.shape[-1]) for y in (x, onto))
        out: Tensor = torch.ops.nomax.dropout(rows, below, share, seed, cpu.DTYPES.index(dtype))
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        to_onto = grad.to(ctx.onto_dtype) if ctx.needs_input_grad[1] else None
        to_x = _Dropout.apply(grad, None, ctx.share, ctx.seed, ctx.dtype) if ctx.needs_input_grad[0] else None
        return to_x, to_onto, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        out, statistics = torch.ops.nomax.layer_norm(_in_three(x), weight, bias, eps, cpu.DTYPES.index(dtype))
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.eps = eps
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the second derivative
            wanted = [each for each, needed in zip((x, weight, bias), ctx.needs_input_grad[:3], strict=True) if needed]
            out = F.layer_norm(x, weight.shape, weight, bias, ctx.eps).to(grad.dtype)
            grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return *(next(grads) if needed else None for needed in ctx.needs_input_grad[:3]), None, None
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grad_x, grad_weight, grad_bias = torch.ops.nomax.layer_norm_backward(
            _in_three(grad), _in_three(x), weight, bias, statistics
        )
        return grad_x.view(x.shape), grad_weight, None if bias is None else grad_bias, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        loss, nll, right, whole = torch.ops.nomax.cross_entropy(logits, labels.contiguous(), smoothing).unbind(0)
        ctx.save_for_backward(logits, labels.contiguous(), whole)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(nll, right)
        return loss, nll, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, whole = ctx.saved_tensors
        grad = grads[0].float().contiguous()
        return torch.ops.nomax.cross_entropy_backward(grad, logits, labels, whole, ctx.smoothing), None, None


class _PlainCrossEntropy(torch.autograd.Function):
    """Keep the logits alone for the backward pass, which makes one tensor of their size instead of several."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        total = logits.logsumexp(-1)
        nll = total - logits.gather(-1, labels[..., None]).squeeze(-1)
        ctx.save_for_backward(logits, labels, total)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(nll)
        return (1 - smoothing) * nll + smoothing * (total - logits.mean(-1)), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, total = ctx.saved_tensors
        grad = (logits - total[..., None]).exp_().sub_(ctx.smoothing / logits.shape[-1])
        share = torch.full_like(total, ctx.smoothing - 1)
        grad.scatter_add_(-1, labels[..., None], share[..., None])
        return grad.mul_(grads[0][..., None]), None, None
