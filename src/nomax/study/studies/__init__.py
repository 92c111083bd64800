"""The studies, by the names they have on the command line."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Protocol, cast

from nomax.study.figure import Figure
from nomax.study.verdict import Verdict

STUDIES = {
    "scaling": "nomax.study.studies.scaling",
    "alpha": "nomax.study.studies.alpha",
    "qk-norm": "nomax.study.studies.qk_norm",
    "gate": "nomax.study.studies.gate",
    "rate": "nomax.study.studies.rate",
    "text-rate": "nomax.study.studies.text_rate",
    "memory": "nomax.study.studies.memory",
    "relu-attention": "nomax.study.studies.relu_attention",
    "documents": "nomax.study.studies.documents",
    "text-phi": "nomax.study.studies.text_phi",
}


class Study(Protocol):
    """What the module of a study has. Its docstring says what it shows, the command, the time, and what came out.

    Its rows and its set-up are those of images, or those of text where KIND = "text".
    """

    TITLE: str
    CLAIMS: tuple[str, ...]

    def grid(self, setup: Any, seeds: Sequence[int]) -> list[Any]:
        """The runs, one seed after the other."""

    def figures(self, rows: Sequence[Any], setup: Any) -> list[Figure]:
        """What came out, as pictures.

        A study that measures something for them, which would come out differently every time, takes a third argument,
        `before`: the numbers of its verdicts by claim, from which to draw the same pictures again.
        """

    def verdicts(self, rows: Sequence[Any], setup: Any) -> list[Verdict]:
        """What came out, as judged claims."""


def load(name: str) -> Study:
    """The module of a study."""
    if name not in STUDIES:
        nearest = get_close_matches(name, STUDIES, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        known = ", ".join(STUDIES)
        raise ValueError(f"there is no study {name!r}{hint} There are {known}, and any file ending in .py.")
    return cast(Study, import_module(STUDIES[name]))
