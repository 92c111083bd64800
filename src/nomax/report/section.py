"""What the page shows of one study."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nomax.report import words
from nomax.report.charts import Chart, chart, percent, plain
from nomax.report.pictures import Picture, picture
from nomax.report.results import Attention, Curve, Figure, Results, Verdict
from nomax.report.words import Block, Sheet

# What nomax.evaluate.rows measures, and how an axis counts it.
STATISTICS: dict[str, tuple[str, Callable[[float], str]]] = {
    "row_sum": ("Mean weight × L", plain),
    "row_sum_sd": ("Standard deviation of row sums", plain),
    "zeros": ("Share of exact zeros", percent),
    "empty": ("Share of empty rows", percent),
    "entropy": ("Entropy of a row, nats", plain),
    "effective_keys": ("Effective number of keys", plain),
}
# Of a run, what says nothing to a reader (key) or has columns of its own (probes).
LEFT_OUT = ("key", "probes", "measured")


@dataclass(frozen=True)
class Judged:
    """A verdict, where it belongs, and its numbers in words."""

    verdict: Verdict
    study: str
    anchor: str
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
    """What the page shows of one study."""

    results: Results
    anchor: str
    text: list[Block]
    verdicts: list[Judged]
    figures: list[Shown]
    curves: list[Panels]
    curves_table: Sheet | None
    attention: Panels | None
    attention_table: Sheet | None
    maps: Picture | None
    runs_table: Sheet | None
    runs_same: list[tuple[str, str]]
    facts: list[tuple[str, list[tuple[str, str]]]]
    when: str
    missing: list[str]
    """Files that study.json names and that are not there."""


def section(results: Results, anchor: str) -> Section:
    """Put a results folder into words, pictures, charts and tables."""
    story = results.story
    figures = [_shown(results, figure) for figure in story.figures]
    runs = [_run(run) for run in results.runs]
    apart, same = words.differing(runs)
    facts = {"Set-up": story.setup, "Machine": story.machine, "Versions": story.versions}
    return Section(
        results=results,
        anchor=anchor,
        text=words.blocks(story.text),
        verdicts=[
            Judged(verdict, story.name, anchor, words.facts(verdict.numbers), story.note)
            for verdict in results.verdicts
        ],
        figures=figures,
        curves=_curves(results.curves),
        curves_table=_curves_table(results.curves),
        attention=_attention(results.attention),
        attention_table=_attention_table(results.attention),
        maps=picture(results.folder, "maps.png"),
        runs_table=words.sheet(apart, [[run.get(name) for name in apart] for run in runs]) if apart else None,
        runs_same=same,
        facts=[(title, words.facts(tree)) for title, tree in facts.items() if tree],
        when=" – ".join(words.when(time) for time in (story.started, story.finished) if time),
        missing=[str(results.folder / shown.figure.file) for shown in figures if shown.picture is None],
    )


def anchors(names: Sequence[str]) -> list[str]:
    """An id for each of these names: all of them different, even if the names are not."""
    found: list[str] = []
    for name in names:
        plain_name = "study-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed")
        taken = sum(other == plain_name or other.startswith(f"{plain_name}--") for other in found)
        found.append(f"{plain_name}--{taken + 1}" if taken else plain_name)
    return found


def _shown(results: Results, figure: Figure) -> Shown:
    found = picture(results.folder, figure.file)
    inside = found.description if found else ""
    table = words.sheet(figure.table.columns, figure.table.rows) if figure.table and figure.table.rows else None
    return Shown(figure, found, figure.alternative or inside or figure.caption or figure.title, table)


def _curves(curves: Sequence[Curve]) -> list[Panels]:
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.group, []).append(curve)
    panels = []
    for group, members in groups.items():
        labels, shared = words.without_common_end([curve.label for curve in members])
        losses = [(label, _points(curve, curve.loss)) for label, curve in zip(labels, members, strict=True)]
        accuracies = [(label, _points(curve, curve.accuracy)) for label, curve in zip(labels, members, strict=True)]
        loss = chart("Training loss", "step", losses, roof=True)
        accuracy = chart("Accuracy in training", "step", accuracies, percent)
        drawn = [found for found in (loss, accuracy) if found]
        if drawn:
            title = ", ".join(dict.fromkeys(part for part in (*group.split(", "), *shared) if part))
            panels.append(Panels(title, drawn))
    return panels


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


def _run(run: dict[str, Any]) -> dict[str, Any]:
    """A run as a line of a table: every probe and measurement is a column."""
    probes = run.get("probes")
    shots = {f"ten_shot {name}": value for name, value in probes.items()} if isinstance(probes, dict) else {}
    measured = run.get("measured")
    found = {**run, **shots, **(measured if isinstance(measured, dict) else {})}
    return {name.replace("_", " "): value for name, value in found.items() if name not in LEFT_OUT}


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
    drawn = []
    for name, (title, say) in STATISTICS.items():
        lines = [(label, _means(run, name)) for label, run in zip(labels, runs, strict=True)]
        found = chart(title, "layer", lines, say, from_zero=True)
        drawn += [found] if found else []
    return Panels(", ".join(shared), drawn) if drawn else None


def _attention_table(runs: Sequence[Attention]) -> Sheet | None:
    rows = []
    for run in runs:
        means = {name: dict(_means(run, name)) for name in STATISTICS}
        layers = sorted({layer for found in means.values() for layer in found})
        rows += [[run.label, int(layer), *(means[name].get(layer) for name in STATISTICS)] for layer in layers]
    return words.sheet(["run", "layer", *(title for title, _ in STATISTICS.values())], rows) if rows else None
