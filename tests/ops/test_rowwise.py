"""LayerNorm, dropout and cross-entropy on the CPU kernels: PyTorch's functions and gradients, as exact or more so."""

import pytest
import torch
import torch.nn.functional as F
from precision import assert_precise, assert_rounded
from torch import Tensor

from nomax.ops import build, cpu
from nomax.ops.rowwise import add_layer_norm_, cross_entropy, dropout, layer_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max())


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, ours: bool) -> list[Tensor]:
    """Return the result of LayerNorm and all its gradients."""
    leaves = [
        y.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for y in (x, weight, bias)
        if y is not None
    ]
    x, weight, bias = (*leaves, None)[:3]
    out = layer_norm(x, weight, bias, 1e-6) if ours else F.layer_norm(x, weight.shape, weight, bias, 1e-6)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 32, 64, 257])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_is_as_exact_as_pytorchs(dtype: torch.dtype, width: int, biased: bool) -> None:
    x = torch.randn(40, 23, 2, width).to(dtype) * 3 + 1
    weight, bias = torch.rand(width), torch.randn(width) if biased else None
    grad = torch.randn(x.shape).to(dtype)
    ours, torchs = normed(x, weight, bias, grad, ours=True), normed(x, weight, bias, grad, ours=False)
    double = [None if y is None else y.double() for y in (x, weight, bias, grad)]
    exact = normed(*double, ours=False)  # type: ignore[arg-type]
    for own, theirs, wanted in zip(ours, torchs, exact, strict=True):
        assert own.dtype == theirs.dtype
        assert error(own, wanted) <= 2 * error(theirs, wanted)


@pytest.mark.usefixtures("every_instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 192, 384, 400])
def test_layer_norm_of_long_rows_is_as_exact_as_pytorchs(dtype: torch.dtype, width: int) -> None:
    x, weight, bias = (
        torch.randn(5, 23, 2 * width).to(dtype)[..., :width] * 3 + 1,
        torch.rand(width),
        torch.randn(width),
    )
    ours = layer_norm(x, weight, bias, 1e-6)
    plain = F.layer_norm(x, (width,), weight, bias, 1e-6)
    assert_precise(ours, plain, F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-6))


@pytest.mark.usefixtures("every_instruction_set")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 128, 384, 385])
def test_a_sum_and_its_norm_are_those_of_pytorch(dtype: torch.dtype, width: int, biased: bool) -> None:
    x, added = torch.randn(3, 31, width), torch.randn(3, 31, width).to(dtype)
    weight, bias = torch.rand(width), torch.randn(width) if biased else None
    level = torch.randn(width) if biased else None
    mine, plain, exact = x.clone(), x + added, x.double() + added.double()
    if level is not None:
        plain, exact = plain + level, exact + level.double()
    out = add_layer_norm_(mine, added, level, weight, bias, 1e-6, dtype)
    assert_precise(mine, plain, exact)
    double = None if bias is None else bias.double()
    wanted = F.layer_norm(exact, (width,), weight.double(), double, 1e-6)
    assert_precise(out, F.layer_norm(plain, (width,), weight, bias, 1e-6).to(dtype), wanted)


@pytest.mark.usefixtures("every_instruction_set")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [7, 64])
def test_layer_norm_of_float32_can_be_in_half_precision(dtype: torch.dtype, width: int) -> None:
    leaves = [torch.randn(900, width) * 3 + 1, torch.rand(width), torch.randn(width)]
    grad = torch.randn(900, width).to(dtype)
    results = []
    for kind in ("ours", "plain", "exact"):
        x, weight, bias = (y.to(torch.float64 if kind == "exact" else y.dtype).requires_grad_() for y in leaves)
        if kind == "ours":
            out = layer_norm(x, weight, bias, 1e-6, dtype)
            assert out.dtype == dtype
        else:
            out = F.layer_norm(x, (width,), weight, bias, 1e-6)
            out = out if kind == "exact" else out.to(dtype)
        results.append([out.detach(), *torch.autograd.grad(out, (x, weight, bias), grad.to(out.dtype))])
    for ours, plain, exact in zip(*results, strict=True):
        assert_precise(ours, plain, exact)


