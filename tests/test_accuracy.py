"""Each backend against float64: its error may be at most twice that of the reference in the same precision."""

import itertools
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import nomax
from nomax.phi import ACTIVATIONS

BACKENDS = ["cpu"]
LENGTHS = [1, 7, 50, 97, 197, 785, 1025]
DIMENSIONS = [8, 16, 48, 59, 64, 80, 111, 128]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKS = ["none", "causal", "lower right", "padding", "boolean", "bias", "bias by key", "hidden row"]
LAYOUTS = ["contiguous", "packed", "transposed", "expanded"]


def make(batch: int, heads: int, length: int, dim: int, layout: str, dtype: torch.dtype, spread: float) -> Tensor:
    """A [batch, heads, length, dim] tensor in one of the layouts that models have."""
    match layout:
        case "contiguous":
            return (torch.randn(batch, heads, length, dim) * spread).to(dtype)
        case "packed":  # one third of a joint projection
            return (torch.randn(batch, length, 3, heads, dim) * spread).to(dtype).permute(2, 0, 3, 1, 4)[1]
        case "transposed":  # columns that do not lie next to each other
            return (torch.randn(batch, heads, dim, length) * spread).to(dtype).mT
        case "expanded":  # one sequence for the whole batch
            return (torch.randn(1, heads, length, dim) * spread).to(dtype).expand(batch, -1, -1, -1)
    raise ValueError(layout)


