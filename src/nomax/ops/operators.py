# alias until the importers have moved: nomax.ops.operators -> nomax.ops.cpu
from nomax.ops.cpu import load

__all__ = ["load"]
