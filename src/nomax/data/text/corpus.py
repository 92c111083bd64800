"""Pairs of segments in two languages, the documents that they make up, and the files that hold them.

Files are JSONL documents, or pairs of text files whose names say their languages: train.en and train.es.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("nomax.data")

LONGEST_LINE = 1 << 24  # bytes, so that a file that is no text does not fill the memory
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON spells a half, or two that make up a character
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*")  # en, deu, pt-BR, zh_Hans
_NEUTRAL = re.compile(  # endings that look like languages and are none
    "bak|bin|bpe|csv|dat|gz|idx|in|log|lst|md|npy|npz|out|raw|ref|src|tar|tgt|tmp|tok|trg|tsv|txt|xz|zip", re.IGNORECASE
)


class Pair(NamedTuple):
    """A segment (a sentence, a verse, a paragraph) and its translation."""

    source: str
    target: str


@dataclass(frozen=True)
class Document:
    """Pairs that belong together, in their order."""

    name: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Corpus:
    """The documents of one split."""

    documents: tuple[Document, ...]
    languages: tuple[str, str]
    """The marks of the source language and of the target language."""
    title: str = "corpus"

    def pairs(self) -> Iterator[Pair]:
        """Iterate over all pairs, document after document."""
        return (pair for document in self.documents for pair in document.pairs)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return sum(len(document.pairs) for document in self.documents)

    def digest(self) -> str:
        """Return a SHA-256 of the text: of its pairs and their order, and where documents end."""
        content = hashlib.sha256()
        for document in self.documents:
            content.update(b"\1")
            for pair in document.pairs:
                content.update("\0".join(["", *pair]).encode("utf-8", "surrogatepass"))
        return content.hexdigest()

    def turned(self) -> "Corpus":
        """Return the corpus with source and target exchanged."""
        return Corpus(
            tuple(
                Document(document.name, tuple(Pair(pair.target, pair.source) for pair in document.pairs))
                for document in self.documents
            ),
            (self.languages[1], self.languages[0]),
            self.title,
        )

    def __repr__(self) -> str:
        sizes = f"{len(self):,} pairs in {len(self.documents):,} documents"
        return f"Corpus({self.title}: {sizes}, {' to '.join(self.languages)})"


def write_jsonl(path: Path, documents: Iterable[Document], languages: tuple[str, str]) -> None:
    """Write documents as JSONL: in each line a name, and a list of segments under the mark of each language."""
    source, target = languages
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for document in documents:
            segments = {
                source: [pair.source for pair in document.pairs],
                target: [pair.target for pair in document.pairs],
            }
            file.write(json.dumps({"name": document.name, **segments}, ensure_ascii=False) + "\n")


def read_jsonl(path: Path, languages: tuple[str, str] | None = None) -> Corpus:
    """Read documents, one in each line: {"name": "Ruth 1", "en": ["…", …], "es": ["…", …]}.

    Without `languages`, the first line says which they are: it has two lists, the source first.
    """
    documents = []
    for number, text in _lines(path):
        where = f"{path}, line {number}"
        if not text.strip():
            continue
        columns = _object(text, where)
        name = columns.pop("name", None)
        name = f"{path.stem} {number}" if name is None else str(name)
        if languages is None:
            languages = _two_languages(columns, where)
        documents.append(_document(name, columns, languages, where))
    if not documents or languages is None:
        raise ValueError(f"{path} holds no documents.")
    return Corpus(tuple(documents), languages, str(path))


def is_jsonl(path: Path) -> bool:
    """Return whether a file's first line that is not empty begins an object, as in JSONL."""
    try:
        first = next((text.strip() for _, text in _lines(path) if text.strip()), "")
    except ValueError:
        return False
    return first.startswith("{")


def read_text_files(
    source: Path, target: Path, languages: tuple[str, str] | None = None, on_error: str = "raise"
) -> Corpus:
    """Read two files in which line i is the translation of line i.

    Their names say the languages, as in train.en and train.es; `languages` in the opposite order exchanges the two
    files. Files with neutral names, such as a.txt and b.txt, have the languages that `languages` says.

    A line that is empty in both files ends a document. Text in one file beside an empty line in the other is an error,
    as are bytes that are not UTF-8; with on_error="skip" such a pair is left out, and counted.
    """
    source, target, languages = _in_direction(source, target, languages)
    documents: list[Document] = []
    pairs: list[Pair] = []
    skipped = 0

    def close() -> None:
        if pairs:
            documents.append(Document(f"{source.stem} {len(documents) + 1}", tuple(pairs)))
            pairs.clear()

    for number, (ours, theirs) in enumerate(_line_pairs(source, target, on_error), 1):
        if ours is None or theirs is None:
            skipped += 1
        elif ours and theirs:
            pairs.append(Pair(ours, theirs))
        elif ours or theirs:
            if on_error == "raise":
                empty, other = (target, source) if ours else (source, target)
                raise ValueError(
                    f"{empty}, line {number} is empty, but line {number} of {other} is not. Leave both empty to end a "
                    'document there, or remove the line from both (in Python, on_error="skip" does it).'
                )
            skipped += 1
        else:
            close()
    close()
    if skipped:
        log.warning("%s pairs of %s and %s were left out: empty on one side, or not UTF-8", skipped, source, target)
    if not documents:
        raise ValueError(f"{source} and {target} hold no pairs.")
    return Corpus(tuple(documents), languages, ", ".join(dict.fromkeys((str(source), str(target)))))


