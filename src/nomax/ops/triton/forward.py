"""The Triton kernel of the forward pass."""

import triton
import triton.language as tl

from nomax.ops.triton.call import Call, Slots, Tiles, View
from nomax.ops.triton.tile import (
    activate,
    coins,
    keys_to_visit,
    listed,
    load_tile,
    numbers_of,
    place,
    product,
    rows_of,
    see,
    store_tile,
    suspicion,
)


@triton.jit
def forward_tile(
    state, q, key: View, value: View, call: Call, coin, at, rows, n, row_shift,
    EDGE: tl.constexpr, CAREFUL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add what the keys from n on contribute to the rows."""
    sums, poison, row_sum, row_log = state
    sequence, batch, head, first_query, first_key, queries, keys = at
    columns = n + tl.arange(0, BLOCK_N)
    inside = columns < keys
    key_head = head // call.group
    k = load_tile(key, batch, key_head, first_key + columns, inside, call.dim, q.shape[1], C)
    v = load_tile(value, batch, key_head, first_key + columns, inside, call.value_dim, sums.shape[1], C)
    i = rows[:, None]
    j = columns[None, :]
    x = tl.dot(q, tl.trans(k), input_precision=C.PRECISION) * call.scale + row_shift[:, None]
    seen = j < keys
    if EDGE:
        x, seen = see(x, call, batch, head, i, j, queries, keys, C)
    h, slope = activate(x, C.ACTIVATION)
    if EDGE:
        h = tl.where(seen, h, 0.0)
    if ROWS:
        row_sum += tl.sum(h, 1)
        row_log += tl.sum(tl.where(h > 0, h * tl.log(tl.where(h > 0, h, 1.0)), 0.0), 1)
    if C.DROPOUT:
        h = tl.where(coins(call, coin, sequence, head, i, j), h * call.kept_factor, 0.0)
    part, bad = product(h, v, seen, CAREFUL, C)
    if CAREFUL:
        poison += bad
    return sums + part, poison, row_sum, row_log


@triton.jit
def forward_rows(
    q, key: View, value: View, call: Call, tiles: Tiles, coin, at, block, rows, row_shift,
    CAREFUL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return Σ_j h_ij·v_j, its poison (see `product`), Σ_j h_ij and Σ_j h_ij·log h_ij of a block of rows."""
    sequence, batch, head, first_query, first_key, queries, keys = at
    BLOCK_M: tl.constexpr = q.shape[0]
    none = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    state = (sums, sums if CAREFUL else none, none, none)
    if tiles is None:
        whole, end = keys_to_visit(call, block, queries, keys, CAREFUL, BLOCK_M, BLOCK_N, C)
        if not CAREFUL:
            for n in range(0, whole, BLOCK_N):
                state = forward_tile(
                    state, q, key, value, call, coin, at, rows, n, row_shift, False, False, ROWS, BLOCK_N, C
                )
        for n in range(whole, end, BLOCK_N):
            state = forward_tile(
                state, q, key, value, call, coin, at, rows, n, row_shift, True, CAREFUL, ROWS, BLOCK_N, C
            )
    else:
        order, count = listed(tiles, batch, head, block)
        for t in range(count):
            n = tl.load(order + t * tiles.order.column) * BLOCK_N
            state = forward_tile(
                state, q, key, value, call, coin, at, rows, n, row_shift, True, CAREFUL, ROWS, BLOCK_N, C
            )
    return state


@triton.jit
def forward_block(
    query: View, key: View, value: View, out: View, row_sums: View, row_logs: View, suspects,
    call: Call, tiles: Tiles, coin, at, block,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    sequence, batch, head, first_query, first_key, queries, keys = at
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < queries
    q = load_tile(query, batch, head, first_query + rows, inside, call.dim, BLOCK_D, C)
    row_shift = numbers_of(call.row_shift, batch, head, first_query + rows, inside, call.shift)
    ROWS: tl.constexpr = row_sums is not None and not CAREFUL
    sums, poison, row_sum, row_log = forward_rows(
        q, key, value, call, tiles, coin, at, block, rows, row_shift, CAREFUL, ROWS, BLOCK_N, BLOCK_DV, C
    )
    if suspects is not None and not CAREFUL:
        tl.store(suspects + tl.program_id(0), suspicion(sums, inside))
    row_gain = numbers_of(call.row_gain, batch, head, first_query + rows, inside, call.gain)
    sums = sums * row_gain[:, None]
    store_tile(out, batch, head, first_query + rows, inside, call.value_dim, sums, poison, CAREFUL)
    if ROWS:
        tl.store(rows_of(row_sums, batch, head, first_query + rows), row_sum, mask=inside)
        tl.store(rows_of(row_logs, batch, head, first_query + rows), row_log, mask=inside)


@triton.jit(do_not_specialize=["coin"])
def forward(
    query: View, key: View, value: View, out: View, row_sums: View, row_logs: View, suspects,
    call: Call, tiles: Tiles, slots: Slots, coin,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of the output, and their statistics; carefully, only if the block is suspect.

    Suspect are blocks whose result is not finite, for they may owe that to a key that they do not see, or to float16. A
    second launch looks at them again: in the same one it would cost every block registers.
    """
    at, block = place(call, slots, call.heads, call.queries, BLOCK_M)
    if not CAREFUL or tl.load(suspects + tl.program_id(0)) != 0:
        forward_block(
            query, key, value, out, row_sums, row_logs, suspects, call, tiles, coin, at, block,
            CAREFUL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, C,
        )  # fmt: skip
