# alias until the importers have moved: nomax.evaluate.watch.looks -> nomax.evaluate.attention_weights.text_weights
from nomax.evaluate.attention_weights import text_weights as looks

__all__ = ["looks"]
