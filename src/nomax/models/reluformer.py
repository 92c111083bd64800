"""ReLUFormer (Shen et al. 2023): a text transformer with ReLU attention and memories as feed-forward layers.

    source → embedding → encoder: (attention, memory) × layers ─┐
    target → embedding → decoder: (causal attention, attention to the source, memory) × layers → logits

B sequences, S source and T target tokens, each `dim` wide. Padding is on the right and is recognised by its id; no
token attends to it, and it does not count in L. Without an encoder, the decoder is a language model.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax._files import check_fields
from nomax.models.hub import Pretrained
from nomax.nn import RELUFORMER, Attention, KeyValueCache, Memory, Penalties
from nomax.nn.attention import Learned
from nomax.nn.layers import Dropout, LayerNorm, linear
from nomax.nn.relu_losses import Found, Tally, View, Wanted
from nomax.phi import ACTIVATIONS, SOFTMAX, Phi

MOST_LAYERS = 1000  # of the encoder and of the decoder: the deepest transformers so far; more is a mistake

Order = Literal["pre", "post"]
Positions = Literal["sinusoidal", "rotary"]


@dataclass(frozen=True)
class ReLUFormerConfig:
    """The config of a ReLUFormer. `dataclasses.asdict` of it is plain JSON.

    These fields also give the transformers that ReLUFormer is compared with:

        softmax                  phi="softmax", learned_gain=None    (also "sparsemax" and "entmax15")
        ReLU put in directly     phi="relu", learned_gain=None
        the factor γ alone       the defaults, trained without penalties
        Wortsman et al.          phi="relu/L", learned_gain=None
        ReLA                     phi="relu", learned_gain=None, joined_norm="rela"
        softmax memory           memory_phi="softmax", and with LayerNorm on its output memory_norm=True
    """

    vocabulary: int  # tokens, the special ones included
    dim: int = 256
    heads: int = 4
    encoder_layers: int = 6  # 0: no encoder, a language model
    decoder_layers: int = 6
    slots: int = 1024  # of each feed-forward layer, which is a memory
    phi: str = RELUFORMER
    learned_gain: Learned | None = "head"  # √2/γ: one per head, one per layer, or fixed by φ and gamma
    learned_shift: Learned | None = None  # a number added to the scores before h
    gamma: float = 1.0  # divides φ's (initial) gain: with √(n/π), rows over n keys sum to 1 at initialisation
    memory_phi: str = "relu"
    memory_norm: bool = False
    joined_norm: Literal["rela"] | None = None
    norm: Order = "pre"  # LayerNorm before each part, or ("post") after the residual sum
    positions: Positions = "sinusoidal"
    dropout: float = 0.1  # of the embedded tokens and the output of each part
    max_length: int = 4096  # of the source and of the target, in tokens
    padding: int = 0  # these three are the ids of special tokens
    begin: int = 1
    end: int = 2

    def __post_init__(self) -> None:
        for name in ("phi", "memory_phi"):
            object.__setattr__(self, name, str(Phi.parse(getattr(self, name))))
        check_fields(self)
        least = {"encoder_layers": 0, "padding": 0, "begin": 0, "end": 0}
        for name in ("vocabulary", "dim", "heads", "encoder_layers", "decoder_layers", "slots", "max_length", *least):
            if getattr(self, name) < least.get(name, 1):
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least {least.get(name, 1)}.")
        for name in ("encoder_layers", "decoder_layers"):
            if getattr(self, name) > MOST_LAYERS:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at most {MOST_LAYERS:,}.")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout={self.dropout!r} must be a probability, from 0 to 1.")
        # Rotations act on pairs within a head, and each sine has its cosine.
        parts = 2 * self.heads if self.positions == "rotary" else self.heads
        if self.dim % parts or self.dim % 2:
            even = " with an even quotient" if self.positions == "rotary" else " and even"
            raise ValueError(f"dim={self.dim} must be a multiple of heads={self.heads}{even}.")
        special = {"padding": self.padding, "begin": self.begin, "end": self.end}
        if len(set(special.values())) < 3 or max(special.values()) >= self.vocabulary:
            raise ValueError(
                f"padding, begin and end must be three different ids below vocabulary={self.vocabulary}, got {special}."
            )
        if Phi.parse(self.phi).length == "keys":
            raise ValueError(
                f"phi={self.phi!r} counts padding and later tokens, so a text would depend on its batch, and decoding "
                'would differ from training. Leave out ", L=keys" to count the keys a token sees, or give a number.'
            )
        if not 0 < self.gamma < math.inf or (self.gamma != 1 and Phi.parse(self.phi).activation not in ACTIVATIONS):
            raise ValueError(
                f"gamma={self.gamma!r} must be a number above 0, and 1 for a φ that normalises each row itself, like "
                "softmax."
            )
        if Phi.parse(self.memory_phi).activation not in (*ACTIVATIONS, SOFTMAX):
            raise ValueError(f'memory_phi={self.memory_phi!r} must be "softmax" or a pointwise φ such as "relu".')
        if self.learned_gain is not None and Phi.parse(self.phi).activation not in ACTIVATIONS:
            raise ValueError(
                f"phi={self.phi!r} normalises each row itself, so there is no gain to learn: pass learned_gain=None "
                f"instead of {self.learned_gain!r}."
            )

    @property
    def matrix_numbers(self) -> int:
        """Number of weights, without biases, norms and other small parameters."""
        attentions = self.encoder_layers + self.decoder_layers * (2 if self.encoder_layers else 1)
        memories = self.encoder_layers + self.decoder_layers
        return self.dim * (self.vocabulary + 4 * self.dim * attentions + 2 * self.slots * memories)

    @property
    def fixed_numbers(self) -> int:
        """Number of values in the model that are not weights."""
        return self.max_length * self.dim if self.positions == "sinusoidal" else 0

    @property
    def macs(self) -> int:
        """Multiply-adds for a token of each side: projections, memories, logits, and rows over max_length keys."""
        width, length = self.dim, self.max_length
        memory, projections = 2 * self.slots * width, 4 * width * width
        encoder = projections + 2 * length * width + memory
        crossing = projections + 2 * length * width if self.encoder_layers else 0
        decoder = projections + length * width + crossing + memory  # a causal row has half of the keys, in the mean
        return self.encoder_layers * encoder + self.decoder_layers * decoder + self.vocabulary * width


@dataclass(frozen=True)
class Encoded:
    """The encoded source: its states [B, S, dim], and a mask [B, 1, 1, S], True for tokens and False for padding."""

    states: Tensor
    mask: Tensor

    def select(self, sequences: Tensor) -> "Encoded":
        """Return the entries of these sequences."""
        return Encoded(self.states[sequences], self.mask[sequences])


class Caches:
    """The keys and values of the tokens decoded so far, and of the source, which are computed once."""

    def __init__(self, layers: int) -> None:
        self.own = [KeyValueCache() for _ in range(layers)]
        self.source = [KeyValueCache() for _ in range(layers)]
        self.position = 0  # of the next token

    def reorder(self, sequences: Tensor, source: bool = True) -> None:
        """Make sequence i continue the former sequence sequences[i]; source=False if both have the same source."""
        for cache in (*self.own, *(self.source if source else ())):
            cache.reorder(sequences)

    def prune(self, kept: Tensor) -> None:
        """Keep only the decoded tokens at the indices kept [B, fewer], in that order."""
        for cache in self.own:
            cache.keep(kept)


class Layer(nn.Module):
    """Attention, attention to the source when translating, then the memory, each with a residual connection."""

    def __init__(self, config: ReLUFormerConfig, *, reads_source: bool) -> None:
        super().__init__()
        dim, phi = config.dim, Phi.parse(config.phi)
        phi = replace(phi, gain=phi.gain / config.gamma) if config.gamma != 1 else phi
        learned: Any = {"learned_gain": config.learned_gain, "learned_shift": config.learned_shift}
        settings: Any = {"phi": phi, "joined_norm": config.joined_norm, **learned}
        self.attention_norm = LayerNorm(dim)
        self.attention = Attention(dim, config.heads, rotary=config.positions == "rotary", **settings)
        self.source_norm = LayerNorm(dim) if reads_source else None
        self.source_attention = Attention(dim, config.heads, context_dim=dim, **settings) if reads_source else None
        self.memory_norm = LayerNorm(dim)
        self.memory = Memory(dim, config.slots, phi=config.memory_phi, norm=config.memory_norm)
        self.dropout = Dropout(config.dropout)
        self.post = config.norm == "post"

    def forward(self, x: Tensor, tally: Tally, own: View, source: View | None = None) -> tuple[Tensor, Found]:
        """Return the new states, and the penalties of the layer, if the tally wants any."""
        tally = tally.empty()
        x = self._add(x, self.attention_norm, lambda y: tally(self.attention, y, own))
        if self.source_attention is not None and self.source_norm is not None and source is not None:
            attention = self.source_attention
            x = self._add(x, self.source_norm, lambda y: tally(attention, y, source))
        split = self.attention.split
        return self._add(x, self.memory_norm, lambda y: tally.look_up(self.memory, y, own, split)), tally.found

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.post:
            out: Tensor = norm(self.dropout(part(x), onto=x))
            return out
        return self.dropout(part(norm(x)), onto=x)


class ReLUFormer(Pretrained):
    """A transformer for text: ReLUFormer(vocabulary=8000, dim=256), with the fields of ReLUFormerConfig as arguments.

    Tokens are [B, length] integers. A target begins with the token `begin`; the logits predict the tokens after it.
    """

    sinusoids: Tensor | None

    def __init__(self, vocabulary: int, **settings: Any) -> None:
        super().__init__()
        self.config = config = ReLUFormerConfig(vocabulary, **settings)
        translates = config.encoder_layers > 0
        # One matrix embeds source and target and gives the logits. With this deviation, both start with variance 1: the
        # embedded tokens, which are scaled by √dim, and the products with states normalised by LayerNorm.
        self.embedding = nn.Embedding(vocabulary, config.dim)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(config.dim))
        sinusoids = sines(config.max_length, config.dim) if config.positions == "sinusoidal" else None
        self.register_buffer("sinusoids", sinusoids, persistent=False)
        self.dropout = Dropout(config.dropout)
        self.encoder = nn.ModuleList(Layer(config, reads_source=False) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(Layer(config, reads_source=translates) for _ in range(config.decoder_layers))
        pre = config.norm == "pre"  # then the residual stream has had no norm yet
        self.encoder_norm = LayerNorm(config.dim) if pre and translates else nn.Identity()
        self.decoder_norm = LayerNorm(config.dim) if pre else nn.Identity()

    @classmethod
    def from_config(cls, config: ReLUFormerConfig) -> "ReLUFormer":
        """Return a model with this config and new weights."""
        return cls(**asdict(config))

    def forward(
        self,
        source: Tensor,
        target: Tensor | None = None,
        *,
        penalties: Wanted = False,
        memory_penalty: Wanted = False,
        margin: float = 0.7,
    ) -> Tensor | tuple[Tensor, Penalties]:
        """Return logits [B, T, vocabulary] for the token after each target token; a language model takes only its text.

        penalties: also return `nomax.nn.penalties`, averaged over tokens, heads and layers; with "sequences" for each
            sequence, [B], independent of the others in the batch.
        memory_penalty: the same for the L1 norm of the weights of memories. Of both, what is not asked for is 0.
        margin: the share of log n above which the entropy of a row over n keys is penalised.
        """
        tally = Tally(penalties, margin, memories=memory_penalty)
        if self.encoder:
            if target is None:
                raise ValueError("this model translates: call it with source and target, or use decoding.beam_search.")
            logits = self._decode(target, self._encode(source, tally), None, None, tally)
        else:
            if target is not None:
                raise ValueError("this model has no encoder (encoder_layers=0): call it with the text alone.")
            logits = self._decode(source, None, None, None, tally)
        return (logits, tally.mean()) if tally.wanted else logits

    def encode(self, source: Tensor) -> Encoded:
        """Encode the source [B, S]."""
        return self._encode(source, Tally(False))

    def decode(
        self,
        target: Tensor,
        encoded: Encoded | None = None,
        caches: Caches | None = None,
        ancestors: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, vocabulary] for the token after each target token.

        caches: target continues the tokens in them, and is added to them.
        ancestors: the target tokens are T alternatives for one position, as in beam search, instead of a sequence. [B,
          T, tokens in the caches with these]: True where a token is in the past of an alternative, or is it.
        """
        if (encoded is None) == bool(self.encoder):
            raise ValueError("encoded must be what model.encode returns, and None for a model with encoder_layers=0.")
        return self._decode(target, encoded, caches, ancestors, Tally(False))

    def caches(self) -> Caches:
        """Return empty caches for decoding token by token."""
        return Caches(self.config.decoder_layers)

    def _encode(self, source: Tensor, tally: Tally) -> Encoded:
        x = self._embed(source, 0, "source")
        tokens = source != self.config.padding
        mask = tokens[:, None, None]
        view = View(mask=mask, visible=mask.sum(-1) * tokens[:, None])
        for layer in self.encoder:
            x = tally.add(layer(x, tally, view))
        return Encoded(self.encoder_norm(x), mask)

    def _decode(
        self, target: Tensor, encoded: Encoded | None, caches: Caches | None, ancestors: Tensor | None, tally: Tally
    ) -> Tensor:
        start = 0 if caches is None else caches.position
        end = start + (target.shape[1] if ancestors is None else 1)
        x = self._embed(target, start, "target", end)
        # Padding is on the right, so causality alone hides it from the tokens.
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
            x = tally.add(layer(x, tally, own, source))
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
        embedded: Tensor = self.dropout(x)
        return embedded


def sines(length: int, dim: int) -> Tensor:
    """Return fixed positions [length, dim]: sines, then cosines, at dim/2 wavelengths from 2π to almost 10,000 · 2π."""
    omega = 10_000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * omega
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()
