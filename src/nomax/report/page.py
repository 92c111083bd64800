"""From results folders to one HTML page that needs nothing but itself, and the table of verdicts as Markdown."""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import nomax
from nomax import _colours, _files
from nomax.report import charts, results, words
from nomax.report.sections import Judged, Section, anchors, section
from nomax.study.claims import CLAIMS

LIMIT = 3_000_000  # bytes: a page that a phone loads without a second thought
HERE = Path(__file__).parent
VERDICTS = ("reproduced", "contradicted", "undecided")


@dataclass(frozen=True)
class Written:
    """The files that were written, and what was missing from them."""

    path: Path
    table: Path
    size: int
    studies: int
    verdicts: int
    missing: list[str]


def write(places: Sequence[Path], out: Path) -> Written:
    """Write the page of some results folders, complete or not at all, and beside it the table of verdicts alone.

    places: results folders, or folders that hold some. Raises FileNotFoundError or ValueError, which name the file.
    """
    folders = results.find(places)
    found = [results.read(folder) for folder in folders]
    claims = iter(anchors("claim", [verdict.claim for one in found for verdict in one.verdicts]))
    names = anchors("study", [one.story.name for one in found])
    studies = [
        section(one, name, list(islice(claims, len(one.verdicts)))) for one, name in zip(found, names, strict=True)
    ]
    page = render(studies).encode()
    if len(page) > LIMIT:
        raise ValueError(
            f"the page would take {len(page) / 1e6:.1f} MB; it may take {LIMIT / 1e6:.0f}. "
            f"{_largest(studies)} Name fewer results folders, or draw it with fewer points."
        )
    _files.write(out, page)
    table = out.with_suffix(".md")
    _files.write(table, markdown(found))
    verdicts = sum(len(one.verdicts) for one in studies)
    return Written(out, table, len(page), len(studies), verdicts, [name for one in studies for name in one.missing])


def render(studies: Sequence[Section]) -> str:
    """The page as HTML. Whatever comes from a file is escaped."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError("a report needs jinja2: pip install jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    style = f"{_colour_sheet()}{style}"
    verdicts = [judged for one in studies for judged in one.verdicts]
    page = environment.get_template("template.html.jinja").render(
        studies=studies,
        headline=headline(verdicts),
        scale=scale(one.results.story for one in studies),
        groups=groups(verdicts),
        lead=next(((one, shown) for one in studies for shown in one.figures if shown.picture), (None, None)),
        words=words,
        chart=charts,
        version=nomax.__version__,
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
    )
    return page.strip() + "\n"


def _colour_sheet() -> str:
    """The colours as variables of the style sheet, in the light and, on a screen, in the dark."""
    roles = {"paper": _colours.PAPER, "ink": _colours.INK, "soft": _colours.SOFT, "rule": _colours.RULE}
    roles |= {"reproduced": _colours.GOOD, "contradicted": _colours.BAD, "undecided": _colours.OPEN}
    roles |= {f"phi-{name}": colour for name, colour in _colours.PHI.items()}
    light, dark = (
        "".join(f"--{name}:{getattr(colour, scheme)};" for name, colour in roles.items())
        for scheme in ("light", "dark")
    )
    lines = "".join(f".phi-{name}{{--line:var(--phi-{name})}}" for name in _colours.PHI)
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{lines}\n"


def _policy(style: str, script: str) -> str:
    """Return what a browser may do for this page: nothing but show its own images, style and script."""
    rules = {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    rules |= {"style-src": _fingerprint(style), "script-src": _fingerprint(script)}
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _fingerprint(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _largest(studies: Sequence[Section]) -> str:
    pictures = [
        (len(shown.picture.uri), str(one.results.folder / shown.figure.file))
        for one in studies
        for shown in one.figures
        if shown.picture
    ]
    pictures += [(len(one.maps.uri), f"the maps in {one.results.folder}") for one in studies if one.maps]
    return f"The largest picture is {max(pictures)[1]} ({max(pictures)[0] / 1e6:.1f} MB)." if pictures else ""


@dataclass(frozen=True)
class Group:
    """Claims that belong together."""

    title: str
    tally: str
    decided: list[Judged]
    undecided: list[Judged]


def headline(verdicts: Sequence[Judged]) -> str:
    """Say how the claims fared, in a sentence."""
    if not verdicts:
        return "No verdict has been reached yet."
    counted = Counter[str](judged.verdict.verdict for judged in verdicts)
    spoken = {"reproduced": "was were", "contradicted": "was were", "undecided": "is are"}
    parts = [
        f"{counted[name]} {verbs.split()[counted[name] != 1]} {name}" for name, verbs in spoken.items() if counted[name]
    ]
    return f"Of {len(verdicts)} claim{'s' * (len(verdicts) != 1)}, {listed(parts)}."


def scale(stories: Iterable[results.Story]) -> str:
    """Say what was trained on what, over all studies: verdicts hold for that alone."""
    models: dict[str, dict[str, None]] = {}
    for story in stories:
        setup = story.setup
        sizes = setup.get("models") or ([f"{setup['dim']}-wide transformers"] if "dim" in setup else [])
        if isinstance(setup.get("data"), str) and isinstance(sizes, list):
            models.setdefault(setup["data"], {}).update(dict.fromkeys(map(str, sizes)))
    return "; ".join(f"{listed(list(sizes))} on {data}" for data, sizes in models.items() if sizes)


def groups(verdicts: Sequence[Judged]) -> list[Group]:
    """The verdicts by where their claims come from; in each group, what was decided comes first."""
    found: dict[str, list[Judged]] = {}
    for judged in verdicts:
        found.setdefault(_source(judged.verdict.claim), []).append(judged)
    return [
        Group(
            title,
            ", ".join(f"{count} {name}" for name in VERDICTS if (count := len(_of(members, name)))),
            [*_of(members, "reproduced"), *_of(members, "contradicted")],
            _of(members, "undecided"),
        )
        for title, members in found.items()
    ]


def listed(parts: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _of(verdicts: Sequence[Judged], name: str) -> list[Judged]:
    return [judged for judged in verdicts if judged.verdict.verdict == name]


def _source(claim: str) -> str:
    """The paper that a claim is from."""
    source = CLAIMS[claim].source.partition(",")[0] if claim in CLAIMS else "other claims"
    return source[0].upper() + source[1:]


def markdown(found: Sequence[results.ResultsFolder]) -> str:
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
