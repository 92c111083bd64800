"""The order of images, and random numbers by address: pure functions, so that a run resumes from its step alone.

A random number is a hash of (seed, purpose, number, …). A generator has a state, and so workers, ranks and
resumed runs would have to ask in a fixed order. A hash has none: the numbers of image 1,234,567 are the same for
everyone, and a whole batch gets its numbers at once.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

WINDOW = 16  # blocks that are mixed with each other: as many shards are being read at a time

# The first number after the seed says what the numbers are for, so that no two purposes share them.
BLOCKS, ORDER, CROP, FLIP, RANDAUGMENT, HELD_OUT = range(6)

_STEP = np.uint64(0x9E3779B97F4A7C15)


def bits(seed: int, *numbers: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for every address; the numbers are broadcast against each other.

    Addresses that differ in the last number only never get the same bits.
    """
    state = _scramble(np.array([seed % 2**64], np.uint64))
    for number in numbers:
        # At least one dimension: numpy warns of overflow, which is the point here, in scalars only.
        state = _scramble(state + (np.atleast_1d(np.asarray(number, np.uint64)) + np.uint64(1)) * _STEP)
    return state


def uniform(seed: int, *numbers: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return a random number in [0, 1) for every address."""
    return (bits(seed, *numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Order:
    """The endless sequence of images, epoch after epoch, cut into batches.

    Position p, counted from the start of training, belongs to step p // batch_size and to epoch p // size. A batch may
    end one epoch and begin the next; none is dropped or cut short. The ranks of a distributed run take contiguous
    shares of a batch, so the batch is the same for every number of ranks.
    """

    size: int
    """Number of images in the source."""
    batch_size: int
    """Images per step, over all ranks."""
    seed: int = 0
    shuffle: bool = True
    """Reorder every epoch; otherwise keep the order of the source."""
    block: int = 1
    """Shuffle blocks of this many neighbours, and then images among 16 blocks: shards are read almost in sequence."""

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("batch_size", 1), ("seed", 0), ("block", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be an integer, at least {least}.")

    def batch(self, step: int, rank: int = 0, world: int = 1) -> tuple[Integers, Integers]:
        """Return the positions and the indices of the images that this rank shows at this step."""
        positions = self.positions(step, rank, world)
        return positions, self.indices(positions)

    def positions(self, step: int, rank: int = 0, world: int = 1) -> Integers:
        """Return the positions of this rank's share of a step."""
        if step < 0 or not 0 <= rank < world:
            raise ValueError(f"step {step}, rank {rank} of {world}: steps and ranks count from 0, up to world - 1.")
        share, rest = divmod(self.batch_size, world)
        if rest:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be shared equally by {world} ranks; "
                f"take {max(share, 1) * world} or {(share + 1) * world}."
            )
        start = step * self.batch_size + rank * share
        return np.arange(start, start + share, dtype=np.int64)

    def indices(self, positions: Integers) -> Integers:
        """Return the number of the image that is shown at each position."""
        epochs, places = np.divmod(positions, self.size)
        if not self.shuffle:
            return places
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = self.epoch(int(epoch))[places[here]]
        return indices

    def epoch(self, number: int) -> Integers:
        """Return all images of an epoch, in the order in which they are shown."""
        if not self.shuffle:
            return np.arange(self.size)
        return _permutation(self.size, self.seed, number, self.block)


# The last batch of an epoch needs two of them. Of 14 million images, each takes 112 MB.
@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int, block: int) -> Integers:
    keys = bits(seed, ORDER, epoch, np.arange(size))  # all different
    if block == 1:
        shown = np.argsort(keys)
    else:
        blocks = np.argsort(bits(seed, BLOCKS, epoch, np.arange(-(-size // block))))
        shown = (blocks[:, None] * block + np.arange(block)).ravel()
        shown = shown[shown < size]  # the last block may be shorter
        for start in range(0, size, WINDOW * block):
            window = slice(start, start + WINDOW * block)
            shown[window] = shown[window][np.argsort(keys[window])]
    shown.flags.writeable = False  # it is kept
    return shown


def _scramble(state: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's mixing function: one to one, and every bit of the input changes about half of the output's."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
