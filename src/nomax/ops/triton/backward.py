"""The Triton kernels of the gradients: of queries, of keys and values, and of a bias."""

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
def differentiate(
    s, g, call: Call, coin, sequence, batch, head, i, j, queries, keys, shift, gain, of_sum, of_log,
    EDGE: tl.constexpr, STATISTICS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Turn products q·k and grad·v into weights and gradients of scores; return these, and where i sees j."""
    x = s * call.scale + shift
    seen = (i < queries) & (j < keys)
    if EDGE:
        x, seen = see(x, call, batch, head, i, j, queries, keys, C)
    h, slope = activate(x, C.ACTIVATION)
    if EDGE:
        h = tl.where(seen, h, 0.0)
    weight = h * gain
    g = g * gain
    if C.DROPOUT:
        kept = coins(call, coin, sequence, head, i, j)
        weight = tl.where(kept, weight * call.kept_factor, 0.0)
        g = tl.where(kept, g * call.kept_factor, 0.0)
    if STATISTICS:
        g += tl.where(h > 0, of_sum + of_log * (tl.log(tl.where(h > 0, h, 1.0)) + 1.0), 0.0)
    g = g * slope
    if EDGE:
        g = tl.where(seen, g, 0.0)
    return weight, g, seen


@triton.jit
def query_tile(
    state, q, grad, key: View, value: View, call: Call, coin, at, rows, n, row_shift, row_gain, of_sum, of_log,
    EDGE: tl.constexpr, CAREFUL: tl.constexpr, STATISTICS: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add what the keys from n on contribute to the gradient of the rows."""
    sums, poison = state
    sequence, batch, head, first_query, first_key, queries, keys = at
    columns = n + tl.arange(0, BLOCK_N)
    inside = columns < keys
    key_head = head // call.group
    k = load_tile(key, batch, key_head, first_key + columns, inside, call.dim, q.shape[1], C)
    v = load_tile(value, batch, key_head, first_key + columns, inside, call.value_dim, grad.shape[1], C)
    s = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
    g = tl.dot(grad, tl.trans(v), input_precision=C.PRECISION)
    weight, g, seen = differentiate(
        s, g, call, coin, sequence, batch, head, rows[:, None], columns[None, :], queries, keys,
        row_shift[:, None], row_gain[:, None], of_sum[:, None], of_log[:, None], EDGE, STATISTICS, C,
    )  # fmt: skip
    part, bad = product(g, k, seen, CAREFUL, C)
    if CAREFUL:
        poison += bad
    return sums + part, poison


@triton.jit
def query_rows(
    q, grad, key: View, value: View, call: Call, tiles: Tiles, coin, at, block, rows, row_shift, row_gain, of_sum,
    of_log, CAREFUL: tl.constexpr, STATISTICS: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return Σ_j dS_ij·k_j and its poison (see `product`)."""
    sequence, batch, head, first_query, first_key, queries, keys = at
    BLOCK_M: tl.constexpr = q.shape[0]
    sums = tl.zeros([BLOCK_M, q.shape[1]], tl.float32)
    state = (sums, sums if CAREFUL else tl.zeros([BLOCK_M], tl.float32))
    if tiles is None:
        whole, end = keys_to_visit(call, block, queries, keys, CAREFUL, BLOCK_M, BLOCK_N, C)
        if not CAREFUL:
            for n in range(0, whole, BLOCK_N):
                state = query_tile(
                    state, q, grad, key, value, call, coin, at, rows, n, row_shift, row_gain, of_sum, of_log,
                    False, False, STATISTICS, BLOCK_N, C,
                )  # fmt: skip
        for n in range(whole, end, BLOCK_N):
            state = query_tile(
                state, q, grad, key, value, call, coin, at, rows, n, row_shift, row_gain, of_sum, of_log,
                True, CAREFUL, STATISTICS, BLOCK_N, C,
            )  # fmt: skip
    else:
        order, count = listed(tiles, batch, head, block)
        for t in range(count):
            n = tl.load(order + t * tiles.order.column) * BLOCK_N
            state = query_tile(
                state, q, grad, key, value, call, coin, at, rows, n, row_shift, row_gain, of_sum, of_log,
                True, CAREFUL, STATISTICS, BLOCK_N, C,
            )  # fmt: skip
    return state


@triton.jit
def query_block(
    query: View, key: View, value: View, grad_out: View, grad_sums: View, grad_logs: View, grad_query: View, suspects,
    call: Call, tiles: Tiles, coin, at, block,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    sequence, batch, head, first_query, first_key, queries, keys = at
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < queries
    q = load_tile(query, batch, head, first_query + rows, inside, call.dim, BLOCK_D, C)
    grad = load_tile(grad_out, batch, head, first_query + rows, inside, call.value_dim, BLOCK_DV, C)
    row_shift = numbers_of(call.row_shift, batch, head, first_query + rows, inside, call.shift)
    of_sum = numbers_of(grad_sums, batch, head, first_query + rows, inside, 0.0)
    of_log = numbers_of(grad_logs, batch, head, first_query + rows, inside, 0.0)
    # The row's factor waits for the end, so that half precision never sees a gradient of size 1/L.
    STATISTICS: tl.constexpr = grad_sums is not None
    factor = numbers_of(call.row_gain, batch, head, first_query + rows, inside, call.gain)
    row_gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if STATISTICS:
        row_gain = tl.where(factor == 0, 0.0, 1.0)
        factor = tl.where(factor == 0, 1.0, factor)
        of_sum = of_sum / factor
        of_log = of_log / factor
    sums, poison = query_rows(
        q, grad, key, value, call, tiles, coin, at, block, rows, row_shift, row_gain, of_sum, of_log,
        CAREFUL, STATISTICS, BLOCK_N, C,
    )  # fmt: skip
    if suspects is not None and not CAREFUL:
        tl.store(suspects + tl.program_id(0), suspicion(sums, inside))
    sums = sums * (factor * call.scale)[:, None]
    store_tile(grad_query, batch, head, first_query + rows, inside, call.dim, sums, poison, CAREFUL)


@triton.jit(do_not_specialize=["coin"])
def query_gradient(
    query: View, key: View, value: View, grad_out: View, grad_sums: View, grad_logs: View, grad_query: View, suspects,
    call: Call, tiles: Tiles, slots: Slots, coin,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of the gradient of the queries; on suspects see `forward`."""
    at, block = place(call, slots, call.heads, call.queries, BLOCK_M)
    if not CAREFUL or tl.load(suspects + tl.program_id(0)) != 0:
        query_block(
            query, key, value, grad_out, grad_sums, grad_logs, grad_query, suspects, call, tiles, coin, at, block,
            CAREFUL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, C,
        )  # fmt: skip


@triton.jit
def key_tile(
    state, k, v, query: View, grad_out: View, grad_sums: View, grad_logs: View, call: Call, coin, at, head, columns, m,
    EDGE: tl.constexpr, CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add what the rows from m on of a head contribute to the gradients of the keys and values."""
    key_sums, value_sums, key_poison, value_poison = state
    sequence, batch, key_head, first_query, first_key, queries, keys = at
    rows = m + tl.arange(0, BLOCK_M)
    inside = rows < queries
    q = load_tile(query, batch, head, first_query + rows, inside, call.dim, k.shape[1], C)
    grad = load_tile(grad_out, batch, head, first_query + rows, inside, call.value_dim, v.shape[1], C)
    row_shift = numbers_of(call.row_shift, batch, head, first_query + rows, inside, call.shift)
    row_gain = numbers_of(call.row_gain, batch, head, first_query + rows, inside, call.gain)
    of_sum = numbers_of(grad_sums, batch, head, first_query + rows, inside, 0.0)
    of_log = numbers_of(grad_logs, batch, head, first_query + rows, inside, 0.0)
    # One factor for all rows waits for the end. Of several, the largest waits for the product: see `query_block`.
    STATISTICS: tl.constexpr = grad_sums is not None
    LIFT: tl.constexpr = (STATISTICS or call.row_gain is not None) and q.dtype == tl.float16
    factor = 1.0
    if LIFT:
        factor = tl.max(tl.abs(row_gain))
        factor = tl.where(factor > 0, factor, 1.0)
        row_gain = row_gain / factor
        of_sum = of_sum / factor
        of_log = of_log / factor
    if not STATISTICS and call.row_gain is None:
        row_gain = tl.full([BLOCK_M], 1.0, tl.float32)
    s = tl.dot(k, tl.trans(q), input_precision=C.PRECISION)
    g = tl.dot(v, tl.trans(grad), input_precision=C.PRECISION)
    weight, g, seen = differentiate(
        s, g, call, coin, sequence, batch, head, rows[None, :], columns[:, None], queries, keys,
        row_shift[None, :], row_gain[None, :], of_sum[None, :], of_log[None, :], EDGE, STATISTICS, C,
    )  # fmt: skip
    value_part, value_bad = product(weight, grad, seen, CAREFUL, C)
    key_part, key_bad = product(g, q, seen, CAREFUL, C)
    if LIFT:
        value_part = value_part * factor
        key_part = key_part * factor
    if CAREFUL:
        key_poison += key_bad
        value_poison += value_bad
    return key_sums + key_part, value_sums + value_part, key_poison, value_poison


@triton.jit
def key_columns(
    k, v, query: View, grad_out: View, grad_sums: View, grad_logs: View, call: Call, tiles: Tiles, coin, at, block,
    columns, CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return Σ_i dS_ij·q_i, Σ_i a_ij·grad_i, and their poisons (see `product`), over all heads of the group."""
    sequence, batch, key_head, first_query, first_key, queries, keys = at
    BLOCK_N: tl.constexpr = k.shape[0]
    none = tl.zeros([BLOCK_N], tl.float32)
    key_sums = tl.zeros([BLOCK_N, k.shape[1]], tl.float32)
    value_sums = tl.zeros([BLOCK_N, v.shape[1]], tl.float32)
    state = (key_sums, value_sums, key_sums if CAREFUL else none, value_sums if CAREFUL else none)
    if tiles is None:
        # Rows from `first` on see a key of the block, and from `all_see` on all of them; `whole` ends whole blocks.
        first = queries * 0
        all_see = queries * 0
        whole = queries // BLOCK_M * BLOCK_M
        if C.CAUSAL:
            start = block * BLOCK_N
            first = tl.minimum(tl.maximum(start - call.diagonal, 0), queries) // BLOCK_M * BLOCK_M
            last = tl.minimum(tl.maximum(start + BLOCK_N - 1 - call.diagonal, 0), queries)
            all_see = tl.cdiv(last, BLOCK_M) * BLOCK_M
        if CAREFUL:
            all_see = tl.cdiv(queries, BLOCK_M) * BLOCK_M
        before = tl.cdiv(all_see - first, BLOCK_M)  # blocks at the edge: before the whole ones, and one after
        after = tl.maximum(whole, all_see)
        edges = before + tl.cdiv(tl.maximum(queries - after, 0), BLOCK_M)
        for member in range(call.group):
            head = key_head * call.group + member
            if not CAREFUL:
                for m in range(all_see, whole, BLOCK_M):
                    state = key_tile(
                        state, k, v, query, grad_out, grad_sums, grad_logs, call, coin, at, head, columns, m,
                        False, False, BLOCK_M, C,
                    )  # fmt: skip
            for t in range(edges):
                m = tl.where(t < before, first + t * BLOCK_M, after)
                state = key_tile(
                    state, k, v, query, grad_out, grad_sums, grad_logs, call, coin, at, head, columns, m,
                    True, CAREFUL, BLOCK_M, C,
                )  # fmt: skip
    else:
        for member in range(call.group):
            head = key_head * call.group + member
            order, count = listed(tiles, batch, head, block)
            for t in range(count):
                m = tl.load(order + t * tiles.order.column) * BLOCK_M
                state = key_tile(
                    state, k, v, query, grad_out, grad_sums, grad_logs, call, coin, at, head, columns, m,
                    True, CAREFUL, BLOCK_M, C,
                )  # fmt: skip
    return state


@triton.jit
def key_block(
    query: View, key: View, value: View, grad_out: View, grad_sums: View, grad_logs: View, grad_key: View,
    grad_value: View, suspects, call: Call, tiles: Tiles, coin, at, block,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    sequence, batch, key_head, first_query, first_key, queries, keys = at
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < keys
    k = load_tile(key, batch, key_head, first_key + columns, inside, call.dim, BLOCK_D, C)
    v = load_tile(value, batch, key_head, first_key + columns, inside, call.value_dim, BLOCK_DV, C)
    key_sums, value_sums, key_poison, value_poison = key_columns(
        k, v, query, grad_out, grad_sums, grad_logs, call, tiles, coin, at, block, columns, CAREFUL, BLOCK_M, C
    )
    if suspects is not None and not CAREFUL:
        tl.store(suspects + tl.program_id(0), suspicion(key_sums, inside) + suspicion(value_sums, inside))
    if grad_sums is None and call.row_gain is None:
        key_sums = key_sums * call.gain
        value_sums = value_sums * call.gain
    key_sums = key_sums * call.scale
    store_tile(grad_key, batch, key_head, first_key + columns, inside, call.dim, key_sums, key_poison, CAREFUL)
    store_tile(
        grad_value, batch, key_head, first_key + columns, inside, call.value_dim, value_sums, value_poison, CAREFUL
    )


@triton.jit(do_not_specialize=["coin"])
def key_gradients(
    query: View, key: View, value: View, grad_out: View, grad_sums: View, grad_logs: View, grad_key: View,
    grad_value: View, suspects, call: Call, tiles: Tiles, slots: Slots, coin, key_heads,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values; on suspects see `forward`."""
    at, block = place(call, slots, key_heads, call.keys, BLOCK_N)
    if not CAREFUL or tl.load(suspects + tl.program_id(0)) != 0:
        key_block(
            query, key, value, grad_out, grad_sums, grad_logs, grad_key, grad_value, suspects, call, tiles, coin, at,
            block, CAREFUL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["coin"])
def bias_gradient(
    query: View, key: View, value: View, grad_out: View, grad_sums: View, grad_logs: View, grad_bias: View,
    call: Call, visit: View, coin, mask_heads, shared_batches, shared_heads,
    BY_ROW: tl.constexpr, BY_KEY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add up the gradient of a tile of the mask over the batches and heads that share it, always in the same order.

    Where the mask has one row for all queries, or one column for all keys, each block writes its own sum.
    """
    row_blocks = tl.cdiv(call.queries, BLOCK_M)
    key_blocks = tl.cdiv(call.keys, BLOCK_N)
    number = tl.program_id(0)
    key_block = number % key_blocks
    row_block = (number // key_blocks) % row_blocks
    mask_head = (number // key_blocks // row_blocks) % mask_heads
    mask_batch = number // key_blocks // row_blocks // mask_heads
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = key_block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < call.queries
    STATISTICS: tl.constexpr = grad_sums is not None
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sharing = tl.load(rows_of(visit, mask_batch, mask_head, row_block) + key_block * visit.column).to(tl.int32)
    for shared in range(sharing * shared_batches * shared_heads):
        batch = mask_batch * shared_batches + shared // shared_heads
        head = mask_head * shared_heads + shared % shared_heads
        key_head = head // call.group
        q = load_tile(query, batch, head, rows, inside, call.dim, BLOCK_D, C)
        grad = load_tile(grad_out, batch, head, rows, inside, call.value_dim, BLOCK_DV, C)
        k = load_tile(key, batch, key_head, columns, columns < call.keys, call.dim, BLOCK_D, C)
        v = load_tile(value, batch, key_head, columns, columns < call.keys, call.value_dim, BLOCK_DV, C)
        row_shift = numbers_of(call.row_shift, batch, head, rows, inside, call.shift)
        row_gain = numbers_of(call.row_gain, batch, head, rows, inside, call.gain)
        of_sum = numbers_of(grad_sums, batch, head, rows, inside, 0.0)
        of_log = numbers_of(grad_logs, batch, head, rows, inside, 0.0)
        s = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
        g = tl.dot(grad, tl.trans(v), input_precision=C.PRECISION)
        weight, g, seen = differentiate(
            s, g, call, coin, batch, batch, head, rows[:, None], columns[None, :], call.queries, call.keys,
            row_shift[:, None], row_gain[:, None], of_sum[:, None], of_log[:, None], True, STATISTICS, C,
        )  # fmt: skip
        total += g
    if not BY_ROW:
        total = tl.sum(total, 0, keep_dims=True)
    if not BY_KEY:
        total = tl.sum(total, 1, keep_dims=True)
    i = rows[:, None] if BY_ROW else row_block + tl.zeros([1, 1], tl.int32)
    j = columns[None, :] if BY_KEY else key_block + tl.zeros([1, 1], tl.int32)
    places = rows_of(grad_bias, mask_batch, mask_head, i) + j.to(tl.int64) * grad_bias.column
    ends = (i < (call.queries if BY_ROW else row_blocks)) & (j < (call.keys if BY_KEY else key_blocks))
    tl.store(places, total, mask=ends)
