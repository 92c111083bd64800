"""Lines or documents in, their translations out, in the same order and number, as they come."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from nomax.data.text import Tokenizer
from nomax.evaluate.translation import SEARCH, Search, Tokens, translate
from nomax.models import ReLUFormer

BLOCK = 1 << 16  # bytes that are read at once, if so many are there
LONGEST_LINE = 1 << 24  # bytes, so that something that is no text does not fill the memory

LONGEST_DOCUMENT = 10_000  # lines; a longer one is translated in parts, for the same reason

# Where a segment that is too long may be cut: after a sentence, after a word.
_CUTS = (re.compile(r"(?<=[.!?…;:])\s+"), re.compile(r"\s+"))

Segment = list[Tokens]  # the parts of a segment: one, unless it had to be cut
Document = list[Segment]


class InputError(ValueError):
    """Some input cannot be translated; `before` are the lines of output that belong to what came before it."""

    before: tuple[str, ...] = ()


def blocks(stream: IO[bytes]) -> Iterator[list[bytes]]:
    """The lines of a stream, as many at a time as have come in; it never waits for more than one."""
    read = getattr(stream, "read1", stream.read)
    rest = b""
    while chunk := read(BLOCK):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise InputError(f"a line has more than {LONGEST_LINE:,} bytes: is this a text?")
        if whole:
            yield whole
    if rest:
        yield [rest]


class Translator:
    """Translates blocks of lines. documents: None for single lines, "lines" or "jsonl" as `nomax translate` has it."""

    def __init__(
        self,
        model: ReLUFormer,
        tokenizer: Tokenizer,
        how: Search = SEARCH,
        documents: str | None = None,
        split: bool = False,
        languages: Sequence[str] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.how, self.documents, self.split = model, tokenizer, how, documents, split
        self.languages = languages
        self.longest = model.config.max_length - 1  # and the end
        self.lines, self.stretches, self.uneven = 0, 0, 0
        self._open: Document = []  # lines of a document whose end has not come yet

    def take(self, block: Iterable[bytes]) -> list[str]:
        """The lines of output that the next lines of input make possible."""
        parsed: list[Document] = []  # one for each line (or JSONL document), or for each document with its empty line
        names: list[dict[str, Any]] = []
        try:
            for raw in block:
                self.lines += 1
                text = self._decoded(raw)
                if self.documents == "jsonl":
                    about, segments = self._object(text)
                    where = f"line {self.lines}, segment"
                    parsed.append([self._parts(s, f"{where} {n}") for n, s in enumerate(segments, 1)])
                    names.append(about)
                elif self.documents == "lines" and text:
                    self._open.append(self._parts(text, f"line {self.lines}"))
                    if len(self._open) == LONGEST_DOCUMENT:
                        parsed.append(self._open)
                        self._open = []
                else:
                    parsed.append([*self._open, self._parts(text, f"line {self.lines}")])
                    self._open = []
        except InputError as error:
            error.before = tuple(self._written([*parsed, *([self._open] if self._open else [])], names))
            raise
        return self._written(parsed, names)

    def end(self) -> list[str]:
        """What is left when the input has ended: a last document without an empty line after it."""
        last, self._open = self._open, []
        return self._written([last], []) if last else []

    def _written(self, parsed: list[Document], names: list[dict[str, Any]]) -> list[str]:
        translated = self._whole(parsed) if self.documents else self._single(parsed)
        if self.documents != "jsonl":
            return [text for document in translated for text in document]
        mark = self.languages[-1] if self.languages else "translation"
        both = zip(names, translated, strict=True)
        return [json.dumps({**about, mark: texts}, ensure_ascii=False) for about, texts in both]

    def _single(self, documents: list[Document]) -> list[list[str]]:
        """Translate each segment by itself."""
        parts = [part for document in documents for segment in document for part in segment]
        found = iter(translate(self.model, parts, self.how))
        return [
            [" ".join(filter(None, (self._text(next(found)) for _ in segment))) for segment in document]
            for document in documents
        ]

    def _whole(self, documents: list[Document]) -> list[list[str]]:
        """Translate documents in stretches of as many whole segments as fit into the model."""
        stretches = [(number, places) for number, one in enumerate(documents) for places in self._packed(one)]
        sources = []
        for number, places in stretches:
            tokens: Tokens = []
            for place in places:
                tokens += [*([self.tokenizer.separator] if tokens else []), *documents[number][place][0]]
            sources.append(tokens)
        texts = [["" for _ in document] for document in documents]
        alone = [(number, place) for number, d in enumerate(documents) for place, s in enumerate(d) if len(s) > 1]
        for (number, places), found in zip(stretches, translate(self.model, sources, self.how), strict=True):
            segments = self.tokenizer.segments(found)
            if len(segments) != len(places):
                self.uneven += 1
                alone += [(number, place) for place in places]
                continue
            for place, segment in zip(places, segments, strict=True):
                texts[number][place] = " ".join(segment.split())
        self.stretches += len(stretches)
        for (number, place), (text,) in zip(alone, self._single([[documents[n][p]] for n, p in alone]), strict=True):
            texts[number][place] = text
        return texts

    def _packed(self, document: Document) -> list[list[int]]:
        """The places of segments that are translated together. Empty ones, and those in parts, are left out."""
        stretches: list[list[int]] = []
        room = 0
        for place, segment in enumerate(document):
            if len(segment) == 1 and segment[0]:
                needed = len(segment[0]) + 1  # the separator before it, or the end
                if needed > room:
                    stretches.append([])
                    room = self.longest + 1
                stretches[-1].append(place)
                room -= needed
        return stretches

    def _parts(self, text: str, where: str) -> Segment:
        tokens = self.tokenizer.encode(text)
        if len(tokens) <= self.longest:
            return [tokens]
        if not self.split:
            raise InputError(
                f"{where} has {len(tokens):,} tokens, more than the {self.longest:,} of this model: “{text[:50]}…”. "
                "Split it, or let --split do that."
            )
        return [self.tokenizer.encode(part) for part in self._cut(text, 0)]

    def _cut(self, text: str, level: int) -> list[str]:
        """A text in as few parts that fit as can be, cut after sentences, else after words, else anywhere."""
        if level == len(_CUTS):
            middle = len(text) // 2
            halves = [text[:middle], text[middle:]] if middle else []
            return [part for half in halves for part in ([half] if self._fits(half) else self._cut(half, level))]
        parts: list[str] = []
        for piece in _CUTS[level].split(text):
            if parts and self._fits(f"{parts[-1]} {piece}"):
                parts[-1] = f"{parts[-1]} {piece}"
            else:
                parts += [piece] if self._fits(piece) else self._cut(piece, level + 1)
        return parts

    def _fits(self, text: str) -> bool:
        return len(self.tokenizer.encode(text)) <= self.longest

    def _text(self, tokens: Tokens) -> str:
        # Byte pieces can spell a line break, which would make two lines of one.
        return " ".join(self.tokenizer.decode(tokens).split())

    def _decoded(self, raw: bytes) -> str:
        try:
            text = raw.decode("utf-8-sig" if self.lines == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"line {self.lines}, byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8. Convert the text, "
                "with iconv for example."
            ) from error
        return text if self.documents == "jsonl" else " ".join(text.split())

    def _object(self, text: str) -> tuple[dict[str, Any], list[str]]:
        """What a line of JSONL says besides its segments, and these."""
        example = '{"name": "…", "' + (self.languages[0] if self.languages else "segments") + '": ["…", …]}'
        try:
            found = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"line {self.lines} is not JSON: {error}. It must be such as {example}.") from error
        lists = (
            {key: value for key, value in found.items() if isinstance(value, list)} if isinstance(found, dict) else {}
        )
        mark = self.languages[0] if self.languages and self.languages[0] in lists else next(iter(lists), None)
        if mark is None or not all(isinstance(segment, str) for segment in lists[mark]):
            raise InputError(f"line {self.lines} must be an object with a list of texts, such as {example}.")
        if self.languages and len(lists) > 1 and mark != self.languages[0]:
            raise InputError(f"line {self.lines} has lists for {', '.join(lists)}, but none for {self.languages[0]!r}.")
        about = {key: value for key, value in found.items() if key not in lists}
        return about, [" ".join(segment.split()) for segment in lists[mark]]
