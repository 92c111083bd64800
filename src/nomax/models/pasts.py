"""What the beams of a search have decoded so far, as keys and values: a tree per sentence, or a copy per beam.

B sentences, K beams each; token and parent are [B, K].
"""

from typing import Protocol

import torch
from torch import Tensor

from nomax.models.reluformer import Encoded, ReLUFormer

# Whether tokens that no beam descends from should go is looked at every so many steps.
PRUNE_EVERY = 16


class Pasts(Protocol):
    def decode(self, token: Tensor) -> Tensor:
        """Add a token to every beam, the same one at first, and return the logits [B, K, vocabulary] of the next."""

    def follow(self, parent: Tensor) -> None:
        """Let beam k of a sentence continue what was its beam parent[k]."""

    def select(self, sentences: Tensor) -> None:
        """Go on with these sentences only."""


class Tree:
    """The beams of a sentence are alternatives for one position, and `ancestors` tells which tokens are whose past.

    So to continue another beam's past moves some booleans instead of keys and values; the source's keys and values are
    there once per sentence; and a sentence's beams share the work of reading both.
    """

    def __init__(self, model: ReLUFormer, encoded: Encoded, beams: int) -> None:
        self.model, self.encoded, self.beams = model, encoded, beams
        self.caches = model.caches()
        device = encoded.mask.device
        self.itself = torch.eye(beams, dtype=torch.bool, device=device)[None]
        # [B, K, tokens]
        self.ancestors = torch.zeros((len(encoded.mask), beams, 0), dtype=torch.bool, device=device)

    def decode(self, token: Tensor) -> Tensor:
        if not self.ancestors.shape[2]:  # a tree has one root
            self.ancestors = self.ancestors.new_ones((*token.shape, 1))
            logits = self.model.decode(token[:, :1], self.encoded, self.caches, self.ancestors[:, :1])
            return logits.repeat(1, self.beams, 1)
        self.ancestors = torch.cat([self.ancestors, self.itself.expand(len(token), -1, -1)], dim=2)
        return self.model.decode(token, self.encoded, self.caches, self.ancestors)

    def follow(self, parent: Tensor) -> None:
        self.ancestors = self.ancestors.gather(1, parent[..., None].expand(-1, -1, self.ancestors.shape[2]))
        if self.caches.position % PRUNE_EVERY == 0:
            self._prune()

    def select(self, sentences: Tensor) -> None:
        self.ancestors = self.ancestors[sentences]
        self.encoded = self.encoded.select(sentences)
        self.caches.reorder(sentences)

    def _prune(self) -> None:
        """Drop tokens from which no beam descends, once they are a quarter of all."""
        alive = self.ancestors.any(1)
        most = int(alive.sum(1).max())
        if 4 * most <= 3 * alive.shape[1]:
            kept = alive.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
            self.ancestors = self.ancestors.gather(2, kept[:, None].expand(-1, self.beams, -1))
            self.caches.prune(kept)


class Copies:
    """Every beam is a sequence of its own, and its keys and values are copied when another beam continues it.

    This is the plain way, for greedy search, where nothing is copied, and for rotary positions, which a cache counts
    by its tokens: it cannot hold several for one position.
    """

    def __init__(self, model: ReLUFormer, encoded: Encoded, beams: int) -> None:
        self.model, self.beams, self.caches = model, beams, model.caches()
        sentences = torch.arange(len(encoded.mask), device=encoded.mask.device)
        self.encoded = encoded.select(sentences.repeat_interleave(beams)) if beams > 1 else encoded

    def decode(self, token: Tensor) -> Tensor:
        logits = self.model.decode(token.reshape(-1, 1), self.encoded, self.caches)
        return logits.view(*token.shape, -1)

    def follow(self, parent: Tensor) -> None:
        if self.beams > 1:
            first = torch.arange(0, parent.numel(), self.beams, device=parent.device)
            # The source is the same for all beams of a sentence.
            self.caches.reorder((first[:, None] + parent).flatten(), source=False)

    def select(self, sentences: Tensor) -> None:
        rows = (sentences[:, None] * self.beams + torch.arange(self.beams, device=sentences.device)).flatten()
        self.encoded = self.encoded.select(rows)
        self.caches.reorder(rows)
