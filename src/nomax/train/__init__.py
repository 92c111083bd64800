"""Training: recipes, the loop, run folders."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nomax.train.text.config import TextConfig
    from nomax.train.text.task import load_text_run
    from nomax.train.vision.config import VisionConfig
    from nomax.train.vision.task import load_run

__all__ = ["TextConfig", "VisionConfig", "load_run", "load_text_run"]

# Imported when they are asked for: images need nothing of text, nor text of images.
_HOMES = {"TextConfig": "text.config", "VisionConfig": "vision.config"}
_HOMES |= {"load_run": "vision.task", "load_text_run": "text.task"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
