"""transformers: φ behind its attention interface, with masks that keep padding and causality, and kept in the config.

The attention function and the mask function are registered under one name: without the latter, masks would be lost.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nomax import _compat
from nomax.conversion import packing
from nomax.conversion.discovery import LOWEST, Watch
from nomax.nn import InnerAttention
from nomax.ops.problem import below

NAME = "nomax"  # of the attention implementation
DOORS = (NAME, "sdpa")  # implementations through which a model may reach φ
CONFIG_KEY = "nomax"  # of what a config says about φ
# The implementation that the config of a saved model names. transformers knows none of this name, so a plain
# AutoModel.from_pretrained raises an error that shows it, instead of running softmax.
LOADER = "nomax.from_pretrained"

# What some models hand over to change the scores or the sum over them, and why φ cannot follow.
REFUSED = {
    "s_aux": "it has attention sinks (s_aux), which enlarge the sum that softmax divides by; φ divides by no sum",
    "softcap": "it caps its scores (softcap) before the softmax, which no φ does",
    "cache": "it runs with a paged cache (continuous batching), which only transformers' own attention reads",
}

_masking: Any = None  # transformers' module of masks, once our functions are registered
watch: Watch | None = None  # while convert looks for the attention of a model


class Unconverted(RuntimeError):
    """A model has the name of our attention in its config, but no φ in its layers."""


def register() -> None:
    """Make "nomax" an attention implementation of transformers."""
    global _masking
    transformers = _compat.transformers()
    _masking = transformers.masking_utils
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, make_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend for a module of transformers, from query [B, H, Lq, D] to [B, Lq, H, D]."""
    if watch is not None and module in watch.names and getattr(module, "inner_attention", None) is None:
        site = watch.note(module, "interface", query, attention_mask)
        site.reason = next((reason for name, reason in REFUSED.items() if more.get(name) is not None), "")
        if watch.observing and attention_mask is not None and is_causal is None and query.shape[2] > 1:
            watch.causal[module] = not _sees_later(attention_mask)
    elif reasons := [reason for name, reason in REFUSED.items() if more.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} cannot have φ attention: {reasons[0]}.")
    grouped = key.shape[1] != query.shape[1]
    inner = _inner(module)
    bounds = {"cu_seqlens_q": more.get("cu_seq_lens_q"), "cu_seqlens_k": more.get("cu_seq_lens_k")}
    if None not in bounds.values():
        # Packed sequences, as transformers' DataCollatorWithFlattening makes them: the bounds take the mask's place.
        if len(query) != 1 or position_bias is not None or more.get("sliding_window"):
            raise ValueError(
                f"{type(module).__name__} got packed sequences (cu_seq_lens_q), which converted attention takes only "
                "as one row, without a sliding window and without a position bias. Pad them instead."
            )
        causal = _is_causal(module, is_causal)
        packing.check_mask(module, attention_mask, more["cu_seq_lens_q"], causal)
        out = inner(query, key, value, None, dropout, causal, scaling, grouped, **bounds)
        return out.transpose(1, 2).contiguous(), None
    step = query.shape[2] == 1 and inner.split is None  # of a split sequence, a process may hold one position
    mask, causal, key, value = _mask(module, query, key, value, attention_mask, is_causal, position_bias, step)
    out = inner(query, key, value, mask, dropout, causal, scaling, grouped)
    weights = inner.weights(query, key, mask, causal, scaling, grouped) if more.get("output_attentions") else None
    return out.transpose(1, 2).contiguous(), weights


_SOFTMAX = InnerAttention("softmax", None)


def _inner(module: nn.Module) -> InnerAttention:
    inner = getattr(module, "inner_attention", Unconverted)
    if isinstance(inner, InnerAttention):
        return inner
    if inner is None or watch is not None:  # left as it was, on purpose; or still to be converted
        return _SOFTMAX
    raise Unconverted(
        f'{type(module).__name__} runs with attn_implementation="{NAME}", but has no φ. If it was saved after '
        "nomax.convert, load it with nomax.from_pretrained(folder); otherwise load it as usual and call "
        'nomax.convert(model, phi="relu/L").'
    )


def _is_causal(module: nn.Module, given: bool | None) -> bool:
    """Return whether a module without a mask is causal: as it says, as its masks were seen to be, or by default."""
    inner = getattr(module, "inner_attention", None)
    seen = (given, getattr(module, "is_causal", None), getattr(inner, "is_causal", None))
    observed = None if watch is None else watch.causal.get(module)
    return bool(next((causal for causal in (*seen, observed) if causal is not None), True))


def _sees_later(mask: Tensor) -> bool:
    """Return whether a mask shows a query any key that comes after it."""
    visible = mask if mask.dtype == torch.bool else mask > LOWEST
    return mask.shape[-2] == 1 or bool(visible.triu(1 + mask.shape[-1] - mask.shape[-2]).any())


def _mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    bias: Tensor | None,
    step: bool,
) -> tuple[Tensor | None, bool, Tensor, Tensor]:
    """Return the mask, whether attention is causal instead, and the keys and values that may be seen at all.

    Without a mask, transformers means "causal" wherever the module is, except in a step of one token, which sees all.
    """
    queries = query.shape[2]
    causal = not step and mask is None and _is_causal(module, is_causal)
    if causal and key.shape[2] > queries:  # the room of a static cache that is not filled yet
        key, value = key[:, :, :queries], value[:, :, :queries]
        bias = None if bias is None else bias[..., :queries]
    if bias is None:
        return mask, causal, key, value
    if causal:
        mask = below(0, queries, key.shape[2], query.device)
    if mask is None:
        mask = bias
    elif mask.dtype == torch.bool:
        mask = bias.masked_fill(~mask, -torch.inf)
    else:
        mask = bias + mask
    return mask.to(query.dtype), False, key, value


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    **more: Any,
) -> Tensor | None:
    """Make the boolean mask for a model of transformers, or None where module.is_causal says it all.

    Padding of an encoder stays [B, 1, 1, keys], which costs nothing: the kernels skip what it hides.
    """
    if watch is not None and watch.observing:
        allow_is_bidirectional_skip, more["allow_is_causal_skip"] = False, False
    mask: Tensor | None = _masking.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=_masking.causal_mask_function if mask_function is None else mask_function,
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **more,
    )
    # Where None would do as well, the model does nothing else with its mask, and a smaller one will do, too.
    if mask is not None and mask_function is _masking.bidirectional_mask_function and allow_is_bidirectional_skip:
        return mask[:, :, :1]
    return mask


def configs(model: nn.Module) -> list[Any]:
    """Return every config of a model and its parts that names an attention implementation."""
    unique: dict[int, Any] = {}

    def add(config: Any) -> None:
        if hasattr(config, "_attn_implementation_internal") and id(config) not in unique:
            unique[id(config)] = config
            for name in getattr(config, "sub_configs", {}):
                add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(unique.values())


def models(model: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers in a module that are not parts of others."""
    base = _compat.transformers().PreTrainedModel
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, base) and module not in inside:
            inside |= set(module.modules())
            yield module


def implementation(description: Mapping[str, Any]) -> str:
    """Return the attention implementation of a converted model: the door that its layers were converted by."""
    return NAME if any(layer["kind"] == "interface" for layer in description["layers"].values()) else "sdpa"
