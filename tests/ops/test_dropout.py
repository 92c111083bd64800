"""Dropout of weights, on every backend: the specified coins, forward and backward."""

import math

import pytest
import torch
from semantics import HEADS, KEYS, QUERIES, B, D, close, on_every_backend, tensors

import nomax


def coin(seed, lane, i, j):
    """The bits of one coin, in Python's integers."""

    def mix(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    row = mix(mix(mix(mix(seed % 2**32) ^ (seed >> 32)) ^ lane) ^ i)
    return mix((mix(j ^ row) + mix(row ^ 0x9E3779B9)) % 2**32)


def dropped_weights(p, batches=B, heads=HEADS, queries=QUERIES, keys=KEYS, backend="reference"):
    """The factors that dropout puts on weights of one: 0, or 1 / (1 - p)."""
    query = torch.zeros(batches, heads, queries, 8)
    key = torch.zeros(batches, heads, keys, 8)
    value = torch.eye(keys).expand(batches, heads, keys, keys)
    return nomax.attention(query, key, value, dropout_p=p, phi="relu(x+1)", backend=backend)


@on_every_backend
@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
def test_dropout_tosses_the_specified_coins(p, backend):
    torch.manual_seed(11)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(11)
    weights = dropped_weights(p, backend=backend)
    for b in range(B):
        for h in range(HEADS):
            for i in range(QUERIES):
                for j in range(KEYS):
                    keep = coin(seed, b * HEADS + h, i, j) >= round(p * 2**32)
                    assert float(weights[b, h, i, j]) == pytest.approx(
                        keep / (1 - p), rel=2 * torch.finfo(torch.float32).eps
                    )


@on_every_backend
def test_dropout_follows_the_seed(backend):
    def run(seed):
        torch.manual_seed(seed)
        return dropped_weights(0.5, backend=backend)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert not torch.equal(dropped_weights(0.5, backend=backend), dropped_weights(0.5, backend=backend))


@on_every_backend
def test_no_dropout_leaves_the_generator_alone(backend):
    before = torch.get_rng_state()
    dropped_weights(0.0, backend=backend)
    assert torch.equal(before, torch.get_rng_state())


@on_every_backend
def test_dropping_everything_gives_zeros(backend):
    query, key, value = (x.requires_grad_() for x in tensors())
    out = nomax.attention(query, key, value, dropout_p=1.0, backend=backend)
    assert (out == 0).all()
    out.sum().backward()
    assert all((x.grad == 0).all() for x in (query, key, value))


@on_every_backend
def test_dropout_in_the_backward_pass_is_that_of_the_forward_pass(backend):
    value = torch.randn(B, HEADS, KEYS, KEYS, requires_grad=True)
    query = torch.zeros(B, HEADS, QUERIES, D)
    key = torch.zeros(B, HEADS, KEYS, D)
    torch.manual_seed(5)
    out = nomax.attention(query, key, value, dropout_p=0.4, phi="relu(x+1)", backend=backend)
    out[..., 0].sum().backward()
    torch.manual_seed(5)
    close(value.grad[..., 0], dropped_weights(0.4, backend=backend).sum(2))


@on_every_backend
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["query", "value"])
def test_a_dropped_weight_is_zero_whatever_its_score_was(place, poison, backend):
    """One key to a head, so that its output and gradients owe everything to one coin."""
    leaves = [torch.ones(1, 64, 1, D) for _ in range(3)]
    leaves[0 if place == "query" else 2] *= poison
    query, key, value = (x.requires_grad_() for x in leaves)

    def run(query, key, value):
        torch.manual_seed(5)
        return nomax.attention(query, key, value, dropout_p=0.5, phi="relu", backend=backend)

    out, ones = run(query, key, value), torch.ones(1, 64, 1, D)
    dropped = (run(ones, ones, ones) == 0)[..., 0]
    assert 0 < dropped.sum() < 64
    of_query, of_key, of_value = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    if place == "query":
        assert (out[dropped] == 0).all()
        assert not out[~dropped].isfinite().any()
        assert (of_value[dropped] == 0).all()
    else:
        assert (of_query[dropped] == 0).all()
        assert (of_key[dropped] == 0).all()
        assert not of_key[~dropped].isfinite().any()


def test_the_coins_are_fair_and_independent():
    torch.manual_seed(0)
    p, size = 0.3, (6, 4, 128, 128)
    kept = dropped_weights(p, *size) > 0
    centred = kept.double() - (1 - p)
    # Five standard deviations of a mean of n independent coins.
    bound = 5 * math.sqrt(p * (1 - p))
    assert abs(float(centred.mean())) < bound / math.sqrt(centred.numel())
    for dimension in range(4):
        means = centred.mean([d for d in range(4) if d != dimension])
        assert float(means.abs().max()) < bound / math.sqrt(centred.numel() / size[dimension])
    for dimension in range(4):
        for distance in (1, 2, 3):
            product = centred.narrow(dimension, 0, size[dimension] - distance) * centred.narrow(
                dimension, distance, size[dimension] - distance
            )
            assert abs(float(product.mean())) < 5 * p * (1 - p) / math.sqrt(product.numel())
    # Each row keeps a binomial number of keys: their spread tells chance from any pattern.
    per_row = kept.sum(-1).double().flatten()
    expected = size[3] * p * (1 - p)
    assert float(per_row.var()) == pytest.approx(expected, rel=5 * math.sqrt(2 / len(per_row)))
    assert len(torch.unique(kept.flatten(0, 2), dim=0)) == len(per_row)
