"""Examples, each of which a model sees whole, and padded batches of them.

An example is a pair, or a stretch of documents that were cut and joined to a length in tokens. Which examples a step
shows is a function of seed and step alone: a run resumes from its step, and all ranks together show the same batch for
any number of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nomax.data.order import BLOCKS, ORDER, bits
from nomax.data.text.corpus import Corpus
from nomax.data.text.tokenizer import BEGIN, END, PADDING, SEPARATOR, Tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Integers = npt.NDArray[np.int64]
Tokens = list[int]
Place = tuple[int, int]  # the number of the document, and of the pair in it

WIDTH = 1.125  # of a bucket: its longest example by its shortest, beyond the first few tokens
ROUNDING = 4  # tokens


@dataclass(frozen=True)
class Example:
    """Tokens of a source and its target, without begin and end; several pairs are separated by the token 4."""

    source: Tokens
    """Empty for a language model."""
    target: Tokens
    name: str
    places: tuple[Place, ...]
    """The pairs that it holds: corpus.documents[d].pairs[p] has the text that a translation is compared with.

    There is one for each stretch between separators. A pair that was split for its length is there several times.
    """

    @property
    def length(self) -> int:
        """Tokens of the longer side, with its end."""
        return max(len(self.source), len(self.target)) + 1


@dataclass(frozen=True)
class _Piece:
    source: Tokens
    target: Tokens
    place: Place


def sentences(
    corpus: Corpus, tokenizer: Tokenizer, *, longest: int | None = None, too_long: str = "raise", side: str = "both"
) -> list[Example]:
    """Make an example of every pair.

    A pair of more than `longest` tokens is an error; too_long="split" cuts it into parts, both sides in as many and at
    the same shares, and too_long="skip" leaves it out. side="source" or "target" is for language models, which
    learn that side alone.
    """
    return [
        Example(piece.source, piece.target, _name(corpus, [piece.place]), (piece.place,))
        for piece in _pieces(corpus, tokenizer, longest, too_long, side)
    ]


def documents(
    corpus: Corpus,
    tokenizer: Tokenizer,
    tokens: int,
    *,
    join: bool = True,
    too_long: str = "raise",
    side: str = "both",
) -> list[Example]:
    """Make examples of at most `tokens` tokens on each side, with as many whole pairs as fit.

    Pairs stay in their order. With `join`, what follows a document's end is the next document of the corpus, so that
    short documents make up long examples too; without, every example ends with its document. `too_long` and `side` are
    as for sentences. Every pair is in exactly one example.
    """
    examples: list[Example] = []
    group: list[_Piece] = []
    lengths = [0, 0]

    def close() -> None:
        if group:
            places = tuple(piece.place for piece in group)
            source, target = (_joined(column) for column in zip(*((p.source, p.target) for p in group), strict=True))
            examples.append(Example(source if side == "both" else [], target, _name(corpus, places), places))
            group.clear()
            lengths[:] = [0, 0]

    for piece in _pieces(corpus, tokenizer, tokens, too_long, side):
        # A separator before each but the first, and the end: as many as there are pairs.
        added = [len(piece.source) + 1 if side == "both" else 0, len(piece.target) + 1]
        parted = group and not join and group[-1].place[0] != piece.place[0]
        if parted or max(lengths[0] + added[0], lengths[1] + added[1]) > tokens:
            close()
        group.append(piece)
        lengths[:] = [lengths[0] + added[0], lengths[1] + added[1]]
    close()
    return examples


def _pieces(corpus: Corpus, tokenizer: Tokenizer, longest: int | None, too_long: str, side: str) -> Iterator[_Piece]:
    if too_long not in ("raise", "split", "skip"):
        raise ValueError(f"too_long must be 'raise', 'split' or 'skip', not {too_long!r}.")
    if side not in ("both", "source", "target"):
        raise ValueError(f"side must be 'both', 'source' or 'target', not {side!r}.")
    if longest is not None and longest < 2:
        raise ValueError(f"an example of {longest} tokens has no room for a token and the end; take at least 2.")
    for number, document in enumerate(corpus.documents):
        for place, pair in enumerate(document.pairs):
            source = tokenizer.encode(pair.source) if side == "both" else []
            target = tokenizer.encode(pair.source if side == "source" else pair.target)
            length = max(len(source), len(target)) + 1
            if longest is None or length <= longest:
                yield _Piece(source, target, (number, place))
            elif too_long == "split":
                parts = -(-(length - 1) // (longest - 1))
                for part in range(parts):
                    yield _Piece(_share(source, part, parts), _share(target, part, parts), (number, place))
            elif too_long == "raise":
                name = _name(corpus, [(number, place)])
                raise ValueError(
                    f"{name} of {corpus.title} has {length:,} tokens with its end, more than {longest:,}: "
                    f"“{pair.source[:60]}…”. Take longer examples, or too_long='split' or 'skip'."
                )


def _share(tokens: Tokens, part: int, parts: int) -> Tokens:
    return tokens[len(tokens) * part // parts : len(tokens) * (part + 1) // parts]


def _joined(column: tuple[Tokens, ...]) -> Tokens:
    return list(chain.from_iterable(([SEPARATOR] if number else []) + tokens for number, tokens in enumerate(column)))


def _name(corpus: Corpus, places: tuple[Place, ...] | list[Place]) -> str:
    (first, start), (last, stop) = places[0], places[-1]
    begin, end = f"{corpus.documents[first].name}:{start + 1}", f"{corpus.documents[last].name}:{stop + 1}"
    return begin if begin == end else f"{begin} to {end}"


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """The endless sequence of batches, epoch after epoch: each example once in every epoch.

    A batch holds examples of about the same length, and padded to the longest it has at most `tokens_per_batch`
    tokens on a side, over all ranks. Lengths are rounded up to those of buckets, so the sizes of the batches are the
    same in every epoch; which examples of a bucket meet in a batch, and which batch comes when, is drawn anew.
    """

    lengths: npt.ArrayLike
    """Tokens of every example, Example.length."""
    tokens_per_batch: int
    seed: int = 0
    shuffle: bool = True
    """Reorder every epoch; otherwise the longest examples come first."""
    _rounded: Integers = field(init=False, repr=False)
    _starts: Integers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths, np.int64)
        if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
            raise ValueError(
                f"lengths has the shape {list(lengths.shape)}; it must hold a positive integer for each example."
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0.")
        longest = int(lengths.argmax())
        if lengths[longest] > self.tokens_per_batch:
            raise ValueError(
                f"example {longest} has {lengths[longest]:,} tokens, more than tokens_per_batch = "
                f"{self.tokens_per_batch:,}. Take larger batches, or cut the examples shorter."
            )
        rounded = _round_up(lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "_rounded", rounded)
        object.__setattr__(self, "_starts", _cut(np.sort(rounded)[::-1], self.tokens_per_batch))

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._rounded)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches that show every example once."""
        return len(self._starts) - 1

    @property
    def fewest(self) -> int:
        """The number of examples in the smallest batch, and so the most ranks that can share it."""
        return int(np.diff(self._starts).min())

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Integers:
        """Return the examples that this rank shows at this step; all ranks together show the same for any number."""
        if step < 0 or not 0 <= rank < world:
            raise ValueError(f"step {step}, rank {rank} of {world}: steps and ranks count from 0, up to world - 1.")
        if world > self.fewest:
            raise ValueError(
                f"{world} ranks cannot share a batch of {self.fewest} examples. Take larger batches, of about "
                f"{world * int(self._rounded.max()):,} tokens, shorter examples or fewer ranks."
            )
        epoch, place = divmod(step, self.steps_per_epoch)
        shown, batches = _epoch(self, epoch)
        number = batches[place]
        chosen = shown[self._starts[number] : self._starts[number + 1]]
        return chosen[rank::world]


