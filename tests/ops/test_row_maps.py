"""softmax in training; sparsemax and entmax15 as φ, row by row against the root finding of the entmax package."""

import importlib
import math
import subprocess
import sys
from collections.abc import Callable

import entmax
import pytest
import torch
import torch.nn.functional as F
from precision import assert_precise, assert_rounded, doubled
from torch import Tensor

import nomax
from nomax import Phi
from nomax.nn import Attention
from nomax.ops import row_maps

POWERS = {"sparsemax": 2.0, "entmax15": 1.5}
B, HEADS, QUERIES, KEYS, D, DV = 2, 4, 5, 7, 8, 6

over_both = pytest.mark.parametrize("phi", POWERS)


def tensors(key_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((B, HEADS, QUERIES, D), (B, key_heads, KEYS, D), (B, key_heads, KEYS, DV))
    return [
        3 * torch.randn(shape, dtype=dtype) if shape[-1] == D else torch.randn(shape, dtype=dtype) for shape in shapes
    ]


def expected(
    phi: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None = None,
    bias: Tensor | float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and weights in float64, from the scores of the visible keys alone, one query at a time."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (
        query.double(),
        key.double().repeat_interleave(group, 1),
        value.double().repeat_interleave(group, 1),
    )
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * (1 / math.sqrt(D) if scale is None else scale) + bias
    seen = torch.ones_like(scores, dtype=torch.bool) if seen is None else seen.expand_as(scores)
    weights = torch.zeros_like(scores)
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in scores.shape[:3])).tolist():
        row = seen[b, h, i]
        if row.any():
            weights[b, h, i, row] = entmax.entmax_bisect(scores[b, h, i, row], alpha=POWERS[phi], n_iter=60)
    return weights @ value, weights


def causal() -> Tensor:
    return torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()


def half_seen() -> Tensor:
    seen = torch.rand(B, 1, QUERIES, KEYS) < 0.5
    seen[0, :, 1] = False
    return seen


def masked(seen: Tensor, hide: float) -> tuple[Tensor, Tensor]:
    bias = torch.randn(seen.shape)
    return bias.masked_fill(~seen, hide), bias


@over_both
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "-inf", "minimum", "padding"])
def test_masks_causality_and_biases_are_what_they_are_for_every_phi(kind: str, phi: str) -> None:
    query, key, value = tensors(key_heads=2)
    seen, bias, arguments = None, 0.0, {}
    if kind == "causal":
        seen, arguments = causal(), {"is_causal": True}
    elif kind == "boolean":
        seen = half_seen()
        arguments = {"attn_mask": seen}
    elif kind in ("-inf", "minimum"):
        seen = half_seen()
        mask, bias = masked(seen, -torch.inf if kind == "-inf" else torch.finfo(torch.float32).min)
        arguments = {"attn_mask": mask}
    elif kind == "padding":
        seen = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0] * 7]).bool()[:, None, None]
        arguments = {"attn_mask": seen}
    out, rows = nomax.attention(query, key, value, **arguments, scale=0.4, enable_gqa=True, phi=phi, return_rows=True)
    wanted, weights = expected(phi, query, key, value, seen, bias, scale=0.4)
    # The scores here are up to 20 times as large as the weights, which inherit their rounding.
    assert_rounded(out, wanted, 32)
    assert_rounded(rows.sum, weights.sum(-1), 8)
    assert_rounded(rows.entropy, torch.special.entr(weights).sum(-1), 32)
    assert (weights == 0).float().mean() > 0.2  # it would not be worth a test otherwise


@over_both
def test_a_query_that_sees_no_key_is_exactly_zero_and_moves_nothing(phi: str) -> None:
    query, key, value = (x.requires_grad_() for x in tensors())
    mask = torch.ones(B, 1, QUERIES, KEYS, dtype=torch.bool)
    mask[0, :, 2], mask[1] = False, False
    out, rows = nomax.attention(query, key, value, mask, phi=phi, return_rows=True)
    (out.square().sum() + rows.sum.square().sum() + rows.entropy.sum()).backward()
    for each in (out, rows.sum.unsqueeze(-1), rows.entropy.unsqueeze(-1), query.grad):
        assert not each[0, :, 2].any()
        assert not each[1].any()
        assert each.isfinite().all()
    assert not key.grad[1].any()
    assert key.grad.isfinite().all()
    assert key.grad[0].any()


