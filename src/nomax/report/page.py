"""`nomax report`: what the studies found, as one HTML page that needs nothing but itself, and as tables in Markdown."""

import base64
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import tyro

import nomax
from nomax import _figures, _files
from nomax.console import Console
from nomax.report import results, words
from nomax.report.sections import Judged, Section, Shown, anchors, section
from nomax.study.claims import CLAIMS, GROUPS, HEADLINE
from nomax.study.engine.publication import results_folders
from nomax.study.engine.verdict import amount

LIMIT = 2_500_000  # bytes: a page that a phone loads without a second thought
HERE = Path(__file__).parent
OTHER = "Other claims"
LEAD = "alpha"  # the study whose figure shows the papers' main finding

Places = tyro.conf.Positional[
    Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[RESULTS ...]", help_behavior_hint="(default: results)")]
]


@dataclass(frozen=True)
class Options:
    """Write one HTML page of what the studies found: verdicts, figures and the tables behind them, training curves.

    The page needs no network and no other file; send it, print it, read it on a phone. Beside it are written, as
    Markdown, the table of all verdicts (report.md) and that of the claims that matter most (headline.md). For example:
    nomax report results/alpha results/scaling --out mine.html
    """

    results: Places = (Path("results"),)
    """Folders that `nomax study` wrote (each with a study.json), or folders that hold some."""
    out: Path = Path("results/report.html")
    """The page."""


def run(options: Options) -> int:
    """Write the page."""
    if options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder; give the name of a file, such as report.html in it.")
    written = write(options.results, options.out)
    for name in written.missing:
        print(f"nomax report: {name} is missing; the page shows the rest.", file=sys.stderr)
    size = f"{written.size / 1e6:.1f} MB" if written.size >= 1e6 else f"{written.size / 1e3:.0f} kB"
    what = f"{words.count(written.studies, 'study', 'studies')}, {words.count(written.verdicts, 'verdict')}"
    Console().print(f"Written: {written.path} ({size}; {what}), {written.table}, {written.headline}")
    return 0


@dataclass(frozen=True)
class Written:
    """The files that were written, and what was missing from them."""

    path: Path
    table: Path
    headline: Path
    size: int
    studies: int
    verdicts: int
    missing: list[str]


def write(places: Sequence[Path], out: Path) -> Written:
    """Write the page of some results folders, complete or not at all, and beside it the tables of verdicts.

    places: results folders, or folders that hold some. Raises FileNotFoundError or ValueError, which name the file.
    """
    folders = [results.read(path) for path in results_folders(places)]
    claims = iter(anchors("claim", [verdict.claim for folder in folders for verdict in folder.verdicts]))
    names = anchors("study", [folder.story.name for folder in folders])
    studies = [
        section(folder, name, list(islice(claims, len(folder.verdicts))))
        for folder, name in zip(folders, names, strict=True)
    ]
    page = render(studies).encode()
    if len(page) > LIMIT:
        raise ValueError(
            f"the page would take {len(page) / 1e6:.1f} MB; it may take {LIMIT / 1e6:g}. "
            f"{_largest(studies)} Name fewer results folders, or draw it with fewer points."
        )
    _files.write(out, page)
    table, short = out.with_suffix(".md"), out.with_name("headline.md")
    _files.write(table, markdown(studies))
    _files.write(short, headline_table(studies))
    verdicts = sum(len(study.verdicts) for study in studies)
    missing = [name for study in studies for name in study.missing]
    return Written(out, table, short, len(page), len(studies), verdicts, missing)


def render(studies: Sequence[Section]) -> str:
    """Render the page as HTML. Whatever comes from a file is escaped."""
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
    verdicts = [judged for study in studies for judged in study.verdicts]
    lead_study, figure = lead_figure(studies)
    page = environment.get_template("template.html.jinja").render(
        studies=studies,
        finding=lead_study.results.story.finding if lead_study else "",
        headline=headline(verdicts),
        scale=scale(study.results.story for study in studies),
        groups=groups(verdicts),
        lead=(lead_study, figure),
        words=words,
        one_number=one_number,
        version=nomax.__version__,
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
    )
    return page.strip() + "\n"


