"""Modules that call F.scaled_dot_product_attention: their class is swapped for one that calls φ instead.

The original forward pass runs as it is (gates, norms, positions, masks); only that one function is another within it.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nomax.conversion.discovery import SDPA

# Methods of tensors that are written in Python: torch.compile knows them as methods, but not as functions.
_METHODS = {name for name, method in vars(Tensor).items() if isinstance(method, FunctionType)}


class Instead(TorchFunctionMode):
    """While it is active, `inner` answers calls of F.scaled_dot_product_attention."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.attend = inner

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return self.attend(*args, **kwargs)
        if torch.compiler.is_compiling() and func.__name__ in _METHODS:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*args, **kwargs)


@cache
def converted_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward pass has φ in the place of F.scaled_dot_product_attention."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Instead(self.inner_attention):
            return original.forward(self, *args, **kwargs)

    return subclass(original, "sdpa", forward, converted_class)


def subclass(
    original: type[nn.Module], kind: str, forward: Callable[..., Any], again: Callable[[Any], type[nn.Module]]
) -> type[nn.Module]:
    """Return a class like another one but for its forward pass.

    again: makes the class from the original one, for pickles and copies of instances.
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _blank, (again, original), self.__dict__

    members = {
        "forward": forward,
        "converted_kind": kind,
        "original_class": original,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), members)  # the name that printed models and errors had shown


def _blank(again: Callable[[Any], type[nn.Module]], original: type[nn.Module]) -> nn.Module:
    kind = again(original)
    return kind.__new__(kind)


def swap_back(module: nn.Module) -> None:
    """Give a module its original class back, and drop its inner attention."""
    module.__class__ = type(module).original_class  # type: ignore[attr-defined]
    del module.inner_attention
