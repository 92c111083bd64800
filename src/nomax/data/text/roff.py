"""Reading manual pages: the paragraphs of a page in roff with the `man` macros, as plain text.

Tables, examples and synopses (no-fill text) are left out, as they are hardly ever translated. A page that programs
roff, with conditions, definitions or registers, is not read.
"""

import re
from typing import NamedTuple


class Unreadable(ValueError):
    """A page uses what this reader does not know."""


class Paragraph(NamedTuple):
    """A stretch of text, and what began it."""

    kind: str
    text: str


_BREAKS = {"PP": "P", "P": "P", "LP": "P", "IP": "IP", "HP": "P", "TP": "TP", "TQ": "TP", "RS": "RS", "RE": "RE"}
_HEADINGS = ("SH", "SS")
_FONTS = ("B", "I", "R", "SM", "SB")
_ALTERNATING = ("BR", "BI", "RB", "RI", "IB", "IR")
_LEFT_OUT = {"nf": "fi", "EX": "EE", "TS": "TE", "SY": "YS"}
_LINKS = {"UR": "UE", "MT": "ME"}
_IGNORED = frozenset("TH ad nh hy in sp PD ft br ti ta ne na bp fi EE TE YS UC".split())  # noqa: SIM905 - so below
# Names of characters, each before its character.
_NAMED = """
aq ' dq " bu • em — en – ha ^ ti ~ lq “ rq ” oq ‘ cq ’ ga ` co © rg ® tm ™ +- ± de ° mu × la ⟨ ra ⟩ fm ′ sd ″ mi − rs \\
Fo « Fc » Bq „ -> → <- ← <= ≤ >= ≥ != ≠ hy - dg † at @ sh # pl + eq =
""".split()  # noqa: SIM905 - a list would take a page
_CHARACTERS = dict(zip(_NAMED[::2], _NAMED[1::2], strict=True))
_SINGLE = {"-": "-", "e": "\\", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`", "\\": "\\", ".": ".", "t": " "}
_EMPTY = set("&:%/,|^c)}{")
_COMMENT = re.compile(r"[.'][ \t]*(?:\\[\"#]|$)")
_ESCAPE = re.compile(
    r"\\(?:f(?:\[[^\]]*\]|\(..|.)|s[+-]?\d{1,2}|\[(?P<long>[^\]]*)\]|\((?P<short>..)"
    r"|\*(?P<string>\(..|\[[^\]]*\]|.)|(?P<one>.))"
)
_STRINGS = {"(lq": "“", "(rq": "”", "R": "®", "(Tm": "™", "-": "-", "(C+": "C++"}


def paragraphs(page: str) -> list[Paragraph]:
    """The paragraphs of a page, in order; those without text are left out."""
    reader = _Reader()
    begun = ""
    for line in page.split("\n"):
        if re.search(r"(?<!\\)\\$", line) and not _COMMENT.match(line):
            begun += line[:-1]  # it goes on in the next one
            continue
        reader.take(begun + line)
        begun = ""
    reader.close("end")
    return reader.found


def plain(text: str) -> str:
    """Text without roff's escapes."""
    return _ESCAPE.sub(_plain, re.sub(r'\\["#].*', "", text))


class _Reader:
    def __init__(self) -> None:
        self.found: list[Paragraph] = []
        self.words: list[str] = []
        self.kind = "P"
        self.until = ""  # the macro that ends what is being left out
        self.wanted = ""  # "tag" or a heading: the next line of text is one
        self.link = ""

    def take(self, line: str) -> None:
        if _COMMENT.match(line):
            return
        macro, rest = "", line
        if line[:1] in (".", "'"):
            match = re.match(r"[.'][ \t]*(\S+)[ \t]*(.*)", line)
            assert match is not None
            macro, rest = match[1], match[2]
        if self.until:
            if macro == self.until or macro in _HEADINGS:
                self.until = ""
            if macro not in _HEADINGS:
                return
        if not macro:
            self.text(plain(rest)) if line.strip() else self.close("P")
        else:
            self.macro(macro, rest)

    def macro(self, macro: str, rest: str) -> None:
        if macro in _HEADINGS:
            self.close(macro)
            self.wanted = macro
            if rest.strip():
                self.text(" ".join(_arguments(rest)))
        elif macro in _BREAKS:
            self.close(_BREAKS[macro])
            self.wanted = "tag" if _BREAKS[macro] == "TP" else ""
            if macro == "IP" and rest.strip():
                tag = _arguments(rest)[0]
                if re.search(r"\w{2}", tag):
                    self.found.append(Paragraph("tag", tag))
        elif macro in _FONTS:
            self.text(" ".join(_arguments(rest)))
        elif macro in _ALTERNATING:
            self.text("".join(_arguments(rest)))
        elif macro in _LEFT_OUT:
            self.close("P")
            self.until = _LEFT_OUT[macro]
        elif macro in _LINKS:
            self.link = "".join(_arguments(rest)[:1])
        elif macro in _LINKS.values():
            self.text(f"<{self.link}>{''.join(_arguments(rest)[:1])}")
            self.link = ""
        elif macro not in _IGNORED:
            raise Unreadable(f"it uses the macro {macro}")

    def text(self, words: str) -> None:
        words = " ".join(words.split())
        if not words:
            return
        self.words.append(words)
        if self.wanted:
            after = "P" if self.wanted in _HEADINGS else "body"
            self.kind = self.wanted
            self.wanted = ""
            self.close(after)

    def close(self, following: str) -> None:
        if self.words:
            self.found.append(Paragraph(self.kind, " ".join(self.words)))
        self.words, self.kind, self.wanted = [], following, ""


def _arguments(rest: str) -> list[str]:
    """A macro's arguments, as plain text."""
    rest = re.sub(r'\\["#].*', "", rest)
    found = re.findall(r'"((?:[^"]|"")*)"?|((?:\\ |\\.|[^\s\\])+)', rest)
    return [plain(quoted.replace('""', '"') or bare) for quoted, bare in found] or [""]


def _plain(match: re.Match[str]) -> str:
    name = match["long"] or match["short"]
    if name is not None:
        if name in _CHARACTERS:
            return _CHARACTERS[name]
        code = re.fullmatch(r"u([0-9A-F]{4,6})", name)
        if code:
            return chr(int(code[1], 16))
        raise Unreadable(f"it uses the character \\[{name}]")
    if match["string"] is not None:
        if match["string"] in _STRINGS:
            return _STRINGS[match["string"]]
        raise Unreadable(f"it uses the string \\*{match['string']}")
    one = match["one"]
    if one is None or one in _EMPTY:
        return ""
    if one in _SINGLE:
        return _SINGLE[one]
    raise Unreadable(f"it uses the escape \\{one}")
