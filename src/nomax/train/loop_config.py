# alias until the importers have moved: nomax.train.loop_config -> nomax.train.config
from nomax.train.config import LoopConfig, differences, digest, read, to_json

__all__ = ["LoopConfig", "differences", "digest", "read", "to_json"]
