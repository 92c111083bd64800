"""ONNX: models with φ attention as graphs of standard operators, which run where nomax is not installed."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nomax.ops import cpu, reference
from nomax.ops.problem import Problem
from nomax.ops.registration import CODES, Arguments

if TYPE_CHECKING:
    from torch._ops import OpOverload

LEAST_OPSET = 18  # the first that torch.onnx writes
_ACTIVATIONS = {code: name for name, code in CODES.items()}


def export_onnx(
    model: nn.Module,
    args: Sequence[Any] = (),
    path: str | os.PathLike[str] = "model.onnx",
    *,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
) -> Path:
    """Write a model as ONNX, with nomax's operators spelled out in standard ones, and return the path.

    args, kwargs: example inputs, as the model's forward takes them.
    dynamic_shapes: which of their dimensions stay open, as in torch.export; all others have the examples' sizes.
    input_names, output_names, opset_version: as in torch.onnx.export.

    The graph holds a matrix of weights [B, H, Lq, Lk] for each attention, as ONNX has no fused operator for φ. Weights
    beyond 2 GB go to a file beside it, as in torch.onnx. The model is exported as it is in eval(), without gradients.
    """
    if opset_version is not None and opset_version < LEAST_OPSET:
        raise ValueError(f"opset_version={opset_version!r} must be at least {LEAST_OPSET}.")
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ImportError(f"torch.onnx needs {' and '.join(missing)}: pip install onnx onnxscript")
    path = Path(path)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*treespec, LeafSpec", FutureWarning
            )  # torch's own, as it copies programs
            program = torch.export.export(model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
            program = program.run_decompositions(decompositions())
            exported = torch.onnx.export(
                program,
                input_names=input_names,
                output_names=output_names,
                opset_version=opset_version,
                dynamo=True,
                verbose=False,
            )
    finally:
        model.train(training)
    if exported is None:
        raise RuntimeError("torch.onnx.export returned nothing to save.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # torch may write a second file, of weights, whose name the first one holds: so both move under their own names.
    with TemporaryDirectory(prefix=".onnx-", dir=path.parent) as aside:
        exported.save(Path(aside, path.name))
        for file in sorted(Path(aside).iterdir(), key=lambda file: file.name == path.name):
            os.replace(file, path.parent / file.name)
    return path


def decompositions() -> dict["OpOverload", Callable[..., Any]]:
    """Return torch's table of decompositions with nomax's operators in it, for ExportedProgram.run_decompositions.

    A program that went through it holds plain PyTorch only: torch.onnx, or whatever else reads torch.export's programs,
    need not know nomax.
    """
    cpu.load()
    operators = torch.ops.nomax
    table: dict[OpOverload, Callable[..., Any]] = dict(torch.export.default_decompositions())
    table[operators.attend.default] = table[operators.attend_forward.default] = _attend
    table[operators.attend_linear.default] = _attend_linear
    return table


def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    call = Arguments(*inputs)
    if call.dropout > 0:
        raise ValueError("attention with dropout cannot be exported: call model.eval() first.")
    if call.query_offsets is not None:
        raise ValueError("varlen_attention cannot be exported: pad the sequences, and call attention with a mask.")
    out, row_sum, row_log = reference.attend(
        Problem(
            query=call.query,
            key=call.key,
            value=call.value,
            mask=call.mask,
            diagonal=call.diagonal,
            activation=_ACTIVATIONS[call.activation],
            scale=call.scale,
            gain=call.gain,
            shift=call.shift,
            row_gain=call.row_gain,
            row_shift=call.row_shift,
            rows=call.last,
        )
    )
    empty = call.query.new_empty(0, *call.query.shape[:3], dtype=torch.float32)
    return out, torch.stack([row_sum, row_log]).float() if call.last else empty


def _attend_linear(query: Tensor, key: Tensor, value: Tensor, factor: float, gain: Tensor | None = None) -> Tensor:
    out, _, _ = reference.attend(
        Problem(
            query=query,
            key=key,
            value=value,
            activation="identity",
            scale=1.0,
            gain=factor,
            row_gain=None if gain is None else gain * factor,
        )
    )
    return out