def _line_pairs(source: Path, target: Path, on_error: str) -> Iterator[tuple[str | None, str | None]]:
    """Yield the lines of both files side by side, None for one that is not UTF-8."""
    sides = _lines(source, on_error), _lines(target, on_error)
    ended = object()
    while True:
        ours, theirs = (next(side, ended) for side in sides)
        if ours is ended and theirs is ended:
            return
        if ours is ended or theirs is ended:
            counts = [sum(1 for _ in _lines(path, "skip")) for path in (source, target)]
            raise ValueError(
                f"{source} has {counts[0]:,} lines, but {target} has {counts[1]:,}: line i of one must be the "
                "translation of line i of the other."
            )
        yield _spaced(ours), _spaced(theirs)


def _spaced(numbered: Any) -> str | None:
    text: str | None = numbered[1]
    return None if text is None else " ".join(text.split())


def _lines(path: Path, on_error: str = "raise") -> Iterator[tuple[int, Any]]:
    """Yield line numbers, from 1, and lines; with on_error="skip", None for a line that is not UTF-8."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise ValueError(f"{path}, line {number} has more than {LONGEST_LINE:,} bytes: is it a text file?")
            try:
                text = raw.decode()
                # A byte-order mark is no part of the text.
                yield number, text.removeprefix("\ufeff") if number == 1 else text
            except UnicodeDecodeError as error:
                if on_error == "raise":
                    raise ValueError(
                        f"{path}, line {number}, byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8. "
                        "Convert the file, with iconv for example."
                    ) from error
                yield number, None


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        columns = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # also a number with too many digits
        raise ValueError(f"{where} is not JSON: {error}.") from error
    if not isinstance(columns, dict):
        raise ValueError(f'{where} must be an object, such as {{"name": "…", "en": ["…"], "es": ["…"]}}.')
    if _SURROGATE.search(text):
        try:
            json.dumps(columns, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(
                f"{where} has {half}, half of a character (a lone surrogate). Write the whole one, or leave it out."
            ) from None
    return columns


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return columns


def _two_languages(columns: dict[str, Any], where: str) -> tuple[str, str]:
    marks = [mark for mark, column in columns.items() if isinstance(column, list)]
    if len(marks) != 2:
        raise ValueError(
            f"{where} has lists for {', '.join(marks) or 'no language'}; there must be two, or --languages says which "
            "(for a language model, --language; in Python, `languages`)."
        )
    return marks[0], marks[1]


def _document(name: str, columns: dict[str, Any], languages: tuple[str, str], where: str) -> Document:
    sides: list[list[str]] = []
    for mark in languages:
        if mark not in columns:
            raise ValueError(f"{where} ({name}): unknown language mark {mark!r}; it has {', '.join(columns)}.")
        column = columns[mark]
        if not isinstance(column, list) or not all(isinstance(text, str) for text in column):
            raise ValueError(f"{where} ({name}): {mark!r} must be a list of strings.")
        sides.append([" ".join(text.split()) for text in column])
    if len(sides[0]) != len(sides[1]):
        counts = [f"{len(side):,} segments in {mark}" for side, mark in zip(sides, languages, strict=True)]
        raise ValueError(f"{where} ({name}) has {counts[0]}, but {counts[1]}.")
    for number, pair in enumerate(zip(*sides, strict=True), 1):
        if not all(pair):
            empty = languages[0] if not pair[0] else languages[1]
            raise ValueError(f"{where} ({name}): segment {number} is empty in {empty}. Leave the pair out.")
    if not sides[0]:
        raise ValueError(f"{where} ({name}) has no segments.")
    return Document(name, tuple(Pair(*pair) for pair in zip(*sides, strict=True)))


def language_of(path: Path, languages: tuple[str, ...] = ()) -> str | None:
    """Return the language in a file's name, one of these or what looks like one: en for train.en and train.en.txt."""
    for word in reversed([suffix[1:] for suffix in path.suffixes]):
        if word in languages or (_LANGUAGE.fullmatch(word) and not _NEUTRAL.fullmatch(word)):
            return word
    return None


def _in_direction(source: Path, target: Path, languages: tuple[str, str] | None) -> tuple[Path, Path, tuple[str, str]]:
    """Return the two files in the order of the languages, and the languages."""
    if languages is None:
        by_name = language_of(source) or source.suffix[1:], language_of(target) or target.suffix[1:]
        if not all(by_name) or by_name[0] == by_name[1]:
            raise ValueError(
                f"which languages are {source.name} and {target.name}? Name them as in train.en and train.es, or pass "
                '--languages en es (in Python, languages=("en", "es")).'
            )
        return source, target, by_name
    named = language_of(source, languages), language_of(target, languages)
    if named[0] == named[1]:  # then they do not tell the files apart
        named = None, None
    for files, marks in (((source, target), named), ((target, source), named[::-1])):
        if all(word in (None, language) for word, language in zip(marks, languages, strict=True)):
            return *files, languages
    unknown = next(word for word in languages if word not in named)
    there = " and ".join(f"{path} is {word}" for path, word in zip((source, target), named, strict=True) if word)
    raise ValueError(
        f"unknown language mark {unknown!r}: by its name {there}, but {' and '.join(languages)} are wanted. Take other "
        "files, rename them, or pass --languages with their marks (in Python, `languages`)."
    )
