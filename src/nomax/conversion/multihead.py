"""nn.MultiheadAttention with φ, by another class for its instances; and PyTorch's shortcuts that would go around it.

B sequences, H heads of dimension D, L queries and S keys.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax.conversion.swapped import subclass
from nomax.ops.problem import hidden


def unsupported(module: nn.MultiheadAttention) -> str:
    """Return why a module cannot be converted, or nothing."""
    if module.bias_k is not None or module.bias_v is not None:
        return "add_bias_kv=True gives every query one more key, which φ's L would count"
    if module.add_zero_attn:
        return "add_zero_attn=True gives softmax a key of zeros to rest on, which φ does not need"
    if type(module).forward is not nn.MultiheadAttention.forward:
        return f"{type(module).__name__} has a forward pass of its own"
    return ""


@cache
def converted_class(original: type[nn.MultiheadAttention]) -> type[nn.Module]:
    """Return a subclass whose forward pass has φ in the place of softmax."""
    return subclass(original, "multihead", _forward, converted_class)


def _forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend as nn.MultiheadAttention does, with its arguments; weights are φ's, before dropout."""
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal=True is a hint about attn_mask, so give that too, as nn.MultiheadAttention asks.")
    if query.is_nested and (query.layout != torch.jagged or need_weights):
        raise ValueError(
            "converted attention takes nested tensors of the jagged layout, with need_weights=False: make them with "
            "torch.nested.nested_tensor(…, layout=torch.jagged), or pad them."
        )
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not self.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in _project(self, query, key, value))

    if is_causal and key_padding_mask is None:
        mask: Tensor | None = None  # what the hint says is quicker to compute
    else:
        mask, is_causal = _mask(attn_mask, key_padding_mask, self.num_heads, q.dtype), False
    heads = self.inner_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal)
    out = self.out_proj(heads.transpose(1, 2).flatten(2))

    weights: Tensor | None = None
    if need_weights:
        weights = self.inner_attention.weights(q, k, mask, is_causal)
        weights = weights.mean(1) if average_attn_weights else weights
    if not batched:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return out if self.batch_first else out.transpose(0, 1), weights


def _project(self: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    if not self._qkv_same_embed_dim:
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    elif query is key and key is value:
        return list(F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1))
    else:
        weights = self.in_proj_weight.chunk(3)
    inputs = (query, key, value)
    return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]


def _mask(mask: Tensor | None, padding: Tensor | None, num_heads: int, dtype: torch.dtype) -> Tensor | None:
    """Join attn_mask [L, S] or [B·H, L, S] and key_padding_mask [B, S], in both of which True hides a key."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if padding is not None:
        padding = padding[:, None, None, :]
    masks = [x for x in (mask, padding) if x is not None]
    if not masks:
        return None
    if wrong := [x.dtype for x in masks if x.dtype != torch.bool and not x.is_floating_point()]:
        raise TypeError(f"attn_mask and key_padding_mask must be boolean or floating point, got {wrong[0]}.")
    if all(x.dtype == torch.bool for x in masks):
        seen = ~masks[0]
        for x in masks[1:]:
            seen = seen & ~x
        return seen
    # A mask that hides and one that adds: the sum of what they add, with -inf wherever one of them hides.
    hides = [x if x.dtype == torch.bool else hidden(x) for x in masks]
    added = [x.to(dtype).masked_fill(gone, 0) for x, gone in zip(masks, hides, strict=True) if x.dtype != torch.bool]
    gone = hides[0] if len(hides) == 1 else hides[0] | hides[1]
    return (added[0] if len(added) == 1 else added[0] + added[1]).masked_fill(gone, -torch.inf)


# Attributes by which PyTorch's encoders decide to compute a whole layer, with its softmax, in one operator.
_SHORTCUTS: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def shortcuts(model: nn.Module) -> list[tuple[nn.Module, str, object]]:
    """Return the modules whose shortcut would go around converted attention, with the setting that closes it."""
    return [
        (module, *setting)
        for module in model.modules()
        for kind, setting in _SHORTCUTS.items()
        if isinstance(module, kind)
        and any(getattr(type(part), "converted_kind", "") == "multihead" for part in module.modules())
    ]
