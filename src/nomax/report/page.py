"""From results folders to one HTML page that needs nothing but itself."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import nomax
from nomax import _colours
from nomax.report import charts, findings, results, summary, words
from nomax.report.section import Section, anchors, section
from nomax.train import files

LIMIT = 3_000_000  # bytes: a page that a phone loads without a second thought
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Written:
    """What was written, and what was missing from it."""

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
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.aside(out) as file:
        file.write(page)
    table = out.with_suffix(".md")
    files.write(table, summary.markdown(found))
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
        headline=findings.headline(verdicts),
        scale=findings.scale(one.results.story for one in studies),
        groups=findings.groups(verdicts),
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
    """What a browser may do for this page: nothing but show its own images, style and script."""
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
