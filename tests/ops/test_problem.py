"""A part of a problem is a problem: the outputs and sums of parts of the keys add up to those of the whole."""

from dataclasses import replace

import pytest
import torch
from semantics import HEADS, B, D, close, on_every_backend, tensors

from nomax import Phi
from nomax.ops import backends, cpu, length
from nomax.ops.problem import Problem

QUERIES, KEYS = 9, 13
BOUNDS = [(0, 5), (5, 6), (6, KEYS)]


def problem(kind: str, **settings) -> Problem:
    query, key, value = tensors(QUERIES, KEYS, key_heads=2)
    masks = {
        "none": {},
        "causal": {"diagonal": 2},
        "padding": {"mask": torch.rand(B, 1, 1, KEYS) > 0.4},
        "bias": {"mask": torch.randn(B, HEADS, QUERIES, KEYS).masked_fill(torch.rand(QUERIES, KEYS) > 0.6, -torch.inf)},
    }
    return Problem(query=query, key=key, value=value, scale=D**-0.5, **masks[kind], **settings)


def sums(parts: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [sum(each) for each in zip(*parts, strict=True)]


@on_every_backend
@pytest.mark.parametrize("phi", ["sigmoid(x-log L)/L^0.5", "sigmoid(x+1-sqrt(2 log L))"])
@pytest.mark.parametrize("kind", ["none", "causal", "padding", "bias"])
def test_parts_of_the_keys_add_up_to_the_whole(kind, phi, backend):
    attend = backends.BACKENDS[backend].attend
    whole = length.scaled(Phi.parse(phi), problem(kind, activation="sigmoid", rows=True))
    parts = [attend(whole.part((0, QUERIES), keys)) for keys in BOUNDS]
    for total, expected in zip(sums(parts), attend(whole), strict=True):
        close(total, expected)


@on_every_backend
def test_parts_of_the_queries_are_their_rows(backend):
    attend = backends.BACKENDS[backend].attend
    whole = length.scaled(Phi.parse("relu/L"), problem("causal", rows=True))
    parts = [attend(whole.part(queries, (0, KEYS))) for queries in [(0, 4), (4, QUERIES)]]
    for pieces, expected in zip(zip(*parts, strict=True), attend(whole), strict=True):
        close(torch.cat(pieces, dim=2), expected)


@on_every_backend
def test_a_part_that_is_alone_is_scaled_by_the_length_it_is_told(backend):
    attend, phi = backends.BACKENDS[backend].attend, Phi.parse("relu/L")
    whole = problem("none")
    parts = [attend(length.scaled(phi, whole.part((0, QUERIES), keys), KEYS))[:1] for keys in BOUNDS]
    close(sums(parts)[0], attend(length.scaled(phi, whole))[0])


@on_every_backend
@pytest.mark.parametrize("kind", ["none", "causal", "padding", "bias"])
def test_the_coins_of_a_part_are_those_of_the_whole(kind, backend):
    whole = problem(kind, dropout=0.4, seed=torch.tensor(2**40 + 17, device="cpu"), rows=True, activation="softplus")
    expected = backends.BACKENDS["reference"].attend(whole)
    part = whole.part((0, QUERIES), BOUNDS[2]).part((4, QUERIES), (2, 7))
    assert part.origin == (0, 4, 8)
    parts = [backends.attend_part(whole.part((0, QUERIES), keys), backend) for keys in BOUNDS]
    for total, one in zip(sums(parts), expected, strict=True):
        close(total, one)
    grad, wanted = torch.randn_like(expected[0]), kind == "bias"
    of_rows = torch.randn(2, *grad.shape[:3]).unbind(0)
    grads = [
        backends.part_gradients(whole.part((0, QUERIES), keys), grad, of_rows, bias_wanted=wanted, backend=backend)
        for keys in BOUNDS
    ]
    query, key, value, bias = backends.part_gradients(whole, grad, of_rows, bias_wanted=wanted, backend="reference")
    close(sum(each[0] for each in grads), query)
    close(torch.cat([each[1] for each in grads], 2), key)
    close(torch.cat([each[2] for each in grads], 2), value)
    if wanted:
        close(torch.cat([each[3] for each in grads], 3), bias)


def test_an_operator_with_a_formula_refuses_dropout_in_a_part():
    part = problem("none", dropout=0.4, seed=torch.tensor(1)).part((4, QUERIES), (2, 7))
    assert "dropout in a part" in cpu.unsupported(part)[0]
    assert backends.choose(None, part) == "reference"


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_a_part_are_not_rounded(dtype, backend):
    """A sum of parts in half precision has the error of one call, and less than one rounding of the result."""
    query, key, value = (x.to(dtype) for x in tensors(QUERIES, KEYS))
    whole = Problem(query=query, key=key, value=value, scale=D**-0.5)
    wide = replace(whole, query=query.double(), key=key.double(), value=value.double())
    exact, *_ = backends.attend_part(wide, "reference")
    total = sum(backends.attend_part(whole.part((0, QUERIES), keys), backend)[0] for keys in BOUNDS)
    alone, *_ = backends.BACKENDS[backend].attend(whole)
    assert total.dtype == torch.float32
    error, usual = (float((x.double() - exact).norm()) for x in (total, alone))
    assert error <= usual
