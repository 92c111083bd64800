"""Time calls against each other: interleaved, round after round, so that all of them meet the same machine."""

import gc
import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

# In seconds. A call that takes longer is sampled three times only, or once: its noise is small, and the wait long.
SLOW, VERY_SLOW = 2.0, 8.0


def race(calls: Mapping[str, Callable[[], Any]], rounds: int, least_seconds: float) -> dict[str, list[float]]:
    """Return each call's seconds, one sample per round; a sample repeats a short call for `least_seconds`."""
    first = {name: sample(call, 1) for name, call in calls.items()}
    repeats = {name: _repeats(call, first[name], least_seconds) for name, call in calls.items()}
    samples = {name: [first[name]] if first[name] > SLOW else [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            # There and back again: a machine that slows down or speeds up favours nobody.
            for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
                if first[name] <= SLOW or (first[name] <= VERY_SLOW and number < 2):
                    samples[name].append(sample(calls[name], repeats[name]))
    finally:
        gc.enable()
    return samples


def sample(call: Callable[[], Any], repeats: int) -> float:
    """The mean seconds of one call."""
    numbers = range(repeats)
    start = perf_counter()
    for _ in numbers:
        call()
    return (perf_counter() - start) / repeats


def _repeats(call: Callable[[], Any], first: float, least_seconds: float) -> int:
    if first >= least_seconds:
        return 1
    # The first call of a short one is mostly warm-up: ask again with a few.
    return math.ceil(least_seconds / sample(call, math.ceil(least_seconds / first / 10)))
