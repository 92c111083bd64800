# alias until the importers have moved: nomax.train.vit -> nomax.train.vision.command
from nomax.train.vision.command import Options, run

__all__ = ["Options", "run"]
