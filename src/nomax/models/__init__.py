"""Models on top of nomax.nn, and their weights on disk."""

from nomax.models.big_vision import from_big_vision
from nomax.models.foreign import from_timm, timm_model
from nomax.models.hub import load, save
from nomax.models.reluformer import ReLUFormer
from nomax.models.reluformer_config import ReLUFormerConfig
from nomax.models.vit import ViT
from nomax.models.vit_config import Preprocessing, ViTConfig

__all__ = [
    "Preprocessing",
    "ReLUFormer",
    "ReLUFormerConfig",
    "ViT",
    "ViTConfig",
    "from_big_vision",
    "from_timm",
    "load",
    "save",
    "timm_model",
]
