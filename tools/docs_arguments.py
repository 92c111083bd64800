"""Let the API page show arguments as a list: our docstrings have them as lines "name: what it means".

mkdocs.yml names this file as an extension of griffe, which reads the docstrings.
"""

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>\S.*)")


class Arguments(griffe.Extension):
    """Turns paragraphs of such lines into Markdown lists."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that was read."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(docstring: str) -> str:
    """The docstring with a list in place of each paragraph that begins with an argument; the first is a sentence."""
    first, *others = docstring.split("\n\n")
    return "\n\n".join([first, *(_listed(paragraph) for paragraph in others)])


def _listed(paragraph: str) -> str:
    if ARGUMENT.match(paragraph) is None:
        return paragraph
    lines = []
    for line in paragraph.split("\n"):
        found = ARGUMENT.match(line)
        if found is None:
            lines.append(f"    {line}")
        else:
            names = ", ".join(f"`{name}`" for name in found["names"].split(", "))
            lines.append(f"- {names}: {found['text']}")
    return "\n".join(lines)
