"""Certainty of a difference, from a few seeds: bootstrap intervals, and the best of a grid with its uncertainty.

Values come in cells, one cell per setting (a model size, say), one value per seed. Cells are resampled one by one.
Two things mend the bootstrap where seeds are few: deviations are multiplied by √(n/(n−1)), since resampling n values
spreads that much less than they do, and the interval is stretched by Student's t over the normal quantile. With three
seeds the plain percentile interval holds the truth three times in four; this one about nineteen times in twenty.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import fmean
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from nomax.study.engine.result import AnyResult, ImageResult, TrainedResult

RESAMPLES = 2000
SEED = 0
Z = 1.959964  # of a normal distribution, 95 % lies within this many standard deviations
Z80 = 0.841621  # and 80 % lies below this many
MOST_SEEDS = 1000  # more than anybody will run
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # the same of Student's t, by freedom

Floats = npt.NDArray[np.float64]
Cell = TypeVar("Cell", bound=Hashable)
Columns = str | tuple[str, ...]  # of results, whose values make a cell


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval that holds the truth in 95 % of cases; NaN where no spread could be seen."""

    mean: float
    low: float
    high: float
    lacking: str = field(default="pairs of runs", kw_only=True)
    """Of what there were fewer than two, where no spread could be seen."""

    @property
    def known(self) -> bool:
        """True if there were enough values to see a spread."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def turned(interval: Interval) -> Interval:
    """Return the interval of minus the number."""
    return Interval(-interval.mean, -interval.high, -interval.low)


@dataclass(frozen=True)
class Best:
    """The place of the best mean on a grid, with its 95 % interval and every resampled place."""

    place: float
    low: float
    high: float
    draws: tuple[float, ...]


def paired(
    first: Mapping[tuple[Cell, int], float], second: Mapping[tuple[Cell, int], float]
) -> dict[Cell, list[float]]:
    """Return the differences first − second by cell, for every (cell, seed) that both have."""
    differences: dict[Cell, list[float]] = {}
    for cell, seed in sorted(first.keys() & second.keys(), key=repr):
        differences.setdefault(cell, []).append(first[cell, seed] - second[cell, seed])
    return differences


def contrast(cells: Sequence[Sequence[float]], weights: Sequence[float] | None = None) -> Interval:
    """Return the weighted sum of the cells' means with its interval; without weights, the mean of the means."""
    if not cells or not all(len(cell) for cell in cells):
        return Interval(math.nan, math.nan, math.nan)
    shares = np.full(len(cells), 1 / len(cells)) if weights is None else np.asarray(weights, np.float64)
    mean = float(sum(share * np.mean(cell) for share, cell in zip(shares, cells, strict=True)))
    if min(map(len, cells)) < 2:
        return Interval(mean, math.nan, math.nan)
    generator = np.random.default_rng(SEED)
    off = np.zeros(RESAMPLES)
    for share, cell in zip(shares, cells, strict=True):
        off += share * _deviations(np.asarray(cell, np.float64)[:, None], generator)[:, 0]
    low, high = np.percentile(off, (2.5, 97.5)) * (student(sum(len(cell) - 1 for cell in cells)) / Z)
    return Interval(mean, mean + float(low), mean + float(high))


def ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the mean of first ÷ second, pair by pair, with its interval."""
    return contrast([[numerator / denominator for numerator, denominator in zip(first, second, strict=True)]])


def slope_weights(x: Sequence[float]) -> list[float]:
    """Return the weights that turn values at x into the slope of their least-squares line."""
    away = np.asarray(x, np.float64) - np.mean(x)
    total = float(np.sum(away**2))
    return [float(value) for value in away / total] if total > 0 else [math.nan] * len(x)


def best(values: Sequence[Sequence[float]], grid: Sequence[float]) -> Best:
    """Find the place on the grid where the mean over seeds is largest; values holds one list over the grid per seed."""
    curves, places = np.asarray(values, np.float64), np.asarray(grid, np.float64)
    if curves.ndim != 2 or curves.shape[1] != len(places) or not curves.size:
        raise ValueError(f"values have the shape {list(curves.shape)}; they must be [seeds, {len(places)}].")
    mean = curves.mean(0)
    place = float(places[mean.argmax()])
    if len(curves) < 2:
        return Best(place, math.nan, math.nan, ())
    resampled = mean + _deviations(curves, np.random.default_rng(SEED))
    draws = places[resampled.argmax(1)]
    low, high = np.percentile(draws, (2.5, 97.5), method="nearest")
    return Best(place, float(low), float(high), tuple(draws.tolist()))


def chosen_elsewhere(values: Sequence[Sequence[float]], of_first: Sequence[bool]) -> list[float]:
    """Return the best of some places of a grid minus the best of the others, once for each seed.

    The mean of the other seeds chooses these places. The largest of several noisy values would be an estimate that is
    too large, the more so the more places there are.
    """
    curves, first = np.asarray(values, np.float64), np.asarray(of_first, bool)
    leads = []
    for seed, curve in enumerate(curves):
        others = np.delete(curves, seed, 0).mean(0)
        ahead, behind = (int(np.where(kind, others, -np.inf).argmax()) for kind in (first, ~first))
        leads.append(float(curve[ahead] - curve[behind]))
    return leads


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t."""
    if freedom < 1:
        raise ValueError(f"freedom={freedom} must be at least 1.")
    if freedom <= len(T):
        return T[freedom - 1]
    # Beyond the table three terms of its expansion around the normal quantile have four correct digits.
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


