"""Decode with a ReLUFormer: translate by beam search (greedy with one beam), and sample texts.

B sentences, K beams: the hypotheses of a sentence that are still being extended, all of the same length.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nomax.models.reluformer import Encoded, ReLUFormer

LARGEST_PENALTY = 10  # length penalty; far beyond useful values, and its powers are still finite
COLDEST = 1e-6  # lowest temperature but 0: logits divided by it are still finite
# Steps between checks whether to drop tokens from which no beam descends.
PRUNE_EVERY = 16


class Hypothesis(NamedTuple):
    """A translation without the tokens `begin` and `end`, and its score, which `beam_search` explains."""

    tokens: list[int]
    score: float


@torch.inference_mode()
def beam_search(
    model: ReLUFormer,
    source: Tensor,
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
) -> list[list[Hypothesis]]:
    """Translate each sentence of source [B, S] into at least one and at most `beams` hypotheses, best first.

    The score of a hypothesis is log p / ((5 + n) / 6)^length_penalty (Wu et al. 2016), where n counts its tokens,
    including `end`. The result for a sentence does not depend on the others in the batch, except for rounding.

    beams: the number of hypotheses to extend per sentence; one that ends makes room for another. 1 is greedy.
    length_penalty: 0 compares probabilities; larger values, at most 10, favour longer translations.
    max_length: the most tokens of a hypothesis, including `end`, which is forced there. None: 10 plus 2 per source
        token.

    A sentence is done when no extension can beat its best hypothesis, or when `beams` hypotheses have ended.
    """
    _check_search(model, source, beams, length_penalty, max_length)
    with _evaluating(model):
        state = _BeamSearch(model, source, beams, length_penalty, max_length)
        while len(state.sentence):
            state.step()
    return state.hypotheses()


class _BeamSearch:
    """The state of a search: the sentences that are not done, and the best hypotheses of all sentences."""

    def __init__(
        self, model: ReLUFormer, source: Tensor, beams: int, length_penalty: float, max_length: int | None
    ) -> None:
        config, count, device = model.config, len(source), source.device
        self.end, self.beams, self.length_penalty = config.end, beams, length_penalty
        self.forbidden = torch.tensor([config.padding, config.begin], device=device)
        cache_class = TreeCache if beams > 1 and config.positions == "sinusoidal" else CopyingCache
        self.cache: BeamCache = cache_class(model, model.encode(source), beams)

        limit = 10 + 2 * (source != config.padding).sum(1)
        limit = limit if max_length is None else torch.full_like(limit, max_length)
        self.limit = limit.clamp(max=config.max_length)
        self.limits = set(self.limit.tolist())
        # log p only falls as a hypothesis grows, and no length divides it by more than this.
        self.largest_penalty = self._penalty(self.limit)

        self.length = 0
        self.sentence = torch.arange(count, device=device)  # which one of the source
        self.token = torch.full((count, beams), config.begin, device=device)
        dtype = torch.promote_types(model.embedding.weight.dtype, torch.float32)
        self.total = torch.full((count, beams), -torch.inf, dtype=dtype, device=device)  # log p, -inf for no hypothesis
        self.total[:, 0] = 0

        # For all sentences: the token and parent of each beam at each length, and the best hypotheses that ended: their
        # scores, best first, their lengths, and the beams to which `end` was added.
        history = (max(self.limits, default=0), count, beams)
        self.tokens = torch.empty(history, dtype=torch.int32, device=device)
        self.parents = torch.empty(history, dtype=torch.int32, device=device)
        self.scores = torch.full((count, beams), -torch.inf, dtype=dtype, device=device)
        self.lengths = torch.ones((count, beams), dtype=torch.int64, device=device)
        self.last_beams = torch.zeros((count, beams), dtype=torch.int64, device=device)

    def step(self) -> None:
        """Extend every beam by one token."""
        total, token, parent = self._candidates()
        self.length += 1
        ended = token == self.end
        if ended.any():
            self._keep(total, parent, ended)
            total, place = total.masked_fill(ended, -torch.inf).topk(self.beams)
            token, parent = token.gather(1, place), parent.gather(1, place)
        self.total, self.token, parent = (x[:, : self.beams] for x in (total, token, parent))
        self.tokens[self.length - 1, self.sentence] = self.token.int()
        self.parents[self.length - 1, self.sentence] = parent.int()
        left = self._not_done()
        if left is not None:
            self.sentence, self.limit, self.largest_penalty, self.token, self.total, parent = (
                x[left] for x in (self.sentence, self.limit, self.largest_penalty, self.token, self.total, parent)
            )
            self.cache.select(left)
        if len(parent):
            self.cache.follow(parent)

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best 2K extensions of each sentence: log p, token and beam. At most K of them end."""
        logits = self.cache.decode(self.token).to(self.total.dtype)
        log_p = logits.index_fill_(2, self.forbidden, -torch.inf).log_softmax(2)
        if self.length + 1 in self.limits:
            last = (self.limit == self.length + 1)[:, None, None]
            other = torch.arange(log_p.shape[2], device=log_p.device) != self.end
            log_p.masked_fill_(last & other, -torch.inf)
        # Select within each beam first: adding log p for the whole vocabulary would take another pass over it.
        log_p, token = log_p.topk(min(2 * self.beams, log_p.shape[2]))
        total, place = (log_p + self.total[..., None]).flatten(1).topk(2 * self.beams)
        return total, token.flatten(1).gather(1, place), place // token.shape[2]

    def _keep(self, total: Tensor, parent: Tensor, ended: Tensor) -> None:
        """Add the best K extensions that ended to the hypotheses of their sentences."""
        total, parent, ended = (x[:, : self.beams] for x in (total, parent, ended))
        scores = total.masked_fill(~ended, -torch.inf) / self._penalty(self.length)
        scores, place = torch.cat([self.scores[self.sentence], scores], 1).topk(self.beams)
        lengths = torch.cat([self.lengths[self.sentence], torch.full_like(parent, self.length)], 1)
        last_beams = torch.cat([self.last_beams[self.sentence], parent], 1)
        self.scores[self.sentence] = scores
        self.lengths[self.sentence] = lengths.gather(1, place)
        self.last_beams[self.sentence] = last_beams.gather(1, place)

    def _not_done(self) -> Tensor | None:
        """Return the indices of unfinished sentences, or None to keep all, since dropping some copies the rest."""
        scores = self.scores[self.sentence]
        # "Not less" rather than "at least", so that a search with NaN ends, too.
        done = ~(scores[:, 0] < self.total[:, 0] / self.largest_penalty) | (scores[:, -1] > -torch.inf)
        count = int(done.sum())
        if 4 * count >= len(done):
            return (~done).nonzero()[:, 0]
        if count:  # they stay, but get no more hypotheses
            self.total = self.total.masked_fill(done[:, None], -torch.inf)
        return None

    def hypotheses(self) -> list[list[Hypothesis]]:
        """Trace all texts back through the history, from the end to the beginning."""
        if not (self.scores[:, :1] > -torch.inf).all():
            raise FloatingPointError("the model's logits are not finite, so no translation has a probability.")
        texts, beam = torch.zeros_like(self.tokens), self.last_beams
        for i in reversed(range(int(self.lengths.max()) - 1 if len(self.lengths) else 0)):
            texts[i] = self.tokens[i].gather(1, beam)
            beam = torch.where(i < self.lengths - 1, self.parents[i].gather(1, beam).long(), beam)
        tokens, lengths = texts.permute(1, 2, 0).cpu().numpy(), self.lengths.tolist()
        return [
            [Hypothesis(tokens[b, k, : lengths[b][k] - 1].tolist(), s) for k, s in enumerate(scores) if s > -math.inf]
            for b, scores in enumerate(self.scores.tolist())
        ]

    def _penalty(self, length: Tensor | int) -> Tensor:
        return torch.as_tensor(((5 + length) / 6) ** self.length_penalty, device=self.forbidden.device)


