"""The named shapes that are measured, and the tensors made from them."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

FORWARD = "forward"
BACKWARD = "forward + backward"
INFERENCE = "inference mode"


@dataclass(frozen=True)
class Shape:
    """B batch entries, H heads, L queries, K keys and D dimensions of a head."""

    name: str
    note: str
    batch: int
    heads: int
    queries: int
    keys: int
    dimension: int = 64
    causal: bool = False
    padded: bool = False
    modes: tuple[str, ...] = (FORWARD, BACKWARD)

    def shrunk(self) -> "Shape":
        """The same kind of shape, so small that its speed means nothing: for smoke runs."""
        small = (min(self.batch, 2), min(self.heads, 2), min(self.queries, 9), min(self.keys, 9), 8)
        return Shape(self.name, self.note, *small, self.causal, self.padded, self.modes)

    def lengths(self) -> list[int]:
        """How many keys each batch entry has: all, or when padded from about 0.3 of them to all."""
        if not self.padded:
            return [self.keys] * self.batch
        return [round(self.keys * float(share)) for share in torch.linspace(0.3, 1, self.batch)]

    def flop(self, mode: str) -> float:
        """Floating point operations on visible keys; the backward's five products count 2.5 times the forward's two."""
        rows = range(1, self.queries + 1)
        pairs = sum(sum(min(row, n) for row in rows) if self.causal else self.queries * n for n in self.lengths())
        return 4.0 * self.heads * self.dimension * pairs * (3.5 if mode == BACKWARD else 1)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("S/32", "ViT-S/32 at 224 pixels", 64, 6, 50, 50),
        Shape("S/16", "ViT-S/16", 16, 6, 197, 197),
        Shape("S/8", "ViT-S/8", 4, 6, 785, 785),
        Shape("B/16", "ViT-B/16", 8, 12, 197, 197),
        Shape("long-2049", "one long sequence", 1, 6, 2049, 2049),
        Shape("long-4096", "one longer sequence", 1, 6, 4096, 4096),
        Shape("causal-1024", "a causal decoder", 1, 8, 1024, 1024, causal=True),
        Shape("padded", "ViT-S/16's shape, sequences 0.3 to 1 of its length", 16, 6, 197, 197, padded=True),
        Shape("decode", "one step of cached decoding", 8, 8, 1, 2048, modes=(FORWARD,)),
        Shape("tiny", "the cost of a call", 1, 1, 1, 1, 8, modes=(FORWARD, INFERENCE, BACKWARD)),
    )
}


@dataclass(frozen=True)
class Inputs:
    """What every peer gets: contiguous tensors, and the mask in the forms that peers take it."""

    query: Tensor  # [B, H, L, D]
    key: Tensor  # [B, H, K, D]
    value: Tensor  # [B, H, K, D]
    grad: Tensor  # [B, H, L, D], the gradient that arrives at the output
    _: KW_ONLY
    lengths: Tensor | None  # [B], when padded
    causal: bool

    @property
    def mask(self) -> Tensor | None:
        """[B, 1, 1, K], True where a query may look; None if only the causal rule or nothing hides keys."""
        if self.lengths is None:
            return None
        return torch.arange(self.key.shape[2]) < self.lengths[:, None, None, None]

    @property
    def hidden(self) -> Tensor | None:
        """True where a query may not look, broadcastable to [B, H, L, K]."""
        if self.causal:
            return torch.ones(self.query.shape[2], self.key.shape[2], dtype=torch.bool).triu(1)
        return None if self.mask is None else ~self.mask

    @property
    def visible(self) -> Tensor | int:
        """The number of keys that each query may see: L."""
        if self.hidden is None:
            return self.key.shape[2]
        return (~self.hidden).sum(-1, keepdim=True).float()

    def parts(self) -> Iterator[tuple[int, slice, "Inputs"]]:
        """One batch entry and a few heads at a time, so that a whole matrix of weights fits into memory."""
        batch, heads, queries, _ = self.query.shape
        step = max(1, 2**23 // (queries * self.key.shape[2]))
        for entry in range(batch):
            for first in range(0, heads, step):
                some = slice(first, first + step)
                tensors = (x[entry : entry + 1, some] for x in (self.query, self.key, self.value, self.grad))
                lengths = None if self.lengths is None else self.lengths[entry : entry + 1]
                yield entry, some, Inputs(*tensors, lengths=lengths, causal=self.causal)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same values in another precision."""
        tensors = (x.to(dtype) for x in (self.query, self.key, self.value, self.grad))
        return Inputs(*tensors, lengths=self.lengths, causal=self.causal)


def make_inputs(shape: Shape, dtype: torch.dtype) -> Inputs:
    """Standard normal tensors, the same in every run.

    Query and key are rounded to multiples of 1/8, so that every precision sums their products without error: else a
    score near zero would be positive in one and negative in the other, and relu's gradient there all or nothing.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = (shape.queries, shape.keys, shape.keys, shape.queries)
    query, key, value, grad = (
        torch.randn(shape.batch, shape.heads, size, shape.dimension, generator=generator) for size in sizes
    )
    tensors = ((query * 8).round() / 8, (key * 8).round() / 8, value, grad)
    lengths = torch.tensor(shape.lengths()) if shape.padded else None
    return Inputs(*(x.to(dtype) for x in tensors), lengths=lengths, causal=shape.causal)
