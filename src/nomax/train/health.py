# alias until the importers have moved: nomax.train.health -> nomax.train.nonfinite
from nomax.train.nonfinite import NonFiniteError

__all__ = ["NonFiniteError"]
