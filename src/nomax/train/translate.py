# alias until the importers have moved: nomax.train.translate -> nomax.train.text.translate
from nomax.train.text.translate import Options, run

__all__ = ["Options", "run"]
