"""Manual pages in English and a translation, paragraph by paragraph: translations keep the paragraphs of a page."""

import re
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from nomax.data.arrays import Job
from nomax.data.packages import members, unpack
from nomax.data.text.corpus import Document, Pair
from nomax.data.text.prepared import split_of, write_splits
from nomax.data.text.roff import Unreadable, paragraphs

RULE = "by page, of whose name without digits a hash decides: 5 % valid, 5 % test; pages of a series stay together"

# The heading of what a translation adds at its end, about the translators.
_COLOPHON = re.compile(r"^\.SH \"?(?:ÜBERSETZUNG|TRADUCTION)\b.*", re.MULTILINE | re.DOTALL)
LARGEST_PAGE = 1 << 24  # bytes


def prepare(job: Job) -> dict[str, Any]:
    """Align each page with its translation; a document is a page."""
    language = job.name.rpartition("-")[2]
    english = _pages(job, ("manpages", "manpages-dev"), "")
    translated = _pages(job, (f"manpages-{language}", f"manpages-{language}-dev"), f"{language}/")
    dropped: Counter[str] = Counter()
    documents = []
    names = sorted(set(english) & set(translated))
    for number, name in enumerate(names):
        job.report("reading pages", number + 1, len(names), "pages")
        try:
            ours = paragraphs(english[name])
            theirs = paragraphs(_COLOPHON.sub("", translated[name]))
        except Unreadable:
            dropped["pages that program roff"] += 1
            continue
        if [paragraph.kind for paragraph in ours] != [paragraph.kind for paragraph in theirs]:
            dropped["pages whose translation has other paragraphs"] += 1
            continue
        pairs = []
        for source, target in zip(ours, theirs, strict=True):
            # They are the same on almost every page, so that half of the pairs of a test would be known by heart.
            if source.kind == "SH":
                dropped["headings of sections"] += 1
            elif source.text == target.text:
                dropped["paragraphs that are not translated"] += 1
            else:
                pairs.append(Pair(source.text, target.text))
        if pairs:
            documents.append((split_of(_series(name)), Document(name, tuple(pairs))))
    return write_splits(job, documents, ("en", language), dict(dropped), RULE)


def _series(name: str) -> str:
    """What pages of a series have in common, such as iso_8859-1.7 and iso_8859-2.7, or sections 2 and 3 of a name."""
    return re.sub(r"[\d_-]", "", PurePosixPath(name).stem)


def _pages(job: Job, packages: tuple[str, ...], folder: str) -> dict[str, str]:
    """Pages by section and name, such as man2/open.2."""
    page = re.compile(rf"usr/share/man/{folder}(man\d/[^/]+)\.gz")
    found = {}
    for package in packages:
        for name, content in members(job.packages[package], lambda name: page.fullmatch(name) is not None):
            match = page.fullmatch(name)
            assert match is not None
            found[match[1]] = _text(content, job.packages[package], name)
    return found


def _text(content: bytes, package: Path, name: str) -> str:
    title = f"{package.name}: {name}"
    try:
        return unpack(content, ".gz", title, LARGEST_PAGE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{title} cannot be read: {error}.") from error
