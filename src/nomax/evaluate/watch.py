"""Look at a model's attention weights while an image or a text passes through it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nomax.data.text import Example
from nomax.data.text.batches import pad
from nomax.models import ReLUFormer, ViT
from nomax.nn import Attention


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


@dataclass(frozen=True)
class Look:
    """One attention of a ReLUFormer at one text."""

    part: str
    """encoder; decoder, to the text before; or source, the decoder's attention to the source."""
    layer: int
    weights: Tensor
    """[heads, queries, keys]"""
    visible: Tensor
    """[queries, keys]: the keys that a query may see."""


@torch.inference_mode()
def looks(model: ReLUFormer, example: Example) -> Iterator[Look]:
    """Show one text, with its source to a model that translates; then each attention, in the order of computation.

    The weights of one attention exist at a time.
    """
    parts = {"encoder": ("encoder", "attention"), "decoder": ("decoder", "attention")}
    parts |= {"source": ("decoder", "source_attention")} if model.encoder else {}
    called: list[tuple[str, int, Attention, Any, Any]] = []

    def hook(part: str, layer: int) -> Callable[[Attention, Any, Any], None]:
        return lambda attention, given, settings: called.append((part, layer, attention, given, settings))

    device = model.embedding.weight.device
    target = pad([[model.config.begin, *example.target]], device)
    with ExitStack() as stack:
        for part, (side, name) in parts.items():
            for layer, block in enumerate(getattr(model, side)):
                handle = block.get_submodule(name).register_forward_pre_hook(hook(part, layer), with_kwargs=True)
                stack.callback(handle.remove)
        model(*([pad([[*example.source, model.config.end]], device)] if model.encoder else []), target)
    for part, layer, attention, (x, context), settings in called:
        how = {name: settings[name] for name in ("attn_mask", "is_causal")}
        weights = attention.weights(x, context, **how)[0]
        visible = torch.ones(weights.shape[1:], dtype=torch.bool, device=device)
        yield Look(part, layer, weights, visible.tril() if settings["is_causal"] else visible)
