# alias until the importers have moved: nomax.evaluate.subset -> nomax.evaluate.accuracy (named -> load_subset)
from nomax.evaluate.accuracy import LabelMap, subset_accuracy, subset_predictions
from nomax.evaluate.accuracy import load_subset as named

__all__ = ["LabelMap", "named", "subset_accuracy", "subset_predictions"]
