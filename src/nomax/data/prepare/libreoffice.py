"""LibreOffice's help in two languages: pages of HTML whose paragraphs have the same id in every language."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from nomax.data.prepare.packages import Job, matching
from nomax.data.registry import HELP_PAIRS, help_package
from nomax.data.text.corpus import Document, Pair

LARGEST_PAGE = 1 << 22  # bytes; the largest of any language has 250 kB
TEST, VALID = 5, 3  # per cent of the pages; nearly half of their paragraphs are also in train, and dropped
CLAIMS = ("train", "test", "valid")  # a paragraph in several splits stays in the first of them
RULE = (
    f"by page, whose path decides: {TEST} % test, {VALID} % valid, the others train. Test drops each pair of which a "
    "side is in train too, but for case, digits and punctuation; valid drops those in train or test"
)

_PAGE = re.compile(r"usr/share/libreoffice/help/([^/]+)/text/(.+)\.html")
_CODE = {"code", "codeintable", "smathcode"}  # classes of paragraphs that nobody translates
_TEXTS = {"p", "h1", "h2", "h3", "h4", "h5", "h6"}
_BESIDE_WORDS = re.compile(r"\W+|\d+|_+")


def prepare(job: Job) -> dict[str, Any]:
    """Join the pages of two languages on (page, id); a document is a page."""
    languages = HELP_PAIRS[job.name]
    names = [help_package(language).name for language in languages]
    ours, theirs = (read(job.packages[name], name.removeprefix("libreoffice-help-")) for name in names)
    job.report("reading pages", len(ours), len(ours), "pages")
    dropped: Counter[str] = Counter()
    splits: dict[str, dict[str, list[Pair]]] = {split: {} for split in CLAIMS}
    for page in sorted(ours.keys() & theirs.keys()):
        splits[split_of(page)][page] = _join(ours[page], theirs[page], dropped)
    documents = _without_repeats(splits, dropped)
    return job.write_documents(documents, languages, dropped=dropped, rule=RULE)


def read(package: Path, language: str) -> dict[str, dict[str, str]]:
    """Read the pages of a package in one language (Catalan's has two): texts by their ids, in their order."""
    pages = {}
    for match, content in matching(package, _PAGE):
        if match[1].lower() != language:
            continue
        if len(content) > LARGEST_PAGE:
            raise ValueError(
                f"{package.name}: {match[0]} has {len(content):,} bytes; a page has {LARGEST_PAGE:,} at most."
            )
        pages[match[2]] = paragraphs(content.decode("utf-8", "replace"))
    if not pages:
        raise ValueError(f"{package.name} holds no pages of help in {language}.")
    return pages


def paragraphs(html: str) -> dict[str, str]:
    """Return the texts of a page's headings and paragraphs that have an id, without what is not translated."""
    page = _Page()
    page.feed(html)
    page.close()
    return page.texts


def split_of(page: str) -> str:
    """Return the split of a page, which its path alone decides."""
    place = int.from_bytes(hashlib.sha256(page.encode()).digest()[:8], "big") % 100
    return "test" if place < TEST else "valid" if place < TEST + VALID else "train"


def normalised(text: str) -> str:
    """Return a text without case, digits, punctuation and spaces; near-duplicates are equal in this form."""
    return _BESIDE_WORDS.sub("", unicodedata.normalize("NFKC", text).casefold())


def _join(ours: Mapping[str, str], theirs: Mapping[str, str], dropped: Counter[str]) -> list[Pair]:
    pairs = []
    for key, source in ours.items():
        target = theirs.get(key, "")
        if not source or not target:
            dropped["paragraphs in one language only"] += 1
            continue
        words, others = normalised(source), normalised(target)
        if not words or not others:
            dropped["paragraphs without words"] += 1
        elif words == others:
            dropped["paragraphs that are equal in both languages"] += 1
        else:
            pairs.append(Pair(source, target))
    return pairs


def _without_repeats(
    splits: Mapping[str, Mapping[str, list[Pair]]], dropped: Counter[str]
) -> Iterator[tuple[str, Document]]:
    """Yield the documents of each split, without what this split or, in nearly the same words, an earlier one holds."""
    earlier: set[tuple[int, str]] = set()  # (0, normalised source) and (1, normalised target)
    for split, pages in splits.items():
        seen: set[Pair] = set()
        for page, pairs in pages.items():
            kept = []
            for pair in pairs:
                if not earlier.isdisjoint(_sides(pair)):
                    dropped[f"near-duplicates in {split} of pairs in other splits"] += 1
                elif pair in seen:
                    dropped["repeated pairs"] += 1
                else:
                    kept.append(pair)
                    seen.add(pair)
            if kept:
                yield split, Document(page, tuple(kept))
        earlier.update(side for pair in seen for side in _sides(pair))


def _sides(pair: Pair) -> Iterator[tuple[int, str]]:
    return enumerate(map(normalised, pair))


class _Page(HTMLParser):
    """The texts of a page's paragraphs and headings, by their ids.

    Some words differ between systems or applications. Such a switch has a case for each, and often a default; the
    default is taken, or else the first case.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: dict[str, str] = {}
        self._inside = False  # of the page's content, after menus and before the footer
        self._tag = self._id = ""  # of the open paragraph
        self._spans: list[str] = []  # the open spans: "plain", "bug", "switch", "case" or "default"
        self._parts: list[list[str]] = []  # the texts of the paragraph and of those spans that are not plain
        self._cases: list[list[tuple[str, str]]] = []  # of the open switches

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = {name: value or "" for name, value in attrs}
        if about.get("id") == "DisplayArea":
            self._inside = True
        elif tag == "footer":
            self._inside = False
        elif tag in _TEXTS:
            self._finish()
            if self._inside and about.get("class") not in _CODE:
                self._tag, self._id, self._parts = tag, about.get("id", ""), [[]]
        elif tag == "br":
            self.handle_data(" ")
        elif tag == "span" and self._id:
            self._spans.append(self._kind(about))
            if self._spans[-1] != "plain":
                self._parts.append([])
            if self._spans[-1] == "switch":
                self._cases.append([])

    def _kind(self, about: Mapping[str, str]) -> str:
        kind = about.get("class", "")
        if kind == "bug":  # a link that leads nowhere
            return "bug"
        if kind.startswith("switch"):
            return "switch"
        if "hidden" in about and "switch" in self._spans:
            return "case" if kind else "default"
        return "plain"

    def handle_data(self, data: str) -> None:
        if self._id and self.cdata_elem is None:  # no script or style
            self._parts[-1].append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._tag:
            self._finish()
        elif tag == "span" and self._spans and (kind := self._spans.pop()) != "plain":
            text = "".join(self._parts.pop())
            if kind in ("case", "default"):
                self._cases[-1].append((kind, text))
            elif kind == "switch" and (cases := self._cases.pop()):
                self._parts[-1].append(dict(reversed(cases)).get("default", cases[0][1]))

    def _finish(self) -> None:
        if self._id:  # a page may embed a paragraph twice
            self.texts.setdefault(self._id, " ".join("".join(self._parts[0]).split()))
        self._tag = self._id = ""
        self._spans, self._cases = [], []

    def close(self) -> None:
        super().close()
        self._finish()
