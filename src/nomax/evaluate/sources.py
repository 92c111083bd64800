# alias until the importers have moved: nomax.evaluate.sources.probe_sets -> nomax.evaluate.probe.probe_sets
from nomax.evaluate.probe import probe_sets

__all__ = ["probe_sets"]
