"""Choose and call an implementation of the operation, and explain the choice in words."""

import warnings
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nomax._files import did_you_mean
from nomax.ops import cpu, length, reference, row_maps
from nomax.ops.arguments import canonical
from nomax.ops.build import BuildError
from nomax.ops.problem import Problem, Rows, from_sums, wide
from nomax.ops.triton import backend as triton
from nomax.phi import ACTIVATIONS, MINUS_LOG_L, ROW_MAPS, SOFTMAX, Phi

# Each has attend(problem), and all but the reference have unsupported(problem), the reasons why they cannot serve it.
BACKENDS: dict[str, ModuleType] = {"reference": reference, "cpu": cpu, "triton": triton}
LARGE = 2**26  # bytes of a matrix of weights that is worth a warning

# Set when the kernels fail to compile in this process, so that only the first call tries and warns.
_build_error: BuildError | None = None
_warned_of_matrix = False


def check(phi: Phi, backend: str | None, return_rows: bool) -> None:
    """Raise if φ does not allow this backend, or rows."""
    if phi.activation in ROW_MAPS:
        if backend is not None:
            raise ValueError(
                f'backend={backend!r} does not apply to phi="{phi}", which runs on '
                f"{row_maps.runs_on(phi.activation)}. Leave backend=None."
            )
    elif return_rows and (phi.gain < 0 or not ACTIVATIONS[phi.activation].nonnegative):
        allowed = ", ".join(name for name, activation in ACTIVATIONS.items() if activation.nonnegative)
        raise ValueError(
            f"return_rows=True needs weights that are never negative, to have an entropy; phi={str(phi)!r} can make "
            f"negative ones. Use one of {allowed}, with a gain of at least 0."
        )


def run(
    phi: Phi, problem: Problem, backend: str | None, gain: Tensor | None = None, shift: Tensor | None = None
) -> tuple[Tensor, Rows | None]:
    """Give the problem φ's factors, and run it on the backend asked for or the best one.

    gain, shift: numbers for each head, [H], besides φ's own; without gradients, and not for maps of rows.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise RuntimeError(
            f"nomax.attention with phi={str(phi)!r} cannot be traced: torch.jit.trace would keep the sizes of its "
            "example, and φ's L with them. Use torch.export.export or torch.compile, which leave the length open."
        )
    if problem.activation in ROW_MAPS:
        return row_maps.attend(problem)
    if backend is None and not (problem.query.is_cpu or problem.query.is_meta) and choose(None, problem) == "reference":
        _warn_of_matrix(problem)
    problem = length.per_head(length.scaled(phi, problem), gain, shift)
    if problem.dropout > 0:
        # Drawn from PyTorch's CPU generator whatever the device, so that torch.manual_seed fixes it on every backend.
        problem = replace(problem, seed=torch.randint(2**63 - 1, (), device="cpu"))
    out, row_sum, row_log = attend(problem, backend)
    if not problem.rows:
        return out, None
    return out, from_sums(row_sum, row_log, problem.gain if problem.row_gain is None else problem.row_gain)


def attend(problem: Problem, backend: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Run a problem that has its factors, and return its outputs and, if problem.rows, each row's two sums."""
    out: tuple[Tensor, Tensor, Tensor]
    try:
        out = BACKENDS[choose(backend, problem)].attend(problem)
    except BuildError as error:
        if backend is not None:
            raise
        _warn_once(error)
        out = reference.attend(problem)
    return out


