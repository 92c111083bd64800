"""Evaluate trained models, and look into them: accuracy, BLEU, few-shot probes, row statistics, attention maps.

The command `nomax X` is in X.py: evaluate, predict, probe, rows, maps, translate, generate.
"""

from nomax.evaluate import fewshot, translation
from nomax.evaluate.accuracy import LabelMap, Score, classify, subset_accuracy
from nomax.evaluate.attention_weights import HeadRows, row_statistics
from nomax.evaluate.maps import attention_maps
from nomax.evaluate.predict import Guess, Prediction, predict
from nomax.evaluate.runs import TrainedImageModel, TrainedTextModel, load, load_text

__all__ = [
    "Guess",
    "HeadRows",
    "LabelMap",
    "Prediction",
    "Score",
    "TrainedImageModel",
    "TrainedTextModel",
    "attention_maps",
    "classify",
    "fewshot",
    "load",
    "load_text",
    "predict",
    "row_statistics",
    "subset_accuracy",
    "translation",
]
