"""The part of an attention layer between its projections: what `nomax.convert` puts in the place of softmax.

B sequences, H heads of dimension D, Hk key heads, Lq queries and Lk keys.
"""

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nomax.nn.layers import LayerNorm
from nomax.ops import length
from nomax.ops.api import attention, attention_by_head, varlen_attention
from nomax.phi import ROW_MAPS, SOFTMAX, Phi

LEARNED = ("gain", "shift", "alpha", "query_norm", "key_norm")  # what an InnerAttention may have besides φ


class SplitAttention(Protocol):
    """What takes the place of `attention` in a model whose sequences are split over processes (`nomax.parallel`)."""

    def attention(self, *inputs: Any, **settings: Any) -> Any:
        """Return what `nomax.attention` returns, for the positions of this process."""

    def lengths(self, phi: Phi, query: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Return φ's L for each query of this process, at least 1 and broadcasting to [B, H, Lq]."""

    def rotation(self, dimension: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return cosines and sines of the angles of this process's positions, as `nn.layers.angles` does."""

    def whole(self, numbers: Tensor) -> Tensor:
        """Return the numbers of each query, [..., Lq], of all processes, in the order of the sequence."""


class InnerAttention(nn.Module):
    """`nomax.attention` as a module, with what a converted layer may learn besides, for each head.

    phi: how scores become weights, e.g. "relu/L" or "softmax" (see `nomax.Phi`).
    num_heads: the number of query heads; None where nothing per head is learned.
    head_dim: the dimension of a head, which qk_norm needs.
    qk_norm: LayerNorm of each query and key over the head dimension, with one learned scale for all heads.
    gain, shift: learn a factor of each head's output, and a number added to its scores before h (float32, [num_heads]).

    `learn` gives these parameters values, and α, a power of L of each head's own. Without any of them it has no
    parameters, so a converted model keeps the keys of its state_dict.
    """

    gain: nn.Parameter | None
    shift: nn.Parameter | None
    alpha: nn.Parameter | None

    def __init__(
        self,
        phi: str | Phi,
        num_heads: int | None,
        *,
        head_dim: int | None = None,
        qk_norm: bool | None = None,
        gain: bool = False,
        shift: bool = False,
    ) -> None:
        super().__init__()
        if num_heads is not None and num_heads < 1:
            raise ValueError(f"num_heads={num_heads!r} must be at least 1, or None if it is not known.")
        self.phi, self.num_heads, self.head_dim = Phi.parse(phi), num_heads, head_dim
        # How to attend where the sequence is split over processes: set by nomax.parallel.parallelize.
        self.split: SplitAttention | None = None
        # Whether it is causal where no mask is given, in a module of transformers that does not say so itself.
        self.is_causal: bool | None = None
        if qk_norm and head_dim is None:
            raise ValueError("qk_norm=True needs head_dim, the dimension that it normalises over.")
        self.query_norm = LayerNorm(head_dim, bias=False) if qk_norm and head_dim is not None else None
        self.key_norm = LayerNorm(head_dim, bias=False) if qk_norm and head_dim is not None else None
        self.register_parameter("gain", None)
        self.register_parameter("shift", None)
        self.register_parameter("alpha", None)
        heads = num_heads or 0
        self.learn(torch.ones(heads) if gain else None, torch.zeros(heads) if shift else None)

    def learn(self, gain: Tensor | None, shift: Tensor | None, alpha: Tensor | None = None) -> None:
        """Register a learned gain, shift and α, a power of L in the place of φ's, with these values, [num_heads] each.

        None leaves one as it is.
        """
        for name, value in (("shift", shift), ("alpha", alpha)):
            if value is not None and self.phi.activation in ROW_MAPS:
                raise ValueError(f'phi="{self.phi}" normalises each row, so it takes no {name}: pass {name}=None.')
        for name, value in (("gain", gain), ("shift", shift), ("alpha", alpha)):
            if value is None:
                continue
            if self.num_heads is None or value.shape != (self.num_heads,):
                raise ValueError(f"{name} must be [num_heads] = [{self.num_heads}], got {list(value.shape)}.")
            self.register_parameter(name, nn.Parameter(value.detach().float().clone()))

    def become_softmax(self) -> None:
        """Compute what the layer did before its conversion, without what it learned besides."""
        self.phi = Phi(SOFTMAX)
        for name in LEARNED:
            setattr(self, name, None)

    def fold_gain(self, projection: nn.Module, dim: int = 1) -> None:
        """Move the gain into the weight of the linear layer that follows the joined heads, and drop it here.

        dim: the weight's dimension over the joined heads: 1 in nn.Linear, 0 in the Conv1D of GPT-2.
        """
        if self.gain is None or self.num_heads is None:
            return
        weight = projection.get_parameter("weight")
        if weight.shape[dim] % self.num_heads:
            raise ValueError(
                f"dimension {dim} of the weight {list(weight.shape)} is not a multiple of num_heads={self.num_heads}, "
                "so this layer does not follow the joined heads."
            )
        columns = self.gain.detach().repeat_interleave(weight.shape[dim] // self.num_heads)
        with torch.no_grad():
            weight.copy_(weight * (columns if dim == 1 else columns.unsqueeze(1)))
        self.gain = None

    def extra_repr(self) -> str:
        return f"phi={str(self.phi)!r}, num_heads={self.num_heads}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """Attend from query [B, H, Lq, D] to key and value [B, Hk, Lk, D]; the arguments are nomax.attention's.

        cu_seqlens_q, cu_seqlens_k: the bounds of packed sequences, if B is 1, as in nomax.varlen_attention; then
            without attn_mask.
        """
        query, key = self._normed(query, key)
        if self.split is None and self._inside(query):
            return attention_by_head(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, phi=self.phi,
                learned=length.PerHead(self.gain, self.shift, self.alpha),
                cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            )  # fmt: skip
        query, key, scale = self._shifted(query, key, scale)
        if cu_seqlens_q is None or cu_seqlens_k is None:
            operation = attention if self.split is None else self.split.attention
            out = operation(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, phi=self.phi)
            return self._scaled(out, query, key, attn_mask, is_causal, enable_gqa)
        if self.split is not None:
            raise ValueError("packed sequences (cu_seqlens_q) cannot be split over processes: pad them instead.")
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out = varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, is_causal, scale, enable_gqa, phi=self.phi
        )
        bounds = cu_seqlens_q, cu_seqlens_k
        return self._scaled(out.transpose(0, 1).unsqueeze(0), query, key, None, is_causal, enable_gqa, bounds)

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention weights [B, H, Lq, Lk], for inspection, by attending to unit vectors."""
        if self.split is not None:
            raise ValueError(
                "attention weights (output_attentions=True) are not there where the sequence is split over processes: "
                "inspect a copy of the model that is not split."
            )
        query, key, scale = self._shifted(*self._normed(query, key), scale)
        keys = key.shape[2]
        unit = torch.eye(keys, dtype=query.dtype, device=query.device).expand(*key.shape[:2], keys, keys)
        weights = attention(query, key, unit, attn_mask, 0.0, is_causal, scale, enable_gqa, phi=self.phi)
        return self._scaled(weights, query, key, attn_mask, is_causal, enable_gqa)

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query), self.key_norm(key)

    def _inside(self, query: Tensor) -> bool:
        """Return whether the kernel can apply gain and shift itself: it gives them no gradients."""
        return (
            not (self.gain is None and self.shift is None and self.alpha is None)
            and not torch.is_grad_enabled()
            and self.phi.activation not in (*ROW_MAPS, "identity")  # whose short cut has one factor for all heads
            and query.dim() == 4
            and not torch.compiler.is_compiling()
        )

    def _shifted(self, query: Tensor, key: Tensor, scale: float | None) -> tuple[Tensor, Tensor, float | None]:
        return (query, key, scale) if self.shift is None else with_shift(query, key, self.shift, scale)

    def lengths(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
        bounds: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return φ's L for each query, at least 1 and broadcasting to [B, H, Lq]; bounds: of packed sequences."""
        if bounds is not None:
            return length.per_packed_query(self.phi, *bounds, query.shape[2], is_causal)
        if self.split is not None:
            return self.split.lengths(self.phi, query, mask, is_causal)
        return length.per_query(self.phi, query, key, mask, is_causal, enable_gqa)

    def _scaled(self, out: Tensor, *call: Any) -> Tensor:
        """Multiply each head by its gain, and by the quotient of its own power of L and φ's."""
        factor = None if self.gain is None else self.gain.unsqueeze(-1)
        if self.alpha is not None:
            power = self.lengths(*call) ** (self.phi.alpha - self.alpha.unsqueeze(-1))
            factor = power if factor is None else power * factor
        return out if factor is None else (out * factor.unsqueeze(-1)).to(out.dtype)


def with_shift(query: Tensor, key: Tensor, shift: Tensor, scale: float | None) -> tuple[Tensor, Tensor, float]:
    """Return queries and keys whose scores are larger by `shift`, [H] or [1], and the scale to use with them.

    The shift is one more dimension: shift / scale in every query, 1 in every key. So it works with every mask, has a
    gradient, and is a third faster to train than a bias.
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    more = (shift / scale).to(query.dtype).view(-1, 1, 1).expand(*query.shape[:-1], 1)
    return torch.cat([query, more], -1), torch.cat([key, key.new_ones(1).expand(*key.shape[:-1], 1)], -1), scale
