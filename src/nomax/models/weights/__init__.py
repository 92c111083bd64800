"""Weights that others trained, as models of ours with any φ."""

from nomax.models.weights.big_vision import from_big_vision
from nomax.models.weights.timm import from_timm

__all__ = ["from_big_vision", "from_timm"]
