"""Is it right? Asked before anything is timed: what is wrong gets no time and so no ratio."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nomax.bench.peers import Attention, eager, ours
from nomax.bench.shapes import Inputs

NAMES = ("output", "query gradient", "key gradient", "value gradient")


@dataclass
class Gate:
    """Our largest errors against float64, and the most that they may be."""

    dtype: str
    shape: str = ""
    name: str = ""
    error: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    green: bool = False

    def reason(self) -> str:
        """Why it is red, in words."""
        if self.failure:
            return self.failure
        wrong = [name for name in self.error if not self.error[name] <= self.allowed[name]]
        return ", ".join(f"{name} off by {self.error[name]:.2g} (allowed {self.allowed[name]:.2g})" for name in wrong)


def check(inputs: Inputs, phi: str, gradients: bool, everywhere: bool) -> Gate:
    """Compare with float64: our error may be twice that of the plain formula in our precision.

    Where the plain formula happens to be exact, one rounding of the largest value is allowed. Unless `everywhere`, only
    the first and the last heads are compared: activations differ inside a tile only, and one of them is checked fully.
    """
    gate = Gate(str(inputs.query.dtype).removeprefix("torch."))
    try:
        mine = results(ours(inputs, phi), inputs, gradients)
    except Exception as error:  # a crash is a wrong result too, and the other shapes are still worth measuring
        gate.failure = f"{type(error).__name__}: {error}"
        return gate

    errors: list[list[Tensor]] = [[] for _ in mine]
    others: list[list[Tensor]] = [[] for _ in mine]
    sizes: list[list[Tensor]] = [[] for _ in mine]
    parts = list(inputs.parts())
    for entry, heads, part in parts if everywhere else (parts[0], parts[-1]):
        wide = part.to(torch.float64)
        exact = results(eager(wide, phi), wide, gradients)
        plain = results(eager(part, phi), part, gradients)
        for i in range(len(mine)):
            errors[i].append((mine[i][entry : entry + 1, heads] - exact[i]).abs().max())
            others[i].append((plain[i] - exact[i]).abs().max())
            sizes[i].append(exact[i].abs().max())

    precision = torch.finfo(inputs.query.dtype).eps
    for i, name in enumerate(NAMES[: len(mine)]):
        gate.error[name] = float(torch.stack(errors[i]).max())  # a NaN stays a NaN, and fails below
        one_rounding = precision * float(torch.stack(sizes[i]).max())
        gate.allowed[name] = max(2 * float(torch.stack(others[i]).max()), one_rounding)
    gate.green = all(gate.error[name] <= gate.allowed[name] for name in gate.error)
    if not all(math.isfinite(error) for error in gate.error.values()):
        gate.failure = "the result is not finite"
    return gate


def results(attention: Attention, inputs: Inputs, gradients: bool) -> list[Tensor]:
    """The output and, if asked for, the gradients of query, key and value."""
    leaves = [x.detach().requires_grad_(gradients) for x in (inputs.query, inputs.key, inputs.value)]
    out = attention(*leaves)
    return [out.detach(), *(torch.autograd.grad(out, leaves, inputs.grad) if gradients else ())]
