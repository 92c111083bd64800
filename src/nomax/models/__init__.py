"""Models on top of nomax.nn, and their weights on disk."""

from nomax.models.hub import load, save
from nomax.models.reluformer import ReLUFormer, ReLUFormerConfig
from nomax.models.vit import Preprocessing, ViT, ViTConfig
from nomax.models.weights import from_big_vision, from_timm

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
]
