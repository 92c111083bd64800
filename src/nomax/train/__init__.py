"""Training: recipes, the loop, run folders."""

from nomax.train.config import VisionConfig
from nomax.train.text import load_text_run
from nomax.train.text_config import TextConfig
from nomax.train.vision import load_run

__all__ = ["TextConfig", "VisionConfig", "load_run", "load_text_run"]
