"""Results folders as `nomax study` writes them, read and checked: an error names the file and what is wrong in it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nomax._files import read_json
from nomax.study.engine.verdict import Verdict

ADVICE = "`nomax study NAME` writes such a folder to results/NAME."

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Table:
    """The numbers behind a figure."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Figure:
    """A figure of a study: a file beside study.json, and what it shows in words and numbers."""

    file: str
    title: str = ""
    caption: str = ""
    alternative: str = ""
    table: Table | None = None


@dataclass(frozen=True)
class Story:
    """study.json: what was done, by which command, on which machine."""

    name: str
    title: str = ""
    note: str = ""
    """A warning to read first: that runs are missing, or that it is a smoke run."""
    finding: str = ""
    """The result in a sentence."""
    text: str = ""
    command: str = ""
    claims: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    setup: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    started: str | None = None
    finished: str | None = None
    runs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """An entry of curves.json: how a run's loss and accuracy went."""

    label: str
    steps: list[float]
    key: str = ""
    """Of its run in runs.json."""
    group: str = ""
    loss: list[float | None] = field(default_factory=list)
    accuracy: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Attention:
    """An entry of rows_statistics.json: a run's row statistics, by layer or by layer and head."""

    label: str
    layers: list[dict[str, Any]]


@dataclass(frozen=True)
class ResultsFolder:
    """A results folder. Only study.json must be there."""

    folder: Path
    story: Story
    verdicts: list[Verdict]
    curves: list[Curve]
    attention: list[Attention]
    runs: list[dict[str, Any]]


def read(folder: Path) -> ResultsFolder:
    """Read a results folder; a ValueError names the file that is damaged."""
    story = _checked(folder / "study.json", Story)
    if story is None:
        raise FileNotFoundError(f"{folder} holds no study.json. {ADVICE}")
    curves = _checked(folder / "curves.json", list[Curve]) or []
    for curve in curves:
        for name, values in (("loss", curve.loss), ("accuracy", curve.accuracy)):
            if values and len(values) != len(curve.steps):
                of = f"{len(values)} values of {name} for {len(curve.steps)} steps"
                raise ValueError(f"{folder / 'curves.json'}: {curve.label!r} has {of}; their numbers must agree.")
    for figure in story.figures:
        table = figure.table or Table([], [])
        for row in table.rows:
            if len(row) != len(table.columns):
                cells = f"{len(row)} cells for {len(table.columns)} columns"
                raise ValueError(f"{folder / 'study.json'}: a row of the table of {figure.file} has {cells}: {row}.")
    return ResultsFolder(
        folder,
        story,
        _checked(folder / "verdicts.json", list[Verdict]) or [],
        curves,
        _checked(folder / "rows_statistics.json", list[Attention]) or [],
        _checked(folder / "runs.json", list[dict[str, Any]]) or [],
    )


def _checked(path: Path, kind: type[Kind]) -> Kind | None:
    """Read a JSON file as the given type; None if there is no such file."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(read_json(path, "Restore it, or run the study again."))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path} is not what a study writes: {where}: {first['msg']}.") from None
