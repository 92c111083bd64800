"""Sequences that are split over processes: attention in two schedules, and models whose sequence is split."""

from nomax.parallel.api import attention, gather, split, total
from nomax.parallel.layout import Layout
from nomax.parallel.parallelize import parallelize

__all__ = ["Layout", "attention", "gather", "parallelize", "split", "total"]
