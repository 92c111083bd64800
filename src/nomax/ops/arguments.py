"""Check the arguments of `attention`, and bring them into the canonical form, a `Problem`.

The canonical form consists of views; only inputs with several broadcast leading dimensions need a copy.
"""

import math
import sys

import torch
from torch import Tensor

from nomax.ops.problem import Problem, autocasts, hidden


def canonical(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    *,
    activation: str = "relu",
    scale: float | None = None,
    dropout: float = 0.0,
    rows: bool = False,
) -> tuple[Problem, tuple[int, ...] | None]:
    """Check the arguments of `attention` and return their problem, whose gain and shift are still to be set.

    Also return what comes before [Lq, Dv] in the shape of the result, or None where that is [B, H] already.
    """
    _check_numbers(dropout, scale)
    query, key, value, leading = _canonical_tensors(query, key, value, enable_gqa)
    mask, diagonal = canonical_mask(attn_mask, is_causal, query, key, leading)
    problem = Problem(
        query=query,
        key=key,
        value=value,
        mask=mask,
        diagonal=diagonal,
        activation=activation,
        scale=_default_scale(query) if scale is None else scale,
        dropout=dropout,
        rows=rows,
    )
    return problem, leading


def canonical_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool,
    enable_gqa: bool,
    activation: str,
    scale: float | None,
    dropout: float,
    rows: bool,
) -> Problem:
    """Check the arguments of `varlen_attention` and return their problem, whose gain and shift are still to be set."""
    _check_numbers(dropout, scale)
    _check_tensors(query, key, value, rank=3)
    _check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], "query")
    _check_offsets("cu_seqlens_k", cu_seqlens_k, key.shape[0], "key")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must describe the same number of sequences, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}."
        )
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    query, key, value, _ = _canonical_tensors(query, key, value, enable_gqa)
    return Problem(
        query=query,
        key=key,
        value=value,
        diagonal=0 if is_causal else None,
        query_offsets=cu_seqlens_q,
        key_offsets=cu_seqlens_k,
        activation=activation,
        scale=_default_scale(query) if scale is None else scale,
        dropout=dropout,
        rows=rows,
    )


