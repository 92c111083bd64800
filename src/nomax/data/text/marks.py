"""Which languages files are in, by the marks in their names: train.en and train.es."""

import re
from pathlib import Path

_LANGUAGE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*")  # en, deu, pt-BR, zh_Hans
_NEUTRAL = re.compile(  # endings that look like languages and are none
    "bak|bin|bpe|csv|dat|gz|idx|in|log|lst|md|npy|npz|out|raw|ref|src|tar|tgt|tmp|tok|trg|tsv|txt|xz|zip", re.IGNORECASE
)


def mark(path: Path, languages: tuple[str, ...] = ()) -> str | None:
    """The language that the name of a file says, one of these or what looks like one: en for train.en, train.en.txt."""
    for word in reversed([suffix[1:] for suffix in path.suffixes]):
        if word in languages or (_LANGUAGE.fullmatch(word) and not _NEUTRAL.fullmatch(word)):
            return word
    return None


def directed(source: Path, target: Path, languages: tuple[str, str] | None) -> tuple[Path, Path, tuple[str, str]]:
    """The two files in the order of the languages, and these."""
    if languages is None:
        found = mark(source) or source.suffix[1:], mark(target) or target.suffix[1:]
        if not all(found) or found[0] == found[1]:
            raise ValueError(
                f"which languages are {source.name} and {target.name}? Name them as in train.en and train.es, or pass "
                '--languages en es (in Python, languages=("en", "es")).'
            )
        return source, target, found
    named = mark(source, languages), mark(target, languages)
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
