"""ReLUFormer's penalties against their formulas in float64, and where logarithms would break."""

import math

import numpy as np
import pytest
import torch
from precision import assert_precise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nomax
from nomax import Rows
from nomax.nn import RELUFORMER, Attention, Penalties, penalties


def formula(weights: Tensor, seen: Tensor, margin: float = 0.7, normalized: bool = False) -> tuple[float, ...]:
    """The three means from the weights themselves, row by row."""
    sums, entropies, sizes = [], [], []
    weights, seen = weights.double().numpy(), seen.expand(weights.shape).numpy()
    for row, visible in zip(weights.reshape(-1, weights.shape[-1]), seen.reshape(-1, seen.shape[-1]), strict=True):
        if visible.any():
            sums.append(abs(math.log(row.sum())))
            s = row[row > 0] / (row.sum() if normalized else 1)
            entropies.append(max(-(s * np.log(s)).sum() - margin * math.log(visible.sum()), 0))
            sizes.append(np.abs(row).sum())
    return float(np.mean(sums)), float(np.mean(entropies)), float(np.mean(sizes))


def some_seen(batch: int, length: int) -> Tensor:
    seen = torch.rand(batch, 1, length, length) < 0.7
    seen[..., 0] = True
    seen[0, :, 1] = False  # one query that sees nothing
    return seen


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("phi", "margin"), [(RELUFORMER, 0.7), ("softplus/L", 0.5), ("softmax", 0.9), ("entmax15", 0.2)]
)
def test_penalties_are_their_formulas(phi: str, margin: float, normalized: bool) -> None:
    module, x, seen = Attention(16, 2, phi=phi), torch.randn(2, 13, 16), some_seen(2, 13)
    with torch.no_grad():
        module.qkv.bias[:32] = 0.7  # of queries and keys, so that no row of ReLU's is all zero
        _, rows = module(x, attn_mask=seen, return_rows=True)
        found = penalties(rows, module.visible(x, attn_mask=seen), margin, normalized=normalized)
        normalisation, entropy, size = formula(module.weights(x, attn_mask=seen), seen, margin, normalized)
    assert isinstance(found, Penalties)
    assert found.normalisation.shape == found.entropy.shape == found.memory_l1.shape == ()
    # A score has 16 products, a row 13 keys, and a logarithm follows: within a hundred roundings of float32.
    roundings = 100 * torch.finfo(torch.float32).eps
    assert float(found.normalisation) == pytest.approx(normalisation, rel=roundings, abs=roundings)
    assert float(found.entropy) == pytest.approx(entropy, rel=roundings, abs=roundings)
    assert float(found.l1) == pytest.approx(size, rel=roundings)


def test_the_literal_entropy_is_the_default_and_differs_from_the_normalized_one() -> None:
    rows = Rows(torch.tensor([2.0]), torch.tensor([-(2 * math.log(0.5))]))  # four weights of ½
    visible = torch.tensor([4])
    literal, normalized = penalties(rows, visible).entropy, penalties(rows, visible, normalized=True).entropy
    assert float(literal) == pytest.approx(2 * math.log(2) - 0.7 * math.log(4))
    assert float(normalized) == pytest.approx(0.3 * math.log(4))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_visible_counts_the_keys_that_forward_shows(cross: bool, is_causal: bool) -> None:
    module = Attention(16, 2, context_dim=6 if cross else None)
    x, context = torch.randn(3, 4, 16), torch.randn(3, 5, 6) if cross else None
    keys = 5 if cross else 4
    found = module.visible(x, context, is_causal=is_causal)
    want = torch.arange(1, 5) if is_causal else torch.full((4,), keys)
    assert torch.equal(found.expand(3, 2, 4), want.expand(3, 2, 4))
    mask = torch.rand(3, 1, 1, keys) < 0.5
    assert torch.equal(module.visible(x, context, attn_mask=mask).expand(3, 2, 4), mask.sum(-1).expand(3, 2, 4))


