# alias until the importers have moved: nomax.data.draws -> nomax.data.randomness
from nomax.data.randomness import CROP as CROP
from nomax.data.randomness import FLIP as FLIP
from nomax.data.randomness import bits as bits
from nomax.data.randomness import uniform as uniform
