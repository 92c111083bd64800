"""Linear layers that stay fast in half precision on CPUs without half-precision matrix products."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _without_products() -> frozenset[torch.dtype]:
    """Return the half-precision dtypes whose products this CPU computes ten times slower than float32."""
    supported = {
        torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None),
        torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None),
    }
    return frozenset(dtype for dtype, ask in supported.items() if ask is not None and not ask())


SLOW = _without_products()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear, internally in float32 where the CPU is slow in half precision."""
    if SLOW and x.is_cpu:
        autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
        if dtype in SLOW:
            with torch.autocast("cpu", enabled=False):
                return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear with `linear`: the same parameters and dtypes, only faster."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
