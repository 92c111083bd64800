"""nomax: attention without softmax."""

from nomax.ops.api import attention, varlen_attention, visible_keys
from nomax.ops.explain import explain
from nomax.ops.rows import Rows
from nomax.phi import Phi

__version__ = "0.1.0"

__all__ = ["Phi", "Rows", "__version__", "attention", "explain", "varlen_attention", "visible_keys"]
