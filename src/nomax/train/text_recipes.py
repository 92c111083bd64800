# alias until the importers have moved: nomax.train.text_recipes -> nomax.train.text.config
from nomax.train.text.config import GAMMA, PENALTY, RECIPES, iwslt, small

__all__ = ["GAMMA", "PENALTY", "RECIPES", "iwslt", "small"]