@dataclass(frozen=True)
class Comparison:
    """A mean of differences, the bounds that its interval must clear to decide, and its noise between seeds.

    It gives the number of seeds that would decide, from a pilot before a study or from an undecided verdict.
    """

    mean: float
    deviation: float
    """The standard deviation that the mean would have if there were one seed."""
    settings: int
    """Cells that the mean is over."""
    seeds: int
    """Of each cell."""
    bounds: tuple[float, ...]
    margin: float
    """The smallest difference that matters: an interval that reaches less far from its mean is narrow enough."""
    unit: str = "points"
    over: Literal["seeds", "settings"] = "seeds"
    """The repetitions: the interval of a mean over settings narrows with settings."""

    def half_width(self, seeds: int) -> float:
        """Return how far a 95 % interval reaches to either side, on average, with so many seeds."""
        if seeds < 2:
            return math.inf
        return student(self.settings * (seeds - 1)) * self.deviation / math.sqrt(seeds)

    def seeds_for(self, distance: float, surely: bool = False) -> int | None:
        """Return how many seeds bring the interval's half-width below a distance; None if more than MOST_SEEDS.

        surely: so far below that an interval around a truth at this distance excludes the bound four times in five,
        rather than every other time.
        """
        more = Z80 * self.deviation if surely else 0.0
        enough = (n for n in range(2, MOST_SEEDS + 1) if self.half_width(n) + more / math.sqrt(n) <= distance)
        return next(enough, None)


def comparison(
    cells: Mapping[Cell, Sequence[float]],
    bounds: Sequence[float],
    *,
    margin: float,
    unit: str = "points",
    weights: Sequence[float] | None = None,
    over: Literal["seeds", "settings"] = "seeds",
) -> Comparison | None:
    """Return the mean of `pooled(cells)`, or of `contrast` with weights, or of `over_settings`, with its noise.

    None if nothing was repeated: then the noise is unknown.
    """
    entries = list(cells.values()) if weights is not None else list(repeated(cells).values())
    if over == "settings":
        entries = [[fmean(cell) for cell in entries]] if entries else []
    if not entries or min(map(len, entries)) < 2:
        return None
    shares = [1 / len(entries)] * len(entries) if weights is None else list(weights)
    variance = sum(share**2 * float(np.var(cell, ddof=1)) for share, cell in zip(shares, entries, strict=True))
    mean = sum(share * fmean(cell) for share, cell in zip(shares, entries, strict=True))
    number = round(fmean(map(len, entries)))
    return Comparison(mean, math.sqrt(variance), len(entries), number, tuple(bounds), margin, unit, over)


def _deviations(values: Floats, generator: np.random.Generator) -> Floats:
    """Return how far the mean of resampled rows is from the mean of the rows, RESAMPLES times."""
    count = len(values)
    chosen = generator.integers(count, size=(RESAMPLES, count))
    away = values - values.mean(0)
    deviations: Floats = away[chosen].mean(1) * math.sqrt(count / (count - 1))
    return deviations


def accuracy(result: ImageResult) -> float | None:
    """Return accuracy among the label subset if the data has one, else on all test images; chance if the run diverged.

    None if it failed, which says nothing about the model: a file was missing, or the machine gave up.
    """
    if result.status == "diverged":
        return 1 / result.classes
    return result.accuracy if result.subset_accuracy is None else result.subset_accuracy


def ten_shot(result: ImageResult) -> float | None:
    """Return the mean 10-shot accuracy over the probes; 0 if the run diverged, since it has no features."""
    return 0.0 if result.status == "diverged" else result.ten_shot


