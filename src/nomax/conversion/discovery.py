"""Find the attention of any model by watching a forward pass, also attention that cannot be converted.

What computes attention is told by what it calls, not by its name: the attention interface of transformers,
F.scaled_dot_product_attention, nn.MultiheadAttention, or a softmax whose result is multiplied with a matrix.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from nomax.nn import Attention, InnerAttention

# interface: transformers' AttentionInterface; sdpa: F.scaled_dot_product_attention; multihead: nn.MultiheadAttention;
# nomax: our own nn.Attention; softmax: a softmax of its own, which cannot be converted.
Kind = Literal["interface", "sdpa", "multihead", "nomax", "softmax"]

SDPA = F.scaled_dot_product_attention
MULTIHEAD = (F.multi_head_attention_forward, torch._native_multi_head_attention)
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
# Functions after which weights are still weights, by name, as functions, methods or operators.
_STILL_WEIGHTS = {
    "dropout", "to", "type", "float", "half", "bfloat16", "type_as", "reshape", "view", "flatten", "unflatten",
    "transpose", "permute", "contiguous", "masked_fill", "nan_to_num", "unsqueeze", "squeeze", "expand", "chunk",
    "split", "unbind", "__getitem__", "div", "__truediv__", "__itruediv__", "where", "clone",
    "cat", "movedim", "swapaxes",
}  # fmt: skip
# Of these, only if the result is as large as the weights.
_STILL_WEIGHTS_IF_AS_LARGE = {"mul", "__mul__", "__imul__", "add", "__add__", "__iadd__", "sub", "__sub__"}
_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum", "linear", "addmm"}
_FOLLOWED = _STILL_WEIGHTS | _STILL_WEIGHTS_IF_AS_LARGE | _PRODUCTS
# A mask this low, but not the dtype's minimum, means "hidden" to softmax (Swin's is -100), though not to every φ.
LOW, LOWEST = -50.0, -1e4
_LOOKS_LIKE_ATTENTION = re.compile(r"Attention|Attn")


@dataclass
class Site:
    """A module that computes attention itself."""

    name: str
    """Its name in the model."""
    module: nn.Module
    kind: Kind
    num_heads: int | None = None
    head_dim: int | None = None
    calls: int = 0
    """How often it attended in the forward pass."""
    low_masks: bool = False
    """Whether it hides keys by a number like -100."""
    reason: str = ""
    """Why it cannot be converted, if it cannot."""
    is_causal: bool | None = None
    """Whether it is causal where it gets no mask, if the module does not say so itself."""

    @property
    def phi(self) -> str:
        """What turns its scores into weights now."""
        inner = getattr(self.module, "inner_attention", None)
        phi = inner.phi if isinstance(inner, InnerAttention) else getattr(self.module, "phi", "softmax")
        return str(phi) if self.kind == "nomax" or isinstance(inner, InnerAttention) else "softmax"


@dataclass
class Sites:
    """All attention that a forward pass reached, in its order, and attention modules that it did not reach."""

    of: dict[nn.Module, Site] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    problem: str = ""
    """Why the model as a whole cannot be converted, if it cannot."""

    def __iter__(self) -> Iterator[Site]:
        return iter(self.of.values())


class Watch(TorchFunctionMode):
    """While it is active, every attention of a model is noted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            self.names.setdefault(module, name)
        self.sites = Sites()
        self.called: set[nn.Module] = set()
        self.observing = False
        """Whether masks are made where None would do, to see from them which modules are causal."""
        self.causal: dict[nn.Module, bool] = {}
        self._stack: list[nn.Module] = []
        self._weights: dict[int, tuple[Tensor, nn.Module]] = {}  # with the tensor itself, so that its id stays its own

    def note(self, module: nn.Module, kind: Kind, query: Tensor | None = None, mask: Tensor | None = None) -> Site:
        """Count a call of attention; the first kind that a module shows is its kind."""
        site = self.sites.of.get(module)
        if site is None:
            site = self.sites.of[module] = Site(self.names[module], module, kind, is_causal=self.causal.get(module))
        if site.kind == kind:
            site.calls += 1
            if query is not None:  # the heads may also be part of the batch
                site.num_heads, site.head_dim = query.shape[1] if query.dim() == 4 else None, query.shape[-1]
            if mask is not None and mask.is_floating_point():
                site.low_masks |= bool(((mask < LOW) & (mask > LOWEST)).any())
        return site

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._stack:
            return func(*args, **kwargs)
        module = self._stack[-1]
        if func is SDPA:
            if not isinstance(module, Attention | InnerAttention):
                self.note(module, "sdpa", *_query_and_mask(*args, **kwargs))
            return func(*args, **kwargs)
        if func in MULTIHEAD:
            if not isinstance(module, nn.MultiheadAttention):
                self.note(module, "softmax").reason = "it calls F.multi_head_attention_forward, which has a softmax"
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func in SOFTMAX:
            self._mark(out, self._owner())
        elif self._weights and name in _FOLLOWED and (marked := self._marked(args)) is not None:
            weights, owner = marked
            if name in _PRODUCTS:
                self.note(owner, "softmax").reason = "it computes a softmax itself, which cannot be replaced"
            elif name not in _STILL_WEIGHTS_IF_AS_LARGE or out.shape == weights.shape:
                for part in out if isinstance(out, tuple | list) else (out,):
                    self._mark(part, owner)
        return out

    def _owner(self) -> nn.Module:
        """Return the innermost module that is more than a softmax."""
        return next((module for module in reversed(self._stack) if type(module) is not nn.Softmax), self._stack[0])

    def _mark(self, weights: Any, owner: nn.Module) -> None:
        if isinstance(weights, Tensor):
            self._weights[id(weights)] = (weights, owner)

    def _marked(self, args: tuple[Any, ...]) -> tuple[Tensor, nn.Module] | None:
        for x in args:
            for part in x if isinstance(x, tuple | list) else (x,):
                if isinstance(part, Tensor) and id(part) in self._weights:
                    return self._weights[id(part)]
        return None

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module not in self.names:
            return
        if isinstance(module, InnerAttention) and self._stack:
            site = self.note(self._stack[-1], kind_of_converted(self._stack[-1]))
            site.num_heads, site.head_dim = module.num_heads, module.head_dim
        elif isinstance(module, Attention):
            site = self.note(module, "nomax")
            site.num_heads, site.head_dim = module.heads, module.dim // module.heads
        elif isinstance(module, nn.MultiheadAttention) and not _is_converted(module):
            site = self.note(module, "multihead")
            site.num_heads, site.head_dim = module.num_heads, module.head_dim
        self.called.add(module)
        self._stack.append(module)

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()

    @contextmanager
    def watching(self) -> Iterator["Watch"]:
        """Note all attention in the block."""
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()
            self._weights.clear()

    def unreached(self) -> list[str]:
        """Return the names of modules that look like attention, but were not called."""
        looking = {module for module in self.names if _LOOKS_LIKE_ATTENTION.search(type(module).__name__)}
        looking -= {module for module in looking if isinstance(module, InnerAttention)}
        outer = {module for module in looking if any(inner in looking for inner in list(module.modules())[1:])}
        return [self.names[module] for module in self.names if module in looking - outer - self.called]


def _query_and_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    return query, attn_mask


def _is_converted(module: nn.Module) -> bool:
    return isinstance(getattr(module, "inner_attention", None), InnerAttention)


def kind_of_converted(module: nn.Module) -> Kind:
    """Return the kind of a module that was converted."""
    kind: Kind = getattr(type(module), "converted_kind", "interface")
    return kind
