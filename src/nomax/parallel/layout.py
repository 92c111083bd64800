"""`Layout`: which positions of a sequence each rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Segment = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Which positions of a sequence each rank holds: segments (start, stop), in the order in which it holds them.

    Layout.contiguous(10, ranks=2)     0 1 2 3 4 | 5 6 7 8 9
    Layout.zigzag(8, ranks=2)          0 1 6 7 | 2 3 4 5       as much causal attention on every rank
    Layout.sized((7, 0, 3))            0 1 2 3 4 5 6 | | 7 8 9
    """

    segments: tuple[tuple[Segment, ...], ...]

    def __post_init__(self) -> None:
        held = sorted(segment for rank in self.segments for segment in rank)
        ends = [0, *(stop for _, stop in held)]
        if not self.segments or any(
            start != end or stop <= start for (start, stop), end in zip(held, ends, strict=False)
        ):
            raise ValueError(
                f"segments={self.segments} must hold every position from 0 on exactly once, as (start, stop) with "
                "start < stop; a rank without positions has no segments."
            )

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> "Layout":
        """Cut a sequence into one segment for each rank, of sizes that differ by one at most."""
        return cls(tuple((segment,) if segment[0] < segment[1] else () for segment in _chunks(length, ranks)))

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> "Layout":
        """Cut a sequence into twice as many segments as ranks, and give each rank one from either end.

        A causal query sees the keys before it, so the last positions have the most work, and the first the least.
        """
        chunks = _chunks(length, 2 * ranks)
        pairs = (_joined(chunks[rank], chunks[-1 - rank]) for rank in range(ranks))
        return cls(tuple(pairs))

    @classmethod
    def sized(cls, sizes: Sequence[int]) -> "Layout":
        """Cut a sequence into one segment for each rank, of these sizes."""
        bounds = pairwise(accumulate(sizes, initial=0))
        return cls(tuple((segment,) if segment[0] < segment[1] else () for segment in bounds))

    @property
    def ranks(self) -> int:
        """Return how many ranks hold the sequence."""
        return len(self.segments)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return how many positions each rank holds."""
        return tuple(sum(stop - start for start, stop in segments) for segments in self.segments)

    @cached_property
    def length(self) -> int:
        """Return the length of the whole sequence."""
        return sum(self.sizes)

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Return the positions that a rank holds."""
        pieces = [torch.arange(start, stop, device=device) for start, stop in self.segments[rank]]
        return torch.cat(pieces) if pieces else torch.arange(0, device=device)

    def local(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return what a rank holds of a tensor of all positions: a view where that is one segment."""
        if x.shape[dim] != self.length:
            raise ValueError(f"dimension {dim} of {list(x.shape)} must have the layout's length, {self.length}.")
        pieces = [x.narrow(dim, start, stop - start) for start, stop in self.segments[rank]] or [x.narrow(dim, 0, 0)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Put the parts of all ranks back together, in the order of the positions."""
        pieces: dict[int, Tensor] = {}
        for part, segments in zip(parts, self.segments, strict=True):
            sizes = [stop - start for start, stop in segments]
            pieces |= zip((start for start, _ in segments), part.split(sizes, dim) if sizes else (), strict=True)
        return torch.cat([pieces[start] for start in sorted(pieces)] or [parts[0]], dim)


def _chunks(length: int, number: int) -> list[Segment]:
    if length < 0 or number < 1:
        raise ValueError(f"a sequence of {length} positions cannot be cut into {number} parts.")
    return list(pairwise(i * length // number for i in range(number + 1)))


def _joined(first: Segment, last: Segment) -> tuple[Segment, ...]:
    """Return both segments, as one where they touch, and without empty ones."""
    if first[1] == last[0]:
        first, last = (first[0], last[1]), (last[1], last[1])
    return tuple(segment for segment in (first, last) if segment[0] < segment[1])
