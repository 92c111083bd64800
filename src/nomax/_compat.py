"""Optional packages, imported only when they are needed, and mended where two of them do not fit together."""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from threading import Lock
from types import ModuleType

import torch

# torchvision's Python part describes these to torch, and fails if its compiled part did not bring them.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_lock = Lock()
_library: torch.library.Library | None = None  # what it defined disappears with it


def torchvision() -> ModuleType:
    """Import torchvision, also beside a build of torch (CPU only) that its compiled part does not fit.

    Then transforms, datasets and models work; torchvision.ops and the compiled decoders of torchvision.io do not.
    """
    with _lock:
        if "torchvision" in sys.modules:
            return sys.modules["torchvision"]
        spec = importlib.util.find_spec("torchvision")
        if spec is None or spec.origin is None:
            raise ImportError("this needs torchvision: pip install torchvision")
        _mend(Path(spec.origin).parent)
        with warnings.catch_warnings():
            # The decoders in its other compiled part; nothing here uses them.
            warnings.filterwarnings("ignore", message="Failed to load image Python extension")
            return importlib.import_module("torchvision")


def timm() -> ModuleType:
    """Import timm, with a torchvision that works."""
    if importlib.util.find_spec("timm") is None:
        raise ImportError("this needs timm: pip install timm")
    torchvision()
    return importlib.import_module("timm")


def transformers() -> ModuleType:
    """Import transformers, with a torchvision that works if there is one."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("this needs transformers: pip install transformers")
    if importlib.util.find_spec("torchvision") is not None:
        torchvision()
    return importlib.import_module("transformers")


def _mend(folder: Path) -> None:
    global _library
    for binary in sorted(folder.glob("_C*.so")) + sorted(folder.glob("_C*.pyd")):
        try:
            torch.ops.load_library(binary)
            return
        except OSError:
            continue
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            _library.define(schema)
