# alias until the importers have moved: nomax.train.kinds.RunConfig -> nomax.train.VisionConfig | TextConfig
from nomax.train.text.config import TextConfig
from nomax.train.vision.config import VisionConfig

RunConfig = VisionConfig | TextConfig

__all__ = ["RunConfig"]
