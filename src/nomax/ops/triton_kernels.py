"""The Triton kernels: forward, the gradients of queries, of keys and values, and of a bias.

Importing this module imports triton, so only `nomax.ops.triton` does, at the first call that needs it. The mathematics
is that of csrc/forward.h and csrc/backward.h. i are queries and j keys, counted within their sequence. One comes as a
column and the other as a row, so that the same functions serve tiles [queries, keys] and tiles [keys, queries].
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class View(NamedTuple):
    """A tensor seen as [batch, head, row, column]; strides count elements, and a broadcast dimension has stride 0."""

    data: Any
    batch: int
    head: int
    row: int
    column: int


class Call(NamedTuple):
    """What all kernels need to know of a call; what is absent is None."""

    heads: int
    group: int  # query heads that share a key head
    queries: int
    keys: int
    dim: int
    value_dim: int
    diagonal: int
    scale: float
    gain: float
    shift: float
    mask: View | None
    row_gain: View | None
    row_shift: View | None
    query_offsets: Any  # bounds of packed sequences
    key_offsets: Any
    drop_below: int  # dropout: coins below it drop their weight; both less 2^31, to fit a signed number
    kept_factor: float
    first_batch: int  # where the coins are counted from
    first_query: int
    first_key: int


class Tiles(NamedTuple):
    """Which blocks to visit: of each owned block those that a mask leaves something of, in ascending order."""

    order: View  # [batch, head, owned block, place]: the number of a block
    count: View  # [batch, head, owned block]


class Slots(NamedTuple):
    """Which block of which packed sequence a program owns."""

    count: int
    sequence: Any  # -1: none
    block: Any


class Constants(NamedTuple):
    """What a kernel is compiled for, beside the sizes of its blocks."""

    ACTIVATION: str
    CAUSAL: bool
    LOWEST: float | None  # numbers of a float mask up to this one hide their key; None: the mask is boolean
    DROPOUT: bool
    PRECISION: str  # of products of float32
    UPCAST: bool  # interpreting bfloat16, whose products the interpreter gets wrong


INFINITY = tl.constexpr(float("inf"))


@triton.jit
def logarithm_of_one_plus(e):
    """Keep the precision of a small e, which 1 + e would lose."""
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def at_least_zero(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def normal_tail(t):
    """Return exp(-t²/2) and Φ(-t), by the fit of csrc/activations.h, whose tail keeps its precision."""
    bell = tl.exp(t * t * -0.5)
    q = 0.0100555802 * t + 0.100087792
    q = q * t + 0.463925093
    q = q * t + 1.19376564
    q = q * t + 1.66878927
    q = q * t + 1.0
    p = 0.0040116543 * t + 0.0399262719
    p = p * t + 0.181134269
    p = p * t + 0.435452163
    p = p * t + 0.5
    return bell, bell * p / q


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return h(x) and h'(x). What nobody uses of it, the compiler leaves out."""
    if ACTIVATION == "relu":
        h = at_least_zero(x)
        d = tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        r = at_least_zero(x)
        h = r * r
        d = r + r
    elif ACTIVATION == "gelu":
        t = tl.minimum(tl.abs(x), 14.0, propagate_nan=tl.PropagateNan.ALL)
        bell, small = normal_tail(t)
        h = at_least_zero(x) - t * small
        d = tl.where(x > 0, 1.0 - small, small) + x * bell * 0.39894228
    elif ACTIVATION == "softplus":
        e = tl.exp(-tl.abs(x))
        h = at_least_zero(x) + logarithm_of_one_plus(e)
        d = tl.where(x > 0, 1.0, e) / (1.0 + e)
    elif ACTIVATION == "identity":
        h = x
        d = tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu6":
        h = tl.minimum(at_least_zero(x), 6.0, propagate_nan=tl.PropagateNan.ALL)
        d = tl.where((x > 0) & (x < 6), 1.0, 0.0)
    elif ACTIVATION == "sigmoid":
        e = tl.exp(-tl.abs(x))
        h = tl.where(x > 0, 1.0, e) / (1.0 + e)
        d = e / ((1.0 + e) * (1.0 + e))
    elif ACTIVATION == "silu":
        e = tl.exp(-tl.abs(x))
        s = tl.where(x > 0, 1.0, e) / (1.0 + e)
        h = x * s
        # Written so that no x overflows: where e is 0, the slope of sigmoid is too.
        d = s + x * e / ((1.0 + e) * (1.0 + e))
    else:
        tl.static_assert(ACTIVATION == "cube")
        h = x * x * x
        d = 3.0 * x * x
    return h, d


