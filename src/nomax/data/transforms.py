# alias until the importers have moved: nomax.data.transforms -> nomax.data.images.transforms
from nomax.data.images.transforms import Augment as Augment
from nomax.data.images.transforms import Evaluation as Evaluation
