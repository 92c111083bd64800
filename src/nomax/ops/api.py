"""`attention` and `varlen_attention`: φ, L and dropout are settled here, once, for every backend."""

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from nomax.ops import backends, cpu, softmax, visible
from nomax.ops.inputs import (
    are_nested,
    canonical,
    canonical_mask,
    check_numbers,
    check_offsets,
    check_tensors,
    packed,
)
from nomax.ops.rows import Rows
from nomax.phi import SOFTMAX, Phi


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    backend: str | None = None,
    return_rows: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    backend: str | None = None,
    return_rows: Literal[True],
) -> tuple[Tensor, Rows]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    backend: str | None = None,
    return_rows: bool = False,
) -> Tensor | tuple[Tensor, Rows]:
    """Attend without softmax: out_i = c_i · Σ_j h(q_i·k_j·scale + bias_ij + shift)·v_j over the keys j that i may see.

    The arguments and their meaning are those of `torch.nn.functional.scaled_dot_product_attention`. `phi` says how
    scores become weights: "relu/L", "sigmoid(x-log L)", ... (see `nomax.Phi`), "softmax", PyTorch's own operation, or
    "sparsemax" and "entmax15", which need the entmax package.

    attn_mask: boolean (True = may look) or float (added to the scores; -inf or the dtype's minimum = may not look).
    backend: None chooses what serves these inputs (`nomax.explain` tells which); "cpu" or "reference" insists.
    return_rows: return also each query's sum and entropy of weights, if the activation is never negative.

    A query that sees no key gets exactly zero, with zero gradients. Jagged nested tensors give what `varlen_attention`
    gives for their sequences, jagged like the query.
    """
    if attn_mask is None and scale is None and backend in (None, "cpu") and not (dropout_p or is_causal or return_rows):
        plain = cpu.attend_plainly(query, key, value, phi)
        if plain is not None:
            return plain
    if are_nested(query, key, value):
        (q, bounds), (k, key_bounds), (v, _) = packed(query, key, value, attn_mask)
        result = varlen_attention(
            q, k, v, bounds, key_bounds, dropout_p, is_causal, scale, enable_gqa,
            phi=phi, backend=backend, return_rows=return_rows,  # type: ignore[call-overload]
        )  # fmt: skip
        if not return_rows:
            return _jagged(result, bounds, query.dim())
        return _jagged(result[0], bounds, query.dim()), Rows(*(_jagged(x, bounds, query.dim()) for x in result[1]))

    phi = Phi.parse(phi)
    check_numbers(dropout_p, scale)
    backends.check(phi, backend, return_rows)
    q, k, v, leading = canonical(query, key, value, enable_gqa)
    mask, diagonal = canonical_mask(attn_mask, is_causal, q, k, leading)

    if phi.activation == SOFTMAX:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        rows = softmax.rows(softmax.weights(SOFTMAX, q, k, mask, diagonal, scale)) if return_rows else None
    else:
        out, rows = backends.run(backend, q, k, v, mask, diagonal, None, None, phi, dropout_p, scale, return_rows)
        if leading is not None:
            out = out.reshape(*leading, *out.shape[-2:])
    if rows is not None and leading is not None:
        rows = Rows(*(row.reshape(*leading, row.shape[-1]) for row in rows))
    return out if rows is None else (out, rows)


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    backend: str | None = None,
    return_rows: Literal[False] = False,
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    backend: str | None = None,
    return_rows: Literal[True],
) -> tuple[Tensor, Rows]: ...
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    backend: str | None = None,
    return_rows: bool = False,
) -> Tensor | tuple[Tensor, Rows]:
    """Attend within packed sequences: the same as `attention` on each sequence alone, in one call and without padding.

    query, key, value: [positions of all sequences, heads, head dimension], one sequence after the other.
    cu_seqlens_q, cu_seqlens_k: where the sequences begin and end, e.g. [0, 5, 12] for two of lengths 5 and 7.
    is_causal: query i of a sequence sees its keys 0 to i (top-left, as in `attention`, if the lengths differ).

    The result is [positions, heads, head dimension of value]; rows are [positions, heads].
    """
    phi = Phi.parse(phi)
    check_numbers(dropout_p, scale)
    backends.check(phi, backend, return_rows)
    check_tensors(query, key, value, rank=3)
    check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], "query")
    check_offsets("cu_seqlens_k", cu_seqlens_k, key.shape[0], "key")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must describe the same number of sequences, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}."
        )
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    q, k, v, _ = canonical(q, k, v, enable_gqa)
    diagonal = 0 if is_causal else None
    out, rows = backends.run(
        backend, q, k, v, None, diagonal, cu_seqlens_q, cu_seqlens_k, phi, dropout_p, scale, return_rows
    )
    out = out[0].transpose(0, 1)
    return out if rows is None else (out, Rows(*(row[0].transpose(0, 1) for row in rows)))


def _jagged(x: Tensor, offsets: Tensor, rank: int) -> Tensor:
    """[all positions, heads, ...] as a jagged [batch, heads, positions, ...], or without heads for a rank of 3."""
    nested = torch.nested.nested_tensor_from_jagged(x, offsets)
    return nested.transpose(1, 2) if rank == 4 else nested.squeeze(2)


def visible_keys(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Count the keys that each query may see: the L of "relu/L", for a model that learns its own power or gain of it.

    The counts are int64 and broadcast to the result's [..., heads, queries]; a mask that is the same for all heads or
    queries gives counts of size 1 there. To scale every row by a learned power of L, with h alone as φ:

        out = attention(q, k, v, mask, phi="relu") * visible_keys(q, k, mask).clamp(min=1).unsqueeze(-1) ** -alpha
    """
    q, k, _, leading = canonical(query, key, key, enable_gqa)
    mask, diagonal = canonical_mask(attn_mask, is_causal, q, k, leading)
    n = visible.count(q, k, mask, diagonal)
    leading = (*q.shape[:2],) if leading is None else leading
    if not isinstance(n, Tensor):
        return torch.full((1,) * (len(leading) + 1), n, device=q.device)
    batch = leading[:-1] if n.shape[0] != 1 else (1,) * len(leading[:-1])
    return n.long().reshape(*batch, *n.shape[1:]) if leading else n.long().reshape(n.shape[2])
