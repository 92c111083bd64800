"""The results folder of a study: numbers, figures and verdicts as files, made from the store at any time.

Figures and verdicts are a pure function of the results in the store: to publish twice is to write the same files.
"""

import csv
import dataclasses
import io
import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from inspect import getdoc, signature
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from nomax import data, study
from nomax._files import read_json, to_json, write, write_json
from nomax.data.images.batches import evaluation_batches
from nomax.data.source import part
from nomax.evaluate import TrainedImageModel, attention_maps, load, maps, row_statistics
from nomax.phi import ROW_MAPS, SOFTMAX
from nomax.study.engine.experiment import Experiment
from nomax.study.engine.publication import Publication, diagnostics_json, read_diagnostics
from nomax.study.engine.result import ImageResult, Result, TrainedResult, finals, trained
from nomax.study.engine.store import OUTCOME, Store
from nomax.train import metrics
from nomax.train.run_folder import facts

if TYPE_CHECKING:
    from nomax.study import Study
    from nomax.study.engine.figure import Figure
    from nomax.study.engine.verdict import Verdict

ADVICE = "Restore it, or run the study again."
NO_CLAIM = "This study judges no claim."
POINTS = 200  # of a training curve
PICTURES: tuple[Literal[".svg", ".png"], ...] = (".svg", ".png")
# Of the look into trained models:
IMAGES = 8  # for row statistics
INDEX = 0  # the test image of the maps
MOST = 6  # runs, so that their maps fit on a page
LAYERS = 4


def publish(
    module: "Study",
    setup: Any,
    runs: Sequence[Experiment],
    store: Store,
    *,
    name: str,
    out: Path,
    command: str,
    before: Publication | None = None,
) -> "list[Verdict]":
    """Write the results folder of a study, and return its verdicts.

    Figures and verdicts are made of the results that are there, and the number of missing runs is noted. What can no
    longer be made, since folders of runs are gone, is kept from the publication before.
    """
    before = before or Publication()
    with store.publishing():
        results = store.results([run.key for run in runs])
        diagnostics = [entry for result in trained(results) if (entry := _diagnostics(result, store, before))]
        figures = draw(module, results, setup, diagnostics)
        verdicts = list(module.verdicts(results, setup))
        out.mkdir(parents=True, exist_ok=True)
        _remove_old_pictures(out, {figure.name for figure in figures})
        for figure in figures:
            for kind in PICTURES:
                write(out / f"{figure.name}{kind}", figure.render(kind))
        write_json(out / "runs.json", results)
        write(out / "runs.csv", to_csv(results))
        write_json(out / "curves.json", [curve(result, store, before) for result in telling(results)])
        if diagnostics:
            write(out / "diagnostics.json", diagnostics_json(diagnostics))
        else:
            (out / "diagnostics.json").unlink(missing_ok=True)
        write_attention(results, store, out, before)
        counts, missing = Counter(result.status for result in results), len(runs) - len(results)
        preliminary = note(setup, missing)
        write_json(out / "verdicts.json", verdicts)
        write(out / "verdicts.md", markdown(module.TITLE, verdicts, command, preliminary))
        about = {
            "name": name,
            "title": module.TITLE,
            "note": preliminary,
            "finding": module.finding(results, setup) if hasattr(module, "finding") else "",
            "text": getdoc(module) or "",
            "command": command,
            "claims": list(module.CLAIMS),
            "figures": [_described(figure) for figure in figures],
            "setup": setup,
            **_story(results, store, command, before),
            "runs": {status: counts[status] for status in ("done", "diverged", "failed")} | {"missing": missing},
        }
        write_json(out / "study.json", about)  # last: whoever finds it finds the others
    return verdicts


def draw(
    module: "Study", results: Sequence[Result], setup: Any, diagnostics: Sequence[Mapping[str, Any]]
) -> "list[Figure]":
    """Return the figures of a study. One whose `figures` takes a third argument gets the points of runs by key."""
    if len(signature(module.figures).parameters) < 3:
        return list(module.figures(results, setup))
    points = {entry["key"]: entry["points"] for entry in diagnostics}
    return list(module.figures(results, setup, points))  # type: ignore[call-arg]


def redraw(folder: Path) -> list[Path]:
    """Draw the figures of a results folder again, from the numbers in it; returns the files.

    Nothing else is written. A ValueError says if the folder is damaged, or if the numbers behind a figure would change.
    """
    about, runs = (read_json(folder / f"{name}.json", ADVICE) for name in ("study", "runs"))
    try:
        own = next((word for word in shlex.split(about["command"]) if word.endswith(".py")), None)
        module = study.load(own or about["name"])
        results, setup = [Result.from_dict(result) for result in runs], _setup(about["setup"], module)
        known = {figure["file"]: figure["table"] for figure in about["figures"]}
        diagnostics = list(Publication.read(folder).diagnostics.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} does not hold what `nomax study` writes: {error!r}.") from None
    figures = draw(module, results, setup, diagnostics)
    drawn = {f"{figure.name}.svg": json.loads(to_json(_described(figure)))["table"] for figure in figures}
    if drawn != known:
        changed = [name for name in {**known, **drawn} if drawn.get(name) != known.get(name)]
        raise ValueError(
            f"{folder}: the table behind {', '.join(changed)} is not what `nomax study {about['name']}` makes of these "
            "runs today. Run the study again."
        )
    pictures = {folder / f"{figure.name}{kind}": figure.render(kind) for figure in figures for kind in PICTURES}
    for path, content in pictures.items():
        write(path, content)
    return list(pictures)


