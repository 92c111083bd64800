"""Pairs of segments in two languages, the documents that they make up, and how they lie in a file."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


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
    """Of the source and of the target."""
    title: str = "corpus"

    def pairs(self) -> Iterator[Pair]:
        """All pairs, document after document."""
        return (pair for document in self.documents for pair in document.pairs)

    def __len__(self) -> int:
        """How many pairs there are."""
        return sum(len(document.pairs) for document in self.documents)

    def digest(self) -> str:
        """A SHA-256 of the text: of its pairs and their order, and where documents end."""
        content = hashlib.sha256()
        for document in self.documents:
            content.update(b"\1")
            for pair in document.pairs:
                content.update("\0".join(["", *pair]).encode("utf-8", "surrogatepass"))
        return content.hexdigest()

    def turned(self) -> "Corpus":
        """The same corpus with source and target exchanged."""
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


def line(document: Document, languages: tuple[str, str]) -> str:
    """A document as one line of a JSONL file: its name, and a list of segments under the mark of each language."""
    source, target = languages
    columns = {source: [pair.source for pair in document.pairs], target: [pair.target for pair in document.pairs]}
    return json.dumps({"name": document.name, **columns}, ensure_ascii=False)


def write(path: Path, documents: Iterable[Document], languages: tuple[str, str]) -> None:
    """Write documents as a JSONL file."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line(document, languages)}\n" for document in documents)
