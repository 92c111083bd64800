"""Reading the user's own text: JSONL documents, and pairs of text files, with errors that say where."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nomax.data.text.corpus import Corpus, Document, Pair
from nomax.data.text.marks import directed

log = logging.getLogger("nomax.data")

LONGEST_LINE = 1 << 24  # bytes, so that a file that is no text does not fill the memory
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON spells a half, or two that make up a character


def jsonl(path: Path, languages: tuple[str, str] | None = None) -> Corpus:
    """Documents, one in each line: {"name": "Ruth 1", "en": ["…", …], "es": ["…", …]}.

    Without `languages`, the two lists of the first line say which, the source first.
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
    """Whether a file's first line that is not empty begins an object, as in JSONL."""
    try:
        first = next((text.strip() for _, text in _lines(path) if text.strip()), "")
    except ValueError:
        return False
    return first.startswith("{")


def text_files(source: Path, target: Path, languages: tuple[str, str] | None = None, on_error: str = "raise") -> Corpus:
    """Two files in which line i is the translation of line i.

    Their names say the languages, as in train.en and train.es: `languages` the other way round turns them. Files with
    neutral names, such as a.txt and b.txt, have the languages that `languages` says.

    A line that is empty in both files ends a document. Text in one file beside an empty line in the other is an error,
    as are bytes that are not UTF-8; with on_error="skip" such a pair is left out, and counted.
    """
    source, target, languages = directed(source, target, languages)
    documents: list[Document] = []
    pairs: list[Pair] = []
    skipped = 0

    def close() -> None:
        if pairs:
            documents.append(Document(f"{source.stem} {len(documents) + 1}", tuple(pairs)))
            pairs.clear()

    for number, (ours, theirs) in enumerate(_together(source, target, on_error), 1):
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


def _together(source: Path, target: Path, on_error: str) -> Iterator[tuple[str | None, str | None]]:
    """Lines of both files, None for one that is not UTF-8."""
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
    """Numbers, from 1, and lines of a file; with on_error="skip", None for a line that is not UTF-8."""
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
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # also a number with too many digits
        raise ValueError(f"{where} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f'{where} must be an object, such as {{"name": "…", "en": ["…"], "es": ["…"]}}.')
    if _SURROGATE.search(text):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(
                f"{where} has {half}, half of a character (a lone surrogate). Write the whole one, or leave it out."
            ) from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


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
