"""The losses: two of image classification, per example, and one of text, per token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def sigmoid(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each class by itself, summed over the classes: [batch] from logits [batch, classes].

    Targets are labels [batch], or, where images are mixed, shares [batch, classes].
    """
    shares = targets if targets.is_floating_point() else F.one_hot(targets, logits.shape[-1])
    losses = F.binary_cross_entropy_with_logits(logits.float(), shares.float(), reduction="none")
    return losses.sum(-1)


def softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all classes: [batch] from logits [batch, classes] and labels or shares."""
    targets = targets.float() if targets.is_floating_point() else targets
    return F.cross_entropy(logits.float(), targets, reduction="none")


LOSSES = {"sigmoid": sigmoid, "softmax": softmax}


def smoothed(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy [...] of logits [..., vocabulary] with smoothed labels [...], and without smoothing, for metrics.

    A share `smoothing` of each label is spread evenly over the whole vocabulary. The second has no gradient.
    """
    loss, nll = _Smoothed.apply(logits.float(), labels, smoothing)
    return loss, nll


class _Smoothed(torch.autograd.Function):
    """Keeps the logits alone for the backward pass, which makes one tensor of their size instead of several."""

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
