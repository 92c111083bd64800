"""What moves the weights: loss, schedule, weight decay, clipping and averaging, each against a closed form."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from precision import assert_rounded
from torch import nn

from nomax.models import ViT
from nomax.train import optimiser
from nomax.train.config import LoopConfig
from nomax.train.vision import task as losses

PAPER = LoopConfig(steps=90_000)


@pytest.mark.parametrize(
    ("step", "share"),
    [(0, 0.0), (5_000, 0.5), (10_000, 1.0), (50_000, 0.5), (30_000, 0.5 + 0.25 * math.sqrt(2)), (90_000, 0.0)],
)
def test_the_schedule_is_a_linear_warm_up_and_then_a_cosine_to_zero(step: int, share: float) -> None:
    assert optimiser.schedule(step, 90_000, 10_000) == pytest.approx(share, abs=2**-50)


def test_without_warm_up_the_schedule_starts_at_its_top() -> None:
    assert [optimiser.schedule(step, 4, 0) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("kernel", [True, False])
def test_an_update_is_big_visions_chain(kernel: bool) -> None:
    """clip → adam → ·1e-3 → + 1e-4·w (kernels only) → ·schedule → ·(-1), by hand in float64."""
    rng = np.random.default_rng(0)
    steps, warmup = 40, 5
    layer = nn.Linear(3, 2, dtype=torch.float64)
    ours = layer.weight if kernel else layer.bias
    other = layer.bias if kernel else layer.weight
    w = ours.detach().numpy().copy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    config = replace(PAPER, steps=steps, warmup=warmup)
    adam = optimiser.make(layer, config)
    for step in range(steps):
        gradient = rng.normal(size=w.shape) * (3.0 if step % 2 else 0.1)
        ours.grad, other.grad = torch.from_numpy(gradient.copy()), torch.zeros_like(other)
        for group in adam.param_groups:
            group["lr"] = config.lr * optimiser.schedule(step, steps, warmup)
        norm = float(optimiser.clip(layer, 1.0))
        adam.step()

        assert norm == pytest.approx(np.linalg.norm(gradient))
        gradient = gradient / max(1.0, np.linalg.norm(gradient) + 1e-6)  # as torch clips
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        direction = (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        share = 0.5 * (1 + np.cos(np.pi * max(0, (step - warmup) / (steps - warmup)))) * min(1, step / warmup)
        w = w - share * (1e-3 * direction + (1e-4 * w if kernel else 0))
    np.testing.assert_allclose(ours.detach().numpy(), w, rtol=20 * steps * 2**-52)  # as many roundings


def test_weights_of_linear_and_convolutional_layers_decay_and_nothing_else() -> None:
    model = ViT(
        "mu/4",
        num_classes=3,
        image_size=8,
        qk_norm=True,
        gate="silu",
        pool="tok",
        rep_size=True,
        learned_gain="head",
        learned_alpha="layer",
    )
    decayed, others = optimiser.make(model, PAPER).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    kernels = {names[parameter] for parameter in decayed["params"]}
    rest = {names[parameter] for parameter in others["params"]}
    # A kernel has two dimensions or more and is neither the positions nor the class token, which begin with a 1.
    assert kernels == {name for name, p in model.named_parameters() if p.dim() > 1 and p.shape[0] != 1}
    assert kernels | rest == set(names.values())
    assert not kernels & rest
    assert {"posemb", "class_token"} <= rest
    assert {"embedding.weight", "head.weight", "pre_logits.weight"} <= kernels


@pytest.mark.parametrize("size", [3.0, 0.3])
def test_gradients_are_scaled_only_when_their_common_norm_is_too_large(size: float) -> None:
    layer = nn.Linear(3, 2, dtype=torch.float64)
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = torch.cat([parameter.grad.flatten() for parameter in layer.parameters()])
    for parameter in layer.parameters():
        parameter.grad *= size / before.norm()
    assert float(optimiser.clip(layer, 1.0)) == pytest.approx(size)
    wanted = before / before.norm() * (size / max(1.0, size + 1e-6))  # as torch clips
    after = torch.cat([parameter.grad.flatten() for parameter in layer.parameters()])
    torch.testing.assert_close(after, wanted, rtol=2**-49, atol=0)


def test_a_limit_of_zero_never_clips() -> None:
    layer = nn.Linear(3, 2)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    optimiser.clip(layer, 0.0)
    assert (layer.weight.grad == 1e3).all()


def test_the_average_of_the_weights_has_its_closed_form() -> None:
    mean, model = nn.Linear(1, 1, dtype=torch.float64), nn.Linear(1, 1, dtype=torch.float64)
    start, weights = mean.weight.item(), torch.randn(9, dtype=torch.float64)
    for weight in weights:
        with torch.no_grad():
            model.weight.fill_(weight)
        optimiser.average(mean, model, 0.9)
    expected = 0.9**9 * start + sum(0.1 * 0.9 ** (8 - i) * float(weight) for i, weight in enumerate(weights))
    assert mean.weight.item() == pytest.approx(expected, abs=30 * 2**-52 * float(weights.abs().max()))  # 30 roundings


@pytest.mark.parametrize("mixed", [False, True])
def test_the_sigmoid_loss_is_the_sum_over_classes_of_binary_cross_entropies(mixed: bool) -> None:
    logits, labels = torch.randn(5, 7) * 4, torch.tensor([0, 6, 3, 3, 1])
    shares = F.one_hot(labels, 7).double()
    if mixed:
        shares = 0.7 * shares + 0.3 * shares.roll(1, 0)
    result = losses.sigmoid(logits, shares.float() if mixed else labels)
    expected = F.binary_cross_entropy_with_logits(logits.double(), shares, reduction="sum") / 5
    assert_rounded(result.mean(), expected, 8)
    by_hand = -(shares * logits.double().sigmoid().log() + (1 - shares) * (-logits.double()).sigmoid().log()).sum(-1)
    assert_rounded(result, by_hand, 8)


def test_losses_are_computed_in_float32_whatever_the_logits_are() -> None:
    logits, labels = torch.randn(4, 1000).bfloat16(), torch.arange(4)
    for loss in losses.LOSSES.values():
        result = loss(logits, labels)
        assert result.dtype == torch.float32
        assert_rounded(result, loss(logits.double(), labels), 80)  # sums of 1,000 terms


def test_softmax_loss_takes_labels_and_shares_alike() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(losses.softmax(logits, labels), losses.softmax(logits, F.one_hot(labels, 3).float()))
