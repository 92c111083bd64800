# alias until the importers have moved: nomax.train.stop -> nomax.train.console
from nomax.train.console import Stop

__all__ = ["Stop"]
