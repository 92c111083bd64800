"""relu/L attention in plain PyTorch, put into the original models: the oracle for converted ones.

It shares nothing with nomax: models of transformers run their own eager code, masks included, with this function in
the place of theirs; all others call it instead of F.scaled_dot_product_attention.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def relu_over_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Σ_j relu(score_ij)·v_j / the number of keys that i may see."""
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen = seen & (attn_mask > torch.finfo(attn_mask.dtype).min / 2)
        scores = scores + attn_mask.masked_fill(~seen if attn_mask.shape == seen.shape else attn_mask < -1e30, 0)
    weights = torch.where(seen, scores.clamp(min=0), 0)
    return weights @ value / seen.sum(-1, keepdim=True).clamp(min=1)


def eagerly(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The same in the place of a model's eager_attention_forward, to which masks are always given."""
    if position_bias is not None:
        attention_mask = position_bias if attention_mask is None else position_bias + attention_mask
    out = relu_over_length(query, key, value, attention_mask, scale=scaling, enable_gqa=key.shape[1] != query.shape[1])
    return out.transpose(1, 2), None


@contextmanager
def in_place_of_softmax(model: torch.nn.Module) -> Iterator[None]:
    """Let an original model compute with relu/L, as long as the block runs."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as patches:
        for module in model.modules():
            if hasattr(module, "fused_attn"):  # timm's modules have two ways to the same result
                module.fused_attn = True
        patches.enter_context(patch("torch.nn.functional.scaled_dot_product_attention", relu_over_length))
        for module in modules:
            if hasattr(module, "eager_attention_forward"):
                patches.enter_context(patch.object(module, "eager_attention_forward", eagerly))
        if any(isinstance(module, torch.nn.MultiheadAttention) for module in model.modules()):
            # It computes its weights with this where it is asked for them, as it is by default; here without masks.
            patches.enter_context(patch("torch.nn.functional.softmax", lambda x, dim: x.relu() / x.shape[dim]))
            patches.enter_context(patch.object(torch.backends.mha, "get_fastpath_enabled", lambda: False))
        yield
