"""nomax: attention without softmax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nomax.ops.api import attention, varlen_attention, visible_keys
    from nomax.ops.explain import explain
    from nomax.ops.rows import Rows
    from nomax.phi import Phi

__version__ = "0.1.0"

__all__ = ["Phi", "Rows", "__version__", "attention", "explain", "varlen_attention", "visible_keys"]

# Found when first asked for, so that `nomax --help` and `import nomax` need not wait for torch.
_HOMES = {
    "attention": "nomax.ops.api",
    "varlen_attention": "nomax.ops.api",
    "visible_keys": "nomax.ops.api",
    "explain": "nomax.ops.explain",
    "Rows": "nomax.ops.rows",
    "Phi": "nomax.phi",
}
_ROOMS = ("data", "evaluate", "models", "nn", "train")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"nomax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'nomax' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
