"""What all kernels share: activations, coins, tiles of tensors and of masks, and products that nothing leaks into.

Importing this module imports triton, so only `nomax.ops.triton.launch` does, at the first call that needs it. The
mathematics is that of csrc/forward.h and csrc/backward.h. i are queries and j keys, counted within their sequence. One
comes as a column and the other as a row, so that the same functions serve tiles [queries, keys] and [keys, queries].
"""

import triton
import triton.language as tl

from nomax.ops.triton.call import Call, Slots, Tiles, View

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
        slot = number % slots.total
        block = tl.load(slots.block + slot)
        sequence = tl.load(slots.sequence + slot)
        there = sequence >= 0  # else this program has nothing to do: its sequence has no length
        query = tl.load(call.query_offsets + sequence, mask=there, other=0)
        key = tl.load(call.key_offsets + sequence, mask=there, other=0)
        queries = (tl.load(call.query_offsets + sequence + 1, mask=there, other=0) - query).to(tl.int32)
        keys = (tl.load(call.key_offsets + sequence + 1, mask=there, other=0) - key).to(tl.int32)
        at = (sequence, number * 0, number // slots.total, query, key, queries, keys)
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
    return rows_of(tiles.order, batch, head, block), tl.load(rows_of(tiles.counts, batch, head, block))
