"""The Triton backend: what it serves, and its operators in torch.

triton is imported, and the operators come into being, at the first call that needs them and not at import.
"""

import os
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nomax.ops import registration
from nomax.ops.problem import Problem
from nomax.ops.registration import SCHEMA, inputs_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cuda", "xpu")  # AMD's GPUs are cuda, too, in torch
WIDEST = 256  # head dimension: a row must fit into registers

_loaded = False
_lock = Lock()


def unsupported(problem: Problem) -> list[str]:
    """Return the reasons why this problem cannot be served here; none means it can."""
    reasons = []
    device = problem.query.device.type
    if device not in DEVICES and not (device == "cpu" and is_interpreted()):
        reasons.append(f"query is on {problem.query.device}, but the kernels run on GPUs (cuda, xpu)")
    elif (missing := _missing()) is not None:
        reasons.append(missing)
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        reasons.append("torch.func's transforms work on other backends only")
    if forward_ad._current_level >= 0:
        reasons.append("forward-mode derivatives work on the reference backend only")
    for name, x in (("query", problem.query), ("attn_mask", problem.mask)):
        if x is not None and x.dtype not in DTYPES and x.dtype != torch.bool:
            reasons.append(f"{name} is {str(x.dtype)[6:]}, but the kernels take float32, bfloat16 and float16")
    for name, x in (("query", problem.query), ("value", problem.value)):
        if x.shape[3] > WIDEST:
            reasons.append(f"{name}'s head dimension is {x.shape[3]}, but the kernels go up to {WIDEST}")
    if problem.dropout > 0 and problem.origin != (0, 0, 0):
        reasons.append("dropout in a part of a larger problem has gradients on the reference backend only")
    return reasons


def is_interpreted() -> bool:
    """Return whether TRITON_INTERPRET=1 has triton run its kernels in Python, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _missing() -> str | None:
    """Return why triton cannot be imported, or None if it can."""
    return _import_error()


@cache
def _import_error() -> str | None:
    try:
        import_module("triton")
    except Exception as error:  # a triton for another torch or driver may fail in its own ways
        return f"triton cannot be imported ({error}); pip install triton installs it"
    return None


# Under torch.compile: run it while tracing, do not trace it.
for _function in (is_interpreted, _missing):
    _function._dynamo_marked_constant = True  # type: ignore[union-attr]


def attend(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the reference returns: the outputs and, if problem.rows, each row's Σh and Σ h·log h."""
    load()
    out, statistics = torch.ops.nomax_triton.attend(*inputs_of(problem), problem.rows)
    return (out, *statistics.unbind(0)) if problem.rows else (out, statistics, statistics)


def serves_parts(problem: Problem) -> bool:
    """Return whether `attend_part` and `part_gradients` serve this problem: not where it is packed."""
    return problem.query_offsets is None


def attend_part(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `attend` returns, in float32 and without gradients: the summands of a larger problem."""
    out, statistics = _launch().forward(*inputs_of(problem), problem.rows, origin=problem.origin, dtype=torch.float32)
    return (out, *statistics.unbind(0)) if problem.rows else (out, statistics, statistics)


def part_gradients(
    problem: Problem, grad: Tensor, grad_sums: tuple[Tensor, Tensor] | None, bias_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and, if wanted, a float mask, in float32."""
    statistics = None if grad_sums is None else torch.stack(grad_sums)
    query, key, value, bias = _launch().backward(
        grad, statistics, *inputs_of(problem), bias_wanted, origin=problem.origin, dtype=torch.float32
    )
    return query, key, value, bias if bias_wanted else None


def load() -> None:
    """Tell torch of the operators, which from then on are torch.ops.nomax_triton."""
    global _loaded
    with _lock:
        if not _loaded:
            _register()
            _loaded = True


load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _register() -> None:
    name = "nomax_triton::attend"
    torch.library.define(name, f"({SCHEMA}) -> (Tensor, Tensor)")
    results = "(Tensor, Tensor, Tensor, Tensor)"
    torch.library.define(f"{name}_backward", f"(Tensor grad, Tensor? statistics, {SCHEMA}) -> {results}")
    torch.library.impl(name, "default", lambda *inputs: _launch().forward(*inputs))
    torch.library.impl(f"{name}_backward", "default", lambda *inputs: _launch().backward(*inputs))
    registration.register("nomax_triton", "Triton kernels")


def _launch() -> Any:
    return import_module("nomax.ops.triton.launch")