def make_mask(kind: str, batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype) -> dict:
    match kind:
        case "none":
            return {}
        case "causal":
            return {"is_causal": True}
        case "lower right":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of NaN where a query sees nothing: softmax's trouble, not ours
                return {"attn_mask": causal_lower_right(queries, keys)}
        case "padding":
            lengths = torch.randint(0, keys + 1, (batch,))
            return {"attn_mask": (torch.arange(keys) < lengths[:, None])[:, None, None]}
        case "boolean":
            return {"attn_mask": torch.rand(batch, 1, queries, keys) < 0.6}
        case "bias":
            return {"attn_mask": torch.randn(1, heads, queries, keys, dtype=dtype)}
        case "bias by key":
            bias = torch.randn(batch, 1, 1, keys, dtype=dtype)
            return {"attn_mask": bias.masked_fill(torch.rand_like(bias) < 0.3, torch.finfo(dtype).min)}
        case "hidden row":
            mask = torch.rand(queries, keys) < 0.5
            mask[queries // 2] = False
            return {"attn_mask": mask}
    raise ValueError(kind)


def outputs_and_gradients(backend: str, phi: str, tensors: list[Tensor], grad: Tensor, masking: dict) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    mask = masking.get("attn_mask")
    if type(mask) is Tensor and mask.is_floating_point():
        mask = mask.to(grad.dtype).detach().requires_grad_()
        leaves.append(mask)
        masking = {"attn_mask": mask}
    out = nomax.attention(*leaves[:3], **masking, phi=phi, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def squared_errors(backend: str, phi: str, tensors: list[Tensor], masking: dict) -> Tensor:
    """For the output and each gradient: the backend's error, the reference's, and that of rounding the exact result."""
    dtype = tensors[0].dtype
    query, _, value = tensors
    grad = torch.randn(*query.shape[:3], value.shape[3]).to(dtype)
    mask = masking.get("attn_mask")
    doubled = masking
    if type(mask) is Tensor and mask.is_floating_point():
        hidden = mask <= torch.finfo(mask.dtype).min
        doubled = {"attn_mask": mask.double().masked_fill(hidden, -torch.inf)}
    got = outputs_and_gradients(backend, phi, tensors, grad, masking)
    same = outputs_and_gradients("reference", phi, tensors, grad, masking)
    exact = outputs_and_gradients("reference", phi, [x.double() for x in tensors], grad.double(), doubled)
    for x, z in zip(got, exact, strict=True):
        assert x.dtype == dtype
        assert x.shape == z.shape
    return torch.stack(
        [
            torch.stack([(approximation.double() - z).square().sum() for approximation in (x, y, z.to(dtype))])
            for x, y, z in zip(got, same, exact, strict=True)
        ]
    )


def check(backend: str, phi: str, draw, draws: int = 1) -> None:
    """draw() makes tensors and a mask. Short sequences are drawn several times: a norm of few roundings is luck."""
    errors = sum(squared_errors(backend, phi, *draw()) for _ in range(draws)).sqrt()
    for name, (error, reference, rounding) in zip(["out", "query", "key", "value", "mask"], errors, strict=False):
        # One rounding of the exact result to the dtype is nobody's fault.
        assert error <= 2 * reference + rounding, f"{name}: {error:.3e}, reference {reference:.3e}, {rounding:.3e}"


def cases():
    """Every activation × mask × dtype × layout, with the sizes dealt out in turn."""
    sizes = itertools.cycle(itertools.product(LENGTHS, DIMENSIONS))
    for number, combination in enumerate(itertools.product(ACTIVATIONS, MASKS, DTYPES, LAYOUTS)):
        length, dim = next(sizes)
        yield pytest.param(*combination, length, dim, id=f"{'-'.join(map(str, combination))}-{length}x{dim}-{number}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("activation", "mask", "dtype", "layout", "length", "dim"), list(cases()))
def test_error_is_at_most_twice_the_references(backend, activation, mask, dtype, layout, length, dim):
    batch, heads = (1, 1) if length > 500 else (2, 3)

    def draw():
        tensors = [make(batch, heads, length, dim, layout, dtype, 1.0) for _ in range(3)]
        return tensors, make_mask(mask, batch, heads, length, length, dtype)

    check(backend, f"{activation}/L", draw, draws=1 if length > 7 else 20 if dtype == torch.float32 else 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "sigmoid"])
def test_on_every_instruction_set(backend, activation, mask, dtype, instruction_set):
    def draw():
        return [make(2, 3, 70, 59, "packed", dtype, 1.0) for _ in range(3)], make_mask(mask, 2, 3, 70, 70, dtype)

    check(backend, f"{activation}/L", draw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_scores(backend, activation, dtype, instruction_set):
    """Scores up to about ±50, where an exponential overflows or a tail vanishes."""

    def draw():
        query, key = (make(1, 2, 97, 64, "contiguous", dtype, 4.0) for _ in range(2))
        return [query, key, make(1, 2, 97, 64, "contiguous", dtype, 1.0)], {}

    check(backend, activation, draw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "value_dim"), [(5, 300, 24, 64), (300, 5, 64, 24), (1, 700, 256, 7)]
)
@pytest.mark.parametrize("mask", ["none", "causal", "lower right", "padding", "bias"])
def test_cross_attention_and_value_dimension(backend, queries, keys, dim, value_dim, mask, dtype):
    def draw():
        query = make(2, 4, queries, dim, "packed", dtype, 1.0)
        key, value = make(2, 4, keys, dim, "packed", dtype, 1.0), make(2, 4, keys, value_dim, "contiguous", dtype, 1.0)
        return [query, key, value], make_mask(mask, 2, 4, queries, keys, dtype)

    check(backend, "relu/L^0.5", draw, draws=4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "phi",
    [
        *("sigmoid(x-log L)", "relu(x-0.25)/L", "1.5*softplus/L^0.5, L=keys", "silu/L, L=64"),
        *("relu(x-sqrt(2 log L))", "relu2(x-0.5*sqrt(2 log L))/L"),
    ],
)
@pytest.mark.parametrize("mask", MASKS)
def test_every_part_of_phi(backend, phi, mask):
    def draw():
        tensors = [make(2, 2, 60, 32, "contiguous", torch.float32, 1.0) for _ in range(3)]
        return tensors, make_mask(mask, 2, 2, 60, 60, torch.float32)

    check(backend, phi, draw)
