"""Studies: a question becomes a grid of runs, the runs a figure, and the figure a verdict.

A study is a module in nomax.study.studies, or any Python file: TITLE, CLAIMS, grid(setup, seeds), figures(rows, setup)
and verdicts(rows, setup). `nomax study NAME` runs it. One of text says so with KIND = "text".
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from nomax.study.studies import Study

NAMES = ("TITLE", "CLAIMS", "grid", "figures", "verdicts")  # what a study has


def load(name: str) -> "Study":
    """A study by its name, or by the path of a Python file."""
    if not name.endswith(".py"):
        from nomax.study import studies

        return studies.load(name)
    path = Path(name)
    spec = spec_from_file_location(f"nomax_study_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path}: no such file. A study is a Python file with grid, figures and verdicts.")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}, is not Python: {error.msg}.") from error
    missing = [name for name in NAMES if not hasattr(module, name)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}. A study has {', '.join(NAMES)}.")
    return cast("Study", module)


def kind(study: "Study") -> Literal["images", "text"]:
    """What the runs of a study are about: its KIND says so, and images if it has none."""
    return "text" if getattr(study, "KIND", "images") == "text" else "images"


def short(name: str) -> str:
    """What a study is called in folders and tables: one of a file like the file."""
    return Path(name).stem.replace("_", "-") if name.endswith(".py") else name
