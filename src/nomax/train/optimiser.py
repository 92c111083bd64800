"""AdamW as in the paper's runs: weight decay, the learning-rate schedule, gradient clipping."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from nomax.nn import Memory
from nomax.train.config import LoopConfig

KERNELS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def schedule(step: int, total: int, warmup: int, kind: str = "cosine") -> float:
    """Return the learning rate at a step, counted from 0, as a share of its peak: linear warm-up, then a cosine to 0.

    As in big_vision, the cosine begins where the warm-up ends, and the very first step has a learning rate of 0.
    "inverse-sqrt" falls as 1/√step instead, as in Vaswani et al. (2017), and does not depend on the number of steps.
    """
    rise = min(1.0, step / warmup) if warmup else 1.0
    if kind == "inverse-sqrt":
        start = max(warmup, 1)
        return rise * math.sqrt(start / max(step, start))
    progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
    return 0.5 * (1 + math.cos(math.pi * progress)) * rise


def kernels(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights of linear and convolutional layers, which big_vision calls `.*/kernel$` and decays.

    The keys and values of a memory are such weights, too: those of a feed-forward layer.
    """
    for module in model.modules():
        if isinstance(module, KERNELS):
            yield module.weight
        elif isinstance(module, Memory):
            yield from (module.keys, module.values)


def make(model: nn.Module, config: LoopConfig) -> AdamW:
    """Make an AdamW that decays only kernels, not biases, LayerNorm scales, positions, class tokens or gains.

    Decay here is multiplied by the learning rate, as in AdamW. big_vision's is not: its 1e-4 at a learning rate of 1e-3
    is 0.1 here. Both follow the same schedule: the update is -schedule·(lr·adam + 1e-4·w) in either. Adam's first
    moment stays in float32, where big_vision rounds it to bfloat16 to save memory.
    """
    decaying = {id(parameter) for parameter in kernels(model)}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[id(parameter) in decaying].append(parameter)
    others, decayed = groups
    wanted = [(decayed, config.weight_decay), (others, 0.0)]
    return AdamW(
        [{"params": parameters, "weight_decay": decay} for parameters, decay in wanted if parameters],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def clip(model: nn.Module, largest: float) -> Tensor:
    """Scale all gradients down together if their norm is above `largest` (0: never), and return the norm they had."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), largest or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def average(mean: nn.Module, model: nn.Module, decay: float) -> None:
    """Move an exponential moving average one step: mean = decay·mean + (1 - decay)·model."""
    averages: list[Tensor] = list(mean.parameters())
    parameters: list[Tensor] = list(model.parameters())
    torch._foreach_lerp_(averages, parameters, 1 - decay)
