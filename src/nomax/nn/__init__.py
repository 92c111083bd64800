"""Modules on top of the operation."""

from nomax.nn.attention import Attention, KeyValueCache
from nomax.nn.inner_attention import InnerAttention
from nomax.nn.layers import GatedRMSNorm, Linear
from nomax.nn.memory import Memory
from nomax.nn.relu_losses import RELUFORMER, Penalties, penalties

__all__ = [
    "RELUFORMER",
    "Attention",
    "GatedRMSNorm",
    "InnerAttention",
    "KeyValueCache",
    "Linear",
    "Memory",
    "Penalties",
    "penalties",
]
