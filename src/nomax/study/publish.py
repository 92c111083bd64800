"""The results folder of a study: numbers, figures and verdicts as files, made from the store at any time."""

import csv
import dataclasses
import io
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from inspect import getdoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nomax.phi import ROW_MAPS
from nomax.study import attention, load
from nomax.study import kind as kind_of
from nomax.study.row import ImageRow, Row
from nomax.study.run import Run
from nomax.study.setup import Setup
from nomax.study.store import OUTCOME, Store
from nomax.study.text_setup import TextSetup
from nomax.train import files, metrics
from nomax.train.facts import facts

if TYPE_CHECKING:
    from nomax.study.figure import Figure
    from nomax.study.studies import Study
    from nomax.study.verdict import Verdict

NO_CLAIM = "This study judges no claim."
POINTS = 200  # of a training curve
PICTURES: tuple[Literal[".svg", ".png"], ...] = (".svg", ".png")


def publish(
    name: str, study: "Study", setup: Setup | TextSetup, runs: Sequence[Run], store: Store, out: Path, command: str
) -> "list[Verdict]":
    """Write the results folder of a study, and return its verdicts.

    It says how many of the study's runs are missing; figures and verdicts are made of those that are there.
    """
    with store.publishing():
        return _publish(name, study, setup, runs, store, out, command)


def _publish(
    name: str, study: "Study", setup: Setup | TextSetup, runs: Sequence[Run], store: Store, out: Path, command: str
) -> "list[Verdict]":
    rows = store.rows([run.key for run in runs])
    figures, verdicts = list(study.figures(rows, setup)), list(study.verdicts(rows, setup))
    out.mkdir(parents=True, exist_ok=True)
    _remove_old_pictures(out, {figure.name for figure in figures})
    for figure in figures:
        for kind in PICTURES:
            files.write(out / f"{figure.name}{kind}", figure.render(kind))
    write_json(out / "runs.json", [dataclasses.asdict(row) for row in rows])
    files.write(out / "runs.csv", to_csv(rows))
    write_json(out / "curves.json", [curve(row, store) for row in telling(rows)])
    _write_attention(rows, store, out)
    counts, missing = Counter(row.status for row in rows), len(runs) - len(rows)
    said = note(setup, missing)
    write_json(out / "verdicts.json", [dataclasses.asdict(verdict) for verdict in verdicts])
    files.write(out / "verdicts.md", markdown(study.TITLE, verdicts, command, said))
    about = {
        "name": name,
        "title": study.TITLE,
        "note": said,
        "text": getdoc(study) or "",
        "command": command,
        "claims": list(study.CLAIMS),
        "figures": [_described(figure) for figure in figures],
        "setup": dataclasses.asdict(setup),
        **_story(rows, store, command),
        "runs": {status: counts[status] for status in ("done", "diverged", "failed")} | {"missing": missing},
    }
    write_json(out / "study.json", about)  # last: whoever finds it finds the others
    return verdicts


def redraw(folder: Path) -> list[Path]:
    """Draw the figures of a results folder again, from the numbers in it; returns the files.

    Nothing else is written. A ValueError says if the folder is damaged, or if the numbers behind a figure would change.
    """
    about, rows, verdicts = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in ("study.json", "runs.json", "verdicts.json")
    )
    try:
        own = next((word for word in shlex.split(about["command"]) if word.endswith(".py")), None)
        study = load(own or about["name"])
        arguments: list[Any] = [[Row.from_json(json.dumps(row)) for row in rows], _setup(about["setup"], study)]
        if "before" in signature(study.figures).parameters:
            arguments.append({verdict["claim"]: verdict["numbers"] for verdict in verdicts})
        known = {figure["file"]: figure["table"] for figure in about["figures"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} does not hold what `nomax study` writes: {error!r}.") from None
    figures = study.figures(*arguments)
    found = {f"{figure.name}.svg": json.loads(json.dumps(_finite(_described(figure))))["table"] for figure in figures}
    if found != known:
        changed = [name for name in {**known, **found} if found.get(name) != known.get(name)]
        raise ValueError(
            f"{folder}: the table behind {', '.join(changed)} is not what `nomax study {about['name']}` makes of these "
            "runs today. Run the study again."
        )
    drawn = {folder / f"{figure.name}{kind}": figure.render(kind) for figure in figures for kind in PICTURES}
    for path, content in drawn.items():
        files.write(path, content)
    return list(drawn)


def _setup(plain: Mapping[str, Any], study: "Study") -> Setup | TextSetup:
    """A set-up as study.json has it."""
    form: Callable[..., Setup | TextSetup] = TextSetup if kind_of(study) == "text" else Setup
    names = signature(form).parameters
    return form(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items() if name in names})


def note(setup: Setup | TextSetup, missing: int) -> str:
    """What a reader of the results must know before anything else; empty if they are what they should be."""
    said = ["smoke: these verdicts mean nothing"] * (setup.name == "smoke")
    said += [f"preliminary: {missing} run{'s are' if missing > 1 else ' is'} missing"] * (missing > 0)
    return "; ".join(said)


