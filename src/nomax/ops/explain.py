"""`explain`: what `attention` would do with these inputs, in words."""

from dataclasses import dataclass

from torch import Tensor

from nomax.ops import backends, cpu, softmax, visible
from nomax.ops.build import BuildError
from nomax.ops.inputs import canonical, canonical_mask, check_numbers
from nomax.ops.scaling import default_scale
from nomax.phi import MINUS_LOG_L, ROW_MAPS, SOFTMAX, Phi


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call of `attention` would run. Print it."""

    backend: str  # "cpu" or "reference"; "torch" for softmax, "entmax" for sparsemax and entmax15
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
    """Say which backend `attention` would run for these arguments and why no other, what φ means here, and its memory.

    Nothing is computed but the number of visible keys; what `attention` would refuse is refused here too.
    """
    phi = Phi.parse(phi)
    check_numbers(dropout_p, scale)
    backends.check(phi, backend, return_rows)
    query, key, value, leading = canonical(query, key, value, enable_gqa)
    mask, diagonal = canonical_mask(attn_mask, is_causal, query, key, leading)
    scale = default_scale(query) if scale is None else scale
    if phi.activation in ROW_MAPS:
        softmax.row_map(phi.activation)  # says what is missing, if something is
        chosen, runs_on = "torch" if phi.activation == SOFTMAX else "entmax", softmax.runs_on(phi.activation)
        reasons = {name: [f"{phi} is not pointwise"] for name in backends.BACKENDS}
    else:
        chosen, reasons = _choice(backend, query, key, value, mask)
        runs_on = f"the {chosen} backend" + (f", {cpu.instruction_set()} kernels" if chosen == "cpu" else "")

    lines = {
        "runs on": runs_on,
        "computes": _formula(phi, scale, mask),
        "where": _where(phi, query, key, mask, diagonal),
        "inputs": backends.describe(query, key, value, mask),
        "memory": _memory(chosen, query, key, value),
        **{f"not {name}": "; ".join(why) for name, why in reasons.items()},
    }
    text = "\n".join(f"  {label:<{max(map(len, lines))}}  {line}" for label, line in lines.items())
    return Explanation(chosen, reasons, f"nomax.attention with phi={str(phi)!r}\n{text}")


def _choice(
    backend: str | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[str, dict[str, list[str]]]:
    """The backend that will run, and the reasons against the others."""
    chosen = backends.choose(backend, query, key, value, mask)
    if chosen == "cpu":
        try:
            cpu.instruction_set()
        except BuildError as error:
            if backend is not None:
                raise
            return "reference", {"cpu": [str(error)]}
    others = [name for name in backends.BACKENDS if name != chosen]
    return chosen, {name: backends.reasons_against(name, backend, query, key, value, mask) for name in others}


def _formula(phi: Phi, scale: float, mask: Tensor | None) -> str:
    bias = " + mask_ij" if mask is not None and mask.dtype.is_floating_point else ""
    shift = " - log L" if phi.shift == MINUS_LOG_L else f" {phi.shift:+g}" if phi.shift else ""
    score = f"{scale:g}·q_i·k_j{bias}{shift}"
    if phi.activation in ROW_MAPS:
        return f"out_i = Σ_j {phi}_j({score})·v_j"
    gain = "" if phi.gain == 1 else f"{phi.gain:g} · "
    power = "" if phi.alpha == 0 else f"L^{-phi.alpha:g} · "
    return f"out_i = {gain}{power}Σ_j {phi.activation}({score})·v_j"


def _where(phi: Phi, query: Tensor, key: Tensor, mask: Tensor | None, diagonal: int | None) -> str:
    seen = visible.count(query, key, mask, diagonal)
    keys = f"the {_range(seen)} keys that query i may see" if isinstance(seen, Tensor) else f"all {seen} keys"
    if phi.alpha == 0 and phi.shift != MINUS_LOG_L:
        return f"j runs over {keys}"
    if phi.length == "visible":
        return f"j runs over {keys}, and L is their number"
    length = f"{key.shape[2]}, all key positions" if phi.length == "keys" else f"{phi.length}, fixed by φ"
    return f"j runs over {keys}; L = {length}"


def _range(counts: Tensor) -> str:
    if counts.is_meta:
        return "(uncounted)"
    if counts.numel() == 0:
        return "0"
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low} to {high}"


def _memory(chosen: str, query: Tensor, key: Tensor, value: Tensor) -> str:
    (batches, heads, queries, dimension), keys = query.shape, key.shape[2]
    # Both compute half precision in float32.
    size = _bytes(batches * heads * queries * keys * max(query.element_size(), 4))
    matrix = f"the {batches}×{heads}×{queries}×{keys} matrix of weights, {size}"
    if chosen in ("reference", "entmax"):
        return f"holds {matrix}, two to three times, and keeps it for the backward pass"
    if chosen == "torch":
        return f"PyTorch decides whether to hold {matrix}"
    # A forward task packs up to 512 queries and their sums, and 256 keys (twice) and values at a time.
    tile = 4 * (512 * (dimension + value.shape[3]) + 256 * (2 * dimension + value.shape[3]))
    return f"at most about {_bytes(tile)} per thread forwards, instead of {matrix}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
