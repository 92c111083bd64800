"""Statistics of rows, on every backend: sums and entropies of weights, and their gradients."""

import math

import oracle
import pytest
import torch
from semantics import KEYS, MASKS, NONNEGATIVE, QUERIES, B, D, close, on_every_backend, tensors

import nomax
from nomax import Phi
from nomax.phi import ACTIVATIONS


@on_every_backend
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("activation", NONNEGATIVE)
def test_rows_are_the_sum_and_entropy_of_the_weights(activation, kind, backend):
    query, key, value = tensors(key_heads=2)
    arguments, seen, bias = MASKS[kind]()
    phi = Phi(activation, alpha=0.5, gain=math.sqrt(2))
    out, rows = nomax.attention(
        query, key, value, **arguments, enable_gqa=True, phi=phi, backend=backend, return_rows=True
    )
    fields = {"activation": activation, "alpha": 0.5, "gain": math.sqrt(2)}
    expected, sums, entropies = oracle.attention(query, key, value, seen, bias, **fields)
    assert rows.sum.dtype == rows.entropy.dtype == torch.float32
    close(out, expected)
    close(rows.sum, sums)
    close(rows.entropy, entropies)


ROW_PHIS = ["relu/L", "relu2(x-0.5)", "relu2(x-0.5*sqrt(2 log L))", "sigmoid(x-log L)", "relu6/L^0.5", "0*softplus"]


@on_every_backend
@pytest.mark.parametrize("phi", ROW_PHIS)
def test_rows_have_gradients_and_none_where_nothing_is_visible(phi, backend):
    query, key, value = tensors()
    mask = torch.rand(B, 1, QUERIES, KEYS) > 0.4
    mask[:, :, 1] = False

    def gradients(backend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (query, key)]
        _, rows = nomax.attention(*leaves, value.to(dtype), mask, phi=phi, backend=backend, return_rows=True)
        assert (torch.stack([*rows, rows.normalized_entropy])[..., 1] == 0).all()
        of_normalized = torch.autograd.grad(rows.normalized_entropy.sum(), leaves, retain_graph=True)
        assert all(gradient.isfinite().all() for gradient in of_normalized)
        return torch.autograd.grad((rows.sum.square() + 2 * rows.entropy).sum(), leaves)

    of_query, of_key = gradients(backend, torch.float32)
    expected = gradients("reference", torch.float64)
    assert (of_query[:, :, 1] == 0).all()
    close(of_query, expected[0])
    close(of_key, expected[1])


@on_every_backend
@pytest.mark.parametrize("keys", [1, 16])  # a part of a vector, and whole ones
def test_entropies_and_their_gradients_are_right_for_weights_of_any_size(keys, backend):
    weights = (10 ** torch.linspace(-37, 35, 5000, dtype=torch.float64)).float()
    query = torch.zeros(1, 1, len(weights), 8)
    query[0, 0, :, 0] = weights
    key = torch.eye(8)[:1].expand(1, 1, keys, 8)
    leaf = query.requires_grad_()
    _, rows = nomax.attention(leaf, key, key, scale=1.0, phi="relu", backend=backend, return_rows=True)
    (gradient,) = torch.autograd.grad(rows.entropy.sum(), leaf)
    log = weights.double().log()
    eps = torch.finfo(torch.float32).eps
    # One logarithm, one product and a sum over the keys: eight roundings, and twice as many for the gradient.
    size = keys * weights.double()
    assert ((rows.entropy[0, 0] + size * log).abs() <= 8 * eps * size * log.abs().clamp(min=1)).all()
    assert ((gradient[0, 0, :, 0] + keys * (log + 1)).abs() <= 16 * eps * keys * log.abs().clamp(min=1)).all()


def test_normalized_entropy_is_that_of_the_normalized_weights():
    query, key, value = tensors()
    _, rows = nomax.attention(query, key, value, phi="relu", return_rows=True)
    weights = torch.relu(query @ key.transpose(-2, -1) / math.sqrt(D)).double()
    entropy = torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1)
    close(rows.normalized_entropy, torch.where(weights.sum(-1) > 0, entropy, 0))


@on_every_backend
def test_rows_do_not_see_dropout(backend):
    query, key, value = tensors()
    _, rows = nomax.attention(query, key, value, backend=backend, return_rows=True)
    _, dropped = nomax.attention(query, key, value, dropout_p=0.5, backend=backend, return_rows=True)
    assert all(torch.equal(a, b) for a, b in zip(rows, dropped, strict=True))


@pytest.mark.parametrize("phi", [*(name for name in ACTIVATIONS if name not in NONNEGATIVE), "-1*relu"])
def test_rows_of_weights_that_can_be_negative_are_refused(phi):
    with pytest.raises(ValueError, match=r"return_rows=True.*relu, relu2, softplus, relu6, sigmoid"):
        nomax.attention(*tensors(), phi=phi, return_rows=True)