def _colour_sheet() -> str:
    """Return the colours as variables of the style sheet, light and, on a screen, dark."""
    roles = {"paper": _figures.PAPER, "ink": _figures.INK, "soft": _figures.SOFT, "rule": _figures.RULE}
    roles |= {"reproduced": _figures.GOOD, "contradicted": _figures.BAD, "undecided": _figures.OPEN}
    light, dark = (
        "".join(f"--{name}:{getattr(colour, scheme)};" for name, colour in roles.items())
        for scheme in ("light", "dark")
    )
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def _policy(style: str, script: str) -> str:
    """Return what a browser may do for this page: nothing but show its own images, style and script."""
    rules = {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    rules |= {"style-src": _fingerprint(style), "script-src": _fingerprint(script)}
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _fingerprint(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _largest(studies: Sequence[Section]) -> str:
    pictures = [
        (shown.picture, study.results.folder / shown.figure.file) for study in studies for shown in study.figures
    ]
    pictures += [(study.maps, study.results.folder / "maps.svg") for study in studies]
    size, name = max(((len(picture.uri), str(path)) for picture, path in pictures if picture), default=(0, ""))
    return f"The largest picture is {name} ({size / 1e6:.1f} MB)." if name else ""


@dataclass(frozen=True)
class Group:
    """Claims that answer one question of a reader."""

    title: str
    tally: str
    verdicts: list[Judged]


def lead_figure(studies: Sequence[Section]) -> tuple[Section | None, Shown | None]:
    """Return the figure at the top of the page with its study: that of LEAD if it is there, else the first."""
    first = sorted(studies, key=lambda study: study.results.story.name != LEAD)  # a stable sort keeps the others' order
    return next(((study, shown) for study in first for shown in study.figures if shown.picture), (None, None))


def headline(verdicts: Sequence[Judged]) -> str:
    """Say how the claims fared: how many are decided, and that this is so at the scale of these runs."""
    if not verdicts:
        return "No verdict has been reached yet."
    counted = Counter[str](judged.verdict.verdict for judged in verdicts)
    open_, decided = counted["undecided"], len(verdicts) - counted["undecided"]
    how = [f"{counted[name]} {name}" for name in ("reproduced", "contradicted") if counted[name]]
    verb = "none is" if not decided else f"{decided} {'is' if decided == 1 else 'are'}"
    sentence = f"Of {words.count(len(verdicts), 'claim')}, {verb} decided at this scale"
    sentence += f": {words.listed(how)}." if how else "."
    if open_:
        unmet = sum(any(not premise.holds for premise in judged.verdict.premises) for judged in verdicts)
        why = f", {unmet} of them because a premise does not hold" if unmet else ""
        sentence += f" {open_} {'is' if open_ == 1 else 'are'} undecided{why}."
    return sentence


def scale(stories: Iterable[results.Story]) -> str:
    """Say what was trained on what, over all studies: verdicts hold for that alone."""
    models: dict[str, dict[str, None]] = {}
    for story in stories:
        setup = story.setup
        sizes = setup.get("models") or ([f"{setup['dim']}-wide transformers"] if "dim" in setup else [])
        if isinstance(setup.get("data"), str) and isinstance(sizes, list):
            models.setdefault(setup["data"], {}).update(dict.fromkeys(map(str, sizes)))
    return "; ".join(f"{words.listed(list(sizes))} on {data}" for data, sizes in models.items() if sizes)


def groups(verdicts: Sequence[Judged]) -> list[Group]:
    """Return the verdicts by the question that they answer; in each group, what was decided comes first."""
    order = {claim: place for place, claim in enumerate(CLAIMS)}
    listed = []
    for title in (*GROUPS, OTHER):
        members = [judged for judged in verdicts if (judged.claim.group if judged.claim else OTHER) == title]
        members.sort(key=lambda judged: (judged.verdict.verdict == "undecided", order.get(judged.verdict.claim, 0)))
        counted = Counter[str](judged.verdict.verdict for judged in members)
        names = ("reproduced", "contradicted", "undecided")
        tally = ", ".join(f"{counted[name]} {name}" for name in names if counted[name])
        listed += [Group(title, tally, members)] if members else []
    return listed


def one_number(judged: Judged) -> str:
    """Return the number that a verdict hangs on: "+3.20 ± 0.45 points"; empty if it does not say which."""
    if not judged.verdict.comparisons:
        return ""
    first = next(iter(judged.verdict.comparisons.values()))
    mean, unit = amount(first.mean, first.unit, signed=True).partition(" ")[::2]
    return (
        f"{mean} ± {amount(first.half_width(first.seeds), first.unit).partition(' ')[0]} {unit or first.unit}".strip()
    )


def markdown(studies: Sequence[Section]) -> str:
    """Return a table for each question, and in it a row for each verdict: the claim, the paper's numbers, and ours."""
    lines = ["<!-- Written by `nomax report` -->"]
    commands = {study.anchor: study.results.story.command for study in studies}
    for group in groups([judged for study in studies for judged in study.verdicts]):
        lines += ["", f"**{group.title}**", "", "| claim | verdict | measured | the paper | by |", "| --- " * 5 + "|"]
        for judged in group.verdicts:
            verdict = judged.verdict
            outcome = f"**{verdict.verdict}**{f' ({judged.note})' if judged.note else ''}"
            paper = f"{judged.claim.paper} ({judged.claim.source})" if judged.claim else ""
            measured = " ".join(filter(None, [words.first_sentence(verdict.sentence), verdict.needed]))
            cells = (verdict.text, outcome, measured, paper, f"`{commands[judged.study_anchor]}`")
            lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def headline_table(studies: Sequence[Section]) -> str:
    """Return the table of the claims that matter most: the verdict and one number for each."""
    lines = ["<!-- Written by `nomax report` -->", "", "| claim | verdict | here | in the paper |", "| --- " * 4 + "|"]
    verdicts = [judged for study in studies for judged in study.verdicts]
    for claim in HEADLINE:
        for judged in (judged for judged in verdicts if judged.verdict.claim == claim):
            number = one_number(judged) or words.short(judged.verdict.sentence)
            cells = (judged.verdict.text, f"**{judged.verdict.verdict}**", number, CLAIMS[claim].paper)
            lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    """Format a row of a table: texts on one line that end no cell and are no markup of HTML."""
    return (
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|').replace('<', '&lt;') for cell in cells)} |"
    )
