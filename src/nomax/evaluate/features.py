# alias until the importers have moved: nomax.evaluate.features.features -> nomax.evaluate.fewshot.features
from nomax.evaluate.fewshot import features

__all__ = ["features"]