@over_both
def test_gradients_of_outputs_and_rows_are_right(phi: str) -> None:
    query, key, value = (x[:1, :1].requires_grad_() for x in tensors(dtype=torch.float64))
    bias = torch.randn(QUERIES, KEYS, dtype=torch.float64)
    bias[0, 1:4] = -torch.inf

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        out, rows = nomax.attention(query, key, value, bias, phi=phi, scale=0.1, return_rows=True)
        return out, rows.entropy

    assert torch.autograd.gradcheck(call, (query, key, value))


@over_both
def test_leading_dimensions_and_empty_sizes(phi: str) -> None:
    query, key, value = tensors()
    whole = nomax.attention(query, key, value, phi=phi)
    torch.testing.assert_close(nomax.attention(query[0], key[0], value[0], phi=phi), whole[0])
    torch.testing.assert_close(nomax.attention(query[0, 0], key[0, 0], value[0, 0], phi=phi), whole[0, 0])
    out, rows = nomax.attention(query, key[:, :, :0], value[:, :, :0], phi=phi, return_rows=True)
    assert torch.equal(out, torch.zeros(B, HEADS, QUERIES, DV))
    assert torch.equal(rows.sum, torch.zeros(B, HEADS, QUERIES))
    assert nomax.attention(query[:, :, :0], key, value, phi=phi).shape == (B, HEADS, 0, DV)


@over_both
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_equals_each_sequence_alone(is_causal: bool, phi: str) -> None:
    lengths = [2, 0, 4]
    offsets = torch.tensor([0, 2, 2, 6])
    packed = [torch.randn(6, HEADS, D) for _ in range(3)]
    arguments = {"phi": phi, "is_causal": is_causal, "return_rows": True}
    out, rows = nomax.varlen_attention(*packed, offsets, offsets, **arguments)
    for o, s, *parts in zip(
        out.split(lengths), rows.sum.split(lengths), *(x.split(lengths) for x in packed), strict=True
    ):
        alone, alone_rows = nomax.attention(*(x.transpose(0, 1) for x in parts), **arguments)
        torch.testing.assert_close(o, alone.transpose(0, 1))
        torch.testing.assert_close(s, alone_rows.sum.T)


@over_both
def test_dropout_drops_weights_and_scales_the_others_up(phi: str) -> None:
    query, key = torch.randn(1, 1, 400, D), torch.randn(1, 1, KEYS, D)
    unit = torch.eye(KEYS)[None, None]
    weights = nomax.attention(query, key, unit, phi=phi)
    dropped, rows = nomax.attention(query, key, unit, None, 0.25, phi=phi, return_rows=True)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    assert float(kept.sum() / (weights != 0).sum()) == pytest.approx(
        0.75, abs=5 * math.sqrt(0.75 * 0.25 / float((weights != 0).sum()))
    )
    torch.testing.assert_close(rows.sum, torch.ones(1, 1, 400))
    assert not nomax.attention(query, key, unit, None, 1.0, phi=phi).any()


@over_both
def test_half_precision_and_autocast_return_what_they_should(phi: str) -> None:
    query, key, value = tensors()
    wanted, _ = expected(phi, query, key, value)
    half = [x.bfloat16() for x in (query, key, value)]
    out = nomax.attention(*half, phi=phi)
    with torch.autocast("cpu", torch.bfloat16):
        casted, rows = nomax.attention(query, key, value, phi=phi, return_rows=True)
    assert out.dtype == casted.dtype == torch.bfloat16
    assert rows.sum.dtype == torch.float32
    torch.testing.assert_close(out, casted)
    assert_rounded(out, expected(phi, *half)[0], 1)
    assert (out.double() - wanted).abs().max() < 0.2
    assert nomax.attention(*(x.double() for x in (query, key, value)), phi=phi).dtype == torch.float64


@over_both
def test_the_module_takes_them_with_a_cache_of_its_own(phi: str) -> None:
    module = Attention(16, 2, phi=phi)
    x, cache = 4 * torch.randn(2, 6, 16), nomax.nn.KeyValueCache()
    with torch.no_grad():
        whole, rows = module(x, is_causal=True, return_rows=True)
        steps = [module(part, is_causal=True, cache=cache) for part in x.split([2, 3, 1], dim=1)]
        exact = doubled(module)(x.double(), is_causal=True)
    assert_precise(torch.cat(steps, 1), whole, exact)
    torch.testing.assert_close(rows.sum, torch.ones(2, 2, 6))
    torch.testing.assert_close(module.weights(x).sum(-1), torch.ones(2, 2, 6))
    with pytest.raises(ValueError, match=f'phi="{phi}" normalises each row itself'):
        Attention(16, 2, phi=phi, learned_gain="head")


