"""Which examples make up the batch of a step: a function of seed and step, so a run resumes from its step alone."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nomax.data import draws

Integers = npt.NDArray[np.int64]

WIDTH = 1.125  # of a bucket: its longest example by its shortest, beyond the first few tokens
ROUNDING = 4  # tokens


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """The endless sequence of batches, epoch after epoch: each example once in every epoch.

    A batch holds examples of about the same length, and padded to the longest it has at most `tokens_per_batch`
    tokens on a side, over all ranks. Lengths are rounded up to those of buckets, so the sizes of the batches are the
    same in every epoch; which examples of a bucket meet in a batch, and which batch comes when, is drawn anew.
    """

    lengths: npt.ArrayLike
    """Tokens of every example, Example.length."""
    tokens_per_batch: int
    seed: int = 0
    shuffle: bool = True
    """Every epoch in another order; else the longest come first."""
    _rounded: Integers = field(init=False, repr=False)
    _starts: Integers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths, np.int64)
        if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
            raise ValueError(
                f"lengths has the shape {list(lengths.shape)}; it must hold a positive integer for each example."
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0.")
        longest = int(lengths.argmax())
        if lengths[longest] > self.tokens_per_batch:
            raise ValueError(
                f"example {longest} has {lengths[longest]:,} tokens, more than tokens_per_batch = "
                f"{self.tokens_per_batch:,}. Take larger batches, or cut the examples shorter."
            )
        rounded = _round_up(lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "_rounded", rounded)
        object.__setattr__(self, "_starts", _cut(np.sort(rounded)[::-1], self.tokens_per_batch))

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self._rounded)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in which every example comes once."""
        return len(self._starts) - 1

    @property
    def fewest(self) -> int:
        """Examples of the smallest batch: at most so many ranks can share it."""
        return int(np.diff(self._starts).min())

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Integers:
        """The examples that this rank shows at this step; all ranks together show the same for any number of them."""
        if step < 0 or not 0 <= rank < world:
            raise ValueError(f"step {step}, rank {rank} of {world}: steps and ranks count from 0, up to world - 1.")
        if world > self.fewest:
            raise ValueError(
                f"{world} ranks cannot share a batch of {self.fewest} examples. Take larger batches, of about "
                f"{world * int(self._rounded.max()):,} tokens, shorter examples or fewer ranks."
            )
        epoch, place = divmod(step, self.steps_per_epoch)
        shown, batches = _epoch(self, epoch)
        number = batches[place]
        chosen = shown[self._starts[number] : self._starts[number + 1]]
        return chosen[rank::world]


@lru_cache(maxsize=4)
def _epoch(order: TokenOrder, epoch: int) -> tuple[Integers, Integers]:
    """All examples, the longest buckets first, and in which order the batches come."""
    keys = draws.bits(order.seed, draws.ORDER, epoch, np.arange(len(order)))
    batches = np.arange(order.steps_per_epoch)
    if not order.shuffle:
        return np.argsort(-order._rounded, kind="stable"), batches
    turns = np.argsort(draws.bits(order.seed, draws.BLOCKS, epoch, batches))
    return np.lexsort((keys, -order._rounded)), turns


def _round_up(lengths: Integers) -> Integers:
    """The lengths of buckets: multiples of 4 at first, then ever wider, up to that of the longest example."""
    bounds = [ROUNDING]
    while bounds[-1] < lengths.max():
        bounds.append(max(bounds[-1] + ROUNDING, int(bounds[-1] * WIDTH) // ROUNDING * ROUNDING))
    return np.minimum(np.asarray(bounds, np.int64)[np.searchsorted(bounds, lengths)], lengths.max())


def _cut(lengths: Integers, budget: int) -> Integers:
    """Where batches start, and where the last one ends, in lengths that never grow."""
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(min(starts[-1] + budget // int(lengths[starts[-1]]), len(lengths)))
    if len(starts) > 2 and starts[-1] - starts[-2] < starts[-2] - starts[-3]:
        # What is left at the end may be a single example: it shares evenly with the batch before.
        starts[-2] = (starts[-3] + starts[-1] + 1) // 2
    return np.asarray(starts, np.int64)
