"""How texts are translated: searched for in batches, packed where the model knows documents, cut where too long."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nomax.data.text import Tokenizer, TokenOrder
from nomax.data.text.batches import pad
from nomax.models import ReLUFormer
from nomax.models.search import search

# Of max_length, what a stretch of a document fills with its source. The translation must fit into max_length, too, and
# can be longer: of the stretches of bible-en-es in 256 tokens, a fifth would not if they filled all; of 3/4, all do.
SHARE = 0.75

# Where a segment that is too long may be cut: after a sentence, after a word.
_CUTS = (re.compile(r"(?<=[.!?…;:])\s+"), re.compile(r"\s+"))

Tokens = list[int]
Segment = list[Tokens]  # the parts of a segment: one, unless it had to be cut
Document = list[Segment]
Report = Callable[[int], None]  # is told how many more are done
Start = Callable[[int], Report]  # is told how many there will be


def silent(total: int) -> Report:
    """A Start that shows nothing."""
    return lambda done: None


@dataclass(frozen=True)
class Search:
    """How translations are searched for, and how many tokens of sources pass through the model at a time."""

    beams: int = 4
    length_penalty: float = 0.6
    tokens: int = 4096


SEARCH = Search()


def translate(model: ReLUFormer, sources: Sequence[Tokens], how: Search = SEARCH) -> Iterator[tuple[int, Tokens]]:
    """The number and the best translation of each source, as they are found. Tokens are without begin and end."""
    if not sources:
        return
    lengths = [len(source) + 1 for source in sources]
    order = TokenOrder(lengths, max(how.tokens, max(lengths)), shuffle=False)
    device = next(model.parameters()).device
    for step in range(order.steps_per_epoch):
        numbers = [int(number) for number in order.batch(step)]
        source = pad([[*sources[number], model.config.end] for number in numbers], device)
        best = search(model, source, beams=how.beams, length_penalty=how.length_penalty)
        for number, hypotheses in zip(numbers, best, strict=True):
            yield number, hypotheses[0].tokens


class TooLongError(ValueError):
    """A text has more tokens than the model can read."""


class Translator:
    """Translates documents, which are lists of segments. whole: as many segments at once as fit, else one by one."""

    def __init__(self, model: ReLUFormer, tokenizer: Tokenizer, how: Search = SEARCH, whole: bool = False) -> None:
        self.model, self.tokenizer, self.how, self.whole = model, tokenizer, how, whole
        self.longest = model.config.max_length - 1  # and the end
        self.room = int(SHARE * model.config.max_length)
        self.stretches, self.uneven = 0, 0

    def segment(self, text: str, split: bool = True) -> Segment:
        """A text as the model reads it. One that is too long is cut after sentences or words, or else an error."""
        text = " ".join(text.split())
        tokens = self.tokenizer.encode(text)
        if len(tokens) <= self.longest:
            return [tokens]
        if not split:
            limit = f"more than the {self.longest:,} of this model"
            raise TooLongError(f"has {len(tokens):,} tokens, {limit}: “{text[:50]}…”.")
        return [self.tokenizer.encode(part) for part in self._cut(text, 0)]

    def translate(self, documents: Sequence[Document], start: Start = silent) -> list[list[str]]:
        """A text for each segment of each document; for an empty one, an empty text.

        What is translated at once is a stretch. One that comes back with another number of segments is `uneven`: its
        halves are translated again, down to single segments.
        """
        parts = [part for document in documents for segment in document for part in segment]
        texts = ["" for _ in parts]
        stretches = self._packed(documents)
        report = start(sum(map(len, stretches)))
        self.stretches += len(stretches)
        uneven = self._round(parts, stretches, texts, report)
        self.uneven += len(uneven)
        while uneven:
            halves = [half for stretch in uneven for half in _halves(stretch)]
            uneven = self._round(parts, halves, texts, report)
        found = iter(texts)
        return [[joined([next(found) for _ in segment]) for segment in document] for document in documents]

    def _round(
        self, parts: list[Tokens], stretches: list[list[int]], texts: list[str], report: Report
    ) -> list[list[int]]:
        """Translate stretches, put what comes back into `texts`, and return the uneven ones."""
        uneven: list[list[int]] = []
        for number, tokens in translate(self.model, [self._source(parts, one) for one in stretches], self.how):
            stretch = stretches[number]
            # Byte pieces can spell a line break, which would make two lines of one.
            found = [" ".join(text.split()) for text in self.tokenizer.segments(tokens)]
            found = [joined(found)] if len(stretch) == 1 else found
            if len(found) != len(stretch):
                uneven.append(stretch)
                continue
            for place, text in zip(stretch, found, strict=True):
                texts[place] = text
            report(len(stretch))
        return uneven

    def _source(self, parts: list[Tokens], stretch: list[int]) -> Tokens:
        first, *others = stretch
        return parts[first] + [token for place in others for token in (self.tokenizer.separator, *parts[place])]

    def _packed(self, documents: Sequence[Document]) -> list[list[int]]:
        """The places of parts that are translated together. What was cut stays alone; what is empty is left out."""
        stretches: list[list[int]] = []
        place = -1
        for document in documents:
            room = 0
            for segment in document:
                for part in segment:
                    place += 1
                    needed = len(part) + 1  # the separator before it, or the end
                    if not part:
                        continue
                    if not self.whole or len(segment) > 1:
                        stretches.append([place])
                        room = 0
                    elif needed > room:
                        stretches.append([place])
                        room = self.room - needed
                    else:
                        stretches[-1].append(place)
                        room -= needed
        return stretches

    def _cut(self, text: str, level: int) -> list[str]:
        """A text in parts that fit, cut after sentences, else after words, else anywhere."""
        if level == len(_CUTS):
            middle = len(text) // 2
            halves = [text[:middle], text[middle:]] if middle else []
            return [part for half in halves for part in ([half] if self._fits(half) else self._cut(half, level))]
        parts: list[str] = []
        for piece in _CUTS[level].split(text):
            if parts and len(self.tokenizer.encode(f"{parts[-1]} {piece}")) < self.room:
                parts[-1] = f"{parts[-1]} {piece}"
            else:
                parts += [piece] if self._fits(piece) else self._cut(piece, level + 1)
        return parts

    def _fits(self, text: str) -> bool:
        return len(self.tokenizer.encode(text)) <= self.longest


def _halves(stretch: list[int]) -> tuple[list[int], list[int]]:
    middle = len(stretch) // 2
    return stretch[:middle], stretch[middle:]


def joined(texts: Sequence[str]) -> str:
    """One text of several, without those that are empty."""
    return " ".join(text for text in texts if text)
