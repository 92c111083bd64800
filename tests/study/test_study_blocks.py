"""Blocks of a long cache: bounds that hold, orders that put alike keys together, and shares known beforehand."""

import pytest
import torch
from torch import Tensor

from nomax.ops.api import attention
from nomax.phi import Phi
from nomax.study.engine import blocks
from nomax.study.engine.blocks import BOUNDS, ORDERS, SIZES, WAYS, Bounds, Cache, Way


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dimension", [1, 13, 64])
def test_no_score_of_a_block_exceeds_its_bound(way: Way, dimension: int) -> None:
    keys, queries = normal(1024, dimension), normal(50, dimension, seed=1)
    largest = (queries @ keys.mT).view(50, -1, way.size).amax(2)
    limits = Bounds.of(keys, way).of_scores(queries)
    # Both are sums of as many products as there are channels, and a ball has a few roundings more.
    rounding = (
        (2 * dimension + 8) * torch.finfo(torch.float64).eps * queries.norm(dim=1)[:, None] * keys.norm(dim=1).max()
    )
    assert (largest <= limits + rounding).all()


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_of_equal_keys_is_their_score(bound: str) -> None:
    # Whole numbers, so nothing is rounded.
    keys = torch.tensor([[3.0, -4.0], [-1.0, 2.0]]).repeat_interleave(16, 0)
    queries = torch.tensor([[1.0, 2.0], [-2.0, 0.0]])
    limits = Bounds.of(keys, Way(16, bound)).of_scores(queries)
    assert limits.equal(torch.tensor([[-5.0, 3.0], [-6.0, 2.0]]))


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_has_every_key_once(order: str) -> None:
    place = ORDERS[order](normal(512, 7))
    assert place.sort().values.equal(torch.arange(512))


def test_halving_puts_clusters_into_blocks_of_their_own() -> None:
    corners = torch.cartesian_prod(*(torch.tensor([-size, size], dtype=torch.float64) for size in (900, 90, 9)))
    cluster = torch.randperm(8 * 64, generator=torch.Generator().manual_seed(2)) % 8
    keys = corners[cluster] + normal(8 * 64, 3, seed=3)
    in_blocks = cluster[ORDERS["halved"](keys)].view(-1, 16)
    assert (in_blocks == in_blocks[:, :1]).all()


def test_the_principal_order_is_that_along_the_direction_of_most_variance() -> None:
    keys = normal(256, 3) * torch.tensor([0.1, 5.0, 0.1], dtype=torch.float64)
    along = keys[ORDERS["principal"](keys), 1]
    # Nearly the second channel: the order of keys that are far apart in it is the same, up or down.
    ends = sorted([float(along[:64].mean()), float(along[-64:].mean())])
    assert ends[0] < -4 < 4 < ends[1]


def cache(shift: float = 0.0) -> Cache:
    """Three of four blocks of 256 keys point away from every query, and one towards it."""
    keys = normal(1024, 4).abs().float()
    keys[:256], keys[512:] = -keys[:256], -keys[512:]
    return Cache(normal(5, 4, seed=1).abs().float(), keys, normal(1024, 4, seed=2).float(), shift)


def test_shares_of_zeros_and_of_blocks_are_those_that_were_planted() -> None:
    found = blocks.skipping([cache()], Phi.parse("relu/L"))
    assert found["cache_zeros"] == 0.75
    for size in SIZES:
        assert found[f"text {size} zero"] == found[f"text {size} box"] == 0.75
        assert found[f"text {size} ball"] <= 0.75
    assert all(0 <= found[f"{order} {size} {part}"] <= 1 for order in ORDERS for size in SIZES for part in BOUNDS)
    assert found["text size"] == 256  # larger ones read less, and skip as much here
    assert found["text box"] == 1
    times = [f"{order} {part}_seconds" for order in ORDERS for part in ("bound", "left", "copied")]
    assert all(found[name] > 0 for name in ("dense_seconds", *times))


def test_a_lower_shift_leaves_fewer_weights_and_more_blocks_to_skip() -> None:
    none, lower, all_zero = (blocks.skipping([cache(shift)], Phi.parse("relu")) for shift in (0.0, -4.0, -1e9))
    for name in ("cache_zeros", "text 16 zero", "text 16 box", "halved 64 ball"):
        assert none[name] <= lower[name] <= all_zero[name] == 1
    assert none["cache_zeros"] < lower["cache_zeros"]
    assert none["text 16 zero"] < lower["text 16 zero"]


@pytest.mark.parametrize("way", WAYS)
def test_attention_over_the_blocks_that_are_left_is_attention_over_all_keys(way: Way) -> None:
    queries, keys, values, _ = (x.double() if isinstance(x, Tensor) else x for x in cache())
    phi = Phi("relu", shift=-1.0)
    for query in queries[:, None]:
        left = (Bounds.of(keys, way).of_scores(query)[0] > 1.0).nonzero().flatten()
        kept = blocks.copied((keys, values), left, way)
        assert way.bound == "ball" or len(kept[0]) < len(keys)
        some, whole = (
            attention(query[None, None], k[None, None], v[None, None], phi=phi, scale=1.0)
            for k, v in (kept, (keys, values))
        )
        # Sums of the same terms but for zeros, in another order.
        sizes = (torch.relu(query @ keys.mT - 1.0) @ values.abs()).sum()
        assert (some - whole).abs().max() <= len(keys) * torch.finfo(torch.float64).eps * sizes


def test_the_way_is_chosen_that_reads_the_least() -> None:
    assert blocks.reading(Way(16, "ball"), 0.5, 32) < blocks.reading(Way(16, "box"), 0.5, 32)
    assert blocks.reading(Way(256, "ball"), 0.0, 32) < blocks.reading(Way(16, "ball"), 0.0, 32)
    assert blocks.reading(Way(16, "box"), 0.2, 32) < blocks.reading(Way(256, "box"), 0.0, 32)
    # A box of one key is as much to read as its key and value.
    assert blocks.reading(Way(1, "box"), 1.0, 32) == 1
