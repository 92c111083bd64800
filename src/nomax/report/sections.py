"""The section of one study on the page, and how its verdicts are told: from a results folder to words and pictures."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nomax import _figures
from nomax.report import words
from nomax.report.pictures import Panel, Picture, chart, picture
from nomax.report.results import Attention, Curve, Figure, ResultsFolder
from nomax.report.words import Block, Sheet
from nomax.study.claims import CLAIMS, Claim
from nomax.study.engine.verdict import Verdict

# What nomax.evaluate.rows measures: its title, and True for a share.
STATISTICS = {
    "row_sum": ("Mean weight × L", False),
    "row_sum_sd": ("Standard deviation of row sums", False),
    "zeros": ("Share of exact zeros", True),
    "empty": ("Share of empty rows", True),
    "entropy": ("Entropy of a row, nats", False),
    "effective_keys": ("Effective number of keys", False),
}
TRIALS = {"phi": "φ", "attention": "attention", "memory": "memory", "variant": "model", "tokens": "L", "data": "data"}


@dataclass(frozen=True)
class Judged:
    """A verdict, what the paper has, and their places on the page."""

    verdict: Verdict
    anchor: str
    study: str
    study_anchor: str
    figure_anchor: str
    """That of the figure that shows it; that of the study if there is none."""
    numbers: list[tuple[str, str]]
    note: str

    @property
    def claim(self) -> Claim | None:
        """The paper's claim, if it is one."""
        return CLAIMS.get(self.verdict.claim)


@dataclass(frozen=True)
class Shown:
    """A figure with its picture, if there is one, and the table behind it."""

    figure: Figure
    anchor: str
    picture: Picture | None
    alternative: str
    table: Sheet | None


@dataclass(frozen=True)
class Section:
    """The section of one study on the page."""

    results: ResultsFolder
    anchor: str
    text: list[Block]
    verdicts: list[Judged]
    figures: list[Shown]
    trials: Sheet | None
    curves: list[tuple[str, Picture]]
    curves_table: Sheet | None
    attention: Picture | None
    attention_table: Sheet | None
    maps: Picture | None
    runs_file: str
    """The file in which every run is a line."""
    facts: list[tuple[str, list[tuple[str, str]]]]
    when: str
    missing: list[str]
    """Files that study.json names and that are not there."""


def section(results: ResultsFolder, anchor: str, claims: Sequence[str]) -> Section:
    """Put a results folder into words, pictures and tables.

    anchor, claims: the ids of its section and of its verdicts on the page.
    """
    story = results.story
    places = anchors(anchor.replace("study-", "figure-", 1), [figure.file for figure in story.figures])
    figures = [_shown(results, figure, place) for figure, place in zip(story.figures, places, strict=True)]
    facts = {"Set-up": story.setup, "Machine": story.machine, "Versions": story.versions}
    return Section(
        results=results,
        anchor=anchor,
        text=words.blocks(story.text),
        verdicts=[
            _judged(results, verdict, place, anchor, figures)
            for verdict, place in zip(results.verdicts, claims, strict=True)
        ],
        figures=figures,
        trials=_trials(results.runs),
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
    """Return an id for each of these names of a kind: all of them different, even if the names are not."""
    made: list[str] = []
    for name in names:
        plain_name = f"{kind}-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed")
        taken = sum(other == plain_name or other.startswith(f"{plain_name}--") for other in made)
        made.append(f"{plain_name}--{taken + 1}" if taken else plain_name)
    return made


def _judged(results: ResultsFolder, verdict: Verdict, place: str, study: str, figures: Sequence[Shown]) -> Judged:
    claim, story = CLAIMS.get(verdict.claim), results.story
    own = [shown.anchor for shown in figures if claim and shown.figure.file.rpartition(".")[0] == claim.figure]
    shown = [*own, *(each.anchor for each in figures), study][0]
    return Judged(verdict, place, story.name, study, shown, words.facts(verdict.numbers), story.note)


def _shown(results: ResultsFolder, figure: Figure, anchor: str) -> Shown:
    drawn = picture(results.folder, figure.file)
    inside = drawn.description if drawn else ""
    table = words.sheet(figure.table.columns, figure.table.rows) if figure.table and figure.table.rows else None
    return Shown(figure, anchor, drawn, figure.alternative or inside or figure.caption or figure.title, table)


