"""The two losses of image classification, per example."""

import torch.nn.functional as F
from torch import Tensor


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