@lru_cache(maxsize=4)
def _epoch(order: TokenOrder, epoch: int) -> tuple[Integers, Integers]:
    """Return all examples, the longest buckets first, and the order in which the batches come."""
    keys = bits(order.seed, ORDER, epoch, np.arange(len(order)))
    batches = np.arange(order.steps_per_epoch)
    if not order.shuffle:
        return np.argsort(-order._rounded, kind="stable"), batches
    turns = np.argsort(bits(order.seed, BLOCKS, epoch, batches))
    return np.lexsort((keys, -order._rounded)), turns


def _round_up(lengths: Integers) -> Integers:
    """Round up to the lengths of buckets: multiples of 4 at first, then ever wider, up to the longest example."""
    bounds = [ROUNDING]
    while bounds[-1] < lengths.max():
        bounds.append(max(bounds[-1] + ROUNDING, int(bounds[-1] * WIDTH) // ROUNDING * ROUNDING))
    return np.minimum(np.asarray(bounds, np.int64)[np.searchsorted(bounds, lengths)], lengths.max())


def _cut(lengths: Integers, budget: int) -> Integers:
    """Return where batches start, and where the last one ends, in lengths that never grow."""
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(min(starts[-1] + budget // int(lengths[starts[-1]]), len(lengths)))
    if len(starts) > 2 and starts[-1] - starts[-2] < starts[-2] - starts[-3]:
        # What is left at the end may be a single example: it shares evenly with the batch before.
        starts[-2] = (starts[-3] + starts[-1] + 1) // 2
    return np.asarray(starts, np.int64)


@dataclass(frozen=True)
class TextBatch:
    """One rank's share of the examples of a step, padded with 0."""

    step: int
    source: "Tensor | None"  # int64 [B, S]: tokens, end; None for a language model
    target: "Tensor"  # int64 [B, T+1]: begin, tokens, end; the model sees [:, :-1] and learns [:, 1:]
    numbers: tuple[int, ...]
    """The indices of the examples."""
    tokens: int
    """Target tokens of this step, over all ranks, by which to divide summed losses."""


def batches(
    examples: Sequence[Example],
    order: TokenOrder,
    start: int = 0,
    rank: int = 0,
    world: int = 1,
    *,
    device: "torch.device | str" = "cpu",
) -> Iterator[TextBatch]:
    """Make the batches of a training run from step `start` on, without end."""
    if len(order) != len(examples):
        raise ValueError(f"the order is for {len(order):,} examples, but there are {len(examples):,}.")
    order.batch(start, rank, world)  # raises now if they are wrong

    def made() -> Iterator[TextBatch]:
        for step in count(start):
            everyone = order.batch(step)
            tokens = sum(len(examples[number].target) + 1 for number in everyone)
            yield _batch(examples, [int(number) for number in everyone[rank::world]], step, tokens, device)

    return made()


def evaluation_batches(
    examples: Sequence[Example], tokens_per_batch: int, *, device: "torch.device | str" = "cpu"
) -> Iterator[TextBatch]:
    """Make batches of every example once, the longest first; `numbers` puts results back into order."""
    order = TokenOrder([example.length for example in examples], tokens_per_batch, shuffle=False)
    for step in range(order.steps_per_epoch):
        numbers = [int(number) for number in order.batch(step)]
        yield _batch(examples, numbers, step, sum(len(examples[n].target) + 1 for n in numbers), device)


def pad(rows: Sequence[Sequence[int]], device: "torch.device | str" = "cpu") -> "Tensor":
    """Return rows of tokens as one tensor [rows, longest], filled up with 0."""
    import torch

    padded = torch.full((len(rows), max(map(len, rows), default=0)), PADDING, dtype=torch.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return padded.to(device)


def _batch(
    examples: Sequence[Example], numbers: list[int], step: int, tokens: int, device: "torch.device | str"
) -> TextBatch:
    chosen = [examples[number] for number in numbers]
    with_source = any(example.source for example in chosen)
    source = pad([[*example.source, END] for example in chosen], device) if with_source else None
    target = pad([[BEGIN, *example.target, END] for example in chosen], device)
    return TextBatch(step, source, target, tuple(numbers), tokens)
