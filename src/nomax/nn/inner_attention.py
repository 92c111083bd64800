"""The part of an attention layer between its projections: what `nomax.convert` puts in the place of softmax.

B sequences, H heads of dimension D, Hk key heads, Lq queries and Lk keys.
"""

import math

import torch
from torch import Tensor, nn

from nomax.nn.layers import LayerNorm
from nomax.ops.api import attention, attention_by_head, varlen_attention
from nomax.phi import ROW_MAPS, Phi


class InnerAttention(nn.Module):
    """`nomax.attention` as a module, with what a converted layer may learn besides: a gain and a shift per head.

    phi: how scores become weights, e.g. "relu/L" or "softmax" (see `nomax.Phi`).
    num_heads: the number of query heads; None where nothing per head is learned.
    head_dim: the dimension of a head, which qk_norm needs.
    qk_norm: LayerNorm of each query and key over the head dimension, with one learned scale for all heads.
    gain, shift: learn a factor of each head's output, and a number added to its scores before h (float32, [num_heads]).

    Without qk_norm, gain and shift it has no parameters, so a converted model keeps the keys of its state_dict.
    """

    gain: nn.Parameter | None
    shift: nn.Parameter | None

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
        if qk_norm and head_dim is None:
            raise ValueError("qk_norm=True needs head_dim, the dimension that it normalises over.")
        self.query_norm = LayerNorm(head_dim, bias=False) if qk_norm and head_dim is not None else None
        self.key_norm = LayerNorm(head_dim, bias=False) if qk_norm and head_dim is not None else None
        self.register_parameter("gain", None)
        self.register_parameter("shift", None)
        heads = num_heads or 0
        self.add_gain_and_shift(torch.ones(heads) if gain else None, torch.zeros(heads) if shift else None)

    def add_gain_and_shift(self, gain: Tensor | None, shift: Tensor | None) -> None:
        """Register a learned gain and shift with these values, [num_heads] each; None leaves one as it is."""
        if shift is not None and self.phi.activation in ROW_MAPS:
            raise ValueError(f'a shift does not change phi="{self.phi}", which normalises each row: pass shift=None.')
        for name, value in (("gain", gain), ("shift", shift)):
            if value is None:
                continue
            if self.num_heads is None or value.shape != (self.num_heads,):
                raise ValueError(f"{name} must be [num_heads] = [{self.num_heads}], got {list(value.shape)}.")
            self.register_parameter(name, nn.Parameter(value.detach().float().clone()))

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
        if self._inside(query):
            return attention_by_head(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, phi=self.phi,
                gain=self.gain, shift=self.shift, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            )  # fmt: skip
        query, key, scale = self._shifted(query, key, scale)
        if cu_seqlens_q is None or cu_seqlens_k is None:
            out = attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, phi=self.phi)
            return self._gained(out)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out = varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, is_causal, scale, enable_gqa, phi=self.phi
        )
        return self._gained(out.transpose(0, 1).unsqueeze(0))

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
        query, key, scale = self._shifted(*self._normed(query, key), scale)
        keys = key.shape[2]
        unit = torch.eye(keys, dtype=query.dtype, device=query.device).expand(*key.shape[:2], keys, keys)
        return self._gained(attention(query, key, unit, attn_mask, 0.0, is_causal, scale, enable_gqa, phi=self.phi))

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query), self.key_norm(key)

    def _inside(self, query: Tensor) -> bool:
        """Return whether the kernel can apply gain and shift itself: it gives them no gradients."""
        return (
            not (self.gain is None and self.shift is None)
            and not torch.is_grad_enabled()
            and self.phi.activation not in (*ROW_MAPS, "identity")  # whose short cut has one factor for all heads
            and query.dim() == 4
            and not torch.compiler.is_compiling()
        )

    def _shifted(self, query: Tensor, key: Tensor, scale: float | None) -> tuple[Tensor, Tensor, float | None]:
        return (query, key, scale) if self.shift is None else with_shift(query, key, self.shift, scale)

    def _gained(self, out: Tensor) -> Tensor:
        return out if self.gain is None else (out * self.gain.view(-1, 1, 1)).to(out.dtype)


def with_shift(query: Tensor, key: Tensor, shift: Tensor, scale: float | None) -> tuple[Tensor, Tensor, float]:
    """Return queries and keys whose scores are larger by `shift`, [H] or [1], and the scale to use with them.

    The shift is one more dimension: shift / scale in every query, 1 in every key. So it works with every mask, has a
    gradient, and is a third faster to train than a bias.
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    more = (shift / scale).to(query.dtype).view(-1, 1, 1).expand(*query.shape[:-1], 1)
    return torch.cat([query, more], -1), torch.cat([key, key.new_ones(1).expand(*key.shape[:-1], 1)], -1), scale
