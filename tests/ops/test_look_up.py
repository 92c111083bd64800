"""A few tokens in a memory of slots, by the kernels of every instruction set, against PyTorch and float64."""

import pytest
import torch
from torch import Tensor

from nomax.ops.look_up import look_up
from nomax.phi import ACTIVATIONS

KINDS = [(dtype, gated) for dtype in (torch.float32, torch.bfloat16) for gated in (False, True)]


def inputs(tokens: int, slots: int, dim: int, dtype: torch.dtype, gated: bool) -> list[Tensor]:
    """x, keys, values and perhaps gates; keys and gates have scores of about 1."""
    torch.manual_seed(0)
    rows = [torch.randn(slots, dim) / dim**0.5 for _ in range(3 if gated else 2)]
    return [x.to(dtype) for x in (torch.randn(tokens, dim), *rows)]


def formula(x: Tensor, keys: Tensor, values: Tensor, gates: Tensor | None = None, *, activation: str, shift: float):
    scores = x @ (keys if gates is None else gates).T
    weights = ACTIVATIONS[activation].value(scores + shift)
    return (weights if gates is None else weights * (x @ keys.T)) @ values


@pytest.mark.parametrize(("dtype", "gated"), KINDS)
@pytest.mark.parametrize(("slots", "dim"), [(1, 1), (5, 130), (97, 33), (700, 64), (5000, 17)])
@pytest.mark.parametrize(("activation", "shift", "degree"), [("relu", -0.5, 1), ("relu2", 0.25, 2), ("relu6", 0.0, 1)])
def test_each_number_is_right_to_the_roundings_of_its_sums(
    activation, shift, degree, slots, dim, dtype, gated, every_instruction_set
):
    for tokens in range(1, 7):
        tensors = inputs(tokens, slots, dim, dtype, gated)
        exact = formula(*(x.double() for x in tensors), activation=activation, shift=shift)
        # Each sum by the magnitudes of its terms, with √n roundings for n of them, as in bench/exact.py.
        unbounded = "relu" if activation == "relu6" else activation
        sizes = formula(*(x.double().abs() for x in tensors), activation=unbounded, shift=abs(shift))
        roundings = (degree + gated) * (dim**0.5 + 1) + slots**0.5 + 1
        found = look_up(*tensors, activation=activation, shift=shift)
        assert found.dtype == torch.float32
        assert ((found - exact).abs() <= roundings * torch.finfo(torch.float32).eps * sizes).all()


@pytest.mark.parametrize(("dtype", "gated"), KINDS)
def test_a_token_alone_and_in_company_gives_the_same_bits_on_any_number_of_threads(dtype, gated, every_instruction_set):
    x, *rows = inputs(6, 3000, 100, dtype, gated)
    settings = {"activation": "relu", "shift": -1.0}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(look_up(x, *rows, **settings))
    finally:
        torch.set_num_threads(before)
    alone = torch.cat([look_up(token, *rows, **settings) for token in x.split(1)])
    for each in (*found[1:], alone):
        assert torch.equal(each, found[0])


@pytest.mark.parametrize(("dtype", "gated"), KINDS)
def test_what_no_weight_is_for_is_not_read_and_a_nan_stays_with_its_tokens(dtype, gated, every_instruction_set):
    x, keys, values, *gates = inputs(3, 500, 64, dtype, gated)
    settings = {"activation": "relu", "shift": -1.0}
    wanted = look_up(x, keys, values, *gates, **settings)
    scores = x.double() @ (gates[0] if gated else keys).double().T - 1
    spoilt = (values, keys) if gated else (values,)
    assert (scores.abs() > 1e-3).any(0).all()  # so that no rounding decides what is zero for all
    unused = (scores < -1e-3).all(0)
    assert 0.2 < unused.double().mean() < 0.9
    for rows in spoilt:
        rows[unused] = torch.nan
    assert torch.equal(look_up(x, keys, values, *gates, **settings), wanted)
    seen = ((scores > 1e-3) == torch.tensor([[True], [False], [False]])).all(0).nonzero()[0]
    spoilt[-1][seen] = torch.nan
    found = look_up(x, keys, values, *gates, **settings)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], wanted[1:])


def test_a_nan_or_an_infinity_in_a_token_or_in_a_gate_comes_through():
    x, *rows = inputs(3, 500, 64, torch.float32, True)
    settings = {"activation": "relu", "shift": 0.0}
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    found = look_up(x, *rows, **settings)
    assert found[0].isfinite().all()
    assert torch.equal(found.isnan(), formula(x, *rows, **settings).isnan())
    rows[2][7, 0] = torch.nan
    assert look_up(x, *rows, **settings).isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(7, 8)}, "1 to 6 contiguous rows"),
        ({"x": torch.randn(2, 8).double()}, "has a type"),
        ({"x": torch.randn(2, 8).half()}, "float32 and bfloat16"),
        ({"keys": torch.randn(9, 8)}, "do not fit x"),
        ({"values": torch.randn(8, 10).T}, "do not fit x"),
        ({"gates": torch.randn(10, 8).bfloat16()}, "do not fit x"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_read(change, message):
    tensors = {"x": torch.randn(2, 8), "keys": torch.randn(10, 8), "values": torch.randn(10, 8)} | change
    with pytest.raises(RuntimeError, match=message):
        look_up(**tensors, activation="relu", shift=0.0)
