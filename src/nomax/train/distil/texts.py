"""Text to distil on: pieces of documents from a few words to the longest, batches of similar lengths, tests."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nomax.conversion import pack
from nomax.data import text
from nomax.train.distil.distillation import embeddings, first_tensor

LENGTHS = (15, 55, 135)  # tokens of the pieces that embeddings are compared on
WITHIN = 0.15  # by how much a piece may be shorter or longer than that
WINDOW = 2048  # pieces that are sorted by length to share batches
MEASURED_TOKENS = 8192  # in a batch without gradients
FEW = (4, 16)  # the fewest and the most words of a piece that is cut out of a segment
QUERY, SEARCHED = 4, 24  # words of a query, and the fewest tokens of a text that it has to find
CALIBRATED_TOKENS = 1024  # in a batch to calibrate on; few, so that texts of similar lengths share it without padding


@dataclass(frozen=True)
class Piece:
    """A text, and how many tokens it has without special ones."""

    text: str
    tokens: int


Segments = list[Piece]  # of one document, in their order
Packing = Callable[[dict[str, Tensor]], dict[str, Any]]  # from a padded batch to one without padding


def documents(names: Sequence[str], split: str, language: str | None, tokenizer: Any) -> list[Segments]:
    """Read a split of data sets, one side of their pairs: `language`, or English, or the source.

    A name such as "bible-kjv-en:kjv" asks for a side of its own.
    """
    result: list[Segments] = []
    for given in names:
        name, own = _side(given)
        corpus = text.load(name, split)
        wanted = own or language or ("en" if "en" in corpus.languages else corpus.languages[0])
        if wanted not in corpus.languages:
            option = f"--data {given}" if own else f"--language {wanted}"
            raise ValueError(f"{option}: {name} has {' and '.join(corpus.languages)}.")
        side = corpus.languages.index(wanted)
        for document in corpus.documents:
            texts = [pair[side] for pair in document.pairs]
            result.append([Piece(each, count) for each, count in zip(texts, _counts(texts, tokenizer), strict=True)])
    return result


def _side(name: str) -> tuple[str, str]:
    """Split the language off a name, if it has one that is no part of a path."""
    before, _, after = name.rpartition(":")
    return (before, after) if before and "/" not in after and not Path(name).exists() else (name, "")


def _counts(texts: list[str], tokenizer: Any) -> list[int]:
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []


def joined(segments: Segments, most: int, start: int) -> tuple[Piece, int]:
    """Join segments from `start` on while they have at most `most` tokens, but at least one; return the next start."""
    end, tokens = start + 1, segments[start].tokens
    while end < len(segments) and tokens + segments[end].tokens <= most:
        tokens += segments[end].tokens
        end += 1
    return Piece(" ".join(piece.text for piece in segments[start:end]), tokens), end


def cut(documents: Iterable[Segments], longest: int, generator: random.Random, short: float = 0.0) -> list[Piece]:
    """Cut documents into pieces of many lengths: single segments, and several in a row up to the longest.

    short: the share of pieces that are a few words in a row out of one segment.
    """
    lengths = (1, 1, longest // 6, longest // 3, 2 * longest // 3, longest)
    pieces = []
    for segments in documents:
        start = 0
        while start < len(segments):
            if short and generator.random() < short:
                piece, start = _few_words(segments[start], generator), start + 1
            else:
                piece, start = joined(segments, generator.choice(lengths), start)
            if piece.tokens > 2:
                pieces.append(piece)
    return pieces


def _few_words(segment: Piece, generator: random.Random) -> Piece:
    """Cut a few words in a row out of a segment; its number of tokens is in proportion."""
    words = segment.text.split()
    count = min(generator.randint(*FEW), len(words))
    start = generator.randint(0, len(words) - count)
    return Piece(" ".join(words[start : start + count]), round(segment.tokens * count / max(len(words), 1)))


def grouped(pieces: Sequence[Piece], tokens: int, longest: int) -> Iterator[list[Piece]]:
    """Group pieces, in their order, into batches that have at most so many tokens once they are padded."""
    batch: list[Piece] = []
    widest = 0
    for piece in pieces:
        width = min(piece.tokens + 2, longest)
        if batch and max(widest, width) * (len(batch) + 1) > tokens:
            yield batch
            batch, widest = [], 0
        batch.append(piece)
        widest = max(widest, width)
    if batch:
        yield batch


def batches(
    documents: Sequence[Segments],
    tokenizer: Any,
    *,
    tokens: int,
    longest: int,
    seed: int,
    short: float = 0.0,
    packing: Packing | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield batches without end, the same for the same seed; each epoch cuts the documents elsewhere.

    With `packing`, a batch has texts of all lengths, so that no step learns about one length only. Without, it has
    padding, so its texts are of similar lengths.
    """
    epoch = 0
    while True:
        generator = random.Random(f"{seed} {epoch}")
        pieces = cut(documents, longest, generator, short)
        if not pieces:
            raise ValueError("the documents hold no text to learn from.")
        generator.shuffle(pieces)
        if packing is not None:
            for group in filled(pieces, tokens, longest):
                yield packing(encoded([piece.text for piece in group], tokenizer, longest))
        else:
            groups = []
            for start in range(0, len(pieces), WINDOW):
                window = sorted(pieces[start : start + WINDOW], key=lambda piece: piece.tokens)
                groups += list(grouped(window, tokens, longest))
            generator.shuffle(groups)
            for group in groups:
                yield encoded([piece.text for piece in group], tokenizer, longest)
        epoch += 1


