# alias until the importers have moved: nomax.ops.softmax -> nomax.ops.row_maps
from nomax.ops.row_maps import row_map

__all__ = ["row_map"]
