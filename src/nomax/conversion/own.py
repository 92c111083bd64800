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


@contextmanager
def as_converted(model: nn.Module) -> Iterator[None]:
    """Let every nomax.nn.Attention call an InnerAttention of its own, and take over what this has learned at the end.

    A gain or shift that it has learned then belongs to the Attention, one number per head, and to the model's config,
    so that the model can be saved.
    """
    attentions = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Attention) and NAME not in module._modules  # in a block inside of this one it is there
    ]
    for name, attention in attentions:
        if attention.alpha is not None:
            raise ValueError(
                f"{name or 'the model'} learns its power of L (learned_alpha), so no gain can be fitted beside it: "
                "make the model without learned_alpha."
            )
    try:
        for _, attention in attentions:
            _lend(attention)
        yield
    finally:
        for _, attention in attentions:
            _take_back(attention)
        _describe(model, [attention for _, attention in attentions])


def _lend(attention: Attention) -> None:
    """Give an attention's φ, gain and shift to an InnerAttention, which computes what it did."""
    phi = attention.phi if attention.gain is None else replace(attention.phi, gain=1.0)
    inner = InnerAttention(phi, attention.heads).to(next(attention.parameters()).device).train(attention.training)
    per_head = [None if x is None else x.expand(attention.heads) for x in (attention.gain, attention.shift)]
    inner.add_gain_and_shift(*per_head)
    for mine, lent in ((attention.gain, inner.gain), (attention.shift, inner.shift)):
        if mine is not None and lent is not None:
            lent.requires_grad_(mine.requires_grad)
    attention.gain = attention.shift = None

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
    if inner.shift is not None:
        attention.shift = nn.Parameter(inner.shift.detach(), inner.shift.requires_grad)


def _describe(model: nn.Module, attentions: list[Attention]) -> None:
    """Say in a model's config what its attention learns."""
    if not isinstance(model, ViT | ReLUFormer) or not attentions:
        return
    for name in ("gain", "shift"):
        per_head = getattr(attentions[0], name) is not None
        if per_head and attentions[0].phi.activation not in ROW_MAPS:
            model.config = replace(model.config, **{f"learned_{name}": "head"})  # type: ignore[arg-type]
