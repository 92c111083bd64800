"""nomax's own attention in the form of converted attention, for as long as something treats both alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from nomax.models import ReLUFormer, ViT
from nomax.nn import Attention, InnerAttention
from nomax.phi import ROW_MAPS

NAME = "inner_attention"  # as in converted modules
PER_HEAD = ("gain", "shift", "alpha")


@contextmanager
def as_converted(model: nn.Module) -> Iterator[None]:
    """Let every nomax.nn.Attention call an InnerAttention of its own, and take over what this has learned at the end.

    What it has learned then belongs to the Attention, one number per head, and to the model's config, so that the model
    can be saved.
    """
    attentions = [
        module
        for module in model.modules()
        if isinstance(module, Attention) and NAME not in module._modules  # in a block inside of this one it is there
    ]
    try:
        for attention in attentions:
            _lend(attention)
        yield
    finally:
        for attention in attentions:
            _take_back(attention)
        _describe(model, attentions)


def _lend(attention: Attention) -> None:
    """Give an attention's φ, and what it learns, to an InnerAttention, which computes what it did."""
    phi = attention.phi if attention.gain is None else replace(attention.phi, gain=1.0)
    inner = InnerAttention(phi, attention.heads).to(next(attention.parameters()).device).train(attention.training)
    mine = [getattr(attention, name) for name in PER_HEAD]
    inner.learn(*(None if x is None else x.expand(attention.heads) for x in mine))
    for name, x in zip(PER_HEAD, mine, strict=True):
        if x is not None:
            getattr(inner, name).requires_grad_(x.requires_grad)
        setattr(attention, name, None)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, **settings: Any
    ) -> tuple[Tensor, None]:
        if settings.get("return_rows"):
            raise ValueError("return_rows=True does not go together with calibration and distillation.")
        return inner(query, key, value, mask, settings.get("dropout", 0.0), is_causal), None

    attention.add_module(NAME, inner)
    attention._attend = attend  # type: ignore[method-assign]


def _take_back(attention: Attention) -> None:
    inner = attention._modules.pop(NAME, None)
    if not isinstance(inner, InnerAttention):  # an error came before it was lent
        return
    del attention._attend
    if inner.gain is not None:
        # An Attention's gain stands in the place of φ's, an InnerAttention's is a factor of it.
        attention.gain = nn.Parameter(inner.gain.detach() * inner.phi.gain, inner.gain.requires_grad)
    for name, x in (("shift", inner.shift), ("alpha", inner.alpha)):
        if x is not None:
            setattr(attention, name, nn.Parameter(x.detach(), x.requires_grad))


def _describe(model: nn.Module, attentions: list[Attention]) -> None:
    """Say in a model's config what its attention learns."""
    if not isinstance(model, ViT | ReLUFormer) or not attentions:
        return
    for name in PER_HEAD:
        per_head = getattr(attentions[0], name) is not None
        if per_head and attentions[0].phi.activation not in ROW_MAPS:
            model.config = replace(model.config, **{f"learned_{name}": "head"})  # type: ignore[arg-type]
