"""Launch the Triton kernels: what they are told of a call, which blocks they visit, and when they look twice."""

import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nomax.ops.problem import hidden
from nomax.ops.registration import CODES, Arguments, output, shapes, shapes_backward
from nomax.ops.triton import backward as backward_kernels
from nomax.ops.triton import forward as forward_kernel
from nomax.ops.triton.backend import is_interpreted
from nomax.ops.triton.call import Call, Constants, Slots, Tiles, View
from nomax.ops.triton.tuning import Config, tuned

KERNELS: dict[str, Any] = {
    "forward": forward_kernel.forward,
    "query_gradient": backward_kernels.query_gradient,
    "key_gradients": backward_kernels.key_gradients,
    "bias_gradient": backward_kernels.bias_gradient,
}
NAMES = tuple(CODES)
_LOW_32 = 0xFFFFFFFF


def forward(
    *inputs: Any, origin: tuple[int, int, int] = (0, 0, 0), dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attend`, of a part that begins at `origin`, with an output of another dtype if wanted."""
    call = Arguments(*inputs)
    out, statistics = shapes(*inputs)
    if dtype is not None:
        out = output(call.query, call.value, dtype)
    if call.key.shape[2] == 0:
        return out.zero_(), statistics.zero_()
    if out.numel() + statistics.numel() == 0:
        return out, statistics
    run = Run(call, origin)
    sums, logs = (run.view(x) for x in statistics) if call.last else (None, None)

    def launch(config: Config) -> None:
        run.launch(
            "forward", config, run.grid(config.rows, call.query, call.query_offsets),
            (run.view(out), sums, logs), (run.tiles(config), run.slots(config.rows, True), run.coin),
        )  # fmt: skip

    with _on(out):
        tuned("forward", call, run.variant, launch)
    return out, statistics


def backward(
    grad: Tensor,
    statistics: Tensor | None,
    *inputs: Any,
    origin: tuple[int, int, int] = (0, 0, 0),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Compute `attend_backward`, of a part that begins at `origin`, with gradients of another dtype if wanted."""
    call = Arguments(*inputs)
    grad_query, grad_key, grad_value, grad_bias = results = shapes_backward(grad, statistics, *inputs)
    if dtype is not None:
        grad_query, grad_key, grad_value = (torch.empty_like(x, dtype=dtype) for x in results[:3])
        results = (grad_query, grad_key, grad_value, grad_bias)
    nothing = 0 in (call.query.numel(), call.key.numel(), call.value.numel()) and statistics is None
    if nothing or 0 in (*call.query.shape[:3], *call.key.shape[:3]):
        return tuple(x.zero_() for x in results)
    run = Run(call, origin)
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
        tuned("query_gradient", call, run.variant, launch_query)
        tuned("key_gradients", call, run.variant, launch_keys)
        if call.last:
            tuned("bias_gradient", call, run.variant, lambda config: run.bias_gradient(config, gradients, grad_bias))
    return grad_query, grad_key, grad_value, grad_bias


class Run:
    """A call in the words of the kernels."""

    def __init__(self, call: Arguments, origin: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.arguments = call
        self.lists: dict[tuple[Config, bool], Tiles] = {}
        query, key, value, mask = call.query, call.key, call.value, call.mask
        (_, heads, queries, dim), (_, key_heads, keys, value_dim) = query.shape, value.shape
        self.inputs = self.view(query), self.view(key), self.view(value)
        self.coin, drop_below, kept_factor = _dropout(call.seed, call.dropout)
        lowest = None if mask is None or mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        self.packed = call.query_offsets is not None
        first_batch, first_query, first_key = origin
        self.call = Call(
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
        self.constants = Constants(
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
        return View(x, *strides, *(0,) * (4 - x.dim()))

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
        """Launch a kernel, and once more for the blocks whose results are not finite: see `forward.forward`."""
        suspects = self.arguments.query.new_empty(programs, dtype=torch.int32) if self.check else None
        for careful in (False, True) if self.check else (False,):
            KERNELS[kernel][(programs,)](
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
        return Slots(len(number), sequence.masked_fill(idle, -1).int(), block_of.masked_fill(idle, 0).int())

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
        if (config, of_keys) not in self.lists:  # once, however often the kernel is launched to time it
            visits = self.visits(config)
            if of_keys:
                visits = visits.expand(-1, -1, -(-self.call.queries // config.rows), -1).mT
            order = visits.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
            lists = Tiles(self.view(order.int()), self.view(visits.sum(-1, dtype=torch.int32)))
            self.lists[config, of_keys] = lists
        return self.lists[config, of_keys]

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
        KERNELS["bias_gradient"][(mask_batch * mask_heads * blocks[0] * blocks[1],)](
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


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of a tensor the current one, on which triton launches."""
    if x.is_cpu:
        # The interpreter computes with numpy, which warns of infinities; a GPU does not.
        return warnings.catch_warnings(action="ignore", category=RuntimeWarning)
    return torch.get_device_module(x.device).device(x.device)
