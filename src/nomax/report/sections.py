"""The section of one study on the page.

Figures and maps become data: URIs of <img>, not part of the document: the SVGs of matplotlib share ids, which must be
unique in a document, and a script in an image never runs.
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from nomax import _colours
from nomax.report import words
from nomax.report.charts import Chart, chart, percent, plain
from nomax.report.results import Attention, Curve, Figure, ResultsFolder, Verdict
from nomax.report.words import Block, Sheet

LARGE_SVG = 400_000  # bytes; from here on a PNG beside it, if that is smaller, is shown instead
PIXELS = {"pt": 4 / 3, "px": 1.0, "": 1.0, "in": 96.0, "cm": 96 / 2.54, "mm": 96 / 25.4}
# What nomax.evaluate.rows measures, and how an axis counts it.
STATISTICS: dict[str, tuple[str, Callable[[float], str]]] = {
    "row_sum": ("Mean weight × L", plain),
    "row_sum_sd": ("Standard deviation of row sums", plain),
    "zeros": ("Share of exact zeros", percent),
    "empty": ("Share of empty rows", percent),
    "entropy": ("Entropy of a row, nats", plain),
    "effective_keys": ("Effective number of keys", plain),
}


@dataclass(frozen=True)
class Picture:
    """An image as the page shows it."""

    uri: str
    width: int
    height: int
    photograph: bool
    """Made of pixels: its colours are the message, and stay as they are in the dark."""
    description: str
    """The description inside the file."""


@dataclass(frozen=True)
class Judged:
    """A verdict, its place and that of its study on the page, and its numbers in words."""

    verdict: Verdict
    anchor: str
    study: str
    study_anchor: str
    numbers: list[tuple[str, str]]
    note: str


@dataclass(frozen=True)
class Shown:
    """A figure with its picture, if there is one, and the table behind it."""

    figure: Figure
    picture: Picture | None
    alternative: str
    table: Sheet | None


@dataclass(frozen=True)
class Panels:
    """Charts that share their lines, and so their legend."""

    title: str
    charts: list[Chart]


@dataclass(frozen=True)
class Section:
    """The section of one study on the page."""

    results: ResultsFolder
    anchor: str
    text: list[Block]
    verdicts: list[Judged]
    figures: list[Shown]
    curves: list[Panels]
    curves_table: Sheet | None
    attention: Panels | None
    attention_table: Sheet | None
    maps: Picture | None
    runs_file: str
    """The file in which every run is a line."""
    facts: list[tuple[str, list[tuple[str, str]]]]
    when: str
    missing: list[str]
    """Files that study.json names and that are not there."""


def section(results: ResultsFolder, anchor: str, claims: Sequence[str]) -> Section:
    """Put a results folder into words, pictures, charts and tables.

    anchor, claims: the ids of its section and of its verdicts on the page.
    """
    story = results.story
    figures = [_shown(results, figure) for figure in story.figures]
    facts = {"Set-up": story.setup, "Machine": story.machine, "Versions": story.versions}
    return Section(
        results=results,
        anchor=anchor,
        text=words.blocks(story.text),
        verdicts=[
            Judged(verdict, place, story.name, anchor, words.facts(verdict.numbers), story.note)
            for verdict, place in zip(results.verdicts, claims, strict=True)
        ],
        figures=figures,
        curves=_curves(results.curves, {str(run.get("key")): run for run in results.runs}),
        curves_table=_curves_table(results.curves),
        attention=_attention(results.attention),
        attention_table=_attention_table(results.attention),
        maps=picture(results.folder, "maps.svg") or picture(results.folder, "maps.png"),
        runs_file=str(runs) if (runs := results.folder / "runs.csv").is_file() else "",
        facts=[(title, words.facts(tree)) for title, tree in facts.items() if tree],
        when=" – ".join(words.when(time) for time in (story.started, story.finished) if time),
        missing=[str(results.folder / shown.figure.file) for shown in figures if shown.picture is None],
    )


def anchors(kind: str, names: Sequence[str]) -> list[str]:
    """An id for each of these names of a kind: all of them different, even if the names are not."""
    found: list[str] = []
    for name in names:
        plain_name = f"{kind}-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed")
        taken = sum(other == plain_name or other.startswith(f"{plain_name}--") for other in found)
        found.append(f"{plain_name}--{taken + 1}" if taken else plain_name)
    return found


def _shown(results: ResultsFolder, figure: Figure) -> Shown:
    found = picture(results.folder, figure.file)
    inside = found.description if found else ""
    table = words.sheet(figure.table.columns, figure.table.rows) if figure.table and figure.table.rows else None
    return Shown(figure, found, figure.alternative or inside or figure.caption or figure.title, table)


def _curves(curves: Sequence[Curve], runs: Mapping[str, Mapping[str, Any]]) -> list[Panels]:
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.group, []).append(curve)
    panels = []
    for group, members in groups.items():
        labels, shared = words.without_common_end([curve.label for curve in members])
        losses = [(label, _points(curve, curve.loss)) for label, curve in zip(labels, members, strict=True)]
        accuracies = [(label, _points(curve, curve.accuracy)) for label, curve in zip(labels, members, strict=True)]
        known = [str(runs.get(curve.key, {}).get("activation", "")) for curve in members]
        phis = _phis([curve.label for curve in members], known)
        loss = chart("Training loss", "step", losses, phis=phis, roof=True)
        accuracy = chart("Accuracy in training", "step", accuracies, percent, phis=phis)
        drawn = [found for found in (loss, accuracy) if found]
        if drawn:
            title = ", ".join(dict.fromkeys(part for part in (*group.split(", "), *shared) if part))
            panels.append(Panels(title, drawn))
    return panels


def _phis(labels: Sequence[str], known: Sequence[str]) -> list[str]:
    """The activation that each line shows: the one named where labels begin to differ, or else what is known of it.

    Models with softmax attention whose memories differ are told apart by these.
    """
    parts = [label.split(", ") for label in labels]
    places = range(min(map(len, parts)))
    apart = next((place for place in places if len({one[place] for one in parts}) > 1), 0)
    return [_colours.activation(one[apart], otherwise) for one, otherwise in zip(parts, known, strict=True)]


def _points(curve: Curve, values: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(step, value) for step, value in zip(curve.steps, values, strict=False) if value is not None]


def _curves_table(curves: Sequence[Curve]) -> Sheet | None:
    columns = ["run", "last step", "first loss", "last loss", "last accuracy"]
    rows: list[list[Any]] = []
    for curve in curves:
        loss = [value for _, value in _points(curve, curve.loss)]
        accuracy = [value for _, value in _points(curve, curve.accuracy)]
        ends = [part[0] if part else None for part in (loss[:1], loss[-1:], accuracy[-1:])]
        rows.append([curve.label, int(curve.steps[-1]) if curve.steps else None, *ends])
    return words.sheet(columns, rows) if rows else None


def _means(run: Attention, name: str) -> list[tuple[float, float]]:
    """A statistic by layer, counted from 1: the mean over the layer's heads."""
    layers: dict[int, list[float]] = {}
    for place, row in enumerate(run.layers):
        value = words.number(row.get(name))
        if value is not None:
            layers.setdefault(int(row.get("layer", place)), []).append(value)
    return [(layer + 1, sum(values) / len(values)) for layer, values in sorted(layers.items())]


