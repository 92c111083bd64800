"""`attention` and `varlen_attention`: φ, L and dropout are settled here, once, for every backend."""

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from nomax.ops import backends, cpu, row_maps
from nomax.ops.arguments import are_nested, canonical, canonical_packed, packed
from nomax.ops.length import PerHead, visible_keys
from nomax.ops.problem import Rows
from nomax.phi import SOFTMAX, Phi

__all__ = ["attention", "varlen_attention", "visible_keys"]


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
    backends.check(phi, backend, return_rows)
    problem, leading = canonical(
        query, key, value, attn_mask, is_causal, enable_gqa,
        activation=phi.activation, scale=scale, dropout=dropout_p, rows=return_rows,
    )  # fmt: skip
    if phi.activation == SOFTMAX and not row_maps.trains_in_float32(problem):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        rows = row_maps.rows(problem) if return_rows else None
    else:
        out, rows = backends.run(phi, problem, backend)
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
    backends.check(phi, backend, return_rows)
    problem = canonical_packed(
        query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal=is_causal, enable_gqa=enable_gqa,
        activation=phi.activation, scale=scale, dropout=dropout_p, rows=return_rows,
    )  # fmt: skip
    out, rows = backends.run(phi, problem, backend)
    out = out[0].transpose(0, 1)
    return out if rows is None else (out, Rows(*(row[0].transpose(0, 1) for row in rows)))


def attention_by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: Phi,
    learned: PerHead,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Attend with numbers of each head's own inside the kernel: for inference, as they get no gradients.

    query, key, value: [B, H, L, D]; with bounds of packed sequences, B is 1.
    """
    settings = {"activation": phi.activation, "scale": scale, "dropout": dropout_p, "rows": False}
    if cu_seqlens_q is None or cu_seqlens_k is None:
        problem, _ = canonical(query, key, value, attn_mask, is_causal, enable_gqa, **settings)  # type: ignore[arg-type]
    else:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        problem = canonical_packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal=is_causal, enable_gqa=enable_gqa, **settings  # type: ignore[arg-type]
        )  # fmt: skip
    return backends.run(phi, problem, None, learned)[0]


def _jagged(x: Tensor, offsets: Tensor, rank: int) -> Tensor:
    """Turn [all positions, heads, ...] into jagged [batch, heads, positions, ...], without heads for a rank of 3."""
    nested = torch.nested.nested_tensor_from_jagged(x, offsets)
    return nested.transpose(1, 2) if rank == 4 else nested.squeeze(2)
