"""What Debian says about its packages, in English and a translation, joined by the checksum of the English text."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nomax.data.arrays import Job
from nomax.data.packages import members, unpack
from nomax.data.text.corpus import Document, Pair
from nomax.data.text.prepared import SPLITS, split_of, write_splits

RULE = "by source package, of which a hash decides: 5 % valid, 5 % test; no English paragraph comes twice"

_BULLET = re.compile(r"\s*(?:[*+o•·–—-]|\d+[.)])\s+")


def prepare(job: Job) -> dict[str, Any]:
    """Align the paragraphs of each description with those of its translation; a document is a package."""
    language = job.name.rpartition("-")[2]
    (file,) = job.packages.values()
    indices = _read(file)
    missing = {"Packages", "Translation-en", f"Translation-{language}"} - set(indices)
    if missing:
        raise ValueError(f"{file.name} lacks {', '.join(sorted(missing))}.")
    digest = hashlib.sha256("\0".join(indices[name] for name in sorted(indices)).encode()).hexdigest()
    sources = dict(_sources(indices["Packages"]))
    translations = _descriptions(indices[f"Translation-{language}"])
    dropped: Counter[str] = Counter()
    found: dict[str, list[tuple[str, list[Pair]]]] = {split: [] for split in SPLITS}
    for checksum, (package, text) in _descriptions(indices["Translation-en"]).items():
        if checksum not in translations:
            continue
        ours, theirs = paragraphs(text), paragraphs(translations[checksum][1])
        if [kind for kind, _ in ours] != [kind for kind, _ in theirs]:
            dropped["descriptions whose translation has other paragraphs"] += 1
            continue
        pairs = [Pair(source, target) for (_, source), (_, target) in zip(ours, theirs, strict=True)]
        found[split_of(sources.get(package, package))].append((package, pairs))
    documents, seen = [], set[str]()
    for split in reversed(SPLITS):  # what the test has, training does not
        for package, pairs in found[split]:
            kept = []
            for pair in pairs:
                if pair.source == pair.target:
                    dropped["paragraphs that are not translated"] += 1
                elif pair.source in seen:
                    dropped["paragraphs that came before"] += 1
                else:
                    seen.add(pair.source)
                    kept.append(pair)
            if kept:
                documents.append((split, Document(package, tuple(kept))))
    job.report("reading descriptions", len(documents), len(documents), "documents")
    about = write_splits(job, documents, ("en", language), dict(dropped), RULE)
    return {**about, "made_with": f"index {digest[:16]}"}


def paragraphs(text: str) -> list[tuple[str, str]]:
    """The kinds and texts of a description's title, paragraphs and items of lists."""
    title, *lines = text.split("\n")
    found, inside = [("title", _words(title))], ""
    for line in lines:
        content = line[1:]
        bullet = _BULLET.match(content)
        if content.strip() in ("", "."):
            inside = ""
        elif bullet:
            inside = "item"
            found.append((inside, _words(content[bullet.end() :])))
        elif inside == "item" or (inside == "text" and not content.startswith(" ")):
            found[-1] = (inside, f"{found[-1][1]} {_words(content)}")
        else:
            inside = "line" if content.startswith(" ") else "text"
            found.append((inside, _words(content)))
    return [(kind, words) for kind, words in found if words]


def _words(text: str) -> str:
    return " ".join(text.split())


def _read(file: Path) -> dict[str, str]:
    """The indices in the file, unpacked, by name."""
    found = {}
    for name, content in members(file, lambda name: name.startswith(("Packages", "Translation-"))):
        stem, _, suffix = name.partition(".")
        title = f"{file.name}: {name}"
        try:
            found[stem] = unpack(content, f".{suffix}", title).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{title} cannot be read: {error}.") from error
    return found


def _sources(index: str) -> Iterator[tuple[str, str]]:
    """Packages, and the source packages that they are built from."""
    for stanza in index.split("\n\n"):
        package = re.search(r"^Package: (\S+)", stanza, re.MULTILINE)
        source = re.search(r"^Source: (\S+)", stanza, re.MULTILINE)
        if package:
            yield package[1], source[1] if source else package[1]


def _descriptions(index: str) -> dict[str, tuple[str, str]]:
    """By the checksum of the English text: the first package with it, and the text."""
    found: dict[str, tuple[str, str]] = {}
    for stanza in index.split("\n\n"):
        match = re.search(
            r"^Package: (?P<package>\S+)\nDescription-md5: (?P<sum>\w+)\nDescription-[\w.@]+: (?P<text>.*)",
            stanza,
            re.MULTILINE | re.DOTALL,
        )
        if match:
            found.setdefault(match["sum"], (match["package"], match["text"].rstrip("\n")))
    return found