@triton.jit
def mix(x):
    """Scramble uint32 as `nomax.ops.reference` does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def coins(call: Call, coin, sequence, head, i, j):
    """Toss dropout's coins: True keeps the weight."""
    lane = ((call.first_batch + sequence) * call.heads + head).to(tl.uint32)
    row = (call.first_query + i).to(tl.uint32)
    row = mix(mix(tl.zeros_like(row) + (coin.to(tl.uint32, bitcast=True) ^ lane)) ^ row)
    second = mix(row ^ 0x9E3779B9)
    bits = mix(mix((call.first_key + j).to(tl.uint32) ^ row) + second)
    return (bits ^ 0x80000000).to(tl.int32, bitcast=True) >= call.drop_below


@triton.jit
def place(call: Call, slots: Slots, owned_heads, owned, BLOCK: tl.constexpr):
    """Return which block of which sequence and head this program owns, and where that sequence lies.

    The last blocks come first: under a diagonal their rows see the most, and short work at the end fills the gaps.
    """
    number = tl.program_id(0)
    if slots is None:
        blocks = tl.cdiv(owned, BLOCK)
        block = blocks - 1 - number % blocks
        head = (number // blocks) % owned_heads
        sequence = number // blocks // owned_heads
        at = (sequence, sequence, head, 0, 0, call.queries, call.keys)
    else:
        slot = number % slots.count
        block = tl.load(slots.block + slot)
        sequence = tl.load(slots.sequence + slot)
        there = sequence >= 0  # else this program has nothing to do: its sequence has no length
        query = tl.load(call.query_offsets + sequence, mask=there, other=0)
        key = tl.load(call.key_offsets + sequence, mask=there, other=0)
        queries = (tl.load(call.query_offsets + sequence + 1, mask=there, other=0) - query).to(tl.int32)
        keys = (tl.load(call.key_offsets + sequence + 1, mask=there, other=0) - key).to(tl.int32)
        at = (sequence, number * 0, number // slots.count, query, key, queries, keys)
    return at, block


@triton.jit
def rows_of(x: View, batch, head, rows):
    """Return the addresses of rows of a head. Only here do numbers outgrow 32 bits."""
    return x.data + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head + rows.to(tl.int64) * x.row


@triton.jit
def load_tile(x: View, batch, head, rows, inside, dim, WIDTH: tl.constexpr, C: tl.constexpr):
    """Load rows of a head as [rows, WIDTH], with zeros after the last dimension and where a row is not inside."""
    columns = tl.arange(0, WIDTH)
    places = rows_of(x, batch, head, rows)[:, None] + columns[None, :].to(tl.int64) * x.column
    tile = tl.load(places, mask=inside[:, None] & (columns < dim)[None, :], other=0.0)
    if C.UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_tile(x: View, batch, head, rows, inside, dim, tile, poison, CAREFUL: tl.constexpr):
    """Store rows of a head; carefully, only what sees no poison, since the rest is as it should be."""
    columns = tl.arange(0, tile.shape[1])
    places = rows_of(x, batch, head, rows)[:, None] + columns[None, :].to(tl.int64) * x.column
    wanted = inside[:, None] & (columns < dim)[None, :]
    if CAREFUL:
        wanted = wanted & (poison == 0)
    tl.store(places, tile.to(x.data.dtype.element_ty), mask=wanted)


@triton.jit
def numbers_of(x: View, batch, head, rows, inside, default):
    """Return one number for each row, from a tensor [batch, head, row] if there is one."""
    if x is None:
        numbers = tl.zeros([rows.shape[0]], tl.float32) + default
    else:
        numbers = tl.load(rows_of(x, batch, head, rows), mask=inside, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def see(x, call: Call, batch, head, i, j, queries, keys, C: tl.constexpr):
    """Add the mask to the scores; return them, and where query i sees key j."""
    seen = (i < queries) & (j < keys)
    if C.CAUSAL:
        seen = seen & (j <= i + call.diagonal)
    mask = call.mask
    if mask is not None:
        bias = tl.load(rows_of(mask, batch, head, i) + j.to(tl.int64) * mask.column, mask=seen, other=0)
        if C.LOWEST is None:
            seen = seen & (bias != 0)
        else:
            bias = bias.to(tl.float32)
            seen = seen & ((bias > C.LOWEST) | (bias != bias))
            x = x + tl.where(seen, bias, 0.0)
    return x, seen


@triton.jit
def product(a, x, seen, CAREFUL: tl.constexpr, C: tl.constexpr):
    """Return a·x, and if careful, how many numbers that are not finite each result sees.

    a is rounded to the type of x, as the tensor instructions ask for. Carefully, numbers of x that are not finite count
    as zero: they would reach also those that do not see them, since 0·NaN is NaN. And rows of a that float16 cannot
    hold are divided by a power of two before, and multiplied by it after.
    """
    poison = 0.0
    factor = 1.0
    if CAREFUL:
        finite = tl.abs(x.to(tl.float32)) < INFINITY
        poison = tl.dot(
            tl.where(seen, 1.0, 0.0).to(x.dtype), tl.where(finite, 0.0, 1.0).to(x.dtype), input_precision=C.PRECISION
        )
        x = tl.where(finite, x, tl.zeros_like(x))
        if x.dtype == tl.float16:
            size = tl.max(tl.abs(a), 1)
            large = (size > 32768.0) & (size < INFINITY)
            factor = tl.where(large, tl.exp2(tl.ceil(tl.log2(tl.where(large, size, 1.0))) - 15.0), 1.0)[:, None]
            a = a / factor
    if C.UPCAST:
        a = a.to(tl.bfloat16)
    result = tl.dot(a.to(x.dtype), x, input_precision=C.PRECISION)
    if CAREFUL and x.dtype == tl.float16:
        result = result * factor
    return result, poison


@triton.jit
def suspicion(x, inside):
    """Return 1 if a number of a tile, in the rows inside, is not finite, else 0."""
    return tl.max(tl.where((tl.abs(x) < INFINITY) | (inside == 0)[:, None], 0, 1))


@triton.jit
def keys_to_visit(call: Call, block, queries, keys, CAREFUL: tl.constexpr, BLOCK_M, BLOCK_N, C: tl.constexpr):
    """Return the end of the blocks of keys of which every row sees all, and the end of the keys that any row sees."""
    whole = keys
    end = keys
    if C.CAUSAL:
        start = block * BLOCK_M
        whole = tl.maximum(tl.minimum(keys, start + call.diagonal + 1), 0)
        end = tl.maximum(tl.minimum(keys, tl.minimum(start + BLOCK_M, queries) + call.diagonal), 0)
    whole = whole // BLOCK_N * BLOCK_N
    if CAREFUL:
        whole = whole * 0
    return whole, end


@triton.jit
def listed(tiles: Tiles, batch, head, block):
    """Return where the list of blocks to visit begins, and how long it is."""
    return rows_of(tiles.order, batch, head, block), tl.load(rows_of(tiles.count, batch, head, block))


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
