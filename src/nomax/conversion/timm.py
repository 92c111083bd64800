"""timm: its models with φ from the start, and its table of attention layers."""

from functools import cache
from typing import Any

from torch import nn

from nomax import _compat
from nomax.conversion.api import convert
from nomax.conversion.swapped import converted_class
from nomax.nn import InnerAttention
from nomax.phi import Phi

PREFIX = "nomax:"  # of our names in timm's table of attention layers


def timm_model(name: str, phi: str | Phi | None = None, **settings: Any) -> nn.Module:
    """Call timm.create_model, and convert the attention of the model to φ; None leaves it as it is.

    It works even if torchvision was built for another torch. There, `import timm` alone fails: "operator
    torchvision::nms does not exist".
    """
    model: nn.Module = _compat.timm().create_model(name, **settings)
    model._timm_settings = settings  # type: ignore[assignment]  # for save_pretrained
    if phi is not None:
        convert(model, phi)
    return model


def attn_layer(phi: str | Phi = "relu/L") -> str:
    """Register φ attention in timm's table, and return its name: timm.create_model(…, attn_layer=attn_layer("relu/L")).

    The weights have the names of timm's own attention, so checkpoints of either load into the other.
    """
    _compat.timm()
    from timm.models.vision_transformer import ATTN_LAYERS

    name = f"{PREFIX}{Phi.parse(phi)}"
    ATTN_LAYERS[name] = _layer_class(Phi.parse(phi))
    return name


@cache
def _layer_class(phi: Phi) -> type[nn.Module]:
    """Return timm's Attention with φ, which timm wants as a class."""
    from timm.layers.attention import Attention

    base: Any = converted_class(Attention)

    class PhiAttention(base):  # type: ignore[misc]
        """timm's Attention, with φ in the place of softmax."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.fused_attn = True  # φ takes the place of the fused operation
            self.inner_attention = InnerAttention(phi, self.num_heads, head_dim=self.head_dim)

    return PhiAttention
