"""Multi-head attention as a module: projections, norms, gate, positions, learned gain, shift and power of L, cache.

B sequences, L positions, H heads of dimension D, dim = H·D.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax.nn.inner_attention import SplitAttention, with_shift
from nomax.nn.layers import GatedRMSNorm, LayerNorm, Linear, angles, rotate
from nomax.ops import length
from nomax.ops.api import attention
from nomax.ops.problem import Rows
from nomax.phi import ROW_MAPS, Phi

Gate = Literal["silu", "sigmoid", "identity"]
Learned = Literal["layer", "head"]

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid, "identity": lambda x: x}


class KeyValueCache:
    """Keep the keys and values of all positions so far for one Attention; each layer needs its own.

    The capacity doubles when it is full instead of being fixed in advance: the final length need not be known, each
    position is copied about once on average, and at most half of the room is empty. `capacity` is the initial one; if
    it is the final length, nothing is ever copied.
    """

    def __init__(self, capacity: int = 0) -> None:
        if capacity < 0:
            raise ValueError(f"capacity={capacity!r} must be a number of positions, at least 0.")
        self.capacity = capacity
        self.length = 0
        # [2, batch, heads, capacity, head dimension]: the positions of a head are contiguous.
        self._room: Tensor | None = None

    def __repr__(self) -> str:
        return f"KeyValueCache({self.length} positions, room for {self.capacity})"

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [batch, heads, new positions, head dimension], and return those of all positions."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError(
                "a key-value cache is for decoding and keeps no gradients. Decode under torch.no_grad() or "
                "torch.inference_mode(), or train on whole sequences, without a cache."
            )
        batch, heads, new, dimension = key.shape
        room = self._room
        if room is not None and (*room.shape[1:3], room.shape[4]) != (batch, heads, dimension):
            raise ValueError(
                f"the cache holds keys of {room.shape[1]} sequences × {room.shape[2]} heads × {room.shape[4]}, but the "
                f"new ones are of {batch} × {heads} × {dimension}. Use one cache per layer and batch, and call "
                "reorder when the batch is rearranged."
            )
        end = self.length + new
        if room is None or end > self.capacity:
            self.capacity = max(end, self.capacity if room is None else 2 * self.capacity)
            larger = key.new_empty(2, batch, heads, self.capacity, dimension)
            if room is not None:
                larger[:, :, :, : self.length] = room[:, :, :, : self.length]
            self._room = room = larger
        room[0, :, :, self.length : end] = key
        room[1, :, :, self.length : end] = value
        self.length = end
        return self.entries()

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of all positions, [batch, heads, positions, head dimension] each, as views."""
        if self._room is None:
            raise RuntimeError("the cache is empty: nothing was appended to it yet.")
        key, value = self._room[:, :, :, : self.length].unbind(0)
        return key, value

    def reorder(self, indices: Tensor) -> None:
        """Make sequence i continue the former sequence indices[i], for beam search; their number may change."""
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indices must be a one-dimensional int32 or int64 tensor, got {indices.dtype} {list(indices.shape)}."
            )
        if self._room is not None:
            self._room = self._room.index_select(1, indices)

    def keep(self, places: Tensor) -> None:
        """Keep only the positions given by places [batch, fewer], in that order; the capacity stays the same."""
        if self._room is None:
            raise RuntimeError("the cache is empty: nothing was appended to it yet.")
        two, batch, heads, capacity, dimension = self._room.shape
        if places.dim() != 2 or len(places) != batch or places.shape[1] > self.length:
            raise ValueError(f"places must be [{batch}, at most {self.length}], got {list(places.shape)}.")
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < self.length:
            raise ValueError(f"places must be from 0 to {self.length - 1}, the positions that the cache holds.")
        first = torch.arange(0, two * batch * heads * capacity, capacity, device=places.device)
        rows = first.view(two, batch, heads, 1) + places[:, None]
        self.length = places.shape[1]
        kept = self._room.view(-1, dimension).index_select(0, rows.flatten())
        self._room[:, :, :, : self.length] = kept.view(two, batch, heads, -1, dimension)