def check_place(out: Path, setup: Setup | TextSetup, runs: int) -> None:
    """Raise a FileExistsError if a folder holds results of more than so many runs, which these would replace.

    Those of another smoke run are worth nothing, and give way.
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


def _write_attention(rows: Sequence[Row], store: Store, out: Path) -> None:
    """Row statistics and attention maps of a few runs of images whose models are in the store."""
    images = [row for row in rows if isinstance(row, ImageRow)]
    chosen = [row for row in attention.chosen(images) if (store.folder(row.key) / "model").is_dir()]
    for name in ("rows_statistics.json", "maps.svg", "maps.png"):  # the last as it was called before
        (out / name).unlink(missing_ok=True)
    if chosen:
        write_json(out / "rows_statistics.json", attention.statistics(chosen, store))
        files.write(out / "maps.svg", attention.maps(chosen, store))


def to_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV, a column for each probe and measurement."""
    columns, records = table(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if value is None else value for value in record] for record in records])
    return text.getvalue()


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """The rows as columns and cells: the ten-shot accuracy of each probe, and each measurement, has a column."""
    kinds = list(dict.fromkeys(type(row) for row in rows)) or [Row]
    plain = list(dict.fromkeys(field.name for kind in kinds for field in dataclasses.fields(kind)))
    found: dict[str, list[Any]] = {name: [getattr(row, name, None) for row in rows] for name in plain}
    for inside, start in (("probes", "ten_shot_"), ("measured", "")):
        cells = found.pop(inside, [])
        for name in sorted({name for cell in cells for name in cell or {}}):
            found[f"{start}{name}"] = [(cell or {}).get(name) for cell in cells]
    return list(found), [list(record) for record in zip(*found.values(), strict=True)]


def telling(rows: Sequence[Row]) -> list[Row]:
    """The runs whose curves are worth a look: of the first seed, softmax, every h at α = 1, and relu at every α."""
    first = min((row.seed for row in rows), default=0)
    chosen = [row for row in rows if row.seed == first and row.status != "failed"]
    return [row for row in chosen if row.activation in (*ROW_MAPS, "relu") or math.isclose(row.alpha, 1)]


def curve(row: Row, store: Store) -> dict[str, Any]:
    """Loss and accuracy in training; of a long run, means over equal parts of it."""
    lines = [line for line in metrics.read(store.folder(row.key)) if "evaluation" not in line]
    length = max(1, math.ceil(len(lines) / POINTS))
    parts = [lines[start : start + length] for start in range(0, len(lines), length)]
    return {
        "key": row.key,
        "label": row.label,
        "group": f"{row.variant}, {row.tokens} tokens",
        "steps": [part[-1]["step"] for part in parts],
        "loss": [_mean(part, "loss") for part in parts],
        "accuracy": [_mean(part, "accuracy") for part in parts],
    }


def markdown(title: str, verdicts: "Sequence[Verdict]", command: str, note: str = "") -> str:
    """The verdicts as a table, if there are any, below what must be known about them."""
    lines = [f"<!-- Written by `{command}` -->", "", f"# {title}", "", *([f"**{note}**", ""] if note else [])]
    lines += ["| claim | verdict | measured | scale |", "| --- | --- | --- | --- |"] if verdicts else [NO_CLAIM]
    for verdict in verdicts:
        cells = (f"{verdict.claim}: {verdict.text}", f"**{verdict.verdict}**", verdict.sentence, verdict.scale)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Write JSON, complete or not at all; numbers that are not finite, which JSON does not have, become null."""
    files.write(path, json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _described(figure: "Figure") -> dict[str, Any]:
    columns, rows = list(figure.table.columns), [list(row) for row in figure.table.rows]
    words = {"title": figure.title, "caption": figure.caption, "alternative": figure.alternative}
    return {"file": f"{figure.name}.svg", **words, "table": {"columns": columns, "rows": rows}}


def _story(rows: Sequence[Row], store: Store, command: str) -> dict[str, Any]:
    """Where and when the runs were done, as their folders say."""
    stories, ends = [], []
    for row in rows:
        folder = store.folder(row.key)
        ends.append((folder / OUTCOME).stat().st_mtime)
        if (folder / "run.json").is_file():
            stories.append(json.loads((folder / "run.json").read_text()))
    stories = stories or [facts(command)]
    last = max(stories, key=lambda story: story["started"])
    finished = datetime.fromtimestamp(max(ends), UTC) if ends else datetime.now(UTC)
    return {
        "machine": last["machine"],
        "versions": last["versions"],
        "started": min(story["started"] for story in stories),
        "finished": finished.isoformat(timespec="seconds"),
    }


def _remove_old_pictures(out: Path, names: set[str]) -> None:
    """Pictures that the study drew when it was published before, and no longer does."""
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


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(name): _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
