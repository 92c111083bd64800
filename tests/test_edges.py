"""Corners in which the short way, the kernels or torch's other modes once gave something else than the reference."""

import pytest
import torch
from torch.autograd import forward_ad

import nomax


@pytest.fixture(autouse=True)
def warm():
    """The short way for plain calls is open only once the kernels are loaded."""
    x = torch.randn(1, 1, 2, 4)
    nomax.attention(x, x, x)


def inputs(*shape):
    return [torch.randn(*shape) for _ in range(3)]


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"phi": "identity/L"}])
def test_forward_mode_derivatives_are_the_references(arguments):
    query, key, value = inputs(2, 4, 5, 8)
    tangent = torch.randn_like(query)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, tangent)
        got = forward_ad.unpack_dual(nomax.attention(dual, key, value, **arguments)).tangent
        expected = forward_ad.unpack_dual(nomax.attention(dual, key, value, backend="reference", **arguments)).tangent
    assert got.abs().max() > 0
    torch.testing.assert_close(got, expected)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        nomax.attention(query, key, value, backend="cpu")


@pytest.mark.parametrize("place", range(3))
def test_one_tensor_on_another_device_is_an_error(place):
    tensors = inputs(2, 4, 5, 8)
    tensors[place] = tensors[place].to("meta")
    with pytest.raises(ValueError, match="device"):
        nomax.attention(*tensors)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}])
def test_all_tensors_on_meta_give_the_shape(arguments):
    tensors = [x.to("meta") for x in inputs(2, 4, 5, 8)]
    assert nomax.attention(*tensors, **arguments).shape == (2, 4, 5, 8)
    assert nomax.explain(*tensors, **arguments).backend == "reference"


def test_a_learned_power_of_l_is_finite_where_nothing_is_visible():
    query, key, value = inputs(2, 4, 5, 8)
    mask = torch.rand(5, 5) > 0.3
    mask[0] = False
    alpha = torch.tensor(0.5, requires_grad=True)
    length = nomax.visible_keys(query, key, mask).clamp(min=1).unsqueeze(-1)
    out = nomax.attention(query, key, value, mask, phi="relu") * length**-alpha
    torch.testing.assert_close(out, nomax.attention(query, key, value, mask, phi="relu/L^0.5"))
    out.sum().backward()
    assert alpha.grad.isfinite()


@pytest.mark.parametrize("phi", ["silu", "gelu", "sigmoid", "softplus", "relu", "relu6"])
@pytest.mark.parametrize("low", [-1e37, float(torch.finfo(torch.bfloat16).min)])
def test_a_hugely_negative_bias_is_as_good_as_hidden(phi, low, instruction_set):
    leaves = [x.requires_grad_() for x in inputs(2, 4, 5, 8)]
    out = nomax.attention(*leaves, torch.full((5, 5), low), phi=phi, backend="cpu")
    assert (out == 0).all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert (grad == 0).all()


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9, 0.999999, 1 / 3])
def test_every_coin_falls_alike_on_every_backend(probability):
    query, key = torch.ones(1, 1, 700, 1), torch.ones(1, 1, 600, 1)
    masks = []
    for backend in ("cpu", "reference"):
        torch.manual_seed(26)
        eye = torch.eye(600).view(1, 1, 600, 600)
        masks.append(nomax.attention(query, key, eye, dropout_p=probability, phi="relu", backend=backend))
    torch.testing.assert_close(*masks)
    assert torch.equal(masks[0] == 0, masks[1] == 0)


def test_inputs_of_other_ranks_after_a_plain_call():
    query, key = torch.randn(2, 8, 5, 8), torch.randn(6, 8)
    expected = nomax.attention(query, key, key, backend="reference")
    torch.testing.assert_close(nomax.attention(query, key, key), expected)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        nomax.attention(query, torch.randn(8), torch.randn(8))


def test_a_power_beyond_numbers_is_a_clear_error():
    tensors = inputs(1, 1, 5, 8)
    with pytest.raises(ValueError, match="too large"):
        nomax.attention(*tensors, phi="relu/L^-1000")


def test_softmax_rows_under_autocast_are_float32():
    tensors = inputs(1, 2, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, rows = nomax.attention(*tensors, phi="softmax", return_rows=True)
    assert rows.entropy.dtype == torch.float32