def _attention(runs: Sequence[Attention]) -> Panels | None:
    labels, shared = words.without_common_end([run.label for run in runs])
    phis = _phis([run.label for run in runs], [""] * len(runs)) if runs else []
    drawn = []
    for name, (title, say) in STATISTICS.items():
        lines = [(label, _means(run, name)) for label, run in zip(labels, runs, strict=True)]
        found = chart(title, "layer", lines, say, phis=phis, from_zero=True)
        drawn += [found] if found else []
    return Panels(", ".join(shared), drawn) if drawn else None


def _attention_table(runs: Sequence[Attention]) -> Sheet | None:
    rows = []
    for run in runs:
        means = {name: dict(_means(run, name)) for name in STATISTICS}
        layers = sorted({layer for found in means.values() for layer in found})
        rows += [[run.label, int(layer), *(means[name].get(layer) for name in STATISTICS)] for layer in layers]
    return words.sheet(["run", "layer", *(title for title, _ in STATISTICS.values())], rows) if rows else None


def picture(folder: Path, name: str) -> Picture | None:
    """The picture in a folder, or None if it is not there; a ValueError says if it is damaged."""
    if Path(name).name != name or Path(name).suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"{folder / 'study.json'}: a figure must be a name.svg or name.png beside it: {name!r}.")
    path = folder / name
    if path.suffix.lower() == ".svg" and path.is_file() and path.stat().st_size > LARGE_SVG:
        pixels = path.with_suffix(".png")
        path = pixels if pixels.is_file() and pixels.stat().st_size < path.stat().st_size else path
    if not path.is_file():
        return None
    return _svg(path) if path.suffix.lower() == ".svg" else _png(path)


def _svg(path: Path) -> Picture:
    content = path.read_bytes()
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} is damaged ({error}). Restore it, or run the study again.") from None
    if root.tag.rpartition("}")[2] != "svg":
        raise ValueError(f"{path} is no SVG image but <{root.tag}>.")
    view = [float(part) for part in re.findall(r"-?[\d.]+", root.get("viewBox", ""))]
    natural = view[2:] if len(view) == 4 else [800.0, 500.0]
    width, height = (_pixels(root.get(name), value) for name, value in zip(("width", "height"), natural, strict=True))
    words = next((part.text for part in root.iter() if part.tag.rpartition("}")[2] == "desc" and part.text), "")
    return Picture(_uri("svg+xml", content), width, height, False, words or "")


def _pixels(length: str | None, otherwise: float) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", (length or "").strip())
    if not match or match[2] not in PIXELS:
        return round(otherwise)
    return round(float(match[1]) * PIXELS[match[2]])


def _png(path: Path) -> Picture:
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            width, height = image.size
            words = str(image.info.get("Description", ""))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is damaged ({error}). Restore it, or run the study again.") from None
    return Picture(_uri("png", path.read_bytes()), width, height, True, words)


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
