"""What a trained model can do and how it attends: accuracy, few-shot probes, row statistics, attention maps."""

from nomax.evaluate import features, fewshot, subset
from nomax.evaluate.accuracy import Score, classify
from nomax.evaluate.maps import attention_maps
from nomax.evaluate.rows import HeadRows, row_statistics
from nomax.evaluate.runs import Run, load
from nomax.evaluate.subset import LabelMap, subset_accuracy

__all__ = [
    "HeadRows",
    "LabelMap",
    "Run",
    "Score",
    "attention_maps",
    "classify",
    "features",
    "fewshot",
    "load",
    "row_statistics",
    "subset",
    "subset_accuracy",
]