def are_nested(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether any of them is a nested tensor."""
    return any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value))


def packed(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Turn jagged [batch, (heads,) positions, dim] into [all positions, heads, dim] and offsets."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor) or not x.is_nested:
            kind = "a dense tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"query, key and value must all be nested tensors if one of them is; {name} is {kind}.")
        if x.layout != torch.jagged:
            raise ValueError(
                f"{name} is a nested tensor of the old layout; make it with torch.nested.nested_tensor(..., "
                "layout=torch.jagged)."
            )
    if attn_mask is not None:
        raise ValueError(
            "nested tensors take no attn_mask: each sequence sees itself alone, and is_causal=True makes that causal. "
            "For other masks, pad them with torch.nested.to_padded_tensor(x, 0.0)."
        )
    parts = []
    for name, x in named.items():
        ragged = x._ragged_idx  # type: ignore[attr-defined]
        if x.dim() not in (3, 4) or x.dim() != query.dim() or ragged != x.dim() - 2:
            shape = ", ".join("*" if d == ragged else str(size) for d, size in enumerate(x.shape))
            raise ValueError(
                f"{name} must be [batch, heads, positions, dim] or [batch, positions, dim], all three alike, with "
                f"positions as the ragged dimension; got [{shape}], where * is ragged. Where the heads come after the "
                "positions, call .transpose(1, 2)."
            )
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name} has {x.shape[0]} sequences, but query has {query.shape[0]}.")
        x = x.transpose(1, 2) if x.dim() == 4 else x.unsqueeze(2)
        x = x.contiguous()  # leaves out what is between the sequences that torch.nested.narrow takes
        parts.append((x.values(), x.offsets()))  # type: ignore[attr-defined]
    if not torch.equal(parts[1][1], parts[2][1]):
        raise ValueError("key and value must have sequences of the same lengths.")
    return parts


def _canonical_tensors(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...] | None]:
    """Check query, key and value, and bring them into canonical form.

    Also return what comes before [Lq, Dv] in the shape of the result, or None where that is [B, H] already.
    """
    if _are_usual(query, key, value):
        return query, key, value, None
    _check_tensors(query, key, value)
    device = query.device.type
    if autocasts(device) and query.dtype != torch.float64:
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    if query.dtype != key.dtype or query.dtype != value.dtype:
        raise ValueError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}. "
            "Convert them with .to(dtype), or run under torch.autocast."
        )
    batch = _batch(query, key, value)
    heads, key_heads = _heads(query, key, value, enable_gqa)
    leading = (*batch, heads) if max(query.dim(), key.dim(), value.dim()) > 2 else ()
    query, key, value = (
        _in_four(query, batch, heads),
        _in_four(key, batch, key_heads),
        _in_four(value, batch, key_heads),
    )
    return query, key, value, None if len(leading) == 2 else leading


def canonical_mask(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor, leading: tuple[int, ...] | None
) -> tuple[Tensor | None, int | None]:
    """Check the mask, and return it in canonical form, with its diagonal if it is causal (i sees j <= i + diagonal)."""
    if attn_mask is None:
        return None, 0 if is_causal else None
    if is_causal:
        raise ValueError(
            "attn_mask and is_causal=True exclude each other, as in F.scaled_dot_product_attention. "
            "Put both into one mask: attn_mask & torch.ones(queries, keys, dtype=torch.bool).tril()."
        )
    queries, keys = query.shape[2], key.shape[2]
    if _is_causal_bias(attn_mask):
        return None, _diagonal_of(attn_mask, queries, keys)
    _check_mask(attn_mask, query)
    mask = _mask_in_four(attn_mask, (*(query.shape[:2] if leading is None else leading), queries, keys))
    if mask.dtype not in (torch.bool, query.dtype) and autocasts(query.device.type):
        # Autocast converts the mask too. The minimum of one dtype need not be that of another, but -inf is -inf in all.
        mask = mask.to(query.dtype).masked_fill(hidden(mask), -torch.inf)
    return mask, None


def _are_usual(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether these are canonical already: a shortcut for the common call, whose checks would take longer."""
    if not (type(query) is type(key) is type(value) is Tensor and query.dim() == 4):
        return False
    query_shape, key_shape, dtype = query.shape, key.shape, query.dtype
    return (
        key_shape == value.shape
        and (query_shape == key_shape or (query_shape[:2] == key_shape[:2] and query_shape[3:] == key_shape[3:]))
        and (dtype is key.dtype and dtype is value.dtype and dtype.is_floating_point)
        and (query.is_cpu and key.is_cpu and value.is_cpu)
        and not torch.is_autocast_enabled("cpu")
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, rank: int | None = None) -> None:
    """Check what the three tensors have in common, whatever their layout."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got a {type(tensor).__name__}.")
        if tensor.is_nested:
            raise ValueError(
                f"{name} is a nested tensor, which only nomax.attention takes. Elsewhere give the tensor of all "
                "positions, x.transpose(1, 2).values(), and x.offsets() as cu_seqlens."
            )
        if rank is not None and tensor.dim() != rank:
            raise ValueError(
                f"{name} must have {rank} dimensions, [positions, heads, head dimension], got {_shape(tensor)}."
            )
        if tensor.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, [..., positions, head dimension], got {_shape(tensor)}."
            )
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} must have a floating-point dtype, got {tensor.dtype}. Convert it with .float().")
        if tensor.device != query.device:
            raise ValueError(
                f"query, key and value must be on one device, but query is on {query.device} and {name} on "
                f"{tensor.device}. Move it with .to({str(query.device)!r})."
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same head dimension (the last one), got {query.shape[-1]} and "
            f"{key.shape[-1]}: query {_shape(query)}, key {_shape(key)}."
        )
    positions = -2 if rank is None else 0
    if key.shape[positions] != value.shape[positions]:
        raise ValueError(
            f"key and value must have the same number of positions, got {key.shape[positions]} and "
            f"{value.shape[positions]}: key {_shape(key)}, value {_shape(value)}."
        )


def _check_numbers(dropout_p: float, scale: float | None) -> None:
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p={dropout_p!r} must be a probability, from 0 to 1.")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale!r} must be a finite number, or None for 1/sqrt(head dimension).")


def _check_mask(mask: Tensor, query: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor or None, got a {type(mask).__name__}.")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(
            f"attn_mask must be boolean (True = may look) or floating-point (added to the scores), got {mask.dtype}. "
            "Convert a mask of zeros and ones with .bool()."
        )
    if mask.device != query.device:
        raise ValueError(
            f"attn_mask is on {mask.device}, but query on {query.device}. Move it with .to({str(query.device)!r})."
        )


def _check_offsets(name: str, offsets: Tensor, total: int, tensor: str) -> None:
    """Check the cumulative lengths of packed sequences, e.g. [0, 5, 5, 12] for lengths 5, 0 and 7."""
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        got = f"{offsets.dtype} {_shape(offsets)}" if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ValueError(f"{name} must be a one-dimensional int32 or int64 tensor of cumulative lengths, got {got}.")
    # Reading the values would break a compiled graph.
    if torch.compiler.is_compiling():
        return
    bounds = offsets.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != total or bounds != sorted(bounds):
        shown = str(bounds) if len(bounds) <= 12 else f"[{str(bounds[:6])[1:-1]}, ..., {str(bounds[-3:])[1:-1]}]"
        raise ValueError(
            f"{name}={shown} must start at 0, never decrease, and end at {total}, the number of positions in {tensor}."
        )


def _is_causal_bias(mask: object) -> bool:
    # Such an object exists only if its module was imported; importing it here would load torch._dynamo, for a second.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _diagonal_of(bias: Tensor, queries: int, keys: int) -> int:
    rows, columns, variant = bias.seq_len_q, bias.seq_len_kv, bias.variant  # type: ignore[attr-defined]
    if (rows, columns) != (queries, keys):
        raise ValueError(
            f"attn_mask is a {variant.name.lower()} causal bias for {rows} queries and {columns} keys, but there are "
            f"{queries} queries and {keys} keys."
        )
    return keys - queries if variant.name == "LOWER_RIGHT" else 0


def _batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the leading dimensions before the heads, broadcast."""
    batch = query.shape[:-3]
    if batch == key.shape[:-3] == value.shape[:-3]:
        return tuple(batch)
    try:
        return tuple(torch.broadcast_shapes(batch, key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        raise ValueError(
            "the leading dimensions of query, key and value must be equal or broadcast, got "
            f"query {_shape(query)}, key {_shape(key)}, value {_shape(value)}."
        ) from None


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, int]:
    """Return the number of query heads and of key heads, after broadcasting."""
    of_query, of_key, of_value = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key, value))
    counts = f"query has {of_query} heads, key {of_key} and value {of_value}"
    if enable_gqa:
        if of_key != of_value:
            raise ValueError(f"with enable_gqa=True key and value must have the same number of heads: {counts}.")
        if of_key == 0 or of_query % of_key:
            raise ValueError(f"with enable_gqa=True query's heads must be a multiple of key's: {counts}.")
        return of_query, of_key
    distinct = {of_query, of_key, of_value} - {1}
    if len(distinct) > 1:
        divides = of_key == of_value != 0 and of_query % of_key == 0
        hint = " Pass enable_gqa=True to let groups of query heads share a key head." if divides else ""
        raise ValueError(f"the head counts (the third dimension from the right) must be equal or 1: {counts}.{hint}")
    heads = max(distinct, default=1) if 0 not in distinct else 0
    # One key head for all queries stays one: nothing is expanded.
    return heads, of_key if of_key == of_value else heads


