"""The verdicts of all studies as one Markdown table: what a README shows."""

from collections.abc import Sequence

from nomax.report import words
from nomax.report.results import Results


def markdown(found: Sequence[Results]) -> str:
    """A row for each verdict: its claim, what came out, the first sentence of why, and the command of its study."""
    lines = [
        "<!-- Written by `nomax report` -->",
        "",
        "| claim | verdict | measured | by |",
        "| --- | --- | --- | --- |",
    ]
    for one in found:
        for verdict in one.verdicts:
            measured = words.SENTENCE.split(verdict.sentence, maxsplit=1)[0]
            outcome = f"**{verdict.verdict}**{f' ({one.story.note})' if one.story.note else ''}"
            cells = (verdict.text, outcome, measured, f"`{one.story.command}`")
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text on one line that ends no cell and is no markup of HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
