"""Rotary positions: complex rotations in float64, distances only, and decoding with a cache."""

import numpy as np
import pytest
import torch
from precision import assert_precise, doubled
from torch import Tensor

import nomax
from nomax.nn import Attention, KeyValueCache


def turned(x: Tensor, first: int = 0) -> Tensor:
    """[B, H, L, D] turned as complex numbers: one half is the real part, the other the imaginary one."""
    y = x.detach().numpy()
    half = y.shape[-1] // 2
    numbers = y[..., :half] + 1j * y[..., half:]
    position = np.arange(first, first + y.shape[2])[:, None]
    turns = np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
    numbers = numbers * turns.astype(numbers.dtype)
    return torch.from_numpy(np.concatenate([numbers.real, numbers.imag], -1))


def expected(module: Attention, phi: str, x: Tensor, first: int = 0, **settings: object) -> Tensor:
    size = module.dim // module.heads
    query, key, value = (y.transpose(1, 2) for y in module.qkv(x).unflatten(-1, (3, module.heads, size)).unbind(2))
    if module.query_norm is not None:
        query, key = (
            (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-6).sqrt() * norm.weight
            for y, norm in ((query, module.query_norm), (key, module.key_norm))
        )
    heads = nomax.attention(turned(query, first), turned(key, first), value, phi=phi, **settings)
    return module.out(heads.transpose(1, 2).flatten(2))


def check(out: Tensor, module: Attention, phi: str, x: Tensor, **settings: object) -> None:
    """Compare an output with the formula of its module."""
    exact = expected(doubled(module), phi, x.double(), **settings)
    assert_precise(out, expected(module, phi, x, **settings), exact)


@pytest.mark.parametrize("phi", ["relu/L", "softmax"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_queries_and_keys_are_turned_after_their_norm(qk_norm: bool, phi: str) -> None:
    module, x = Attention(24, 3, phi=phi, rotary=True, qk_norm=qk_norm), 3 * torch.randn(2, 9, 24)
    if qk_norm:
        torch.nn.init.normal_(module.query_norm.weight)
        torch.nn.init.normal_(module.key_norm.weight)
    check(module(x), module, phi, x)
    check(module(x, is_causal=True), module, phi, x, is_causal=True)
    # Far beyond rounding: without positions the two would be equal.
    assert not torch.allclose(module(x.flip(1)).flip(1), module(x), atol=1e-3)


def test_only_distances_matter() -> None:
    module, x = Attention(16, 2, phi="relu/L", rotary=True), torch.randn(2, 6, 16)
    check(module(x), module, "relu/L", x, first=100)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [2, 7]])
@pytest.mark.parametrize("phi", ["relu/L", "softmax"])
def test_positions_go_on_where_the_cache_ends(phi: str, chunks: list[int]) -> None:
    module, x, cache = Attention(16, 2, phi=phi, rotary=True), torch.randn(3, 9, 16), KeyValueCache()
    with torch.no_grad():
        whole = module(x, is_causal=True)
        parts = [module(part, is_causal=True, cache=cache) for part in x.split(chunks, dim=1)]
        other = torch.randn(2, 1, 16)
        indices = torch.tensor([2, 0])
        cache.reorder(indices)
        last = module(other, is_causal=True, cache=cache)
        longer = torch.cat([x[indices], other], 1)
        exact = doubled(module)
        assert_precise(torch.cat(parts, 1), whole, exact(x.double(), is_causal=True))
        whole, wanted = (each(longer.to(each.out.weight), is_causal=True)[:, -1:] for each in (module, exact))
    assert_precise(last, whole, wanted)


def test_padding_on_the_right_changes_nothing() -> None:
    module, x = Attention(16, 2, rotary=True), torch.randn(2, 8, 16)
    seen = torch.arange(8) < torch.tensor([5, 8])[:, None, None, None]
    out = module(x, attn_mask=seen)
    exact = doubled(module)
    assert_precise(out[:1, :5], module(x[:1, :5]), exact(x[:1, :5].double()))
    assert_precise(out[1:], module(x[1:]), exact(x[1:].double()))


@pytest.mark.parametrize("how", ["autocast", "converted"])
def test_angles_are_exact_in_half_precision_also_far_out(how: str) -> None:
    module, x = Attention(16, 2, phi="identity/L", rotary=True), torch.randn(1, 700, 16)
    # Neighbours far out: bfloat16 would round their positions to the same number.
    want = module(x, is_causal=True)
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            got = module(x, is_causal=True)
    else:
        got = module.bfloat16()(x.bfloat16(), is_causal=True)
    assert got.dtype == torch.bfloat16
    assert (got - want)[:, 300:].abs().max() < 0.05 * want[:, 300:].abs().max()


def test_gradients_are_right() -> None:
    module = Attention(8, 2, phi="softplus/L", rotary=True).double()
    assert torch.autograd.gradcheck(module, torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True))


def test_there_is_nothing_to_learn_and_it_is_printed() -> None:
    module = Attention(16, 2, rotary=True)
    assert set(module.state_dict()) == set(Attention(16, 2).state_dict())
    assert "rotary=True" in repr(module)
    assert "rotary" not in repr(Attention(16, 2))


@pytest.mark.parametrize(("dim", "settings"), [(16, {"context_dim": 16}), (6, {})])
def test_cross_attention_and_odd_heads_are_refused_in_words(dim: int, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"rotary=True needs self-attention.*even head dimension"):
        Attention(dim, 2, rotary=True, **settings)
