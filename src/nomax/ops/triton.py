"""The Triton backend: fused kernels for GPUs, and their operators in torch.

triton is imported, and the operators come into being, at the first call that needs them and not at import.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from nomax.ops.problem import Problem, hidden
from nomax.phi import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cuda", "xpu")  # AMD's GPUs are cuda, too, in torch
WIDEST = 256  # head dimension: a row must fit into registers
NAMES = tuple(ACTIVATIONS)
_LOW_32 = 0xFFFFFFFF

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
    out, statistics = torch.ops.nomax_triton.attend(
        problem.query, problem.key, problem.value, problem.mask, problem.row_gain, problem.row_shift, problem.seed,
        problem.query_offsets, problem.key_offsets, NAMES.index(problem.activation), problem.scale, problem.gain,
        problem.shift, problem.diagonal, problem.dropout, list(problem.origin), problem.rows,
    )  # fmt: skip
    return (out, *statistics.unbind(0)) if problem.rows else (out, statistics, statistics)


class Arguments(NamedTuple):
    """The arguments of the operator `attend`.

    `attend_backward` has the gradients of the output and of the statistics before them, and `last` says whether the
    gradient of the bias is wanted.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    row_gain: Tensor | None
    row_shift: Tensor | None
    seed: Tensor | None
    query_offsets: Tensor | None
    key_offsets: Tensor | None
    activation: int
    scale: float
    gain: float
    shift: float
    diagonal: int | None
    dropout: float
    origin: list[int]
    last: bool  # rows, if forward


TENSORS = Arguments._fields.index("activation")  # as many of them are tensors
MASK = Arguments._fields.index("mask")
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? row_gain, Tensor? row_shift, Tensor? seed, "
    "Tensor? query_offsets, Tensor? key_offsets, int activation, float scale, float gain, float shift, "
    "SymInt? diagonal, float dropout, SymInt[] origin, bool last"
)


def load() -> None:
    """Tell torch of the operators, which from then on are torch.ops.nomax_triton."""
    global _loaded
    with _lock:
        if not _loaded:
            _register()
            _loaded = True


load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _register() -> None:
    define, implement, name = torch.library.define, torch.library.impl, "nomax_triton::attend"
    define(name, f"({SCHEMA}) -> (Tensor, Tensor)")
    define(f"{name}_backward", f"(Tensor grad, Tensor? statistics, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)")
    implement(name, "default", _forward)
    implement(f"{name}_backward", "default", _backward)
    torch.library.register_fake(name, _shapes)
    torch.library.register_fake(f"{name}_backward", _shapes_backward)
    torch.library.register_autograd(name, _gradients, setup_context=_save)
    torch.library.register_autograd(f"{name}_backward", _refuse, setup_context=lambda ctx, inputs, output: None)
    register_flop_formula(torch.ops.nomax_triton.attend, get_raw=False)(_flops)
    register_flop_formula(torch.ops.nomax_triton.attend_backward, get_raw=False)(_flops_backward)


def _shapes(*inputs: Any) -> tuple[Tensor, Tensor]:
    # Heads next to each other, as F.scaled_dot_product_attention has it: what joins them afterwards is a view.
    call = Arguments(*inputs)
    batch, heads, queries, _ = call.query.shape
    out = call.query.new_empty(batch, queries, heads, call.value.shape[3]).transpose(1, 2)
    return out, call.query.new_empty(2 if call.last else 0, batch, heads, queries, dtype=torch.float32)


