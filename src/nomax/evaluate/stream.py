"""Lines or documents in, their translations out, in the same order and number, as they come."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from nomax.evaluate.translator import Document, Segment, TooLongError, Translator

BLOCK = 1 << 16  # bytes that are read at once, if so many are there
LONGEST_LINE = 1 << 24  # bytes, so that something that is no text does not fill the memory

LONGEST_DOCUMENT = 10_000  # lines; a longer one is translated in parts, for the same reason


class InputError(ValueError):
    """Some input cannot be translated; `before` are the lines of output that belong to what came before it."""

    before: tuple[str, ...] = ()


def blocks(stream: IO[bytes]) -> Iterator[list[bytes]]:
    """The lines of a stream, as many at a time as have come in; it never waits for more than one.

    Of a line that is too long the beginning comes, and nothing after it: Stream.take says what is wrong.
    """
    read = getattr(stream, "read1", stream.read)
    rest = b""
    while chunk := read(BLOCK):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            break
        if whole:
            yield whole
            whole = []
    if rest:
        yield [*whole, rest]


class Stream:
    """Translates blocks of lines. documents: None for single lines, "lines" or "jsonl" as `nomax translate` has it.

    split: cut what is too long for the model, instead of raising InputError. languages: source and target, if known.
    """

    def __init__(
        self,
        translator: Translator,
        documents: str | None = None,
        split: bool = False,
        languages: Sequence[str] | None = None,
    ) -> None:
        self.translator, self.documents, self.split, self.languages = translator, documents, split, languages
        self.lines = 0
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
                    if text:
                        about, segments = self._object(text)
                        where = f"line {self.lines}, segment"
                        parsed.append([self._segment(s, f"{where} {n}") for n, s in enumerate(segments, 1)])
                        names.append(about)
                elif self.documents == "lines" and text:
                    self._open.append(self._segment(text, f"line {self.lines}"))
                    if len(self._open) == LONGEST_DOCUMENT:
                        parsed.append(self._open)
                        self._open = []
                else:
                    parsed.append([*self._open, self._segment(text, f"line {self.lines}")])
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
        translated = self.translator.translate(parsed)
        if self.documents != "jsonl":
            return [text for document in translated for text in document]
        both = zip(names, translated, strict=True)
        return [json.dumps({**about, self._mark: texts}, ensure_ascii=False) for about, texts in both]

    @property
    def _mark(self) -> str:
        """What the list of translations is called in JSONL."""
        return self.languages[-1] if self.languages else "translation"

    def _segment(self, text: str, where: str) -> Segment:
        try:
            return self.translator.segment(text, self.split)
        except TooLongError as error:
            raise InputError(f"{where} {error} Split it, or let --split do that.") from error

    def _decoded(self, raw: bytes) -> str:
        if len(raw) > LONGEST_LINE:
            raise InputError(f"line {self.lines} has more than {LONGEST_LINE:,} bytes: is this a text?")
        try:
            text = raw.decode()
            # A byte-order mark is no part of the text.
            return (text.removeprefix("\ufeff") if self.lines == 1 else text).strip()
        except UnicodeDecodeError as error:
            raise InputError(
                f"line {self.lines}, byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8. Convert the text, "
                "with iconv for example."
            ) from error

    def _object(self, text: str) -> tuple[dict[str, Any], list[str]]:
        """What a line of JSONL says besides its segments, and these."""
        example = '{"name": "…", "' + (self.languages[0] if self.languages else "segments") + '": ["…", …]}'
        try:
            found = json.loads(text)
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise InputError(f"line {self.lines} has {half} alone, which is only half of a character.") from error
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"line {self.lines} cannot be read as JSON: {error}. It must be such as {example}."
            ) from error
        lists = [key for key, value in found.items() if isinstance(value, list)] if isinstance(found, dict) else []
        mark = self.languages[0] if self.languages else next(iter(lists), "")
        if lists and mark not in lists:
            raise InputError(f"line {self.lines}: unknown language mark {mark!r}; it has {', '.join(lists)}.")
        if not lists or not all(isinstance(segment, str) for segment in found[mark]):
            raise InputError(f"line {self.lines} must be an object with a list of texts, such as {example}.")
        return {key: value for key, value in found.items() if key not in (mark, self._mark)}, found[mark]