def _setup(plain: Mapping[str, Any], module: "Study") -> Any:
    """Rebuild a set-up from study.json."""
    setup_type = type(study.setups(study.kind(module))["default"])
    names = signature(setup_type).parameters
    return setup_type(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items() if name in names})


def note(setup: Any, missing: int) -> str:
    """Return the warning that a reader must see first; empty for complete results."""
    warnings = ["smoke: these verdicts mean nothing"] * (setup.name == "smoke")
    warnings += [f"preliminary: {missing} run{'s are' if missing > 1 else ' is'} missing"] * (missing > 0)
    return "; ".join(warnings)


def check_place(out: Path, setup: Any, runs: int) -> None:
    """Raise a FileExistsError if a folder holds the results of more runs than these, which would replace them.

    Results of another smoke run are always replaced.
    """
    try:
        about = json.loads((out / "study.json").read_text(encoding="utf-8"))
        before, other = about["runs"]["done"] + about["runs"]["diverged"], about["setup"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    mine = json.loads(json.dumps(dataclasses.asdict(setup) | {"device": other.get("device")}))
    if runs < before and (other == mine or other.get("name") != "smoke"):
        raise FileExistsError(
            f"{out} holds the results of {before} runs, of `{about.get('command')}`; those of {runs} do not replace "
            "them. Give another --out, or move that folder away."
        )


def to_csv(results: Sequence[Result]) -> str:
    """Format results as CSV, with a column for each probe and measurement."""
    columns, records = table(results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if value is None else value for value in record] for record in records])
    return text.getvalue()