def _in_four(tensor: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    shape = (*batch, heads, *tensor.shape[-2:])
    if tensor.shape != shape:
        tensor = tensor.expand(shape)
    return tensor if len(shape) == 4 else tensor.reshape(math.prod(batch), *shape[-3:])


def _mask_in_four(mask: Tensor, scores: tuple[int, ...]) -> Tensor:
    rank = len(scores)
    shape = (1,) * (rank - mask.dim()) + tuple(mask.shape)
    if len(shape) > rank or any(size not in (1, whole) for size, whole in zip(shape, scores, strict=True)):
        raise ValueError(
            f"attn_mask of shape {list(mask.shape)} does not broadcast to the scores' {list(scores)} "
            "([..., heads, queries, keys]); each of its dimensions must be 1 or equal, counted from the right."
        )
    if rank <= 4:
        return mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    # Several batch dimensions become one, of size 1 if the mask is the same for all.
    batch = shape[:-3] if all(size == 1 for size in shape[:-3]) else scores[:-3]
    return mask.expand(*batch, *shape[-3:]).reshape(math.prod(batch), *shape[-3:])


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _default_scale(query: Tensor) -> float:
    """Return 1 / sqrt(head dimension), which keeps the scores of independent unit normals at unit variance."""
    dimension: int = query.shape[3]
    return dimension**-0.5 if dimension else 1.0