def values(
    results: Sequence[AnyResult], columns: Columns, score: Callable[[AnyResult], float | None]
) -> dict[tuple[Any, int], float]:
    """Return the score of each (cell, seed) that has one. A cell is the value of a column, or the values of several."""
    cell = attrgetter(*([columns] if isinstance(columns, str) else columns))
    return {(cell(result), result.seed): value for result in results if (value := score(result)) is not None}


def by_cell(
    results: Sequence[AnyResult], columns: Columns, score: Callable[[AnyResult], float | None]
) -> dict[Any, list[float]]:
    """Return the scores of each cell, over the seeds."""
    cells: dict[Any, list[float]] = {}
    for (cell, _), value in values(results, columns, score).items():
        cells.setdefault(cell, []).append(value)
    return cells


def differences(
    first: Sequence[AnyResult],
    second: Sequence[AnyResult],
    columns: Columns,
    score: Callable[[AnyResult], float | None],
) -> dict[Any, list[float]]:
    """Return the scores of the first results minus those of the second, at equal cell and seed."""
    return paired(values(first, columns, score), values(second, columns, score))


def repeated(cells: Mapping[Cell, Sequence[float]]) -> dict[Cell, Sequence[float]]:
    """Return the cells that have at least two seeds; all of them where none has, for a mean without an interval."""
    several = {cell: entries for cell, entries in cells.items() if len(entries) > 1}
    return several or dict(cells)


def pooled(cells: Mapping[Cell, Sequence[float]]) -> Interval:
    """Return the mean over the cells that have at least two seeds, with its interval."""
    return contrast(list(repeated(cells).values()))


def over_settings(cells: Mapping[Cell, Sequence[float]]) -> Interval:
    """Return the mean over cells that depend on each other, with an interval from how they differ."""
    mean = contrast([[fmean(entries) for entries in cells.values()]] if cells else [])
    return replace(mean, lacking="settings")


def seeds(results: Sequence[TrainedResult]) -> list[int]:
    """Return the seeds, in order."""
    return sorted({result.seed for result in results})


def lengths(results: Sequence[TrainedResult]) -> list[int]:
    """Return the sequence lengths, the shortest first."""
    return sorted({result.tokens for result in results})


@dataclass(frozen=True)
class BestAlpha(Generic[Cell]):
    """The best α of several lines, which have a score for each α and seed: close to 1, or further away?"""

    within: float
    """Close to 1 is so near."""
    best: dict[Cell, Best]
    """The place of the best mean of each line, over the seeds that have every α."""
    leads: dict[Cell, list[float]]
    """By how much a line's best α close to 1 beats its best further away, for each seed that has every α.

    The other seeds choose which α is the best of each kind, so that a lucky run is not chosen for being lucky. It makes
    the seeds depend on each other: intervals are to be taken over lines.
    """
    by_chance: float
    """The share of the α of the grid that is close to 1."""

    @property
    def lead(self) -> Interval:
        """The mean lead, with its interval over the lines."""
        return over_settings(self.leads)

    @property
    def near(self) -> int:
        """The number of lines whose best α is close to 1."""
        return sum(abs(best.place - 1) <= self.within for best in self.best.values())


def best_alpha(
    lines: Mapping[Cell, Sequence[AnyResult]], score: Callable[[AnyResult], float | None], within: float = 0.0
) -> BestAlpha[Cell]:
    """Find the best α of each line, and whether those within a distance of 1 beat the others."""
    best_of: dict[Cell, Best] = {}
    leads: dict[Cell, list[float]] = {}
    for name, results in lines.items():
        grid, curves = _curves(results, score)
        near = [abs(alpha - 1) <= within for alpha in grid]
        if curves and len(grid) > 1:
            best_of[name] = best(curves, grid)
        if len(curves) > 1 and len(set(near)) == 2:
            leads[name] = chosen_elsewhere(curves, near)
    every = {result.alpha for results in lines.values() for result in results}
    chance = fmean([abs(alpha - 1) <= within for alpha in every]) if every else math.nan
    return BestAlpha(within, best_of, leads, chance)


def _curves(
    results: Sequence[AnyResult], score: Callable[[AnyResult], float | None]
) -> tuple[list[float], list[list[float]]]:
    """Return the grid of α, and the scores over it of every seed that has them all."""
    grid = sorted({result.alpha for result in results})
    by_seed: dict[int, dict[float, float]] = {}
    for (alpha, seed), value in values(results, "alpha", score).items():
        by_seed.setdefault(seed, {})[alpha] = value
    whole = [by_seed[seed] for seed in sorted(by_seed) if len(by_seed[seed]) == len(grid)]
    return grid, [[by_alpha[alpha] for alpha in grid] for by_alpha in whole]
