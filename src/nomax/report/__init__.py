"""The page: what the studies found, as one HTML file that needs no network."""

from nomax.report.page import write

__all__ = ["write"]
