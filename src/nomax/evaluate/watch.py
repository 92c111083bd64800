"""Look at a model's attention weights while an image passes through it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nomax.models import ViT


def watch(model: ViT, image: Tensor, look: Callable[[int, Tensor], None]) -> None:
    """Show one image, [C, height, width] in [−1, 1], and call look(layer, weights) at each layer.

    The weights are [heads, queries, keys]; those of one layer exist at a time.
    """

    def hook(layer: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
        return lambda attention, arguments: look(layer, attention.weights(arguments[0])[0])

    hooks = [
        block.get_submodule("attention").register_forward_pre_hook(hook(layer))
        for layer, block in enumerate(model.blocks)
    ]
    try:
        with torch.inference_mode():
            model.features(image.unsqueeze(0).to(next(model.parameters())))
    finally:
        for handle in hooks:
            handle.remove()