@over_both
def test_the_notation_knows_them_alone(phi: str) -> None:
    assert str(Phi.parse(phi)) == phi
    assert Phi.parse(f" {phi} ") == Phi(phi)
    for wrong in (f"{phi}/L", f"2*{phi}", f"{phi}(x-1)", f"{phi}, L=7"):
        with pytest.raises(ValueError, match=f"{phi} normalises each row itself"):
            Phi.parse(wrong)
    with pytest.raises(ValueError, match=f"did you mean '{phi}'"):
        Phi.parse(phi.replace("max", "mx"))
    with pytest.raises(ValueError, match="softmax or sparsemax or entmax15 alone"):
        Phi.parse("nothing")


@over_both
def test_a_backend_cannot_be_asked_for(phi: str) -> None:
    for function in (nomax.attention, nomax.explain):
        with pytest.raises(ValueError, match=f'does not apply to phi="{phi}", which runs on the entmax package\'s'):
            function(*tensors(), phi=phi, backend="cpu")


@over_both
def test_explain_names_the_package_the_formula_and_the_matrix(phi: str) -> None:
    explanation = nomax.explain(*tensors(), is_causal=True, scale=0.5, phi=phi)
    assert explanation.backend == "entmax"
    assert explanation.reasons == {name: [f"{phi} is not pointwise"] for name in ("reference", "cpu", "triton")}
    for words in (
        f"the entmax package's {phi}",
        f"Σ_j {phi}_j(0.5·q_i·k_j)·v_j",
        "holds the 2×4×5×7 matrix",
        "1 to 5 keys",
    ):
        assert words in str(explanation)


@over_both
def test_a_missing_package_is_answered_with_how_to_install_it(phi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.import_module

    def without_entmax(name: str) -> object:
        if name == "entmax":
            raise ModuleNotFoundError(name)
        return find(name)

    monkeypatch.setattr("nomax.ops.row_maps.import_module", without_entmax)
    for function in (nomax.attention, nomax.explain):
        with pytest.raises(ImportError, match=rf"phi='{phi}' needs the entmax package: pip install entmax"):
            function(*tensors(), phi=phi)
    query, key, value = tensors()
    torch.testing.assert_close(
        nomax.attention(query, key, value, phi="softmax"), F.scaled_dot_product_attention(query, key, value)
    )


def test_the_package_is_imported_when_it_is_needed_and_not_before() -> None:
    program = (
        "import sys, torch, nomax, nomax.nn; q = torch.randn(1, 1, 3, 4); nomax.attention(q, q, q, phi='softmax');"
        "print('entmax' in sys.modules); nomax.attention(q, q, q, phi='sparsemax'); print('entmax' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["False", "True"]


@pytest.mark.parametrize("keys", [row_maps.SHORT - 1, row_maps.SHORT + 1])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_trains_in_half_precision_at_least_as_exactly_as_pytorch(keys: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(keys)
    exact = [torch.randn(2, 2, length, 16, generator=generator) for length in (5, keys, keys)]
    bias = torch.randn(5, keys, generator=generator).bfloat16() if masked else None
    weight = torch.randn(2, 2, 5, 16, generator=generator)

    def results(attention: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        # Every precision starts from the same rounded inputs.
        inputs = [x.bfloat16().to(dtype).requires_grad_() for x in exact]
        out = attention(*inputs, None if bias is None else bias.to(dtype))
        assert out.dtype == dtype
        return [out, *torch.autograd.grad((out * weight.to(dtype)).sum(), inputs)]

    oracle = results(F.scaled_dot_product_attention, torch.float64)
    theirs = results(F.scaled_dot_product_attention, torch.bfloat16)
    ours = results(lambda *tensors: nomax.attention(*tensors, phi="softmax"), torch.bfloat16)
    for wanted, peer, actual in zip(oracle, theirs, ours, strict=True):
        assert torch.equal(actual, peer) == (keys > row_maps.SHORT)
        # The mean: which number is rounded worst is chance.
        assert (actual - wanted).abs().mean() <= (peer - wanted).abs().mean()