def _shapes_backward(grad: Tensor, statistics: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    call = Arguments(*inputs)
    shape = call.mask.shape if call.last and call.mask is not None else (0,)
    bias = call.query.new_empty(shape, dtype=torch.float32)
    return torch.empty_like(call.query), torch.empty_like(call.key), torch.empty_like(call.value), bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.settings, ctx.rows = inputs[TENSORS:-1], inputs[-1]


def _gradients(ctx: Any, grad: Tensor, statistics: Tensor) -> tuple[Tensor | None, ...]:
    tensors, bias_wanted = ctx.saved_tensors, ctx.needs_input_grad[MASK]
    query, key, value, bias = torch.ops.nomax_triton.attend_backward(
        grad, statistics if ctx.rows else None, *tensors, *ctx.settings, bias_wanted
    )
    rest = (None,) * (len(Arguments._fields) - MASK - 1)
    return query, key, value, bias.to(tensors[MASK].dtype) if bias_wanted else None, *rest


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        'the Triton kernels have no second derivative. Call attention(..., backend="reference"), which has.'
    )


# The counter's convention: a multiply and an add are two, and what a mask would spare is not taken off.
def _flops(query: Any, key: Any, value: Any, *rest: Any, **unused: Any) -> int:
    batch, heads, queries, dim = query
    return int(2 * batch * heads * queries * key[2] * (dim + value[3]))


def _flops_backward(grad: Any, statistics: Any, query: Any, key: Any, value: Any, *rest: Any, **unused: Any) -> int:
    batch, heads, queries, dim = query
    return int(2 * batch * heads * queries * key[2] * (3 * dim + 2 * value[3]))


class Config(NamedTuple):
    """How a kernel cuts its work: rows and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


def candidates(kernel: str, dtype: torch.dtype, width: int) -> list[Config]:
    """Return how a kernel may cut its work, the likely best first; what does not fit a GPU's memory is passed over.

    A program holds a tile of sums in registers, as wide as the head, and streams the other side through shared memory:
    the wider the head and the number, the smaller the tile. The gradients hold twice as much, so their tiles are half
    as large. Warps own 16 or 32 rows each.
    """
    half = dtype != torch.float32
    if kernel == "forward":
        if half:
            if width <= 64:
                return [Config(128, 64, 4, 3), Config(128, 128, 8, 3), Config(64, 64, 4, 3)]
            if width <= 128:
                return [Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(64, 64, 4, 2)]
            return [Config(128, 64, 8, 2), Config(64, 32, 4, 2)]
        return [Config(64, 64, 4, 2), Config(64, 32, 4, 2)] if width <= 64 else [Config(32, 32, 4, 2)]
    if not half:
        return [Config(32, 32, 4, 1)]
    if width > 128:  # 64 of what a program owns, since the tensor instructions of newer GPUs take no less
        if kernel == "key_gradients":
            return [Config(32, 64, 8, 2), Config(32, 64, 8, 1), Config(32, 32, 4, 1)]
        return [Config(64, 32, 8, 2), Config(32, 32, 4, 1)]
    if width > 64:
        return [Config(64, 64, 8, 1), Config(64, 32, 4, 2), Config(64, 64, 4, 1)]
    if kernel == "key_gradients":
        return [Config(64, 64, 4, 2), Config(32, 128, 4, 2), Config(64, 128, 8, 1)]
    return [Config(64, 64, 4, 2), Config(128, 64, 8, 2), Config(128, 32, 4, 2)]


_fastest: dict[Any, Config] = {}


def _tuned(kernel: str, call: Arguments, variant: tuple[Any, ...], launch: Callable[[Config], None]) -> None:
    """Launch a kernel with the candidate that was fastest in the first call like this one."""
    if call.query.is_cpu:
        # Interpreted, a tile takes its time whatever its size; small ones have small tests meet several.
        rows, keys = call.query.shape[2], call.key.shape[2]
        return launch(Config(16 if rows <= 1024 else 256, 32 if keys <= 1024 else 256, 4, 1))
    width = max(call.query.shape[3], call.value.shape[3])
    # The best cut depends on lengths only while there are few blocks.
    lengths = tuple(min(x.shape[2], 4096).bit_length() for x in (call.query, call.key))
    key = (kernel, call.query.device, call.query.dtype, width, *lengths, *variant)
    choices = candidates(kernel, call.query.dtype, width)
    if key in _fastest:
        return launch(_fastest[key])
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times: dict[Config, float] = {}
    capturing = call.query.is_cuda and torch.cuda.is_current_stream_capturing()
    for config in choices:
        try:
            launch(config)
            if capturing:
                return None  # nothing can be timed within a graph
            times[config] = do_bench(lambda config=config: launch(config), warmup=5, rep=20)
        except OutOfResources:
            continue
    if not times:
        raise RuntimeError(
            f"none of nomax's Triton kernels fits {call.query.device} for head dimensions of {width} in "
            f'{str(call.query.dtype)[6:]}. Call attention(..., backend="reference"), and please tell us.'
        )
    _fastest[key] = min(times, key=lambda config: times[config])
    return launch(_fastest[key])


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of a tensor the current one, on which triton launches."""
    if x.is_cpu:
        # The interpreter computes with numpy, which warns of infinities; a GPU does not.
        return warnings.catch_warnings(action="ignore", category=RuntimeWarning)
    return torch.get_device_module(x.device).device(x.device)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    call = Arguments(*inputs)
    out, statistics = _shapes(*inputs)
    if call.key.shape[2] == 0:
        return out.zero_(), statistics.zero_()
    if out.numel() + statistics.numel() == 0:
        return out, statistics
    run = _Run(call)
    sums, logs = (run.view(x) for x in statistics) if call.last else (None, None)

    def launch(config: Config) -> None:
        run.launch(
            "forward", config, run.grid(config.rows, call.query, call.query_offsets),
            (run.view(out), sums, logs), (run.tiles(config), run.slots(config.rows, True), run.coin),
        )  # fmt: skip

    with _on(out):
        _tuned("forward", call, run.variant, launch)
    return out, statistics


