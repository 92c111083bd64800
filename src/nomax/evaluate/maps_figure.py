# alias until the importers have moved: nomax.evaluate.maps_figure.draw -> nomax.evaluate.maps.draw
from nomax.evaluate.maps import draw

__all__ = ["draw"]
