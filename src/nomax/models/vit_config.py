# alias until the importers have moved: nomax.models.vit_config -> nomax.models.vit
from nomax.models.vit import Probabilities

__all__ = ["Probabilities"]
