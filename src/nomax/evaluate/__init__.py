"""What a trained model can do and how it attends: accuracy, BLEU, few-shot probes, row statistics, attention maps."""

from nomax.evaluate import features, fewshot, subset, translation
from nomax.evaluate.accuracy import Score, classify
from nomax.evaluate.maps import attention_maps
from nomax.evaluate.rows import HeadRows, row_statistics, text_row_statistics
from nomax.evaluate.runs import Run, TextRun, load, load_text
from nomax.evaluate.subset import LabelMap, subset_accuracy

__all__ = [
    "HeadRows",
    "LabelMap",
    "Run",
    "Score",
    "TextRun",
    "attention_maps",
    "classify",
    "features",
    "fewshot",
    "load",
    "load_text",
    "row_statistics",
    "subset",
    "subset_accuracy",
    "text_row_statistics",
    "translation",
]
