# alias until the importers have moved: nomax.data.batches -> nomax.data.images.batches
from nomax.data.images.batches import Batch as Batch
from nomax.data.images.batches import batches as batches
from nomax.data.images.batches import evaluation_batches as evaluation_batches
from nomax.data.images.batches import floats as floats
