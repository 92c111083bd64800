"""Modules on top of the operation."""

from nomax.nn.attention import Attention
from nomax.nn.cache import KeyValueCache
from nomax.nn.linear import Linear

__all__ = ["Attention", "KeyValueCache", "Linear"]
