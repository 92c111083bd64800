# alias until the importers have moved: nomax.data.workers -> nomax.data.images.workers
from nomax.data.images.workers import CHUNK as CHUNK
from nomax.data.images.workers import Maker as Maker
from nomax.data.images.workers import Request as Request
from nomax.data.images.workers import made_by as made_by
