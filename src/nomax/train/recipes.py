# alias until the importers have moved: nomax.train.recipes -> nomax.train.vision.config
from nomax.train.vision.config import AUGMENTATIONS, RECIPES, i1k, i21k, small

__all__ = ["AUGMENTATIONS", "RECIPES", "i1k", "i21k", "small"]
