"""The order of images: a pure function of seed and position, so that a run resumes from its step alone."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nomax.data import randomness

Integers = npt.NDArray[np.int64]

WINDOW = 16  # blocks that are mixed with each other: as many shards are being read at a time


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
    """Every epoch in another order; else in the order of the source."""
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
    keys = randomness.bits(seed, randomness.ORDER, epoch, np.arange(size))  # all different
    if block == 1:
        shown = np.argsort(keys)
    else:
        blocks = np.argsort(randomness.bits(seed, randomness.BLOCKS, epoch, np.arange(-(-size // block))))
        shown = (blocks[:, None] * block + np.arange(block)).ravel()
        shown = shown[shown < size]  # the last block may be shorter
        for start in range(0, size, WINDOW * block):
            window = slice(start, start + WINDOW * block)
            shown[window] = shown[window][np.argsort(keys[window])]
    shown.flags.writeable = False  # it is kept
    return shown
