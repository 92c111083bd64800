"""Tell DTensor how the operation may be sharded, so that `nomax.attention` takes DTensors.

One row of the table below is what softmax lacks: queries replicated, keys and values sharded along the sequence, and an
output that is a partial sum.
"""

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from nomax.ops import cpu
from nomax.ops.registration import Arguments
from nomax.ops.triton import backend as triton

BATCH, HEADS, POSITIONS = 0, 1, 2
Sharding = tuple[list[Placement | None], list[Placement | None]]
_registered = False


def register_operators() -> None:
    """Register the shardings of nomax's operators with DTensor; then `nomax.attention` takes DTensors.

    Batch and heads can be sharded, the queries' positions with keys and values replicated, or the keys' positions with
    queries replicated. Others are redistributed by DTensor, as usual. For sequences that are sharded in both,
    `nomax.parallel.attention` on local tensors sends less.
    """
    global _registered
    if _registered:
        return
    cpu.load()
    triton.load()
    for operators in (torch.ops.nomax, torch.ops.nomax_triton):
        register_sharding(operators.attend.default)(_forward)
        register_sharding(operators.attend_backward.default)(_backward)
    # For calls that need no gradients, and for those whose formula is Python's own.
    register_sharding(torch.ops.nomax.attend_forward.default)(_forward)
    register_sharding(torch.ops.nomax.attend_gradients.default)(_backward)
    _registered = True


def _forward(*inputs: Any) -> list[Sharding]:
    call = Arguments(*inputs)
    return [([out, _statistics(out)], _inputs(call, query, key)) for query, key, out, *_ in _ways(call)]


def _backward(grad: Any, grad_statistics: Any, *inputs: Any) -> list[Sharding]:
    call = Arguments(*inputs)
    shardings: list[Sharding] = []
    for query, key, _, grad_query, grad_key in _ways(call):
        # The gradient of a mask is a sum over whatever is sharded, unless that is sharded itself: not worth the cases.
        if call.last and not (query == key == Replicate()):
            continue
        # A partial sum has one gradient, that of the whole: it is placed as the queries are.
        of_statistics = None if grad_statistics is None else _statistics(query)
        outputs: list[Placement | None] = [grad_query, grad_key, grad_key, Replicate()]
        shardings.append((outputs, [query, of_statistics, *_inputs(call, query, key)]))
    return shardings


def _ways(call: Arguments) -> list[tuple[Placement, ...]]:
    """Return the placements of query, key and value, out, and the gradients of query, and of key and value."""
    whole = Replicate()
    ways: list[tuple[Placement, ...]] = [(whole,) * 5]
    if call.dropout or call.query_offsets is not None:  # coins are addressed by places in the whole
        return ways
    ways.append((Shard(BATCH),) * 5)
    if call.query.shape[HEADS] == call.key.shape[HEADS]:
        ways.append((Shard(HEADS),) * 5)
    if call.diagonal is None:
        along = Shard(POSITIONS)
        ways.append((along, whole, along, along, Partial()))
        ways.append((whole, along, Partial(), Partial(), along))
    return ways


def _inputs(call: Arguments, query: Placement, key: Placement) -> list[Placement | None]:
    """Return the placements of all inputs; what has one entry for all of a sharded dimension is replicated."""
    placements: list[Placement | None] = [query, key, key]
    for name in Arguments._fields[3:]:
        x = getattr(call, name)
        if not hasattr(x, "shape"):
            placements.append(None)
        elif name == "mask" and isinstance(key, Shard) and key.dim == POSITIONS:
            placements.append(Shard(3) if x.shape[3] != 1 else Replicate())
        elif isinstance(query, Shard) and query.dim < len(x.shape) and x.shape[query.dim] != 1:
            placements.append(query)
        else:
            placements.append(Replicate())
    return placements


def _statistics(out: Placement) -> Placement:
    """Return the placement of both sums of rows, stacked before the batch."""
    return Shard(out.dim + 1) if isinstance(out, Shard) else out
