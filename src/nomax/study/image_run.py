# alias until the importers have moved: nomax.study.image_run.ImageRun -> nomax.study.engine.experiment.ImageExperiment
from nomax.study.engine.experiment import ImageExperiment as ImageRun

__all__ = ["ImageRun"]
