# alias until the importers have moved: nomax.train.language -> nomax.train.text.language
from nomax.train.text.language import Options, run

__all__ = ["Options", "run"]
