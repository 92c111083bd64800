"""Which class an icon belongs to: its name without what only says in which style it is drawn."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

# Endings that are a style in some sets and part of the name in others ("home-line", but "chart-line"): they are dropped
# where at least this share of a set's icons, and this many, end so.
SHARE, FEWEST = 0.02, 10
ENDINGS = frozenset(
    (
        *("outline", "outlined", "line", "linear", "stroke", "filled", "fill", "solid", "f", "bold"),
        *("thin", "light", "regular", "medium", "duotone", "duo", "twotone", "rounded", "round"),
        *("sharp", "broken", "remix", "bulk", "alt", "variant", "o", "expressive", "minimalistic"),
        *("small", "compact", "large", "ltr", "rtl", "mirrored", "logo", "one", "two", "three", "four"),
    )
)
BEGINNINGS = frozenset(("brand", "logo", "logos", "social"))
_NUMBER = re.compile(r"\d\d?(px)?")  # sizes and variants: home-24, home-02


def class_names(icons: Sequence[str], prefixes: Iterable[str] = (), suffixes: Iterable[str] = ()) -> dict[str, str]:
    """The class of every icon of a set; `prefixes` and `suffixes` are those that the set itself declares as styles."""
    declared = {icon: _without_declared(icon, prefixes, suffixes).split("-") for icon in icons}
    least = max(FEWEST, SHARE * len(icons))
    endings, beginnings = (
        {
            word
            for word, count in Counter(words[at] for words in declared.values() if len(words) > 1).items()
            if count >= least
        }
        for at in (-1, 0)
    )
    return {icon: _without(words, endings & ENDINGS, beginnings & BEGINNINGS) for icon, words in declared.items()}


def _without_declared(name: str, prefixes: Iterable[str], suffixes: Iterable[str]) -> str:
    for prefix in sorted(prefixes, key=len, reverse=True):
        if prefix and name.startswith(f"{prefix}-"):
            name = name.removeprefix(f"{prefix}-")
            break
    for suffix in sorted(suffixes, key=len, reverse=True):
        if suffix and name.endswith(f"-{suffix}"):
            return name.removesuffix(f"-{suffix}")
    return name


def _without(words: list[str], endings: set[str], beginnings: set[str]) -> str:
    if len(words) > 1 and words[0] in beginnings:
        words = words[1:]
    end = len(words)
    while end > 1 and (words[end - 1] in endings or _NUMBER.fullmatch(words[end - 1])):
        end -= 1
    return "-".join(words[:end])