def _trials(runs: Sequence[Mapping[str, Any]]) -> Sheet | None:
    """Tabulate the runs that chose settings on a validation split: the mean over seeds of each setting."""
    names: list[str] = []
    cells: dict[tuple[Any, ...], list[float]] = {}
    rows = [run for run in runs if run.get("held_out") or run.get("split", "test") != "test"]
    score = "accuracy" if any(run.get("accuracy") is not None for run in rows) else "loss"
    for run in rows:
        names = names or [name for name in (*TRIALS, "lr", "gamma", "penalty") if name in run]
        value = run.get(score)
        cells.setdefault(tuple(run.get(name) for name in names), []).extend([] if value is None else [value])
    if not rows:
        return None
    means = {setting: fmean(entries) if entries else None for setting, entries in cells.items()}
    fixed = len([name for name in names if name in TRIALS])
    sign = 1 if score == "accuracy" else -1
    best: dict[tuple[Any, ...], float] = {}
    for setting, mean in means.items():
        if mean is not None:
            best[setting[:fixed]] = max(sign * mean, best.get(setting[:fixed], sign * mean))
    columns = [*(TRIALS.get(name, name) for name in names), f"validation {score}", "seeds", "best"]
    columns = ["learning rate" if name == "lr" else name for name in columns]
    return words.sheet(
        columns,
        [
            [
                *setting,
                mean,
                len(cells[setting]),
                "✓" if mean is not None and sign * mean == best[setting[:fixed]] else "",
            ]
            for setting, mean in means.items()
        ],
    )


def _curves(curves: Sequence[Curve], runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Picture]]:
    """Return a title and a chart for each group of training curves."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.group, []).append(curve)
    charts = []
    for group, members in groups.items():
        labels, shared = words.without_common_end([curve.label for curve in members])
        in_title = group.split(", ")
        labels = [", ".join(part for part in label.split(", ") if part not in in_title) or label for label in labels]
        losses = [(label, _points(curve, curve.loss)) for label, curve in zip(labels, members, strict=True)]
        accuracies = [(label, _points(curve, curve.accuracy)) for label, curve in zip(labels, members, strict=True)]
        known = [str(runs.get(curve.key, {}).get("activation", "")) for curve in members]
        title = ", ".join(dict.fromkeys(part for part in (*in_title, *shared) if part))
        panels = [
            Panel("Training loss", "step", losses, roof=True),
            Panel("Accuracy in training", "step", accuracies, percent=True),
        ]
        drawn = chart(title or "Training curves", panels, phis([curve.label for curve in members], known))
        charts += [(title, drawn)] if drawn else []
    return charts


def phis(labels: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the activation that each line shows: the one named where labels begin to differ, or else what is known.

    Models with softmax attention whose memories differ are told apart by these.
    """
    parts = [label.split(", ") for label in labels]
    places = range(min(map(len, parts)))
    apart = next((place for place in places if len({label[place] for label in parts}) > 1), 0)
    return [_figures.activation(label[apart], otherwise) for label, otherwise in zip(parts, known, strict=True)]


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
    """Average a statistic over the heads of each layer; layers count from 1."""
    layers: dict[int, list[float]] = {}
    for place, row in enumerate(run.layers):
        value = words.number(row.get(name))
        if value is not None:
            layers.setdefault(int(row.get("layer", place)), []).append(value)
    return [(layer + 1, fmean(values)) for layer, values in sorted(layers.items())]


def _attention(runs: Sequence[Attention]) -> Picture | None:
    if not runs:
        return None
    labels, shared = words.without_common_end([run.label for run in runs])
    panels = [
        Panel(
            title, "layer", [(label, _means(run, name)) for label, run in zip(labels, runs, strict=True)], share, True
        )
        for name, (title, share) in STATISTICS.items()
    ]
    title = ", ".join(["How attention weights are spread", *shared])
    return chart(title, panels, phis([run.label for run in runs], [""] * len(runs)))


def _attention_table(runs: Sequence[Attention]) -> Sheet | None:
    rows = []
    for run in runs:
        means = {name: dict(_means(run, name)) for name in STATISTICS}
        layers = sorted({layer for by_layer in means.values() for layer in by_layer})
        rows += [[run.label, int(layer), *(means[name].get(layer) for name in STATISTICS)] for layer in layers]
    return words.sheet(["run", "layer", *(title for title, _ in STATISTICS.values())], rows) if rows else None
