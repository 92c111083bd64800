"""GELU on the CPU kernels: F.gelu's function and gradients, as exact as PyTorch's or more so, and its fallbacks."""

import math

import pytest
import torch
import torch.nn.functional as F
from precision import assert_precise
from torch import Tensor

from nomax.ops import build, cpu
from nomax.ops.rowwise import gelu

KINDS = ("none", "tanh")
X = torch.linspace(-14, 14, 20_001)


def closed_form(x: Tensor, kind: str) -> Tensor:
    x = x.double()
    if kind == "tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x * torch.special.ndtr(x)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that F.gelu was asked for."""
    seen: list[int] = []
    plain = F.gelu
    monkeypatch.setattr(
        F, "gelu", lambda x, approximate="none": (seen.append(x.numel()), plain(x, approximate=approximate))[1]
    )
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_the_closed_form(kind: str, dtype: torch.dtype, calls: list[int]) -> None:
    x = X.to(dtype).requires_grad_()
    grad = torch.randn(len(X), generator=torch.Generator().manual_seed(0)).to(dtype)
    out = gelu(x, approximate=kind)
    (got,) = torch.autograd.grad(out, x, grad)
    wide = x.detach().double().requires_grad_()
    exact = closed_form(wide, kind)
    (want,) = torch.autograd.grad(exact, wide, grad.double())
    assert out.dtype == got.dtype == dtype
    assert calls == []
    theirs = F.gelu(x, approximate=kind)
    assert_precise(out, theirs, exact)
    assert_precise(got, torch.autograd.grad(theirs, x, grad)[0], want)
    # Each number, too, within a few roundings of one at most as large as itself or 1.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(got.double(), want, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("kind", KINDS)
def test_values_without_a_gradient_are_the_same_bits_whatever_the_threads(kind: str) -> None:
    x = torch.randn(70_001, requires_grad=True)
    with torch.no_grad():
        out = gelu(x, approximate=kind)
    assert torch.equal(out, gelu(x, approximate=kind))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(out, gelu(x.detach(), approximate=kind))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_is_served(kind: str) -> None:
    x = torch.randn(60, 3, 50).transpose(0, 2)[:, ::2].requires_grad_()
    out = gelu(x, approximate=kind)
    (got,) = torch.autograd.grad(out.sum(), x)  # the gradient of a sum is an expanded number
    want = F.gelu(x, approximate=kind)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_beyond_all_bounds_stay_what_they_are(kind: str) -> None:
    x = torch.tensor([math.inf, 1e30, -1e30, math.nan, 0.0]).repeat(1000)
    out = gelu(x, approximate=kind)[:5]
    assert out[:3].tolist() == [math.inf, x[1].item(), 0]
    assert math.isnan(out[3])
    assert out[4] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_second_derivative(kind: str) -> None:
    x = torch.linspace(-3, 3, 5000).requires_grad_()
    (slope,) = torch.autograd.grad(gelu(x, approximate=kind).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(closed_form(wide, kind).sum(), wide, create_graph=True)
    (plain,) = torch.autograd.grad(F.gelu(x, approximate=kind).sum(), x, create_graph=True)
    assert_precise(bend, torch.autograd.grad(plain.sum(), x)[0], torch.autograd.grad(exact.sum(), wide)[0])


def test_what_the_kernels_do_not_serve_goes_to_pytorch(calls: list[int]) -> None:
    gelu(torch.randn(10))  # small
    gelu(torch.randn(5000, dtype=torch.float64))
    torch.func.vmap(gelu)(torch.randn(2, 5000))
    assert len(calls) == 3


def test_without_a_compiler_it_is_only_slower(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise build.BuildError("no compiler")

    monkeypatch.setattr(cpu, "load", fail)
    monkeypatch.setattr(cpu, "_loaded", False)
    monkeypatch.setattr(cpu, "_without_kernels", False)
    x = torch.randn(5000)
    assert torch.equal(gelu(x), gelu(x))
    assert len(calls) == 2


def test_an_unknown_approximation_is_refused() -> None:
    with pytest.raises(ValueError, match='approximate=\'erf\' must be "none" or "tanh"'):
        gelu(X, approximate="erf")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2])
def test_a_bias_is_added_first_and_has_its_gradient(kind: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    dtype = dtypes[0]
    x, bias = torch.randn(7, 11, 67).to(dtype).requires_grad_(), torch.randn(67).to(dtypes[1]).requires_grad_()
    out = gelu(x, bias, kind)
    got = torch.autograd.grad(out.square().sum(), (x, bias))
    wide_x, wide_bias = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    exact = closed_form(wide_x + wide_bias, kind)
    # What comes from above is the rounded result, so that only this function's own rounding is judged.
    want = torch.autograd.grad(exact, (wide_x, wide_bias), 2 * out.detach().double())
    theirs = F.gelu((x + bias).to(dtype), approximate=kind)
    plain = torch.autograd.grad(theirs, (x, bias), 2 * out.detach())
    assert out.dtype == got[0].dtype == dtype
    assert got[1].dtype == dtypes[1]
    assert_precise(out, theirs, exact)
    for ours, usual, right in zip(got, plain, want, strict=True):
        assert_precise(ours, usual, right)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 50)])
def test_what_is_spent_is_overwritten_only_if_no_gradient_is_wanted(bias: Tensor | None) -> None:
    x = torch.randn(100, 50)
    want, before = gelu(x, bias), x.clone()
    assert torch.equal(gelu(x.clone().requires_grad_(), bias, spent=True), want)
    assert torch.equal(x, before)
    kept = x.requires_grad_()
    gelu(kept, bias, spent=True)
    assert torch.equal(kept, before)
    with torch.no_grad():
        out = gelu(kept, bias, spent=True)
    assert torch.equal(out, want)
    assert out.data_ptr() == kept.data_ptr()