def attend_part(problem: Problem, backend: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `attend` returns, in at least float32 and without gradients: for schedules, which add up parts."""
    module = _for_parts(problem, backend)
    if module is not None:
        results: tuple[Tensor, Tensor, Tensor] = module.attend_part(problem)
        return results
    with torch.no_grad():
        return attend(_widened(problem), backend)


def part_gradients(
    problem: Problem,
    grad: Tensor,
    grad_sums: tuple[Tensor, Tensor] | None = None,
    *,
    bias_wanted: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and, if wanted, a float mask, in at least float32.

    grad, grad_sums: the gradients of the output, in the dtype of the query, and of both sums of rows if there are any.
    """
    module = _for_parts(problem, backend)
    if module is not None:
        computed: tuple[Tensor, Tensor, Tensor, Tensor | None]
        computed = module.part_gradients(problem, grad, grad_sums, bias_wanted)
        return computed
    problem = _widened(problem)
    names = ("query", "key", "value", *(("mask",) if bias_wanted else ()))
    with torch.enable_grad():
        leaves: dict[str, Any] = {name: getattr(problem, name).detach().requires_grad_() for name in names}
        out, *sums = attend(replace(problem, **leaves), backend)
        results, grads = [out], [grad.to(out.dtype)]
        if grad_sums is not None:
            results, grads = [out, *sums], [*grads, *grad_sums]
        query, key, value, *mask = torch.autograd.grad(results, list(leaves.values()), grads, materialize_grads=True)
    return query, key, value, mask[0] if mask else None


def _for_parts(problem: Problem, backend: str | None) -> Any:
    """Return the backend that computes parts of this problem in the dtype of its tensors, or None."""
    # Only operators with an autograd formula mind where a part begins.
    module: Any = BACKENDS[choose(backend, replace(problem, origin=(0, 0, 0)))]
    return module if module is not reference and module.serves_parts(problem) else None


def _widened(problem: Problem) -> Problem:
    dtype = wide(problem.query)
    return replace(problem, query=problem.query.to(dtype), key=problem.key.to(dtype), value=problem.value.to(dtype))


def choose(backend: str | None, problem: Problem) -> str:
    """Return the name of the backend that will run: the fastest that can serve, or the one asked for."""
    if backend is None:
        if problem.query.is_cpu:
            return "reference" if _build_error or cpu.unsupported(problem) else "cpu"
        return "reference" if triton.unsupported(problem) else "triton"
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown{did_you_mean(backend, BACKENDS)} Choose one of {', '.join(BACKENDS)}, "
            "or None."
        )
    if backend != "reference" and (reasons := BACKENDS[backend].unsupported(problem)):
        raise ValueError(
            f"backend={backend!r} cannot serve these inputs:\n  {_describe(problem)}\n"
            + "".join(f"  - {reason}\n" for reason in reasons)
            + "Leave backend=None to let nomax choose."
        )
    return backend


@dataclass(frozen=True, slots=True)
class Explanation:
    """The backend that a call of `attention` would run, and why. Print it."""

    backend: str  # "cpu", "triton" or "reference"; "torch" for softmax, "entmax" for sparsemax and entmax15
    reasons: dict[str, list[str]]  # for each other backend, why it will not run
    text: str

    def __str__(self) -> str:
        return self.text


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    phi: str | Phi = "relu/L",
    backend: str | None = None,
    return_rows: bool = False,
) -> Explanation:
    """Explain which backend `attention` would run for these arguments, and why; what φ computes; and the memory needed.

    Only the number of visible keys is computed. Arguments that `attention` would reject are rejected here, too.
    """
    phi = Phi.parse(phi)
    check(phi, backend, return_rows)
    problem, _ = canonical(
        query, key, value, attn_mask, is_causal, enable_gqa,
        activation=phi.activation, scale=scale, dropout=dropout_p, rows=return_rows,
    )  # fmt: skip
    if phi.activation in ROW_MAPS:
        row_maps.row_map(phi.activation)  # says what is missing, if something is
        chosen, runs_on = "torch" if phi.activation == SOFTMAX else "entmax", row_maps.runs_on(phi.activation)
        reasons = {name: [f"{phi} is not pointwise"] for name in BACKENDS}
    else:
        chosen, reasons = _choice(backend, problem)
        runs_on = f"the {chosen} backend" + (f", {cpu.instruction_set()} kernels" if chosen == "cpu" else "")
        if chosen == "triton" and triton.is_interpreted():
            runs_on += ", interpreted in Python"

    lines = {
        "runs on": runs_on,
        "computes": _formula(phi, problem),
        "where": length.in_words(phi, problem),
        "inputs": _describe(problem),
        "memory": _memory(chosen, problem),
        **{f"not {name}": "; ".join(why) for name, why in reasons.items()},
    }
    text = "\n".join(f"  {label:<{max(map(len, lines))}}  {line}" for label, line in lines.items())
    return Explanation(chosen, reasons, f"nomax.attention with phi={str(phi)!r}\n{text}")