def filled(pieces: Sequence[Piece], tokens: int, longest: int) -> Iterator[list[Piece]]:
    """Group pieces, in their order, into batches of about so many tokens, without padding."""
    batch: list[Piece] = []
    count = 0
    for piece in pieces:
        batch.append(piece)
        count += min(piece.tokens + 2, longest)
        if count >= tokens:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def packing_of(model: nn.Module, batch: dict[str, Tensor]) -> Packing | None:
    """Return how to pack batches for a model; None if it does not compute the same from a packed batch.

    Models count their positions from 0, or, as RoBERTa does, from the number after that of padding.
    """
    padding = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    with torch.inference_mode():
        wanted = embeddings(first_tensor(model(**batch)), batch)
        for first_position in (0, padding + 1):
            packed = pack(batch["input_ids"], batch["attention_mask"], first_position)
            try:
                given = embeddings(first_tensor(model(**packed)), packed)
            except (ValueError, TypeError, RuntimeError, IndexError):  # it does not take them, or not these positions
                continue
            if torch.allclose(given, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())):
                return partial(_packed, first_position=first_position)
    return None


def _packed(batch: dict[str, Tensor], first_position: int) -> dict[str, Any]:
    return pack(batch["input_ids"], batch["attention_mask"], first_position)


def encoded(texts: list[str], tokenizer: Any, longest: int) -> dict[str, Tensor]:
    """Return the arguments of a model for some texts."""
    return dict(tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt"))


def freeze_embeddings(model: nn.Module) -> None:
    """Leave a model's tables of words and positions as they are, which saves time."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)


def measured(documents: Sequence[Segments], count: int, special: int = 2) -> dict[int, list[Piece]]:
    """Return up to `count` pieces of each of LENGTHS tokens, special ones included, from all over the documents.

    Lengths that no pieces have are left out.
    """
    result = {}
    for length in LENGTHS:
        pieces = []
        for segments in documents:
            start = 0
            while start < len(segments):
                piece, start = joined(segments, round(length * (1 + WITHIN)) - special, start)
                if abs(piece.tokens + special - length) <= WITHIN * length:
                    pieces.append(piece)
        random.Random(length).shuffle(pieces)
        if pieces:
            result[length] = pieces[:count]
    if not result:
        raise ValueError(f"the test split has no texts of about {', '.join(map(str, LENGTHS))} tokens to measure on.")
    return result


def embedded(model: nn.Module, texts: Sequence[Piece], tokenizer: Any, longest: int) -> Tensor:
    """Return the normalised embeddings of texts, in their order: the mean of the last hidden states."""
    order = sorted(range(len(texts)), key=lambda index: texts[index].tokens)
    parts = []
    model.eval()
    with torch.inference_mode():
        for group in grouped([texts[index] for index in order], MEASURED_TOKENS, longest):
            batch = encoded([piece.text for piece in group], tokenizer, longest)
            parts.append(embeddings(first_tensor(model(**batch)), batch))
    vectors = nn.functional.normalize(torch.cat(parts), dim=-1)
    return vectors[torch.tensor(order).argsort()]


def pairs(name: str, split: str, tokenizer: Any) -> tuple[list[Piece], list[Piece]]:
    """Return both sides of a data set's pairs, for retrieval."""
    corpus = text.load(name, split)
    sides = []
    for side in (0, 1):
        texts = [pair[side] for pair in corpus.pairs()]
        sides.append([Piece(each, count) for each, count in zip(texts, _counts(texts, tokenizer), strict=True)])
    return sides[0], sides[1]


def queries(documents: Sequence[Segments], count: int, tokenizer: Any) -> tuple[list[Piece], list[Piece]] | None:
    """Return a few words in a row out of each of up to `count` texts, and the texts; None if there are none so long.

    Words are far shorter than what they have to find, so a model whose embeddings depend on length in another way than
    its original's finds less: a harder task than to recognise a paraphrase, which is as long.
    """
    generator = random.Random("queries")
    chosen = [piece for segments in documents for piece in segments if piece.tokens >= SEARCHED]
    chosen = generator.sample(chosen, min(count, len(chosen)))
    asked = []
    for piece in chosen:
        words = piece.text.split()
        start = generator.randrange(max(len(words) - QUERY, 0) + 1)
        asked.append(" ".join(words[start : start + QUERY]))
    if not chosen:
        return None
    return [Piece(each, tokens) for each, tokens in zip(asked, _counts(asked, tokenizer), strict=True)], chosen


def retrieval(source: Tensor, target: Tensor, *, both_ways: bool) -> float:
    """Return how often the nearest of all targets is a source's own; both ways: and the other way round, on average."""
    own = torch.arange(len(source))
    scores = source @ target.T
    hits = [(scores.argmax(dim) == own).float().mean() for dim in ((1, 0) if both_ways else (1,))]
    return float(torch.stack(hits).mean())
