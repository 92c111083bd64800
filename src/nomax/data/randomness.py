"""Random numbers by address: hashes of (seed, purpose, number, …), so that any of them can be computed alone.

A generator has a state, and with it an order in which workers, ranks and resumed runs would have to ask. A hash has
none: the numbers of image 1,234,567 are the same whoever asks for them, and they come for a whole batch at once.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

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


def _scramble(state: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's mixing function: one to one, and every bit of the input changes about half of the output's."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