def _choice(backend: str | None, problem: Problem) -> tuple[str, dict[str, list[str]]]:
    """Return the backend that will run, and the reasons against the others."""
    chosen = choose(backend, problem)
    if chosen == "cpu":
        try:
            cpu.instruction_set()
        except BuildError as error:
            if backend is not None:
                raise
            return "reference", {"cpu": [str(error)], "triton": triton.unsupported(problem)}
    return chosen, {name: _reasons_against(name, chosen, backend, problem) for name in BACKENDS if name != chosen}


def _reasons_against(name: str, chosen: str, backend: str | None, problem: Problem) -> list[str]:
    """Return why `choose` did not return `name`."""
    if backend is not None:
        return [f"backend={backend!r} was asked for"]
    if name == "reference":
        return [f"the {chosen} backend serves these inputs, faster"]
    if name == "triton" and problem.query.is_cpu and triton.is_interpreted():
        return ["it is interpreted here, for tests: ask for it"]
    return ([str(_build_error)] if _build_error and name == "cpu" else []) + BACKENDS[name].unsupported(problem)


def _describe(problem: Problem) -> str:
    """Describe the inputs in one line."""
    query, mask = problem.query, problem.mask
    named = {"query": query, "key": problem.key, "value": problem.value} | ({} if mask is None else {"mask": mask})
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
    dtypes = str(query.dtype) + ("" if mask is None or mask.dtype == query.dtype else f" (mask {mask.dtype})")
    return f"{shapes}, {dtypes.replace('torch.', '')} on {query.device}"


def _formula(phi: Phi, problem: Problem) -> str:
    bias = " + mask_ij" if problem.mask is not None and problem.mask.dtype.is_floating_point else ""
    shift = " - log L" if phi.shift == MINUS_LOG_L else f" {phi.shift:+g}" if phi.shift else ""
    threshold = f" {-phi.threshold:+g}·√(2 log L)" if phi.threshold else ""
    score = f"{problem.scale:g}·q_i·k_j{bias}{shift}{threshold}"
    if phi.activation in ROW_MAPS:
        return f"out_i = Σ_j {phi}_j({score})·v_j"
    gain = "" if phi.gain == 1 else f"{phi.gain:g} · "
    power = "" if phi.alpha == 0 else f"L^{-phi.alpha:g} · "
    return f"out_i = {gain}{power}Σ_j {phi.activation}({score})·v_j"


def _memory(chosen: str, problem: Problem) -> str:
    shape, size = _matrix(problem)
    dimension, value_dimension = problem.query.shape[3], problem.value.shape[3]
    matrix = f"the {shape} matrix of weights, {_bytes(size)}"
    if chosen in ("reference", "entmax"):
        return f"holds {matrix}, two to three times, and keeps it for the backward pass"
    if chosen == "torch":
        return f"PyTorch decides whether to hold {matrix}"
    if chosen == "triton":
        return f"tiles in the GPU's registers, instead of {matrix}"
    # A forward task packs up to 512 queries and their sums, and 256 keys (twice) and values at a time.
    tile = 4 * (512 * (dimension + value_dimension) + 256 * (2 * dimension + value_dimension))
    return f"at most about {_bytes(tile)} per thread forwards, instead of {matrix}"


def _matrix(problem: Problem) -> tuple[str, int]:
    """Return the shape of the matrix of weights, in words, and its bytes: half precision is computed in float32."""
    (batches, heads, queries, _), keys = problem.query.shape, problem.key.shape[2]
    size = batches * heads * queries * keys * max(problem.query.element_size(), 4)
    return f"{batches}×{heads}×{queries}×{keys}", size


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _warn_of_matrix(problem: Problem) -> None:
    """Warn once that there is no fused kernel for this device, if that costs memory."""
    global _warned_of_matrix
    if _warned_of_matrix or torch.compiler.is_compiling():
        return
    shape, size = _matrix(problem)
    if size < LARGE:
        return
    _warned_of_matrix = True
    warnings.warn(
        f"nomax has no fused kernel for this call ({'; '.join(triton.unsupported(problem))}), so its reference backend "
        f"runs, in plain PyTorch: it holds the whole {shape} matrix of weights, {size:,} bytes, two to three times, "
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
            stacklevel=5,
        )