def table(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and cells: the ten-shot accuracy of each probe, and each number measured of text, has a column."""
    plain = list(
        dict.fromkeys(
            name for result in {type(result): result for result in results}.values() for name in result.to_dict()
        )
    )
    columns: dict[str, list[Any]] = {name: [getattr(result, name, None) for result in results] for name in plain}
    for inside, start in (("probes", "ten_shot_"), ("measured", "")):
        cells = columns.pop(inside, [])
        for name in sorted({name for cell in cells for name in cell or {}}):
            columns[f"{start}{name}"] = [(cell or {}).get(name) for cell in cells]
    for name in {"settings", "numbers"} & columns.keys():  # of measurements, each of which has its own
        columns[name] = [None if cell is None else json.dumps(cell, ensure_ascii=False) for cell in columns[name]]
    return list(columns), [list(record) for record in zip(*columns.values(), strict=True)]


def telling(results: Sequence[Result]) -> list[TrainedResult]:
    """Choose the runs whose curves are worth a look: of the first seed, softmax, every h at α = 1, relu at every α."""
    models: list[TrainedResult] = finals(results)
    first = min((result.seed for result in models), default=0)
    chosen = [result for result in models if result.seed == first and result.status != "failed"]
    return [result for result in chosen if result.activation in (*ROW_MAPS, "relu") or math.isclose(result.alpha, 1)]


def _diagnostics(result: TrainedResult, store: Store, before: Publication) -> Mapping[str, Any] | None:
    """Return the entry of a run in diagnostics.json; None if it recorded no diagnostics."""
    if points := read_diagnostics(store.folder(result.key)):
        return {"key": result.key, "label": result.label, "points": points}
    return before.diagnostics.get(result.key)


def curve(result: TrainedResult, store: Store, before: Publication) -> dict[str, Any]:
    """Return loss and accuracy in training; of a long run, means over equal parts of it."""
    lines = [line for line in metrics.read(store.folder(result.key)) if "evaluation" not in line]
    if not lines and result.key in before.curves:
        return before.curves[result.key]
    length = max(1, math.ceil(len(lines) / POINTS))
    parts = [lines[start : start + length] for start in range(0, len(lines), length)]
    return {
        "key": result.key,
        "label": result.label,
        "group": f"{result.variant}, {result.tokens} tokens",
        "steps": [part[-1]["step"] for part in parts],
        "loss": [_mean(part, "loss") for part in parts],
        "accuracy": [_mean(part, "accuracy") for part in parts],
    }


def markdown(title: str, verdicts: "Sequence[Verdict]", command: str, note: str = "") -> str:
    """Format the verdicts as a table, if there are any, below the warning about them."""
    lines = [f"<!-- Written by `{command}` -->", "", f"# {title}", "", *([f"**{note}**", ""] if note else [])]
    lines += ["| claim | verdict | measured | premise | scale |", "| --- " * 5 + "|"] if verdicts else [NO_CLAIM]
    for verdict in verdicts:
        cells = (
            f"{verdict.claim}: {verdict.text}",
            f"**{verdict.verdict}**",
            f"{verdict.sentence} {verdict.needed}".strip(),
            "; ".join(f"{'✓' if premise.holds else '✗'} {premise.sentence}" for premise in verdict.premises),
            verdict.scale,
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _described(figure: "Figure") -> dict[str, Any]:
    columns, rows = list(figure.table.columns), [list(row) for row in figure.table.rows]
    words = {"title": figure.title, "caption": figure.caption, "alternative": figure.alternative}
    return {"file": f"{figure.name}.svg", **words, "table": {"columns": columns, "rows": rows}}


def _story(results: Sequence[Result], store: Store, command: str, before: Publication) -> dict[str, Any]:
    """Return where and when the runs were done, from their folders; for runs without one, from what published them."""
    stories, ends, old = [], [], False
    for result in results:
        folder = store.folder(result.key)
        if not (folder / OUTCOME).is_file():
            old = True
            continue
        ends.append(datetime.fromtimestamp((folder / OUTCOME).stat().st_mtime, UTC))
        if (folder / "run.json").is_file():
            stories.append(json.loads((folder / "run.json").read_text()))
    for about in (before.about, *before.lenders) if old else ():
        if {"machine", "versions", "started", "finished"} <= about.keys():
            stories.append(dict(about))
            ends.append(datetime.fromisoformat(about["finished"]))
    stories = stories or [facts(command)]
    last = max(stories, key=lambda story: story["started"])
    finished = max(ends, default=datetime.now(UTC))
    return {
        "machine": last["machine"],
        "versions": last["versions"],
        "started": min(story["started"] for story in stories),
        "finished": finished.isoformat(timespec="seconds"),
    }


def _remove_old_pictures(out: Path, names: set[str]) -> None:
    """Remove pictures of the publication before that the study no longer draws."""
    try:
        before = json.loads((out / "study.json").read_text())["figures"]
    except (OSError, ValueError, KeyError):
        return
    for name in {Path(figure["file"]).stem for figure in before} - names:
        for kind in PICTURES:
            (out / f"{name}{kind}").unlink(missing_ok=True)


def _mean(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return round(sum(values) / len(values), 5) if values else None


def write_attention(results: Sequence[Result], store: Store, out: Path, before: Publication) -> None:
    """Write row statistics and attention maps of a few image runs whose models are in the store.

    If a model of the publication before is gone, its files stay as they are.
    """
    images = [result for result in finals(results) if isinstance(result, ImageResult)]
    looked = worth_a_look(images)
    chosen = [result for result in looked if (store.folder(result.key) / "model").is_dir()]
    if any(result.key in before.results for result in looked if result not in chosen):
        return
    for name in ("rows_statistics.json", "maps.svg", "maps.png"):  # the last as it was called before
        (out / name).unlink(missing_ok=True)
    if chosen:
        write_json(out / "rows_statistics.json", _row_statistics(chosen, store))
        write(out / "maps.svg", _attention_maps(chosen, store))


def worth_a_look(results: Sequence[ImageResult]) -> list[ImageResult]:
    """Choose the runs to look into: of the first seed, middle length and one size, softmax and others at α = 1."""
    done = [result for result in results if result.status == "done"]
    if not done:
        return []
    tokens = median_low(sorted({result.tokens for result in done}))
    first = min(result.seed for result in done)
    near = [result for result in done if result.seed == first and result.tokens == tokens]
    near = [result for result in near if result.size == near[0].size]
    return [result for result in near if result.activation == SOFTMAX or math.isclose(result.alpha, 1)][:MOST]


def _row_statistics(results: Sequence[ImageResult], store: Store) -> list[dict[str, Any]]:
    """Return the entries of rows_statistics.json: every head of every layer."""
    entries = []
    for result in results:
        trained = load(store.folder(result.key))
        heads = row_statistics(trained.model, _images(trained, result, IMAGES))
        entries.append({"label": result.label, "layers": [dataclasses.asdict(head) for head in heads]})
    return entries


def _attention_maps(results: Sequence[ImageResult], store: Store) -> bytes:
    """Draw where the models look, as an SVG that follows the dark mode."""
    shown, image = {}, torch.empty(0)
    for result in results:
        trained = load(store.folder(result.key))
        image = _images(trained, result, 1)[0]
        # In units of 1/L, and over all heads.
        shown[result.label.replace(", ", "\n")] = attention_maps(trained.model, image).mean(1) * result.tokens
    depth = min(len(layers) for layers in shown.values())
    layers = torch.linspace(0, depth - 1, min(depth, LAYERS)).round().int().tolist()
    return maps.draw(image, shown, layers, "Where the mean patch looks (mean over heads)", ".svg")


def _images(trained: TrainedImageModel, result: ImageResult, number: int) -> list[torch.Tensor]:
    """Return this many test images as the model sees them, spread evenly from the first."""
    source = data.load(result.data, "test", on_error=trained.config.on_error if trained.config else "raise")
    places = np.linspace(INDEX, len(source) - 1, number).round().astype(np.int64)
    with evaluation_batches(part(source, places), trained.transform, 8) as batches:
        return [image for batch, _ in batches for image in batch]
