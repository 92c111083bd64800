"""Modules on top of the operation."""

from nomax.nn.attention import Attention
from nomax.nn.cache import KeyValueCache
from nomax.nn.linear import Linear
from nomax.nn.memory import Memory
from nomax.nn.norm import GatedRMSNorm
from nomax.nn.relu_losses import RELUFORMER, Penalties, penalties

__all__ = [
    "RELUFORMER",
    "Attention",
    "GatedRMSNorm",
    "KeyValueCache",
    "Linear",
    "Memory",
    "Penalties",
    "penalties",
]
