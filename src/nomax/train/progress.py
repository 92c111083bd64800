# alias until the importers have moved: nomax.train.progress -> nomax.train.console
from nomax.train.console import Bar, peak_memory, perplexity

__all__ = ["Bar", "peak_memory", "perplexity"]
