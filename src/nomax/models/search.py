# alias until the importers have moved: nomax.models.search -> nomax.models.decoding (search -> beam_search)
from nomax.models.decoding import COLDEST, LARGEST_PENALTY, Hypothesis, sample, stream
from nomax.models.decoding import beam_search as search

__all__ = ["COLDEST", "LARGEST_PENALTY", "Hypothesis", "sample", "search", "stream"]