class BeamCache(Protocol):
    """The keys and values of the tokens in the beams of a search; token and parent are [B, K]."""

    def decode(self, token: Tensor) -> Tensor:
        """Add a token to each beam, the same one at first, and return the logits [B, K, vocabulary] of the next."""

    def follow(self, parent: Tensor) -> None:
        """Make beam k of each sentence continue its former beam parent[k]."""

    def select(self, sentences: Tensor) -> None:
        """Keep only these sentences."""


class TreeCache:
    """Keep the beams of a sentence as alternatives for one position; `ancestors` marks the tokens in each beam's past.

    Continuing another beam then moves booleans instead of keys and values, each sentence has one copy of the source's
    keys and values, and the beams of a sentence share the work of reading both.
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
        """Drop tokens from which no beam descends, once they are a quarter of all tokens."""
        alive = self.ancestors.any(1)
        most = int(alive.sum(1).max())
        if 4 * most <= 3 * alive.shape[1]:
            kept = alive.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
            self.ancestors = self.ancestors.gather(2, kept[:, None].expand(-1, self.beams, -1))
            self.caches.prune(kept)


class CopyingCache:
    """Keep each beam as a separate sequence, and copy its keys and values when another beam continues it.

    Used for greedy search, where nothing is copied, and for rotary positions, which a cache derives from its number of
    tokens, so that it cannot hold several tokens for one position.
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


