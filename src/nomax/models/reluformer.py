"""ReLUFormer (Shen et al. 2023): a transformer for text with ReLU in all attention and memories as feed-forward layers.

    source → embedding → encoder: (attention, memory) × layers ─┐
    target → embedding → decoder: (causal attention, attention to the source, memory) × layers → logits

B sequences, S source and T target tokens, all of them `dim` wide. Padding is on the right and is read off the ids: no
token attends to it, and it is not counted in L. Without an encoder the decoder is a language model.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax.models.pretrained import Pretrained
from nomax.models.reluformer_config import ReLUFormerConfig
from nomax.nn import Attention, KeyValueCache, Memory, Penalties, penalties
from nomax.nn.linear import linear
from nomax.phi import Phi


@dataclass(frozen=True)
class Encoded:
    """What the decoder reads of the source: its states [B, S, dim], and [B, 1, 1, S] where there is a token."""

    states: Tensor
    mask: Tensor

    def select(self, sequences: Tensor) -> "Encoded":
        """What belongs to these sequences."""
        return Encoded(self.states[sequences], self.mask[sequences])


class Caches:
    """The keys and values of what was decoded so far, and those of the source, which are computed once."""

    def __init__(self, layers: int) -> None:
        self.own = [KeyValueCache() for _ in range(layers)]
        self.source = [KeyValueCache() for _ in range(layers)]
        self.position = 0  # of the next token

    def reorder(self, sequences: Tensor, source: bool = True) -> None:
        """Let sequence i continue what was sequence sequences[i], with its source unless that is the same."""
        for cache in (*self.own, *(self.source if source else ())):
            cache.reorder(sequences)

    def prune(self, kept: Tensor) -> None:
        """Keep of what was decoded only the tokens whose places are in kept [B, fewer], in its order."""
        for cache in self.own:
            cache.keep(kept)


@dataclass(frozen=True)
class View:
    """What an attention reads: a context or x itself, as far as mask and causality let it, and its cache."""

    context: Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    cache: KeyValueCache | None = None
    # For penalties: how many keys each query sees, broadcasting to [B, heads, queries], and 0 for one that is padding:
    # such a row is in none of them.
    visible: Tensor | None = None


class Tally:
    """Calls attention, and keeps the penalties of its rows if anybody asked for them."""

    def __init__(self, wanted: bool | Literal["sequences"], margin: float = 0.7) -> None:
        self.found: list[Penalties] | None = [] if wanted else None
        self.margin, self.by_sequence = margin, wanted == "sequences"

    def __call__(self, attention: Attention, x: Tensor, view: View) -> Tensor:
        how: Any = {"attn_mask": view.mask, "is_causal": view.is_causal, "cache": view.cache}
        if self.found is None or view.visible is None:
            plain: Tensor = attention(x, view.context, **how)
            return plain
        out, rows = attention(x, view.context, return_rows=True, **how)
        self.found.append(penalties(rows, view.visible, self.margin, by_sequence=self.by_sequence))
        return out

    def mean(self) -> Penalties:
        """Each attention counts alike, however many rows it has."""
        normalisation, entropy = zip(*self.found or (), strict=True)
        return Penalties(torch.stack(normalisation).mean(0), torch.stack(entropy).mean(0))


class Layer(nn.Module):
    """Attention, in a decoder of translations attention to the source, then the memory, each added to what it reads."""

    def __init__(self, config: ReLUFormerConfig, *, reads_source: bool) -> None:
        super().__init__()
        dim, phi = config.dim, Phi.parse(config.phi)
        phi = replace(phi, gain=phi.gain / config.gamma) if config.gamma != 1 else phi
        settings: Any = {"phi": phi, "learned_gain": config.learned_gain, "joined_norm": config.joined_norm}
        self.attention_norm = nn.LayerNorm(dim, eps=1e-6)
        self.attention = Attention(dim, config.heads, rotary=config.positions == "rotary", **settings)
        self.source_norm = nn.LayerNorm(dim, eps=1e-6) if reads_source else None
        self.source_attention = Attention(dim, config.heads, context_dim=dim, **settings) if reads_source else None
        self.memory_norm = nn.LayerNorm(dim, eps=1e-6)
        self.memory = Memory(dim, config.slots, phi=config.memory_phi, norm=config.memory_norm)
        self.dropout = nn.Dropout(config.dropout)
        self.post = config.norm == "post"

    def forward(self, x: Tensor, tally: Tally, own: View, source: View | None = None) -> Tensor:
        x = self._add(x, self.attention_norm, lambda y: tally(self.attention, y, own))
        if self.source_attention is not None and self.source_norm is not None and source is not None:
            attention = self.source_attention
            x = self._add(x, self.source_norm, lambda y: tally(attention, y, source))
        return self._add(x, self.memory_norm, self.memory)

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.post:
            out: Tensor = norm(x + self.dropout(part(x)))
            return out
        return x + self.dropout(part(norm(x)))


class ReLUFormer(Pretrained):
    """A transformer for text: ReLUFormer(vocabulary=8000, dim=256), with the fields of ReLUFormerConfig as arguments.

    Tokens are [B, length] integers. A target begins with the token `begin`, and what follows is what logits predict.
    """

    sinusoids: Tensor | None

    def __init__(self, vocabulary: int, **settings: Any) -> None:
        super().__init__()
        self.config = config = ReLUFormerConfig(vocabulary, **settings)
        translates = config.encoder_layers > 0
        # One matrix embeds source and target and makes the logits. With this deviation both start with variance 1:
        # embedded tokens, which are scaled by √dim, and the products of it with states that LayerNorm has left.
        self.embedding = nn.Embedding(vocabulary, config.dim)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(config.dim))
        sinusoids = sines(config.max_length, config.dim) if config.positions == "sinusoidal" else None
        self.register_buffer("sinusoids", sinusoids, persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(Layer(config, reads_source=False) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(Layer(config, reads_source=translates) for _ in range(config.decoder_layers))
        pre = config.norm == "pre"  # the sum of all parts has had no norm yet
        self.encoder_norm = nn.LayerNorm(config.dim, eps=1e-6) if pre and translates else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.dim, eps=1e-6) if pre else nn.Identity()

    @classmethod
    def from_config(cls, config: ReLUFormerConfig) -> "ReLUFormer":
        """The model that a config describes, with new weights."""
        return cls(**asdict(config))

    def forward(
        self,
        source: Tensor,
        target: Tensor | None = None,
        *,
        penalties: bool | Literal["sequences"] = False,
        margin: float = 0.7,
    ) -> Tensor | tuple[Tensor, Penalties]:
        """Logits [B, T, vocabulary] of the token after each of target; a language model takes its text alone.

        penalties: return also the two of ReLUFormer, averaged over tokens, heads and layers; with "sequences" [B] each,
            of every sequence by itself, which do not depend on the others in the batch.
        margin: the share of log n above which the entropy of a row over n keys is penalised.
        """
        tally = Tally(penalties, margin)
        if self.encoder:
            if target is None:
                raise ValueError("this model translates: call it with source and target, or use search.")
            logits = self._decode(target, self._encode(source, tally), None, None, tally)
        else:
            if target is not None:
                raise ValueError("this model has no encoder (encoder_layers=0): call it with the text alone.")
            logits = self._decode(source, None, None, None, tally)
        return (logits, tally.mean()) if penalties else logits

    def encode(self, source: Tensor) -> Encoded:
        """Read the source [B, S]."""
        return self._encode(source, Tally(False))

    def decode(
        self,
        target: Tensor,
        encoded: Encoded | None = None,
        caches: Caches | None = None,
        ancestors: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, vocabulary] of the token after each of target.

        caches: target continues what they hold, and is added to it.
        ancestors: target's tokens are T alternatives for one position instead of a sequence, as in beam search; True in
          [B, T, tokens in the caches with these] where a token belongs to an alternative's past, or is the alternative.
        """
        if (encoded is None) == bool(self.encoder):
            raise ValueError("encoded must be what model.encode returns, and None for a model with encoder_layers=0.")
        return self._decode(target, encoded, caches, ancestors, Tally(False))

    def caches(self) -> Caches:
        """Empty caches, to decode token by token."""
        return Caches(self.config.decoder_layers)

    def _encode(self, source: Tensor, tally: Tally) -> Encoded:
        x = self._embed(source, 0, "source")
        tokens = source != self.config.padding
        mask = tokens[:, None, None]
        view = View(mask=mask, visible=mask.sum(-1) * tokens[:, None])
        for layer in self.encoder:
            x = layer(x, tally, view)
        return Encoded(self.encoder_norm(x), mask)

    def _decode(
        self, target: Tensor, encoded: Encoded | None, caches: Caches | None, ancestors: Tensor | None, tally: Tally
    ) -> Tensor:
        start = 0 if caches is None else caches.position
        end = start + (target.shape[1] if ancestors is None else 1)
        x = self._embed(target, start, "target", end)
        # Padding is on the right, so causality alone keeps tokens from seeing it.
        own = View(is_causal=True) if ancestors is None else View(mask=ancestors[:, None])
        tokens = (target != self.config.padding)[:, None]
        if caches is None:
            own = replace(own, visible=torch.arange(1, end + 1, device=target.device) * tokens)
        source = None
        if encoded is not None:
            source = View(encoded.states, encoded.mask, visible=encoded.mask.sum(-1) * tokens)
        for i, layer in enumerate(self.decoder):
            if caches is not None:
                own = replace(own, cache=caches.own[i])
                source = source and replace(source, cache=caches.source[i])
            x = layer(x, tally, own, source)
        if caches is not None:
            caches.position = end
        return linear(self.decoder_norm(x), self.embedding.weight)

    def _embed(self, tokens: Tensor, start: int, name: str, end: int | None = None) -> Tensor:
        if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be [batch, length] token ids, got {tokens.dtype} {list(tokens.shape)}.")
        end = tokens.shape[1] if end is None else end
        if end > self.config.max_length:
            raise ValueError(
                f"{name} has {end:,} tokens, but the model's max_length is {self.config.max_length:,}. Split the text, "
                "or train a model with a larger max_length."
            )
        x = F.embedding(tokens, self.embedding.weight) * math.sqrt(self.config.dim)
        if self.sinusoids is not None:
            x = x + self.sinusoids[start:end]
        return self.dropout(x)


def sines(length: int, dim: int) -> Tensor:
    """Fixed positions [length, dim]: sines, then cosines, at dim/2 wavelengths from 2π to almost 10,000 · 2π."""
    omega = 10_000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * omega
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()
