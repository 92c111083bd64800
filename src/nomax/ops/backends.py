"""The implementations of the operation, the choice between them, and the call."""

import warnings
from difflib import get_close_matches
from types import ModuleType

import torch
from torch import Tensor

from nomax.ops import cpu, reference, scaling, softmax
from nomax.ops.build import BuildError
from nomax.ops.inputs import check_rows
from nomax.ops.rows import Rows, from_sums
from nomax.phi import ROW_MAPS, Phi

BACKENDS: dict[str, ModuleType] = {"reference": reference, "cpu": cpu}
LARGE = 2**26  # bytes of a matrix of weights that is worth a warning

# Set once the kernels failed to compile in this process, so that only the first call tries, and warns.
_build_error: BuildError | None = None
_warned_of_matrix = False


def run(
    backend: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    diagonal: int | None,
    query_offsets: Tensor | None,
    key_offsets: Tensor | None,
    phi: Phi,
    dropout_p: float,
    scale: float | None,
    return_rows: bool,
) -> tuple[Tensor, Rows | None]:
    """Run φ on canonical inputs, on the backend asked for or the best one."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise RuntimeError(
            f"nomax.attention with phi={str(phi)!r} cannot be traced: torch.jit.trace would keep the sizes of its "
            "example, and φ's L with them. Use torch.export.export or torch.compile, which leave the length open."
        )
    if phi.activation in ROW_MAPS:
        return softmax.attend(
            phi.activation,
            query,
            key,
            value,
            mask,
            diagonal,
            query_offsets,
            key_offsets,
            dropout_p,
            scale,
            return_rows,
        )
    chosen = choose(backend, query, key, value, mask)
    if backend is None and chosen == "reference" and not (query.is_cpu or query.is_meta):
        _warn_of_matrix(query, key)
    gain, shift, row_gain, row_shift = scaling.factors(phi, query, key, mask, diagonal, query_offsets, key_offsets)
    # Drawn from PyTorch's CPU generator whatever the device, so that torch.manual_seed fixes it on every backend.
    seed = torch.randint(2**63 - 1, (), device="cpu") if dropout_p > 0 else None

    try:
        out, row_sum, row_log = BACKENDS[chosen].attend(
            query,
            key,
            value,
            mask,
            row_gain,
            row_shift,
            seed,
            query_offsets,
            key_offsets,
            activation=phi.activation,
            scale=scaling.default_scale(query) if scale is None else scale,
            gain=gain,
            shift=shift,
            diagonal=diagonal,
            dropout=dropout_p,
            rows=return_rows,
        )
    except BuildError as error:
        if backend is not None:
            raise
        _warn_once(error)
        return run(
            "reference",
            query,
            key,
            value,
            mask,
            diagonal,
            query_offsets,
            key_offsets,
            phi,
            dropout_p,
            scale,
            return_rows,
        )
    return out, from_sums(row_sum, row_log, gain if row_gain is None else row_gain) if return_rows else None


def check(phi: Phi, backend: str | None, return_rows: bool) -> None:
    """Check what φ allows."""
    if phi.activation not in ROW_MAPS:
        if return_rows:
            check_rows(phi)
    elif backend is not None:
        raise ValueError(
            f'backend={backend!r} does not apply to phi="{phi}", which runs on {softmax.runs_on(phi.activation)}. '
            "Leave backend=None."
        )


def choose(backend: str | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Return the name of the backend that will run: the fastest that can serve, or the one asked for."""
    if backend is None:
        return "reference" if _build_error or cpu.unsupported(query, key, value, mask) else "cpu"
    if backend not in BACKENDS:
        nearest = get_close_matches(str(backend).lower(), BACKENDS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"backend={backend!r} is unknown; {hint}Choose one of {', '.join(BACKENDS)}, or None.")
    if backend == "cpu" and (reasons := cpu.unsupported(query, key, value, mask)):
        raise ValueError(
            f"backend={backend!r} cannot serve these inputs:\n  {describe(query, key, value, mask)}\n"
            + "".join(f"  - {reason}\n" for reason in reasons)
            + "Leave backend=None to let nomax choose."
        )
    return backend


def reasons_against(
    name: str, backend: str | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> list[str]:
    """Why `choose` did not return `name`."""
    if backend is not None:
        return [f"backend={backend!r} was asked for"]
    if name == "reference":
        return ["the cpu backend serves these inputs, faster"]
    return ([str(_build_error)] if _build_error else []) + cpu.unsupported(query, key, value, mask)


def describe(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """The inputs in one line."""
    named = {"query": query, "key": key, "value": value} | ({} if mask is None else {"mask": mask})
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
    dtypes = str(query.dtype) + ("" if mask is None or mask.dtype == query.dtype else f" (mask {mask.dtype})")
    return f"{shapes}, {dtypes.replace('torch.', '')} on {query.device}"


def _warn_of_matrix(query: Tensor, key: Tensor) -> None:
    """Say once that there is no fused kernel for this device, as soon as that costs memory."""
    global _warned_of_matrix
    if _warned_of_matrix or torch.compiler.is_compiling():
        return
    (batches, heads, queries, _), keys = query.shape, key.shape[2]
    size = batches * heads * queries * keys * max(query.element_size(), 4)
    if size < LARGE:
        return
    _warned_of_matrix = True
    warnings.warn(
        f"nomax has no fused kernel for {query.device.type} yet, so its reference backend runs, in plain PyTorch: it "
        f"holds the whole {batches}×{heads}×{queries}×{keys} matrix of weights, {size:,} bytes, two to three times, "
        "and keeps it for the backward pass. Attend to fewer queries at a time if that is too much, or pass "
        'backend="reference" to accept it without this warning.',
        RuntimeWarning,
        stacklevel=4,
    )


def _warn_once(error: BuildError) -> None:
    global _build_error
    if _build_error is None:
        _build_error = error
        warnings.warn(
            f"{error}\nUntil then nomax runs on its reference backend: correct, but slow, and with the whole matrix of "
            "weights in memory.",
            RuntimeWarning,
            stacklevel=4,
        )
