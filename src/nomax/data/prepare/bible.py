"""The Bible in two editions, verse by verse, from modules in SWORD's zText format.

pysword knows how each tradition numbers the verses. The blocks are read here, because pysword unpacks a whole book
again for every verse, keeps its files open and takes a block that it cannot unpack for an empty one.
"""

import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nomax.data.prepare.packages import Job, members
from nomax.data.text.corpus import Document, Pair

Verse = tuple[str, int, int]  # book, chapter, verse

# Whole books, of both testaments, without parallel passages elsewhere: not the gospels, which tell the same story, nor
# Samuel, Kings and Chronicles, nor Psalms, Isaiah, Jeremiah, Ezra and Nehemiah, which repeat chapters of other books.
TEST = ("Esth", "Eccl", "Dan", "Jas", "Rev")
VALID = ("Ruth", "Song", "Nah", "Hab", "Mal", "1Cor")
RULE = f"by book; test: {', '.join(TEST)}; valid: {', '.join(VALID)}"

# Here the two editions number the verses differently, so that verse i is not verse i: found by comparing the lengths of
# neighbours, and by reading.
RENUMBERED = {
    *(("Num", 13), ("Num", 30), ("Judg", 14), ("1Sam", 24), ("2Sam", 2), ("1Kgs", 18), ("1Kgs", 22), ("1Chr", 1)),
    *(("1Chr", 2), ("1Chr", 21), ("2Chr", 33), ("Job", 39), ("Job", 40), ("Hos", 12), ("Jonah", 2), ("2Cor", 13)),
}
LARGEST_BOOK = 1 << 24  # bytes of a block, which is a book or a part of one
# A verse much longer than its translation holds more than the verse: a colophon, a glossary, a neighbour.
MOST_UNEQUAL = 2

_DROPPED = re.compile(r"<(note|speaker)\b[^>]*(?<!/)>.*?</\1>", re.DOTALL)
_INSIDE_WORDS = re.compile(r"</?(?:w|q|seg|name|catchWord|divineName)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")


def prepare(job: Job) -> dict[str, Any]:
    """Align the English and the Spanish edition by the number of the verse; a document is a chapter."""
    return _aligned(job, _world_english(job), read(job.packages["sword-text-sparv"], "kjv"), ("en", "es"), RENUMBERED)


def prepare_english(job: Job) -> dict[str, Any]:
    """Align two English editions, the King James Version and the World English Bible, which number verses alike."""
    return _aligned(job, read(job.packages["sword-text-kjv"], "kjv"), _world_english(job), ("kjv", "en"), set())


def _world_english(job: Job) -> dict[Verse, str]:
    return read(job.packages["sword-text-web"], "nrsva")


def _aligned(
    job: Job,
    sources: dict[Verse, str],
    targets: dict[Verse, str],
    languages: tuple[str, str],
    renumbered: set[tuple[str, int]],
) -> dict[str, Any]:
    job.report("reading verses", len(sources), len(sources), "verses")
    dropped: Counter[str] = Counter()
    chapters: dict[tuple[str, int], list[Pair]] = {}
    for verse, target in targets.items():
        book, chapter, _ = verse
        source = sources.get(verse, "")
        if not source and not target:
            continue
        if (book, chapter) in renumbered:
            dropped["verses of chapters that are numbered differently"] += 1
        elif not source or not target:
            dropped["verses in one edition only"] += 1
        elif not 1 / MOST_UNEQUAL < len(source) / len(target) < MOST_UNEQUAL:
            dropped["verses of very different lengths"] += 1
        else:
            chapters.setdefault((book, chapter), []).append(Pair(source, target))
    documents = (
        (_split(book), Document(f"{book} {chapter}", tuple(pairs))) for (book, chapter), pairs in chapters.items()
    )
    return job.write_documents(documents, languages, dropped=dropped, rule=RULE)


def read(package: Path, numbering: str) -> dict[Verse, str]:
    """Read the verses of a package, cleaned, in the order of the canon."""
    files = {Path(name).name: content for name, content in members(package, lambda name: "/ztext/" in name)}
    missing = {f"{testament}.bz{kind}" for testament in ("ot", "nt") for kind in "vsz"} - set(files)
    if missing:
        raise ValueError(f"{package.name} lacks {', '.join(sorted(missing))}.")
    return {
        verse: clean(text)
        for testament in ("ot", "nt")
        for verse, text in _testament(files, testament, numbering, package.name)
    }


def clean(text: str) -> str:
    """Strip notes, names of speakers and markup from a verse."""
    text = _TAG.sub(" ", _INSIDE_WORDS.sub("", _DROPPED.sub(" ", text)))
    return re.sub(r" (?=[,.;:!?)”’])|(?<=[¿¡(“‘]) ", "", " ".join(text.split()))


def _testament(files: dict[str, bytes], testament: str, numbering: str, title: str) -> Iterator[tuple[Verse, str]]:
    from pysword.canons import canons

    places, blocks, texts = (files[f"{testament}.bz{kind}"] for kind in "vsz")
    at, block, text = 2, -1, b""  # the first two places are the module's and the testament's headings
    for _, book, _, lengths in canons[numbering][testament]:
        at += 1  # the book's heading
        for chapter, verses in enumerate(lengths, 1):
            at += 1  # the chapter's heading
            for verse in range(1, verses + 1):
                if (at + 1) * 10 > len(places):
                    return  # a module may end before the canon
                needed, start, length = struct.unpack_from("<IIH", places, at * 10)
                if needed != block and length:
                    try:
                        offset, size, _ = struct.unpack_from("<III", blocks, needed * 12)
                        unpacker = zlib.decompressobj()
                        block, text = needed, unpacker.decompress(texts[offset : offset + size], LARGEST_BOOK)
                        if not unpacker.eof:
                            raise zlib.error(f"it is cut off, or has more than {LARGEST_BOOK:,} bytes")
                    except (struct.error, zlib.error) as error:
                        raise ValueError(f"{title}: {book} {chapter}:{verse} cannot be read: {error}.") from error
                yield (book, chapter, verse), text[start : start + length].decode("utf-8") if length else ""
                at += 1


def _split(book: str) -> str:
    return "test" if book in TEST else "valid" if book in VALID else "train"
