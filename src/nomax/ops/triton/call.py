"""A call in the words of the kernels: what they are told, and what they are compiled for."""

from typing import Any, NamedTuple


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
    counts: View  # [batch, head, owned block]


class Slots(NamedTuple):
    """Which block of which packed sequence a program owns."""

    total: int
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
