"""Values as people read them, and tables that can be sorted by what the words mean."""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

NOTHING = "–"
SENTENCE = re.compile(r"(?<=[.])\s+(?=[A-Z])")  # where one sentence ends and the next begins
# A number at the start of a cell that a study has put into words: "71.2 ± 0.4", "81 %", "1,234", "−0.3".
NUMBER = re.compile(r"([+\-−]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+\-]?\d+)?)(?=$|[\s%×±])", re.IGNORECASE)


@dataclass(frozen=True)
class Sheet:
    """A table as the page shows it."""

    columns: list[str]
    numeric: list[bool]
    """Columns that hold nothing but numbers are sorted as such."""
    rows: list[list[str]]


def sheet(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Sheet:
    """Make a table for people: numbers cut to what is worth reading."""
    texts = [[say(value) for value in row] for row in rows]
    numeric = []
    for column in range(len(columns)):
        known = [row[column] for row, text in zip(rows, texts, strict=True) if text[column] != NOTHING]
        numeric.append(bool(known) and all(number(value) is not None for value in known))
    return Sheet(list(columns), numeric, texts)


def number(value: Any) -> float | int | None:
    """Return the number that a cell is or starts with."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    match = NUMBER.match(str(value).strip())
    return float(match[1].replace(",", "").replace("−", "-")) if match else None


def say(value: Any) -> str:
    """Format any value of a JSON file."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, float):
        if 1000 <= abs(value) < 1e7:
            return f"{value:,.0f}".replace("-", "−")
        return f"{value:.4g}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-").replace("-", "−")
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {say(part)}" for name, part in value.items()) or NOTHING
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(say, value)) or NOTHING
    return str(value)


def short(sentence: str) -> str:
    """Return what a verdict says first, without what stands in brackets: the difference and its interval."""
    first = first_sentence(sentence)
    while (less := re.sub(r"\s*\([^()]*\)", "", first)) != first:
        first = less
    return first


def first_sentence(text: str) -> str:
    """Return the first sentence; of a verdict whose premise fails, also the one after it."""
    parts = SENTENCE.split(text)
    return " ".join(parts[: 2 if parts[0].startswith("Nothing can be decided") else 1])


def count(number: int, singular: str, plural: str = "") -> str:
    """Format a number of things: "1 study", "2 studies"."""
    return f"{number} {singular if number == 1 else plural or f'{singular}s'}"


def listed(parts: Sequence[str]) -> str:
    """Join words: a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def facts(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return names and values of a JSON object, one per line; an object inside another is unfolded."""
    lines: list[tuple[str, str]] = []
    for name, value in tree.items():
        title = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping) and value:
            lines += facts(value, f"{title} · ")
        else:
            lines.append((title, say(value)))
    return lines


@dataclass(frozen=True)
class Block:
    """A paragraph ("p"), a list ("ul") or lines to be kept as they are ("pre")."""

    kind: str
    parts: list[str]


def blocks(text: str) -> list[Block]:
    """Split a docstring into paragraphs, lists and lines of code."""
    made = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = [line for line in part.split("\n") if line.strip()]
        if not lines:
            continue
        if all(line.startswith("    ") for line in lines) or any(line.lstrip().startswith("|") for line in lines):
            made.append(Block("pre", [inspect.cleandoc("\n" + "\n".join(lines))]))
        elif lines[0].lstrip().startswith("- "):
            items = re.split(r"(?:^|\n)\s*- ", part)
            made.append(Block("ul", [" ".join(item.split()) for item in items if item.strip()]))
        else:
            made.append(Block("p", [" ".join(part.split())]))
    return made


def without_common_end(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut the last parts that all labels ("relu/L, pico/4, seed 0") share; return the labels and those parts."""
    parts = [label.split(", ") for label in labels]
    shared: list[str] = []
    while len(parts) > 1 and all(len(label) > 1 and label[-1] == parts[0][-1] for label in parts):
        shared.insert(0, parts[0][-1])
        parts = [label[:-1] for label in parts]
    return [", ".join(label) for label in parts], shared


def when(time: str) -> str:
    """Format a time of a JSON file, to the minute."""
    try:
        return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return time
