# alias until the importers have moved: nomax.data.text.entries.TEXTS -> nomax.data.registry.TEXTS
from nomax.data.registry import TEXTS as TEXTS
