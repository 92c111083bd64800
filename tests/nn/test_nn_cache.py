"""Decoding with a key-value cache against the whole sequence."""

import pytest
import torch
from precision import assert_precise, doubled
from test_nn_attention import randomised

from nomax.nn import Attention, KeyValueCache

DECODERS = {
    "softmax": {"phi": "softmax"},
    "relu/L": {"phi": "relu/L", "qk_norm": True, "gate": "silu"},
    "sigmoid": {"phi": "sigmoid(x-log L)"},
    "threshold": {"phi": "relu2(x-0.5*sqrt(2 log L))", "qk_norm": True},
    "learned": {"phi": "relu/L^0.5", "learned_gain": "head", "learned_alpha": "layer"},
}


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [9], [2, 7]])
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_with_a_cache_is_the_causal_whole(name: str, chunks: list[int]) -> None:
    module = randomised(Attention(16, 2, **DECODERS[name]))
    x, cache = torch.randn(3, 9, 16), KeyValueCache()
    with torch.no_grad():
        whole = module(x, is_causal=True)
        parts = [module(part, is_causal=True, cache=cache) for part in x.split(chunks, dim=1)]
        exact = doubled(module)(x.double(), is_causal=True)
    assert_precise(torch.cat(parts, 1), whole, exact)
    assert cache.length == 9


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_with_padding_on_the_left_is_decoding_without_it(name: str) -> None:
    module = randomised(Attention(16, 2, **DECODERS[name]))
    x, pads = torch.randn(2, 8, 16), (3, 0)
    visible = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    visible[0, ..., :3] = False
    cache = KeyValueCache()
    with torch.inference_mode():
        first = torch.ones(4, 4, dtype=torch.bool).tril() & visible[..., :4]
        start = module(x[:, :4], attn_mask=first, cache=cache)
        steps = [
            module(x[:, i : i + 1], attn_mask=visible[..., : i + 1], is_causal=True, cache=cache) for i in range(4, 8)
        ]
        out = torch.cat([start, *steps], 1)
        for b, pad in enumerate(pads):
            alone = x[b : b + 1, pad:]
            exact = doubled(module)(alone.double(), is_causal=True)
            assert_precise(out[b : b + 1, pad:], module(alone, is_causal=True), exact)


def test_cross_attention_with_a_cache_projects_the_context_once() -> None:
    module = randomised(Attention(16, 2, context_dim=6))
    calls = []
    module.kv.register_forward_hook(lambda *_: calls.append(1))
    x, context, cache = torch.randn(2, 5, 16), torch.randn(2, 7, 6), KeyValueCache()
    mask = torch.rand(2, 1, 1, 7) < 0.6
    with torch.no_grad():
        whole = module(x, context, attn_mask=mask)
        calls.clear()
        parts = [module(x[:, i : i + 1], context if i == 0 else None, attn_mask=mask, cache=cache) for i in range(5)]
    assert len(calls) == 1
    exact = doubled(module)(x.double(), context.double(), attn_mask=mask)
    assert_precise(torch.cat(parts, 1), whole, exact.detach())


def test_a_reordered_cache_continues_the_chosen_sequences() -> None:
    module = Attention(16, 2)
    x, indices = torch.randn(3, 4, 16), torch.tensor([2, 0, 0, 1])
    new = torch.randn(4, 1, 16)
    cache = KeyValueCache()
    with torch.no_grad():
        module(x, is_causal=True, cache=cache)
        cache.reorder(indices)
        out = module(new, is_causal=True, cache=cache)
        longer = torch.cat([x[indices], new], 1)
        whole, exact = module(longer, is_causal=True), doubled(module)(longer.double(), is_causal=True)
    assert_precise(out, whole[:, -1:], exact[:, -1:])
    KeyValueCache().reorder(indices)
    with pytest.raises(ValueError, match="indices"):
        cache.reorder(torch.tensor([0.5]))


def test_a_cache_keeps_chosen_positions_and_goes_on_behind_them() -> None:
    cache, places = KeyValueCache(), torch.tensor([[0, 3], [4, 1]])
    whole, new = torch.randn(2, 2, 3, 5, 4), torch.randn(2, 2, 3, 1, 4)
    cache.append(*whole)
    cache.append(*new)  # there is more room than positions now
    cache.keep(places)
    key, value = cache.append(*new)
    chosen = torch.stack([whole[:, b, :, places[b]] for b in range(2)], 1)
    for found, want in zip((key, value), torch.cat([chosen, new], 3), strict=True):
        assert torch.equal(found, want)
    for wrong in (torch.tensor([[0, 3]]), torch.tensor([[0, 1, 2, 0]] * 2), torch.tensor([[0], [3]]), places - 1):
        with pytest.raises(ValueError, match="places must be"):
            cache.keep(wrong)
    with pytest.raises(RuntimeError, match="empty"):
        KeyValueCache().keep(places)


def test_a_cache_grows_by_doubling_and_keeps_what_it_has() -> None:
    cache, parts, capacities = KeyValueCache(capacity=3), [], []
    for _ in range(14):
        parts.append(torch.randn(2, 2, 3, 1, 4))
        key, value = cache.append(*parts[-1])
        capacities.append(cache.capacity)
        assert torch.equal(key, torch.cat(parts, -2)[0])
        assert torch.equal(value, torch.cat(parts, -2)[1])
    assert capacities == [3] * 3 + [6] * 3 + [12] * 6 + [24] * 2
    assert repr(cache) == "KeyValueCache(14 positions, room for 24)"


def test_a_misused_cache_is_answered_in_words() -> None:
    module, cache = Attention(16, 2), KeyValueCache()
    with pytest.raises(RuntimeError, match="no_grad"):
        module(torch.randn(2, 3, 16), cache=cache)
    with torch.no_grad():
        module(torch.randn(2, 3, 16), cache=cache)
        with pytest.raises(ValueError, match="2 sequences × 2 heads × 8"):
            module(torch.randn(3, 1, 16), cache=cache)
        cross, cross_cache = Attention(16, 2, context_dim=6), KeyValueCache()
        with pytest.raises(ValueError, match="needs context"):
            cross(torch.randn(2, 1, 16), cache=cross_cache)
        with pytest.raises(ValueError, match="cross-attention"):
            cross(torch.randn(2, 1, 16), torch.randn(2, 5, 6), cache=cross_cache, is_causal=True)
    with pytest.raises(RuntimeError, match="empty"):
        KeyValueCache().entries()
    with pytest.raises(ValueError, match="capacity=-1"):
        KeyValueCache(-1)