def sample(model: ReLUFormer, prompt: Tensor, max_new: int, **settings: Any) -> list[list[int]]:
    """Continue each text of prompt [B, T] by at most max_new tokens, and return the new tokens, up to `end`.

    All prompts have the same length, which may be 0, and do not contain the token `begin`. settings: as for `stream`.
    """
    added = [step.unsqueeze(1) for step in stream(model, prompt, max_new, **settings)]
    texts = torch.cat(added, 1).tolist() if added else [[] for _ in prompt]
    return [[token for token in text if token != model.config.padding] for text in texts]


@torch.inference_mode()
def stream(
    model: ReLUFormer,
    prompt: Tensor,
    max_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield the tokens of `sample` one at a time: the next of each text, [B], or padding for texts that have ended.

    temperature: divides the logits, from 1e-6 to 1e6; 0 takes the likeliest token.
    top_k: choose only among this many likeliest tokens.
    top_p: choose only among the likeliest tokens that together have at least this probability.
    seed: the same seed gives the same texts.
    """
    config = model.config
    _check_sample(model, prompt, max_new, temperature, top_k, top_p)
    generator = torch.Generator(prompt.device).manual_seed(seed)
    forbidden = torch.tensor([config.padding, config.begin], device=prompt.device)
    choices = 1 if temperature == 0 else min(top_k or config.vocabulary, config.vocabulary)
    text = torch.cat([prompt.new_full((len(prompt), 1), config.begin), prompt], 1)
    going = torch.ones((len(prompt), 1), dtype=torch.bool, device=prompt.device)
    with _evaluating(model):
        caches = model.caches()
        for _ in range(max_new):
            logits = model.decode(text, caches=caches)[:, -1].float().index_fill_(1, forbidden, -torch.inf)
            best, token = logits.topk(choices)
            if not best[:, :1].isfinite().all():
                raise FloatingPointError("the model's logits are not finite, so no token has a probability.")
            if choices > 1:
                p = (best / temperature).softmax(1)
                if top_p is not None:  # keep a token if the likelier ones before it do not reach top_p
                    p = p.masked_fill(p.cumsum(1, dtype=torch.float64) - p >= top_p, 0)
                token = token.gather(1, p.multinomial(1, generator=generator))
            going = going & (token != config.end)
            if not going.any():
                return
            text = token.masked_fill(~going, config.padding)
            yield text[:, 0]


@contextmanager
def _evaluating(model: ReLUFormer) -> Iterator[None]:
    """Switch dropout off, even in the middle of training."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_search(model: ReLUFormer, source: Tensor, beams: int, length_penalty: float, max_length: int | None) -> None:
    if not model.config.encoder_layers:
        raise ValueError("this model is a language model (encoder_layers=0), it does not translate: use sample.")
    if source.dim() != 2:
        raise ValueError(f"source must be [batch, length] token ids, got {list(source.shape)}.")
    if type(beams) is not int or beams < 1:
        raise ValueError(f"beams={beams!r} must be an integer of at least 1; 1 is greedy search.")
    if not 0 <= length_penalty <= LARGEST_PENALTY:
        raise ValueError(f"length_penalty={length_penalty!r} must be a number from 0 to {LARGEST_PENALTY}.")
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise ValueError(f"max_length={max_length!r} must be an integer of at least 1, or None.")


def _check_sample(
    model: ReLUFormer, prompt: Tensor, max_new: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    if model.config.encoder_layers:
        raise ValueError("this model translates: use beam_search. Only one with encoder_layers=0 continues texts.")
    if prompt.dim() != 2 or prompt.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"prompt must be [batch, length] token ids, got {prompt.dtype} {list(prompt.shape)}.")
    if not (temperature == 0 or COLDEST <= temperature <= 1 / COLDEST):
        raise ValueError(
            f"temperature={temperature!r} must be from {COLDEST:g} to {1 / COLDEST:g}, or 0, which takes the likeliest "
            "token."
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k!r} must be at least 1, or None for the whole vocabulary.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r} must be more than 0 and at most 1, or None for the whole vocabulary.")
    # The last token needs no position, since it is never read, but `begin` does.
    most = model.config.max_length - prompt.shape[1]
    if type(max_new) is not int or not 0 <= max_new <= most:
        raise ValueError(
            f"max_new={max_new!r} must be from 0 to {max(most, 0):,}: the model's max_length is "
            f"{model.config.max_length:,}, and the prompt has {prompt.shape[1]:,} tokens."
        )
