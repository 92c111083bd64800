"""Conversion of models that exist to φ attention, and back."""

from nomax.conversion.api import convert, revert
from nomax.conversion.folders import from_pretrained, save_pretrained
from nomax.conversion.packing import pack, unpack
from nomax.conversion.report import ConversionError, Layer, Report
from nomax.conversion.timm import attn_layer, timm_model

__all__ = [
    "ConversionError",
    "Layer",
    "Report",
    "attn_layer",
    "convert",
    "from_pretrained",
    "pack",
    "revert",
    "save_pretrained",
    "timm_model",
    "unpack",
]