class Attention(nn.Module):
    """Self-attention, or with `context_dim` cross-attention, with weights φ(q·k/√D) computed by nomax.attention.

    phi: how scores become weights, e.g. "relu/L" or "softmax" (see `nomax.Phi`).
    qk_norm: LayerNorm of each query and key over the head dimension, with one learned scale for all heads.
    rotary: rotate queries and keys by their positions, so that scores depend on distances; for self-attention.
    joined_norm: "rela" normalises the joined heads as in ReLA (`GatedRMSNorm`).
    gate: multiply the joined heads by "silu", "sigmoid" or "identity" of another projection of the input.
    learned_gain, learned_alpha: learn φ's gain or its power of L, one for the whole "layer" or one per "head".
    learned_shift: learn a number to add to the scores before h, besides φ's own; it starts at zero.
    dropout: the share of attention weights to drop in training.
    backend: as in nomax.attention.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        phi: str | Phi = "relu/L",
        context_dim: int | None = None,
        qk_norm: bool = False,
        rotary: bool = False,
        joined_norm: Literal["rela"] | None = None,
        gate: Gate | None = None,
        bias: bool = True,
        learned_gain: Learned | None = None,
        learned_alpha: Learned | None = None,
        learned_shift: Learned | None = None,
        dropout: float = 0.0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or dim < 1 or dim % heads:
            raise ValueError(f"dim={dim} must be a positive multiple of heads={heads}.")
        if gate is not None and gate not in GATES:
            raise ValueError(f"gate={gate!r} is unknown; choose one of {', '.join(GATES)}, or None for no gate.")
        if joined_norm not in ("rela", None):
            raise ValueError(f'joined_norm={joined_norm!r} must be "rela", or None for no norm.')
        if rotary and (context_dim is not None or dim // heads % 2):
            raise ValueError(
                "rotary=True needs self-attention, whose queries and keys share their positions, and an even head "
                f"dimension; got context_dim={context_dim}, dim={dim} and heads={heads}."
            )
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout!r} must be a probability, from 0 to 1.")
        self.dim, self.heads, self.context_dim = dim, heads, context_dim
        self.phi, self.dropout, self.backend = Phi.parse(phi), dropout, backend
        self.gate_kind, self.rotary = gate, rotary
        # How to attend where the sequence is split over processes: set by nomax.parallel.parallelize.
        self.split: SplitAttention | None = None

        if context_dim is None:
            self.qkv = Linear(dim, 3 * dim, bias)
        else:
            self.q = Linear(dim, dim, bias)
            self.kv = Linear(context_dim, 2 * dim, bias)
        self.query_norm = LayerNorm(dim // heads, bias=False) if qk_norm else None
        self.key_norm = LayerNorm(dim // heads, bias=False) if qk_norm else None
        self.joined_norm = GatedRMSNorm(dim) if joined_norm is not None else None
        self.gate = Linear(dim, dim) if gate is not None else None
        self.gain = self._learned("learned_gain", learned_gain)
        self.alpha = self._learned("learned_alpha", learned_alpha)
        self.shift = self._learned("learned_shift", learned_shift)
        self.out = Linear(dim, dim, bias)
        self.reset_parameters()

    def _learned(self, name: str, per: Learned | None) -> nn.Parameter | None:
        if per is None:
            return None
        if per not in ("layer", "head"):
            raise ValueError(f'{name}={per!r} must be "layer", "head" or None.')
        if self.phi.activation in ROW_MAPS:
            raise ValueError(
                f'{name}={per!r} needs a φ with a gain, a shift and a power of L, but phi="{self.phi}" normalises each '
                'row itself. Use a pointwise φ such as "relu/L".'
            )
        return nn.Parameter(torch.empty(self.heads if per == "head" else 1))

    def reset_parameters(self) -> None:
        """Initialise each projection Xavier-uniform as a separate matrix, even where several share one; zero biases."""
        whole = [self.qkv] if self.context_dim is None else [self.q, self.kv]
        for linear in [*whole, self.out, *([] if self.gate is None else [self.gate])]:
            with torch.no_grad():
                for matrix in linear.weight.split(self.dim):
                    nn.init.xavier_uniform_(matrix)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.joined_norm is not None:
            self.joined_norm.reset_parameters()
        if self.gain is not None:
            nn.init.constant_(self.gain, self.phi.gain)
        if self.alpha is not None:
            nn.init.constant_(self.alpha, self.phi.alpha)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def fold_gain(self) -> None:
        """Move the learned gain into the projection of the values, and φ's own gain with it; the output stays."""
        if self.gain is None:
            return
        values = self.qkv if self.context_dim is None else self.kv
        rows = self.gain.detach().expand(self.heads).repeat_interleave(self.dim // self.heads)
        with torch.no_grad():
            for x in (values.weight, *([] if values.bias is None else [values.bias])):
                x[-self.dim :] *= rows if x.dim() == 1 else rows.unsqueeze(1)
        self.gain, self.phi = None, replace(self.phi, gain=1.0)

    def extra_repr(self) -> str:
        rotary = True if self.rotary else None
        settings = {"phi": str(self.phi), "rotary": rotary, "gate": self.gate_kind, "backend": self.backend}
        given = "".join(f", {name}={value!r}" for name, value in settings.items() if value is not None)
        return f"{self.dim}, heads={self.heads}{given}" + (f", dropout={self.dropout}" if self.dropout else "")

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: KeyValueCache | None = None,
        return_rows: bool = False,
    ) -> Tensor | tuple[Tensor, Rows]:
        """Attend from x [B, L, dim] to itself, or to context [B, keys, context_dim], and return [B, L, dim].

        attn_mask: as in nomax.attention, broadcast to [B, heads, L, keys]; with a cache, keys are all keys so far.
        is_causal: a position sees itself and those before it, including those in the cache.
        cache: keeps keys and values between calls. Cross-attention computes them only in the first call.
        return_rows: also return the sum and entropy of each query's weights, [B, heads, L] each (see `penalties`).
        """
        query, key, value = self._project(x, context, cache)
        if self.split is not None and cache is not None:
            raise ValueError(
                "a model whose sequences are split (nomax.parallel.parallelize) takes no cache: decode with a copy of "
                "the model that is not split."
            )
        if is_causal and cache is not None:
            attn_mask, is_causal = self._lower_right(query.shape[2], key.shape[2], attn_mask)
        dropout = self.dropout if self.training else 0.0
        heads, rows = self._attend(query, key, value, attn_mask, is_causal, dropout=dropout, return_rows=return_rows)
        joined = heads.transpose(1, 2).flatten(2)  # a view: attention's output is [B, L, H, D] in memory
        if self.joined_norm is not None:
            joined = self.joined_norm(joined)
        if self.gate is not None and self.gate_kind is not None:
            joined = joined * GATES[self.gate_kind](self.gate(x))
        out: Tensor = self.out(joined)
        return out if rows is None else (out, rows)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the attention weights [B, heads, L, keys], for inspection, by attending to unit vectors."""
        query, key, _ = self._project(x, context, None)
        keys = key.shape[2]
        unit = torch.eye(keys, dtype=query.dtype, device=query.device).expand(*key.shape[:2], keys, keys)
        return self._attend(query, key, unit, attn_mask, is_causal)[0]

    def visible(
        self, x: Tensor, context: Tensor | None = None, *, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Count the keys that each position of x may see, broadcasting to [B, heads, L], for `penalties`."""
        # Only sizes matter, so one dimension of x stands in for the queries, and one of x or context for the keys.
        query, key = (
            y.detach()[..., :1].unsqueeze(1).expand(-1, self.heads, -1, -1)
            for y in (x, x if context is None else context)
        )
        return length.visible_keys(query, key, attn_mask, is_causal)

    def _project(self, x: Tensor, context: Tensor | None, cache: KeyValueCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, H, L, D] as strided views of the projections, without copies."""
        _check("x", x, self.dim)
        shape = (self.heads, self.dim // self.heads)
        if self.context_dim is None:
            if context is not None:
                raise ValueError(
                    "context was given to self-attention. Build Attention(..., context_dim=...) for cross-attention."
                )
            query, key, value = self.qkv(x).unflatten(-1, (3, *shape)).unbind(2)
            query, key, value = _heads(query, self.query_norm), _heads(key, self.key_norm), _heads(value)
            if self.rotary:
                first = 0 if cache is None else cache.length
                rotation = (
                    angles(first, x.shape[1], shape[1], query)
                    if self.split is None
                    else self.split.rotation(shape[1], query)
                )
                query, key = rotate(query, *rotation), rotate(key, *rotation)
            return (query, key, value) if cache is None else (query, *cache.append(key, value))

        query = _heads(self.q(x).unflatten(-1, shape), self.query_norm)
        if cache is not None and cache.length:
            return (query, *cache.entries())
        if context is None:
            raise ValueError(f"cross-attention needs context, [batch, keys, {self.context_dim}].")
        _check("context", context, self.context_dim)
        key, value = self.kv(context).unflatten(-1, (2, *shape)).unbind(2)
        key, value = _heads(key, self.key_norm), _heads(value)
        return (query, key, value) if cache is None else (query, *cache.append(key, value))

    def _lower_right(self, queries: int, keys: int, mask: Tensor | None) -> tuple[Tensor | None, bool]:
        """Return the attn_mask and is_causal that make the last `queries` of `keys` positions causal."""
        if self.context_dim is not None:
            raise ValueError("is_causal=True has no meaning in cross-attention with a cache.")
        if queries in (1, keys) or mask is not None:
            return mask, queries != 1
        # Imported here because it takes a second, and only chunks after the first need it.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, keys), False

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        *,
        dropout: float = 0.0,
        return_rows: bool = False,
    ) -> tuple[Tensor, Rows | None]:
        """Run nomax.attention, and multiply its rows by the learned part of gain · L^-alpha."""
        # The learned α changes φ's own, n^(φ.alpha - alpha), so that half precision never sees a sum without its 1/L.
        phi = replace(self.phi, gain=1.0) if self.gain is not None and self.phi.gain != 1 else self.phi
        rows, backend, scale = None, self.backend, None
        operation = attention if self.split is None else self.split.attention
        if self.shift is not None:
            query, key, scale = with_shift(query, key, self.shift, scale)
        if return_rows:
            out, rows = operation(
                query, key, value, mask, dropout, is_causal, scale, phi=phi, backend=backend, return_rows=True
            )
        else:
            out = operation(query, key, value, mask, dropout, is_causal, scale, phi=phi, backend=backend)
        factor = None if self.gain is None else _per_query(self.gain)
        if self.alpha is not None:
            lengths = (
                length.per_query(self.phi, query, key, mask, is_causal)
                if self.split is None
                else self.split.lengths(self.phi, query, mask, is_causal)
            )
            power = lengths ** (self.phi.alpha - _per_query(self.alpha))
            factor = power if factor is None else power * factor
        if factor is not None:
            out = (out * factor.unsqueeze(-1)).to(out.dtype)
            rows = None if rows is None else _scaled_rows(rows, factor)
        return out, rows if rows is None or self.split is None else Rows(*map(self.split.whole, rows))


def _scaled_rows(rows: Rows, factor: Tensor) -> Rows:
    """Return the rows of weights scaled by `factor`."""
    # Negative weights have no entropy. -Σ a·log|a| stands in for it, so that a loss survives a learned gain that falls
    # below zero.
    logarithm = torch.where(factor == 0, 1, factor).abs().log()
    return Rows(factor * rows.sum, factor * (rows.entropy - logarithm * rows.sum))


def _per_query(x: Tensor) -> Tensor:
    """Make [1] or [H] broadcast to [B, H, L], in at least float32, since it multiplies whole rows."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).unsqueeze(-1)


def _heads(x: Tensor, norm: nn.Module | None = None) -> Tensor:
    """Transpose [B, L, H, D] to [B, H, L, D], normalised if there is a norm."""
    return (x if norm is None else norm(x)).transpose(1, 2)


def _check(name: str, x: Tensor, dim: int) -> None:
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f"{name} must be [batch, positions, {dim}], got {list(x.shape)}.")
