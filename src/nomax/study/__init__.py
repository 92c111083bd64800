"""Studies: a question becomes a grid of runs, the runs a figure, and the figure a verdict.

A study is a module of nomax.study.images or nomax.study.text, or any Python file: TITLE, CLAIMS, grid(setup, seeds),
figures(results, setup) and verdicts(results, setup). `nomax study NAME` runs it. KIND = "text" marks one of text,
CHANGES adapts the set-ups, by name, and finding(results, setup) puts the result in a sentence for the top of the page.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from nomax._files import did_you_mean

if TYPE_CHECKING:
    from nomax.study.engine.figure import Figure
    from nomax.study.engine.verdict import Verdict

# The names on the command line, in the order of the papers, and the modules.
STUDIES = {
    "scaling": "images.scaling",
    "alpha": "images.alpha",
    "qk-norm": "images.qk_norm",
    "gate": "images.gate",
    "sequence-parallel": "images.sequence_parallel",
    "rate": "images.rate",
    "text-rate": "text.rate",
    "memory": "text.memory",
    "relu-attention": "text.relu_attention",
    "documents": "text.documents",
    "text-phi": "text.phi",
    "zeros": "zeros.study",
}
NEEDED = ("TITLE", "CLAIMS", "grid", "figures", "verdicts")


class Study(Protocol):
    """The module of a study. Its docstring gives the question, the command, the time it takes, and the outcome.

    Its results and its set-up are those of images, or those of text where KIND = "text".
    """

    TITLE: str
    CLAIMS: tuple[str, ...]

    def grid(self, setup: Any, seeds: Sequence[int]) -> list[Any]:
        """Return the runs, one seed after the other. A separate measurement is a run of the grid, too."""

    def figures(self, results: Sequence[Any], setup: Any) -> "list[Figure]":
        """Draw the results, and nothing but the results."""

    def verdicts(self, results: Sequence[Any], setup: Any) -> "list[Verdict]":
        """Judge the claims, by nothing but the results."""


def load(name: str) -> Study:
    """Return a study by its name, or by the path of a Python file."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    if name not in STUDIES:
        known = f"There are {', '.join(STUDIES)}, and any file ending in .py."
        raise ValueError(f"there is no study {name!r}{did_you_mean(name, STUDIES)} {known}")
    return cast(Study, import_module(f"nomax.study.{STUDIES[name]}"))


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
    """Return the kind of data that a study trains on: images unless its KIND is text."""
    return "text" if getattr(study, "KIND", "images") == "text" else "images"


def setups(kind: Literal["images", "text"]) -> Mapping[str, Any]:
    """Return the set-ups of a kind of study by name; both kinds have the same names."""
    return cast(Mapping[str, Any], import_module(f"nomax.study.{kind}.setup").SETUPS)


def named_setup(study: Study, name: str) -> Any:
    """Return a set-up by name, with the study's changes to it."""
    known = setups(kind(study))
    if name not in known:
        raise ValueError(f"there is no set-up {name!r}{did_you_mean(name, known)} There are {', '.join(known)}.")
    return replace(known[name], **getattr(study, "CHANGES", {}).get(name, {}))


def short(name: str) -> str:
    """Return the name of a study in folders and tables: that of the file if it is one."""
    return Path(name).stem.replace("_", "-") if name.endswith(".py") else name
