"""Images to train on and to evaluate with: named data sets, folders, shards, and other libraries' data sets."""

from nomax.data.load import load, located, meta
from nomax.data.registry import cache_folder
from nomax.data.source import ArraySource, Source

__all__ = ["ArraySource", "Source", "cache_folder", "load", "located", "meta"]
