"""Studies: a question becomes a grid of runs, the runs a figure, and the figure a verdict.

A study is a module in nomax.study.studies, or any Python file: TITLE, CLAIMS, grid(setup, seeds), figures(rows, setup)
and verdicts(rows, setup). `nomax study NAME` runs it. One of text says so with KIND = "text".
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from nomax._files import did_you_mean

if TYPE_CHECKING:
    from nomax.study.engine.figure import Figure
    from nomax.study.engine.verdict import Verdict

# By the names they have on the command line, in the order of the papers.
STUDIES = (
    "scaling",
    "alpha",
    "qk-norm",
    "gate",
    "sequence-parallel",
    "rate",
    "text-rate",
    "memory",
    "relu-attention",
    "documents",
    "text-phi",
)
NEEDED = ("TITLE", "CLAIMS", "grid", "figures", "verdicts")


class Study(Protocol):
    """The module of a study. Its docstring says what it shows, the command, the time, and what came out.

    Its rows and its set-up are those of images, or those of text where KIND = "text".
    """

    TITLE: str
    CLAIMS: tuple[str, ...]

    def grid(self, setup: Any, seeds: Sequence[int]) -> list[Any]:
        """Return the runs, one seed after the other; what is measured apart is a run of the grid, too."""

    def figures(self, rows: Sequence[Any], setup: Any) -> "list[Figure]":
        """Return what came out, as pictures: made of the rows alone."""

    def verdicts(self, rows: Sequence[Any], setup: Any) -> "list[Verdict]":
        """Return what came out, as judged claims: made of the rows alone."""


def load(name: str) -> Study:
    """Return a study by its name, or by the path of a Python file."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    if name not in STUDIES:
        known = f"There are {', '.join(STUDIES)}, and any file ending in .py."
        raise ValueError(f"there is no study {name!r}{did_you_mean(name, STUDIES)} {known}")
    return cast(Study, import_module(f"nomax.study.studies.{name.replace('-', '_')}"))


def _load_file(path: Path) -> Study:
    spec = spec_from_file_location(f"nomax_study_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path}: no such file. A study is a Python file with grid, figures and verdicts.")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}, is not Python: {error.msg}.") from error
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}. A study has {', '.join(NEEDED)}.")
    return cast(Study, module)


def kind(study: Study) -> Literal["images", "text"]:
    """Return what the runs of a study are about: its KIND says so, and images if it has none."""
    return "text" if getattr(study, "KIND", "images") == "text" else "images"


def short(name: str) -> str:
    """Return what a study is called in folders and tables: one of a file like the file."""
    return Path(name).stem.replace("_", "-") if name.endswith(".py") else name