def test_layer_norm_takes_strided_views_as_they_are() -> None:
    joint = torch.randn(30, 17, 3, 4, 32)
    weight = torch.rand(32)
    grad = torch.randn(30, 4, 17, 32).transpose(1, 2)
    view = joint[:, :, 1]
    for x, y in zip(
        normed(view, weight, None, grad, True),
        normed(view.contiguous(), weight, None, grad.contiguous(), True),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_layer_norm_has_second_derivatives() -> None:
    x, weight = torch.randn(300, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    grads = []
    for own in (layer_norm(x, weight, None, 1e-6), F.layer_norm(x, (16,), weight, None, 1e-6)):
        (slope,) = torch.autograd.grad(own.square().sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(slope.square().sum(), (x, weight)))
    for ours, torchs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-2)  # both in float32; only the first pass differs


def test_what_the_kernels_do_not_serve_goes_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    plain = F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda x, *rest: (calls.append(x), plain(x, *rest))[1])
    for x in (torch.randn(2, 8), torch.randn(1000, 8, dtype=torch.float64), torch.randn(8, 1000).T):
        layer_norm(x, torch.ones(8, dtype=x.dtype), None, 1e-6)
    layer_norm(torch.randn(1000, 8), torch.ones(8), None, 1e-6)
    assert len(calls) == 3

    def fail() -> None:
        raise build.BuildError("no compiler")

    monkeypatch.setattr(cpu, "load", fail)
    monkeypatch.setattr(cpu, "_loaded", False)
    monkeypatch.setattr(cpu, "_without_kernels", False)
    layer_norm(torch.randn(1000, 8), torch.ones(8), None, 1e-6)
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [3, 300])  # PyTorch, and our kernel
def test_cross_entropy_is_as_exact_as_pytorchs(dtype: torch.dtype, smoothing: float, rows: int) -> None:
    logits = (4 * torch.randn(rows, 2, 101)).to(dtype)
    labels = torch.randint(101, (rows, 2))
    labels[: rows // 2] = logits[: rows // 2].argmax(-1)
    grad = torch.rand(rows, 2)
    results = {}
    for name, wide in (("ours", dtype), ("torch", dtype), ("exact", torch.float64)):
        x = logits.to(wide, copy=True).requires_grad_()
        if name == "ours":
            loss, nll, right = cross_entropy(x, labels, smoothing)
            assert torch.equal(right, logits.argmax(-1) == labels)
            assert not nll.requires_grad
            assert loss.dtype == nll.dtype == torch.float32
        else:
            y = x if name == "exact" else x.float()
            loss = F.cross_entropy(y.mT, labels, reduction="none", label_smoothing=smoothing)
            nll = F.cross_entropy(y.mT, labels, reduction="none")
        (loss * grad.to(loss.dtype)).sum().backward()
        results[name] = (loss.detach(), nll.detach(), x.grad)
    for ours, torchs, exact in zip(*results.values(), strict=True):
        # A loss of about 10 is a difference of numbers with 24 bits, however it is summed.
        assert error(ours, exact) <= 2 * max(error(torchs, exact), 10 * torch.finfo(torch.float32).eps)


def test_a_label_is_right_where_argmax_names_it_also_among_equals() -> None:
    logits = torch.zeros(100, 64)
    logits[:, [5, 40]] = 1.0
    labels = torch.tensor([5, 40, 0, 63] * 25)
    assert torch.equal(cross_entropy(logits, labels)[2], logits.argmax(-1) == labels)


def test_what_is_not_finite_stays_so() -> None:
    logits = torch.zeros(100, 64)
    logits[0, 3], logits[1, 3], logits[2, 3] = torch.nan, torch.inf, -torch.inf
    loss, _, _ = cross_entropy(logits, torch.full((100,), 9))
    exact = F.cross_entropy(logits.double(), torch.full((100,), 9), reduction="none")
    assert loss[0].isnan()
    assert loss[1].isinf()
    assert error(loss[2:], exact[2:]) <= 4 * torch.finfo(torch.float32).eps * 8


def test_a_label_that_is_no_class_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the label 64 is none of the 64 classes"):
        cross_entropy(torch.zeros(100, 64), torch.full((100,), 64))


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def coins(rows: int, width: int, share: float, seed: int) -> Tensor:
    """Return True where a number is kept, by the hash in Python's integers."""
    start = mixed(mixed(seed % 2**32) ^ seed >> 32)
    kept = torch.empty(rows, width, dtype=torch.bool)
    for row in range(rows):
        first = mixed(start ^ row)
        second = mixed(first ^ 0x9E3779B9)
        for column in range(width):
            bits = mixed((mixed(column ^ first) + second) % 2**32)
            kept[row, column] = bits >= min(2**32 - 1, round(share * 2**32))
    return kept


@pytest.mark.usefixtures("every_instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 257])
def test_dropout_hashes_the_seed_and_the_place_of_each_number(dtype: torch.dtype, width: int) -> None:
    rows = 4096 // width + 1
    x, below = torch.randn(rows, width).to(dtype).requires_grad_(), torch.randn(rows, width, requires_grad=True)
    grad = torch.randn(rows, width)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ()))
    factor = coins(rows, width, 0.3, seed).double() / 0.7
    torch.manual_seed(3)
    out = dropout(x, 0.3, below)
    to_x, to_below = torch.autograd.grad(out, (x, below), grad)
    assert (out.dtype, to_x.dtype) == (torch.float32, dtype)
    assert_rounded(out, below.double() + factor * x.double(), 2)
    assert_rounded(to_x, factor * grad.double(), 2)
    assert torch.equal(to_below, grad)
    torch.manual_seed(3)
    assert_rounded(dropout(x, 0.3), factor * x.double(), 2)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(share: float) -> None:
    x, below = torch.randn(100, 64, requires_grad=True), torch.randn(100, 64)
    out = dropout(x, share, below)
    assert torch.equal(out, below + (1 - share) * x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full_like(x, 1 - share))


def test_what_dropout_drops_may_be_nan_and_layouts_do_not_matter() -> None:
    x = torch.randn(3, 40, 64)
    torch.manual_seed(1)
    plain = dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(x.transpose(0, 1).contiguous().transpose(0, 1), 0.5), plain)
    torch.manual_seed(1)
    assert torch.equal(dropout(x.masked_fill(plain == 0, torch.nan), 0.5), plain)


def test_dropout_has_second_derivatives_and_fresh_coins_at_each_call() -> None:
    x = torch.randn(100, 64, requires_grad=True)
    out = dropout(x, 0.5)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(slope.sum(), x)
    assert torch.equal(twice, 8.0 * (out != 0))
    assert not torch.equal(dropout(x, 0.5), out)


def test_dropout_that_the_kernel_does_not_serve_is_pytorchs() -> None:
    for x in (torch.randn(2, 8), torch.randn(1000, 8, dtype=torch.float64)):
        torch.manual_seed(5)
        ours = dropout(x, 0.4, x)
        torch.manual_seed(5)
        assert torch.equal(ours, x + F.dropout(x, 0.4))


def test_dropout_compiles() -> None:
    x = torch.randn(100, 64, requires_grad=True)
    compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    out = compiled(x, 0.5, x)
    assert 0.4 < float((out == x).double().mean()) < 0.6
    out.sum().backward()
