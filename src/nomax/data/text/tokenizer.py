"""The vocabulary: one for both languages, learned by sentencepiece from the training split alone."""

import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from nomax import _files
from nomax.data.text.corpus import Corpus

PADDING, BEGIN, END, UNKNOWN, SEPARATOR = range(5)
SMALLEST = 5 + 256  # the special pieces, and one for each byte
MOST_SEGMENTS = 1_000_000  # that it learns from, spread evenly over the corpus: this bounds the memory
LONGEST_SEGMENT = 1 << 14  # bytes


class SizeError(ValueError):
    """The text yields no vocabulary of this size."""

    def __init__(self, message: str, nearest: int):
        super().__init__(message)
        self.nearest = nearest
        """The nearest size that it does yield."""


class Tokenizer:
    """Convert text to numbers and back. 0 is padding, 1 begin, 2 end, 3 unknown, 4 separates segments of a document.

    It spells what it did not see in training in bytes, so decode(encode(text)) is the text with single spaces.
    Only ▁, which is how sentencepiece spells a space, becomes a low line.
    """

    padding, begin, end, unknown, separator = PADDING, BEGIN, END, UNKNOWN, SEPARATOR

    def __init__(self, model: bytes, title: str = "tokenizer"):
        self._pieces = _library().SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"{title} is not a vocabulary of sentencepiece: {error}.") from error
        special = tuple(self._pieces.PieceToId(piece) for piece in ("<pad>", "<s>", "</s>", "<unk>", "<sep>"))
        if special != tuple(range(5)):
            raise ValueError(
                f"{title} was not made by nomax: its <pad>, <s>, </s>, <unk> and <sep> are {special}, not 0 to 4."
            )
        self.model = model
        self.digest = hashlib.sha256(model).hexdigest()

    @classmethod
    def train(cls, corpus: Corpus, vocabulary: int, path: str | os.PathLike[str] | None = None) -> "Tokenizer":
        """Learn `vocabulary` pieces from both sides of a corpus, and write them to `path`.

        The same corpus gives the same vocabulary, bit by bit.
        """
        if not isinstance(vocabulary, int) or vocabulary <= SMALLEST:
            raise ValueError(
                f"vocabulary is {vocabulary!r}; it must be more than {SMALLEST}: the bytes and special pieces."
            )
        model = io.BytesIO()
        try:
            _library().SentencePieceTrainer.Train(
                sentence_iterator=_segments(corpus),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocabulary,
                pad_id=PADDING,
                bos_id=BEGIN,
                eos_id=END,
                unk_id=UNKNOWN,
                control_symbols=["<sep>"],
                normalization_rule_name="identity",
                character_coverage=0.9999,
                byte_fallback=True,
                max_sentence_length=LONGEST_SEGMENT,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise _explained(error, vocabulary, corpus.title) from error
        tokenizer = cls(model.getvalue())
        if path is not None:
            tokenizer.save(path)
        return tokenizer

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read a vocabulary that was written by train or save."""
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"{file}: there is no such vocabulary.")
        return cls(file.read_bytes(), str(file))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary into a file, atomically."""
        _files.write(Path(path), self.model)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the pieces of a text, without begin and end."""
        return list(self._pieces.EncodeAsIds(_without_sign(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some pieces; special ones are silent. Segments of a document are joined by a space."""
        return " ".join(self.segments(ids))

    def segments(self, ids: Sequence[int]) -> list[str]:
        """Return the texts between separators: the translations of the single segments of a document."""
        for number in ids:
            if not 0 <= number < len(self):
                raise ValueError(f"{number} is no piece of this vocabulary, which has {len(self):,}.")
        parts: list[list[int]] = [[]]
        for number in ids:
            if number == SEPARATOR:
                parts.append([])
            elif number > SEPARATOR:
                parts[-1].append(int(number))
        return [str(self._pieces.DecodeIds(part)) for part in parts]

    def check(self, vocabulary: int, digest: str | None = None, title: str = "the checkpoint") -> None:
        """Raise ValueError unless this is the vocabulary of a model with so many pieces and, if known, this digest."""
        if vocabulary != len(self):
            raise ValueError(f"{title} has a vocabulary of {vocabulary:,} pieces, but this one has {len(self):,}.")
        if digest is not None and digest != self.digest:
            raise ValueError(
                f"{title} was trained with the vocabulary {digest[:12]}…, but this one is {self.digest[:12]}…: its "
                "pieces have other numbers. Use the vocabulary in the folder of the run."
            )

    def __len__(self) -> int:
        """Return the number of pieces."""
        return int(self._pieces.GetPieceSize())

    def __repr__(self) -> str:
        return f"Tokenizer({len(self):,} pieces, {self.digest[:12]}…)"

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[bytes]]:
        return Tokenizer, (self.model,)


def _segments(corpus: Corpus) -> Iterator[str]:
    every = max(1, -(-2 * len(corpus) // MOST_SEGMENTS))
    return (
        part for pair in islice(corpus.pairs(), 0, None, every) for text in pair for part in _parts(_without_sign(text))
    )


def _parts(text: str) -> list[str]:
    """Cut a text that is too long for sentencepiece into parts; a character has at most four bytes."""
    longest = LONGEST_SEGMENT // 4
    if len(text) <= longest or len(text.encode()) <= LONGEST_SEGMENT:
        return [text]
    return [text[start : start + longest] for start in range(0, len(text), longest)]


def _without_sign(text: str) -> str:
    return text.replace("▁", "_")


def _explained(error: RuntimeError, vocabulary: int, title: str) -> ValueError:
    """Turn what sentencepiece says into advice to users of nomax."""
    what = f"vocabulary is {vocabulary:,}, which sentencepiece cannot learn from {title}"
    if most := re.search(r"too high .* value <= (\d+)", str(error)):
        return SizeError(
            f"{what}: it has {int(most[1]):,} pieces at most. Pass --vocabulary {most[1]} or less, or take more text.",
            int(most[1]),
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
        return SizeError(
            f"{what}: its characters alone need {int(least[1]):,} pieces. Pass --vocabulary {least[1]} or more.",
            int(least[1]),
        )
    return ValueError(f"{what}: {error}.")


def _library() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ImportError("text needs sentencepiece: pip install sentencepiece") from error
    return sentencepiece
