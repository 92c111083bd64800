"""Which image is shown when: every image once an epoch, whatever the ranks, from any step on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nomax.data.order import WINDOW, Order

orders = st.builds(
    Order,
    size=st.integers(1, 300),
    batch_size=st.integers(1, 60),
    seed=st.integers(0, 2**70),
    shuffle=st.booleans(),
    block=st.sampled_from([1, 2, 7, 1000]),
)


@settings(max_examples=50)
@given(orders, st.integers(0, 3))
def test_every_epoch_shows_every_image_once(order: Order, epoch: int) -> None:
    assert sorted(order.epoch(epoch)) == list(range(order.size))


@settings(max_examples=50)
@given(orders, st.integers(0, 50))
def test_steps_walk_through_the_epochs_without_a_gap(order: Order, step: int) -> None:
    positions, indices = order.batch(step)
    assert list(positions) == list(range(step * order.batch_size, (step + 1) * order.batch_size))
    for position, index in zip(positions, indices, strict=True):
        assert order.epoch(position // order.size)[position % order.size] == index


@settings(max_examples=50)
@given(orders, st.integers(0, 20), st.integers(1, 8))
def test_the_shares_of_all_ranks_are_the_whole_batch(order: Order, step: int, world: int) -> None:
    order = Order(order.size, order.batch_size * world, order.seed, order.shuffle, order.block)
    shares = [order.batch(step, rank, world) for rank in range(world)]
    for whole, parts in zip(order.batch(step), zip(*shares, strict=True), strict=True):
        assert np.array_equal(whole, np.concatenate(parts))


@settings(max_examples=50)
@given(orders, st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_a_step_is_the_same_whatever_was_asked_before(order: Order, steps: list[int]) -> None:
    asked = [order.batch(step)[1] for step in steps]
    again = Order(order.size, order.batch_size, order.seed, order.shuffle, order.block)
    assert np.array_equal(asked[-1], again.batch(steps[-1])[1])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    shown = [tuple(Order(100, 10, seed).epoch(epoch)) for seed in range(10) for epoch in range(10)]
    assert len(set(shown)) == 100


@pytest.mark.parametrize("block", [1, 4])
def test_every_image_is_equally_often_at_every_place(block: int) -> None:
    size, epochs = 12, 2000
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), Order(size, 1, block=block).epoch(epoch)] += 1
    expected = epochs / size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)  # chi-squared


def test_with_blocks_few_neighbourhoods_are_read_at_a_time() -> None:
    order = Order(size=16_000, batch_size=10, block=50)
    shown = order.epoch(0)
    for start in range(0, order.size, WINDOW * order.block):
        window = shown[start : start + WINDOW * order.block]
        assert len(set(window // order.block)) <= WINDOW
        assert len(set(window[: order.block] // order.block)) > WINDOW / 2, "the blocks of a window are not mixed"
    assert len(set(shown[: WINDOW * 50] // (WINDOW * 50))) > 5, "the blocks are in the order of the source"


def test_the_order_is_what_it_always_was() -> None:
    """A run that is resumed by another version must not see other images."""
    assert Order(10, 1, seed=0).epoch(0).tolist() == [2, 9, 7, 0, 5, 1, 4, 3, 8, 6]
    assert Order(10, 1, seed=3).epoch(2).tolist() == [5, 7, 4, 2, 1, 8, 9, 3, 6, 0]
    assert Order(10, 1, seed=0, block=2).epoch(1).tolist() == [2, 6, 5, 1, 0, 4, 7, 9, 8, 3]


def test_without_shuffling_the_order_is_that_of_the_source() -> None:
    assert Order(5, 3, shuffle=False).batch(1)[1].tolist() == [3, 4, 0]


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 10 cannot be shared equally by 4 ranks; take 8 or 12"):
        Order(100, 10).batch(0, rank=0, world=4)
    with pytest.raises(ValueError, match="rank 4 of 4"):
        Order(100, 8).batch(0, rank=4, world=4)


@pytest.mark.parametrize("wrong", [{"size": 0}, {"batch_size": 0}, {"seed": -1}, {"block": 0}, {"batch_size": 2.5}])
def test_impossible_orders_are_refused_by_name(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is"):
        Order(**{"size": 10, "batch_size": 2, **wrong})