def _backward(grad: Tensor, statistics: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Arguments(*inputs)
    grad_query, grad_key, grad_value, grad_bias = results = _shapes_backward(grad, statistics, *inputs)
    if 0 in (call.query.numel(), call.key.numel(), call.value.numel()) and statistics is None:
        return tuple(x.zero_() for x in results)  # type: ignore[return-value]
    if 0 in (*call.query.shape[:3], *call.key.shape[:3]):
        return tuple(x.zero_() for x in results)  # type: ignore[return-value]
    run = _Run(call)
    gradients = (run.view(grad), *((None, None) if statistics is None else (run.view(x) for x in statistics)))

    def launch_query(config: Config) -> None:
        run.launch(
            "query_gradient", config, run.grid(config.rows, call.query, call.query_offsets),
            (*gradients, run.view(grad_query)), (run.tiles(config), run.slots(config.rows, True), run.coin),
        )  # fmt: skip

    def launch_keys(config: Config) -> None:
        tiles, slots = run.tiles(config, of_keys=True), run.slots(config.keys, False)
        run.launch(
            "key_gradients", config, run.grid(config.keys, call.key, call.key_offsets),
            (*gradients, run.view(grad_key), run.view(grad_value)), (tiles, slots, run.coin, call.key.shape[1]),
        )  # fmt: skip

    with _on(grad):
        _tuned("query_gradient", call, run.variant, launch_query)
        _tuned("key_gradients", call, run.variant, launch_keys)
        if call.last:
            _tuned("bias_gradient", call, run.variant, lambda config: run.bias_gradient(config, gradients, grad_bias))
    return grad_query, grad_key, grad_value, grad_bias


class _Run:
    """A call in the words of the kernels."""

    def __init__(self, call: Arguments) -> None:
        self.kernels: Any = import_module("nomax.ops.triton_kernels")
        self.arguments = call
        query, key, value, mask = call.query, call.key, call.value, call.mask
        (_, heads, queries, dim), (_, key_heads, keys, value_dim) = query.shape, value.shape
        self.inputs = self.view(query), self.view(key), self.view(value)
        self.coin, drop_below, kept_factor = _dropout(call.seed, call.dropout)
        lowest = None if mask is None or mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        self.packed = call.query_offsets is not None
        first_batch, first_query, first_key = call.origin
        self.call = self.kernels.Call(
            heads=heads,
            group=heads // key_heads,
            queries=queries,
            keys=keys,
            dim=dim,
            value_dim=value_dim,
            diagonal=call.diagonal or 0,
            scale=call.scale,
            gain=call.gain,
            shift=call.shift,
            mask=None if mask is None else self.view(mask.view(torch.uint8) if lowest is None else mask),
            row_gain=self.view(call.row_gain),
            row_shift=self.view(call.row_shift),
            query_offsets=call.query_offsets,
            key_offsets=call.key_offsets,
            drop_below=drop_below,
            kept_factor=kept_factor,
            first_batch=first_batch,
            first_query=first_query,
            first_key=first_key,
        )
        self.constants = self.kernels.Constants(
            ACTIVATION=NAMES[call.activation],
            CAUSAL=call.diagonal is not None,
            LOWEST=lowest,
            DROPOUT=call.seed is not None,
            PRECISION=_precision(query),
            UPCAST=is_interpreted() and query.dtype == torch.bfloat16,
        )
        # Whether results that are not finite need a second look: hidden keys may have leaked, or float16 overflown.
        self.check = mask is not None or call.diagonal is not None or query.dtype == torch.float16
        self.variant = (self.constants, mask is not None, self.packed, call.row_gain is not None, call.last)

    def view(self, x: Tensor | None) -> Any:
        """Return a tensor [batch, head, row (, column)] with its strides, 0 where its size is 1."""
        if x is None:
            return None
        strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        return self.kernels.View(x, *strides, *(0,) * (4 - x.dim()))

    def options(self, config: Config) -> dict[str, Any]:
        return {
            "BLOCK_M": config.rows,
            "BLOCK_N": config.keys,
            "BLOCK_D": _width(self.call.dim),
            "BLOCK_DV": _width(self.call.value_dim),
            "C": self.constants,
            "num_warps": config.warps,
            "num_stages": config.stages,
            "enable_fp_fusion": True,  # whatever TRITON_DEFAULT_FP_FUSION says: one rounding less
        }

    def launch(
        self, kernel: str, config: Config, programs: int, tensors: tuple[Any, ...], rest: tuple[Any, ...]
    ) -> None:
        """Launch a kernel, and once more for the blocks whose results are not finite: see `triton_kernels.forward`."""
        suspects = self.arguments.query.new_empty(programs, dtype=torch.int32) if self.check else None
        for careful in (False, True) if self.check else (False,):
            getattr(self.kernels, kernel)[(programs,)](
                *self.inputs, *tensors, suspects, self.call, *rest, CAREFUL=careful, **self.options(config)
            )

    def grid(self, block: int, x: Tensor, offsets: Tensor | None) -> int:
        """Return the number of programs, each of which owns a block of rows of x."""
        batch, heads, rows, _ = x.shape
        if offsets is None:
            return batch * heads * -(-rows // block)
        return heads * _slots(rows, offsets, block)

    def slots(self, block: int, of_queries: bool) -> Any:
        """Deal the blocks of packed sequences out to programs, without asking the GPU how many there are."""
        call = self.arguments
        offsets, x = (call.query_offsets, call.query) if of_queries else (call.key_offsets, call.key)
        if offsets is None:
            return None
        blocks = (offsets.diff() + block - 1) // block
        ends = blocks.cumsum(0)
        number = torch.arange(_slots(x.shape[2], offsets, block), device=offsets.device)
        sequence = torch.searchsorted(ends, number, right=True)
        idle = sequence == len(blocks)
        sequence = sequence.masked_fill(idle, 0)
        block_of = number - (ends - blocks)[sequence]
        return self.kernels.Slots(
            len(number), sequence.masked_fill(idle, -1).int(), block_of.masked_fill(idle, 0).int()
        )

    def visits(self, config: Config) -> Tensor:
        """Return where tiles have anything to see: [1 or batch, 1 or heads, 1 or blocks of rows, blocks of keys]."""
        mask = self.arguments.mask
        assert mask is not None
        visible = mask if mask.dtype == torch.bool else ~hidden(mask)
        visible = _any_in_blocks(_any_in_blocks(visible, 2, config.rows), 3, config.keys)
        firsts = torch.arange(0, self.call.keys, config.keys, device=mask.device)
        if self.constants.CAUSAL:
            ends = torch.arange(0, self.call.queries, config.rows, device=mask.device) + config.rows
            visible = visible & (firsts < ends.clamp(max=self.call.queries)[:, None] + self.call.diagonal)
        return visible.expand(*visible.shape[:3], len(firsts))

    def tiles(self, config: Config, of_keys: bool = False) -> Any:
        """Return for each block of rows the blocks of keys to visit; or the other way round."""
        if self.arguments.mask is None:
            return None
        visits = self.visits(config)
        if of_keys:
            visits = visits.expand(-1, -1, -(-self.call.queries // config.rows), -1).mT
        order = visits.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        return self.kernels.Tiles(self.view(order.int()), self.view(visits.sum(-1, dtype=torch.int32)))

    def bias_gradient(self, config: Config, gradients: tuple[Any, ...], result: Tensor) -> None:
        call = self.arguments
        assert call.mask is not None
        (batch, heads, queries, _), keys = call.query.shape, call.key.shape[2]
        blocks = -(-queries // config.rows), -(-keys // config.keys)
        by_row, by_key = (call.mask.shape[2] > 1 or queries == 1), (call.mask.shape[3] > 1 or keys == 1)
        mask_batch, mask_heads = result.shape[:2]
        parts = result
        if not (by_row and by_key):
            sizes = queries if by_row else blocks[0], keys if by_key else blocks[1]
            parts = result.new_empty(mask_batch, mask_heads, *sizes)
        visits = self.visits(config).to(torch.uint8)
        self.kernels.bias_gradient[(mask_batch * mask_heads * blocks[0] * blocks[1],)](
            *self.inputs, *gradients, self.view(parts), self.call, self.view(visits), self.coin, mask_heads,
            batch // mask_batch, heads // mask_heads, BY_ROW=by_row, BY_KEY=by_key, **self.options(config),
        )  # fmt: skip
        if parts is not result:
            result.copy_(parts.sum_to_size(result.shape))


def _any_in_blocks(x: Tensor, dim: int, block: int) -> Tensor:
    """Return whether any entry of each block in one dimension is True; one entry there serves all."""
    if x.shape[dim] == 1:
        return x
    missing = -x.shape[dim] % block
    if missing:
        padding = (0,) * (2 * (x.dim() - 1 - dim)) + (0, missing)
        x = torch.nn.functional.pad(x, padding, value=False)
    return x.unflatten(dim, (-1, block)).any(dim + 1)


def _slots(rows: int, offsets: Tensor, block: int) -> int:
    """Return how many blocks the packed sequences can have at most."""
    return rows // block + len(offsets) - 1


def _width(dim: int) -> int:
    """Return the next power of two, of at least 16: what the tensor instructions take."""
    return max(16, 1 << (dim - 1).bit_length())


def _precision(query: Tensor) -> str:
    """Return how products of float32 are computed: as exactly as PyTorch's own."""
    allowed = query.is_cuda and torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def _dropout(seed: Tensor | None, probability: float) -> tuple[int, int, float]:
    """Return what the seed makes of the coins, the bound below which they drop a weight, and the factor of the others.

    The arithmetic is that of `nomax.ops.reference.kept`; the numbers are 32 bits wide, and signed.
    """
    if seed is None:
        return 0, 0, 1.0
    number = int(seed)
    coin = _mix(_mix(number & _LOW_32) ^ (number >> 32 & _LOW_32))
    bound = min(_LOW_32, round(probability * 2**32))
    return coin - (coin >> 31 << 32), bound - 2**31, 1 / (1 - probability) if probability < 1 else 0.0


def _mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & _LOW_32
    x = (x ^ x >> 15) * 0x846CA68B & _LOW_32
    return x ^ x >> 16
