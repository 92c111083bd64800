"""Training: recipes, the loop, run folders."""

from nomax.train.config import VisionConfig
from nomax.train.vision import load_run

__all__ = ["VisionConfig", "load_run"]
