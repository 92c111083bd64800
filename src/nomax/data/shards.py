# alias until the importers have moved: nomax.data.shards -> nomax.data.images.shards
from nomax.data.images.shards import ShardSource as ShardSource