def test_rows_without_a_visible_key_do_not_count_and_a_batch_of_them_is_zero() -> None:
    sums, entropy = torch.tensor([math.e, 0.0, 1.0]), torch.tensor([0.5, 0.0, 2.0])
    found = penalties(Rows(sums, entropy), torch.tensor([1, 0, 1]))
    assert float(found.normalisation) == pytest.approx(0.5)
    assert float(found.entropy) == pytest.approx(1.25)
    assert float(found.l1) == pytest.approx((math.e + 1) / 2)
    nothing = penalties(Rows(torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(1, 3))
    assert [float(x) for x in nothing] == [0, 0, 0, 0]


def test_the_logarithm_goes_on_as_a_tangent_below_a_small_sum() -> None:
    sums = torch.tensor([1e-3, 1e-4, 5e-5, 0.0, -1e-4], dtype=torch.float64, requires_grad=True)
    values = torch.stack([penalties(Rows(s, s * 0), torch.tensor(3)).normalisation for s in sums])
    log = math.log(1e-4)
    want = torch.tensor([-math.log(1e-3), -log, -log + 0.5, -log + 1, -log + 2], dtype=torch.float64)
    torch.testing.assert_close(values, want)
    values.sum().backward()
    torch.testing.assert_close(sums.grad, torch.tensor([-1e3, -1e4, -1e4, -1e4, -1e4], dtype=torch.float64))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("gain", [1.4, 1e-6, 0.0, -0.5])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_of_zeros_and_gains_that_stray_leave_everything_finite(
    backend: str, gain: float, normalized: bool
) -> None:
    module = Attention(16, 2, phi=RELUFORMER, learned_gain="head", backend=backend)
    assert torch.equal(module.gain, torch.full((2,), math.sqrt(2)))
    with torch.no_grad():
        module.gain[1] = gain
        module.qkv.bias[:16], module.qkv.bias[16:32] = 3.0, -3.0  # most scores are negative: rows of zeros
    x, seen = 0.3 * torch.randn(2, 5, 16, requires_grad=True), some_seen(2, 5)
    x.retain_grad()
    _, rows = module(x, attn_mask=seen, return_rows=True)
    dead = (rows.sum[:, 0] == 0) & (seen.sum(-1)[:, 0] > 0)
    assert dead.any()
    found = penalties(rows, module.visible(x, attn_mask=seen), normalized=normalized)
    (found.normalisation + found.entropy).backward()
    for tensor in (*found, x.grad, module.gain.grad, module.qkv.weight.grad):
        assert tensor.isfinite().all()


def test_a_gain_below_zero_is_pulled_back_up() -> None:
    module, x = Attention(16, 2, phi=RELUFORMER, learned_gain="head"), torch.randn(2, 9, 16)
    torch.nn.init.constant_(module.gain, -0.3)
    optimiser = torch.optim.Adam([module.gain], lr=0.05)
    for _ in range(40):
        _, rows = module(x, return_rows=True)
        optimiser.zero_grad()
        penalties(rows, module.visible(x)).normalisation.backward()
        optimiser.step()
    assert (module.gain > 0).all()


@pytest.mark.parametrize(
    ("phi", "backend"),
    [
        *((phi, backend) for phi in (RELUFORMER, "softplus/L^0.5") for backend in ("cpu", "reference")),
        *((phi, None) for phi in ("softmax", "sparsemax", "entmax15")),
    ],
)
def test_gradients_through_rows_are_those_of_the_weights(phi: str, backend: str | None) -> None:
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8)
    unit = torch.eye(6).expand(1, 2, 6, 6)
    visible = torch.arange(1, 6)

    def gradients(dtype: torch.dtype, through_rows: bool) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (query, key)]
        own = backend if dtype == torch.float32 else None
        weights, rows = nomax.attention(*leaves, unit.to(dtype), is_causal=True, phi=phi, backend=own, return_rows=True)
        if not through_rows:
            positive = torch.where(weights > 0, weights, 1)
            rows = Rows(weights.sum(-1), -(positive * positive.log()).sum(-1))
        found = penalties(rows, visible, 0.3)
        return torch.autograd.grad(found.normalisation + 2 * found.entropy, leaves)

    gradients_of_rows, plain = (gradients(torch.float32, through_rows) for through_rows in (True, False))
    for got, usual, want in zip(gradients_of_rows, plain, gradients(torch.float64, False), strict=True):
        assert_precise(got, usual, want)


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_matrix_of_all_pairs_is_ever_made() -> None:
    length = 1024
    module, x = Attention(16, 2, phi=RELUFORMER, learned_gain="head"), torch.randn(1, length, 16)
    with Largest() as largest:
        out, rows = module(x, is_causal=True, return_rows=True)
        found = penalties(rows, module.visible(x, is_causal=True))
        (out.sum() + found.normalisation + found.entropy).backward()
    assert largest.numel <= 4 * 16 * length < length**2 / 8


def test_reluformers_phi_is_relu_over_the_root_of_half_the_length() -> None:
    query, key = torch.randn(2, 1, 1, 7, 4).unbind(0)
    weights = nomax.attention(query, key, torch.eye(7).expand(1, 1, 7, 7), phi=RELUFORMER)
    plain, exact = ((q @ k.mT / 2).clamp(min=0) for q, k in ((query, key), (query.double(), key.double())))
    assert_precise(weights, plain / math.sqrt(7 / 2), exact / math.sqrt(7 / 2))
