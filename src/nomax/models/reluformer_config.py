"""The config of a ReLUFormer: an encoder-decoder for translation, or a decoder alone as a language model."""

import math
from dataclasses import dataclass
from typing import Literal

from nomax.models.fields import check_fields
from nomax.nn import RELUFORMER
from nomax.nn.attention import Learned
from nomax.phi import ACTIVATIONS, SOFTMAX, Phi

MOST_LAYERS = 1000  # of the encoder and of the decoder: as deep as transformers have been made; more is a slip

Order = Literal["pre", "post"]
Positions = Literal["sinusoidal", "rotary"]


@dataclass(frozen=True)
class ReLUFormerConfig:
    """All that makes a ReLUFormer what it is, but for its weights. `dataclasses.asdict` of it is plain JSON.

    The transformers that ReLUFormer is compared with are changes of these fields:

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
    learned_gain: Learned | None = "head"  # √2/γ: one per head, one per layer, or as φ and gamma have it
    gamma: float = 1.0  # divides φ's gain, or where it starts if learned: √(n/π) lets new rows over n keys sum to 1
    memory_phi: str = "relu"
    memory_norm: bool = False
    joined_norm: Literal["rela"] | None = None
    norm: Order = "pre"  # LayerNorm of what a part reads, or ("post") of the sum to which it was added
    positions: Positions = "sinusoidal"
    dropout: float = 0.1  # of the embedded tokens and of what each part adds
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
        # A rotation turns pairs within a head, and a sine has its cosine.
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
                f"phi={self.phi!r} counts padding and what comes later, so a text would depend on its batch, and be "
                'decoded other than trained. Leave ", L=keys" out, which counts what a token sees, or give a number.'
            )
        if not 0 < self.gamma < math.inf or (self.gamma != 1 and Phi.parse(self.phi).activation not in ACTIVATIONS):
            raise ValueError(
                f"gamma={self.gamma!r} must be a number above 0, and 1 for a φ that normalises each row itself, such "
                "as softmax."
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
        """How many numbers the weights have, but for biases, norms and other small things."""
        attentions = self.encoder_layers + self.decoder_layers * (2 if self.encoder_layers else 1)
        memories = self.encoder_layers + self.decoder_layers
        return self.dim * (self.vocabulary + 4 * self.dim * attentions + 2 * self.slots * memories)

    @property
    def fixed_numbers(self) -> int:
        """How many numbers belong to the model that are no weights."""
        return self.max_length * self.dim if self.positions == "sinusoidal" else 0
