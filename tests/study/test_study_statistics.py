"""Intervals hold what they promise, differences pair, and the best of a grid knows how sure it is."""

import math

import numpy as np
import pytest
import scipy.stats

from nomax.study.engine.statistics import Interval, best, contrast, paired, slope_weights, student


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 11, 14, 20, 50, 1000])
def test_students_quantile_is_scipys(freedom: int) -> None:
    assert student(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), rel=5e-4)


@pytest.mark.parametrize(("cells", "seeds"), [(1, 3), (1, 10), (6, 3), (4, 2)])
def test_intervals_hold_the_truth_in_about_nineteen_of_twenty_cases(cells: int, seeds: int) -> None:
    """Of a mean of normal cells whose levels differ; the truth is the mean of the levels."""
    generator = np.random.default_rng(1)
    trials, levels = 600, np.linspace(0, 5, cells)
    held = 0
    for _ in range(trials):
        values = levels[:, None] + generator.standard_normal((cells, seeds))
        found = contrast(values.tolist())
        held += found.low <= levels.mean() <= found.high
    assert 0.90 <= held / trials <= 0.985


def test_many_values_give_the_interval_of_the_central_limit_theorem() -> None:
    values = np.random.default_rng(2).exponential(size=400)
    found = contrast([values.tolist()])
    half = 1.96 * values.std(ddof=1) / math.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_an_interval_is_the_same_every_time_and_leaves_the_global_generator_alone() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    assert contrast([[1.0, 2.0, 4.0]]) == contrast([[1.0, 2.0, 4.0]])
    assert np.random.get_state()[1].tolist() == before


def test_one_seed_has_a_mean_and_no_interval() -> None:
    found = contrast([[0.5], [0.7, 0.8]])
    assert found.mean == pytest.approx((0.5 + 0.75) / 2)
    assert not found.known
    assert not contrast([]).known
    assert not contrast([[]]).known


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert contrast([[0.25, 0.25, 0.25]]) == Interval(0.25, 0.25, 0.25)


def test_cells_are_weighed_alike_however_many_seeds_they_have() -> None:
    assert contrast([[0.0] * 10, [1.0, 1.0]]).mean == pytest.approx(0.5)


def test_pairing_cancels_what_seeds_share() -> None:
    """Seeds differ by much and the two settings by exactly 1: the interval has no width but for rounding."""
    shared = {seed: 100.0 * seed**2 for seed in range(5)}
    first = {("a", seed): level + 1 for seed, level in shared.items()}
    second = {("a", seed): level for seed, level in shared.items() if seed != 3} | {("b", 0): 7.0}
    cells = paired(first, second)
    assert cells == {"a": [1.0] * 4}
    found = contrast(list(cells.values()))
    assert found.high - found.low < 1e-9


def test_slope_weights_give_the_least_squares_slope() -> None:
    x, y = np.array([0.1, 0.4, 1.3, 2.0]), np.array([0.3, 0.2, 0.7, 0.9])
    assert np.dot(slope_weights(x.tolist()), y) == pytest.approx(np.polyfit(x, y, 1)[0])
    slope = contrast([[value, value] for value in y], slope_weights(x.tolist()))
    assert slope.mean == pytest.approx(np.polyfit(x, y, 1)[0])


GRID = [0.0, 0.5, 1.0, 1.5, 2.0]


def test_a_clear_peak_is_certain() -> None:
    found = best([[0.1, 0.2, 0.9, 0.3, 0.1], [0.2, 0.1, 0.8, 0.2, 0.2], [0.1, 0.3, 0.9, 0.2, 0.1]], GRID)
    assert (found.place, found.low, found.high) == (1.0, 1.0, 1.0)
    assert set(found.draws) == {1.0}


def test_a_flat_curve_leaves_the_best_place_open() -> None:
    values = np.random.default_rng(5).standard_normal((3, 5))
    found = best(values.tolist(), GRID)
    assert found.place == GRID[int(values.mean(0).argmax())]
    assert found.high - found.low >= 0.5


def test_two_places_that_seeds_disagree_on_are_drawn_as_often_as_resampling_says() -> None:
    """Seed 0 prefers place 0 by 1, seeds 1 and 2 place 1 by 1: place 0 wins where two or three draws are seed 0."""
    found = best([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], [0.0, 1.0])
    # √(3/2) stretches deviations from the mean difference 1/3: one seed 0 in three draws gives +1/3, two give −0.48.
    share = 3 * (1 / 9) * (2 / 3) + 1 / 27
    assert found.place == 1.0
    assert found.draws.count(0.0) / len(found.draws) == pytest.approx(share, abs=0.03)


def test_one_seed_has_a_best_place_and_no_interval() -> None:
    found = best([[0.1, 0.4, 0.2]], [0.0, 1.0, 2.0])
    assert found.place == 1.0
    assert math.isnan(found.low)
    assert found.draws == ()


def test_values_that_do_not_fit_the_grid_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"must be \[seeds, 3\]"):
        best([[0.1, 0.4]], [0.0, 1.0, 2.0])
