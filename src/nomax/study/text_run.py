# alias until the importers have moved: nomax.study.text_run.TextRun -> nomax.study.engine.experiment.TextExperiment
from nomax.study.engine.experiment import TextExperiment as TextRun

__all__ = ["TextRun"]
