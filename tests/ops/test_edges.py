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


# Sizes that no memory holds. (An expanded dimension costs nothing until somebody computes with it.)


def expanded(*shape):
    return torch.ones(1, 1, 1, 1).expand(shape)


@pytest.mark.parametrize("phi", ["relu/L", "identity/L"])
@pytest.mark.parametrize("dimension", [2**61, 2**58, 2**31])
def test_an_absurd_head_dimension_is_refused_by_name(dimension, phi):
    query, key, value = expanded(1, 1, 1, dimension), expanded(1, 1, 2, dimension), torch.ones(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match=f"^nomax: the head dimension is {dimension}, but .* below 2\\^31"):
        nomax.attention(query, key, value, phi=phi, scale=1.0)
    with pytest.raises(RuntimeError, match=f"head dimension of the values is {dimension}"):
        nomax.attention(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2, 4), key, phi=phi)


@pytest.mark.parametrize("phi", ["relu/L", "identity/L"])
def test_an_absurd_batch_is_refused_and_an_empty_one_is_no_work(phi):
    with pytest.raises(RuntimeError, match="the batch size is 8589934592"):
        nomax.attention(*(expanded(2**33, 1, 1, 1),) * 3, phi=phi)
    nothing = torch.ones(1, 1, 1, 0).expand(2**30, 1, 1, 0)
    out = nomax.attention(expanded(2**30, 1, 1, 1), expanded(2**30, 1, 1, 1), nothing, phi=phi)
    assert out.shape == (2**30, 1, 1, 0)


@pytest.mark.parametrize(
    ("query", "key", "value", "phi", "message"),
    [
        ((1, 1, 2**30, 1), (1, 1, 2, 1), (1, 1, 2, 2**30), "relu/L", r"output, 2\^62 bytes or more\. Attend to fewer"),
        ((1, 1, 1, 2**30), (1, 1, 2, 2**30), (1, 1, 2, 4), "relu", r"workspace of a thread, \d+ bytes \(\d+ GB\)\. It"),
        (
            (1, 1, 1, 2**30),
            (1, 1, 2**30, 2**30),
            (1, 1, 2**30, 16),
            "identity/L",
            "sums of key · value, 72057594037927936 b",
        ),
    ],
)
def test_memory_that_is_not_there_is_named_with_its_size_and_what_to_do(query, key, value, phi, message):
    with pytest.raises(RuntimeError, match=f"^nomax: no memory for the {message}"):
        nomax.attention(expanded(*query), expanded(*key), expanded(*value), phi=phi, scale=1.0)


def test_gradients_that_do_not_fit_are_named_too():
    query, key, one = expanded(2**30, 1, 2, 2**20), expanded(2**30, 1, 1, 2**20), expanded(2**30, 1, 1, 1)
    settings = (None,) * 6, (0, 1.0, 1.0, 0.0, None, 0.0, False)
    with pytest.raises(RuntimeError, match=r"^nomax: no memory for the gradient of query, 9007199254740992 bytes"):
        torch.ops.nomax.attend_backward(expanded(2**30, 1, 2, 1), None, query, key, one, *settings[0], *settings[1])


def test_more_heads_than_a_wave_of_tasks_are_all_computed():
    """Tasks run in waves of some thousands, so that no list of them grows with the batch."""
    query, key, value = (torch.randn(3001, 3, 2, 8) for _ in range(3))
    for phi in ("relu/L", "identity/L"):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        expected_leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = nomax.attention(*leaves, phi=phi, backend="cpu")
        expected = nomax.attention(*expected_leaves, phi=phi, backend="reference")
        torch.testing.assert_close(out, expected)
        grad = torch.randn_like(out)
        for x, y in zip(
            torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, expected_leaves, grad), strict=True
        ):
            torch.testing.assert_close(x, y)
