"""A part of a problem is a problem: the outputs and sums of parts of the keys add up to those of the whole."""

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
@pytest.mark.parametrize("kind", ["none", "causal", "padding", "bias"])
def test_parts_of_the_keys_add_up_to_the_whole(kind, backend):
    attend = backends.BACKENDS[backend].attend
    whole = length.scaled(Phi.parse("sigmoid(x-log L)/L^0.5"), problem(kind, activation="sigmoid", rows=True))
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


def test_the_coins_of_a_part_are_those_of_the_whole():
    whole = problem("causal", dropout=0.4, seed=torch.tensor(2**40 + 17))
    attend = backends.BACKENDS["reference"].attend
    part = whole.part((0, QUERIES), BOUNDS[2]).part((4, QUERIES), (2, 7))
    assert part.origin == (0, 4, 8)
    parts = [attend(whole.part((0, QUERIES), keys))[:1] for keys in BOUNDS]
    close(sums(parts)[0], attend(whole)[0])
    # The kernels do not know where they are in a larger problem yet, and say so.
    assert "dropout in a part" in cpu.unsupported(part)[0]
    assert backends.choose(None, part) == "reference"
