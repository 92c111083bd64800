"""Linear layers in half precision: PyTorch's dtypes, at least its accuracy, whatever the CPU."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from precision import assert_precise, doubled
from torch import Tensor

from nomax.nn import Linear
from nomax.nn import layers as module

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=["as this CPU", "slow in half precision", "fast in half precision"], autouse=True)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on this CPU, and as on CPUs without and with products of halves."""
    if request.param != "as this CPU":
        monkeypatch.setattr(module, "SLOW", frozenset(HALVES if request.param.startswith("slow") else ()))


def errors(
    layer: torch.nn.Linear, x: Tensor, exact: list[Tensor], linear: torch.nn.Module | None = None
) -> list[float]:
    """The largest error of output and gradients against float64."""
    x = x.clone().requires_grad_()
    out = layer(x) if linear is None else linear(x)
    grads = torch.autograd.grad(out.square().sum() / 2, [x, *layer.parameters()])
    return [float((got.double() - want).abs().max()) for got, want in zip([out.detach(), *grads], exact, strict=True)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_layer_is_as_exact_as_pytorchs_and_keeps_its_dtype(dtype: torch.dtype, bias: bool) -> None:
    layer = Linear(67, 35, bias=bias).to(dtype)
    x = torch.randn(3, 5, 67).to(dtype)
    wide = torch.nn.Linear(67, 35, bias=bias).double()
    wide.load_state_dict(layer.state_dict())
    exact_x = x.double().requires_grad_()
    out = wide(exact_x)
    exact = [out.detach(), *torch.autograd.grad(out.square().sum() / 2, [exact_x, *wide.parameters()])]

    assert layer(x).dtype == dtype
    plain = errors(layer, x, exact, lambda x: F.linear(x, layer.weight, layer.bias))
    for ours, theirs, want in zip(errors(layer, x, exact), plain, exact, strict=True):
        assert ours <= max(2 * theirs, torch.finfo(dtype).eps * float(want.abs().max()))


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_gives_its_dtype_and_gradients_of_the_weights_own(dtype: torch.dtype) -> None:
    layer, x = Linear(16, 8), torch.randn(3, 16, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out = layer(x)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32
    exact = doubled(layer)(x.double())
    with torch.autocast("cpu", dtype):
        assert_precise(out, F.linear(x, layer.weight, layer.bias), exact)
        assert layer(x.to(dtype)).dtype == dtype


def test_its_weights_are_those_of_pytorchs_layer() -> None:
    layer = Linear(4, 3)
    assert isinstance(layer, torch.nn.Linear)
    torch.nn.Linear(4, 3).load_state_dict(layer.state_dict())


@pytest.mark.parametrize(
    ("supported", "avx512", "instruction", "slow"),
    [
        (True, True, True, False),
        (True, True, False, True),  # PyTorch says that it supports bfloat16, and emulates it
        (False, False, False, True),
        (True, False, False, False),  # not an x86
    ],
)
def test_bfloat16_is_slow_without_an_instruction_for_its_products(
    supported: bool, avx512: bool, instruction: bool, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: supported, _is_mkldnn_fp16_supported=lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", asked)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instruction)
    assert module._without_products() == ({torch.bfloat16} if slow else set())
