# alias until the importers have moved: nomax.train.text_data -> nomax.train.text.data
from nomax.train.text.data import examples, has_test, kept, learned, load, of_run, stages, vocabulary

__all__ = ["examples", "has_test", "kept", "learned", "load", "of_run", "stages", "vocabulary"]
