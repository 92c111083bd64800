# alias until the importers have moved: nomax.ops.explain -> nomax.ops.backends
from nomax.ops.backends import Explanation, explain

__all__ = ["Explanation", "explain"]
