"""Find where a number first stopped being finite: recompute the batch while watching every layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is not finite; `report` says at which step, with which data, and in which layer."""

    def __init__(self, message: str, report: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.report = dict(report)


def locate(model: nn.Module, losses: Callable[[], Iterator[Tensor]]) -> tuple[int, str]:
    """Recompute the losses and their gradients; say where the first non-finite number is, and how certain that is.

    The leading number is smaller the closer the finding is to the cause: of several ranks, the smallest is right.
    Everything is computed even after a finding, since other ranks may be waiting for their part.
    """
    findings: list[tuple[int, str]] = []
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            findings.append((0, f"the parameter {name} was not finite before the step"))
            break
    model.zero_grad()
    watch = _Watch(model)
    try:
        for loss in losses():
            if watch.finding is None and not _finite(loss):
                watch.finding = (3, "the loss itself: every layer's output is finite")
            loss.backward()
    finally:
        watch.remove()
    findings += [watch.finding] if watch.finding else []
    # Gradients flow from the last layers to the first, so the last parameter is the first to be hit.
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            findings.append((4, f"the gradient of {name}: every layer's output and the loss are finite"))
            break
    model.zero_grad()
    nothing = (
        5,
        "nowhere when the batch was computed again: a fault of the hardware, or an operation that is not exact",
    )
    return min(findings, default=nothing)


class _Watch:
    """Hooks on every layer that remember the first output that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.finding: tuple[int, str] | None = None
        names = {module: name for name, module in model.named_modules()}
        self._hooks = [model.register_forward_pre_hook(self._input)]
        for module, name in names.items():
            self._hooks.append(module.register_forward_hook(self._output(name)))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _input(self, module: nn.Module, inputs: Any) -> None:
        if self.finding is None and not _finite(inputs):
            self.finding = (1, "the input of the model")

    def _output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.finding is not None or _finite(output):
                return
            if _finite(inputs):
                self.finding = (2, f"the layer {name or 'at the top'} ({type(module).__name__}): its input is finite")
            else:
                inside = name.rpartition(".")[0] or "the model"
                self.finding = (2, f"an operation inside {inside}, in front of {name}, whose input is not finite")

        return look


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value) if tensor.is_floating_point())
