"""Runs of text: a ReLUFormer learns to translate, or to continue texts."""

from typing import Any


# alias until the importers have moved: nomax.train.text.measure -> nomax.train.text.task.measure
def __getattr__(name: str) -> Any:
    if name != "measure":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nomax.train.text.task import measure

    return measure
