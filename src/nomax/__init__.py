"""nomax: attention without softmax."""

import sys
from importlib import import_module, util
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from nomax.conversion import convert, from_pretrained, revert, save_pretrained, timm_model
    from nomax.conversion.calibrate import calibrate
    from nomax.conversion.export import export_onnx
    from nomax.ops.api import attention, varlen_attention, visible_keys
    from nomax.ops.backends import explain
    from nomax.ops.problem import Rows
    from nomax.phi import Phi
    from nomax.train.distil.distillation import distil

__version__ = "0.1.0"

__all__ = [
    "Phi",
    "Rows",
    "__version__",
    "attention",
    "calibrate",
    "convert",
    "distil",
    "explain",
    "export_onnx",
    "from_pretrained",
    "load_operators",
    "revert",
    "save_pretrained",
    "timm_model",
    "varlen_attention",
    "visible_keys",
]

# Found when first asked for, so that `nomax --help` and `import nomax` need not wait for torch.
_HOMES = {
    "attention": "nomax.ops.api",
    "varlen_attention": "nomax.ops.api",
    "visible_keys": "nomax.ops.api",
    "explain": "nomax.ops.backends",
    "calibrate": "nomax.conversion.calibrate",
    "convert": "nomax.conversion",
    "distil": "nomax.train.distil.distillation",
    "export_onnx": "nomax.conversion.export",
    "from_pretrained": "nomax.conversion",
    "revert": "nomax.conversion",
    "save_pretrained": "nomax.conversion",
    "timm_model": "nomax.conversion",
    "Rows": "nomax.ops.problem",
    "Phi": "nomax.phi",
}
_ROOMS = ("conversion", "data", "evaluate", "models", "nn", "parallel", "train")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"nomax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'nomax' has no attribute {name!r}")
    member = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return member


def load_operators() -> None:
    """Load the compiled operators, torch.ops.nomax, compiling them first if need be.

    Python finds them by itself: a call of `attention` loads them, and so does torch.export.load of a program that uses
    them, once nomax is imported. A package of AOTInductor is loaded by C++, which does not ask Python: call this before
    torch._inductor.aoti_load_package.
    """
    import_module("nomax.ops.cpu").load()


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])


class _Operators(ModuleType):
    """Stands at torch.ops.nomax until somebody asks for an operator, as torch.export.load does, and loads them then.

    Loading at import would import torch and might compile; without this, a program that was exported with the operators
    could not be loaded before the first call of `attention`.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"torch.ops.nomax has no attribute {name!r}")
        load_operators()
        return getattr(sys.modules["torch"].ops.nomax, name)


class _AfterTorch:
    """An import hook that tells torch of the operators when torch is imported after nomax."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> "ModuleSpec | None":
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_announce(module: ModuleType) -> None:
                execute(module)
                _announce(module)

            spec.loader.exec_module = execute_and_announce  # type: ignore[method-assign]
        return spec


def _announce(torch: ModuleType) -> None:
    if "nomax.ops.cpu" not in sys.modules:
        torch.ops.nomax = _Operators("torch.ops.nomax")


if "torch" in sys.modules:
    _announce(sys.modules["torch"])
else:
    sys.meta_path.insert(0, _AfterTorch())
