"""Examples, which a model is shown whole: a pair, or stretches of documents cut and joined to a length in tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from nomax.data.text.corpus import Corpus
from nomax.data.text.tokenizer import SEPARATOR, Tokenizer

Tokens = list[int]
Place = tuple[int, int]  # the number of the document, and of the pair in it


@dataclass(frozen=True)
class Example:
    """Tokens of a source and its target, without begin and end; where they hold several pairs, separated by 4."""

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
