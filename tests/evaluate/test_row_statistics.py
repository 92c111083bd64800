"""Row statistics and attention maps, against cases whose weights are known."""

import math

import pytest
import torch
from precision import EPSILON
from torch import Tensor

from nomax import evaluate
from nomax.evaluate import attention_maps, row_statistics
from nomax.models import ViT


def model(phi: str = "relu/L", **settings: object) -> ViT:
    torch.manual_seed(0)
    return ViT("mu/8", **{"num_classes": 0, "image_size": 32, "phi": phi, "qk_norm": True, **settings}).eval()


def images(number: int = 3) -> list[Tensor]:
    return list(torch.rand(number, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1)


def test_softmax_rows_sum_to_one_and_have_no_zeros() -> None:
    # The weights are float32: a sum of 16 of them is within 8 roundings, and their mean 16 times nearer.
    for row in row_statistics(model("softmax"), images()):
        assert row.length == 16
        assert row.row_sum == pytest.approx(1, abs=8 * EPSILON)
        assert row.mean_weight == pytest.approx(1 / 16, abs=EPSILON / 2)
        assert row.row_sum_sd < 8 * EPSILON
        assert row.zeros == row.empty == 0
        assert 1 <= row.effective_keys <= 16
        assert math.log(row.effective_keys) <= row.entropy <= math.log(16)  # as Rényi's entropies are ordered


def test_statistics_are_those_of_the_weights_themselves() -> None:
    """By plain loops over every row of every image."""
    vit = model("relu/L", posemb="sincos2d")
    statistics = row_statistics(vit, images())
    weights: list[Tensor] = []
    block = vit.blocks[0]
    hook = block.attention.register_forward_pre_hook(lambda module, given: weights.append(module.weights(given[0])))  # type: ignore[union-attr]
    with torch.no_grad():
        for image in images():
            vit(image[None])
    hook.remove()
    # The same float32 weights, summed in float64 on both sides: 1e-9 is far above its roundings, and below a mistake.
    a = torch.cat(weights).double()
    for row in statistics:
        of_head = a[:, row.head].flatten(0, 1)
        sums = [float(line.sum()) for line in of_head]
        mean = sum(sums) / len(sums)
        alive = [line for line in of_head if float(line.sum()) > 0]
        assert row.row_sum == pytest.approx(mean, rel=1e-9)
        assert row.mean_weight == pytest.approx(mean / 16, rel=1e-9)
        assert row.row_sum_sd == pytest.approx(math.sqrt(sum((s - mean) ** 2 for s in sums) / len(sums)), rel=1e-9)
        assert row.zeros == pytest.approx(float((of_head == 0).double().mean()))
        assert row.empty == pytest.approx(1 - len(alive) / len(sums))
        entropies = [-sum(float(p) * math.log(p) for p in line / line.sum() if p > 0) for line in alive]
        assert row.entropy == pytest.approx(sum(entropies) / len(alive), rel=1e-9)
        keys = [float(line.sum() ** 2 / line.square().sum()) for line in alive]
        assert row.effective_keys == pytest.approx(sum(keys) / len(alive), rel=1e-9)


def test_a_hand_made_case() -> None:
    """Every query sees each key with the same score 2, so relu/L gives 2/16 to all of them."""
    vit = model("relu/L", qk_norm=False)
    attention = vit.blocks[0].attention
    with torch.no_grad():
        attention.qkv.weight.zero_()  # type: ignore[union-attr]
        attention.qkv.bias.zero_()  # type: ignore[union-attr]
        # Heads are 16 wide: q·k/√16 = 2 with q = k = √8 in one place of each head.
        for head in range(2):
            for part in range(2):
                attention.qkv.bias[part * 32 + head * 16] = math.sqrt(8)  # type: ignore[union-attr]
    for row in row_statistics(vit, images(1)):
        assert row.row_sum == pytest.approx(2)
        assert row.mean_weight == pytest.approx(2 / 16)
        assert row.row_sum_sd == pytest.approx(0, abs=8 * EPSILON)  # the rows are equal but for rounding
        assert row.zeros == 0
        assert row.entropy == pytest.approx(math.log(16))
        assert row.effective_keys == pytest.approx(16)
    with torch.no_grad():
        attention.qkv.bias[32 : 32 + 32] *= -1  # type: ignore[union-attr]
    for row in row_statistics(vit, images(1)):
        assert row.row_sum == 0
        assert row.zeros == row.empty == 1
        assert math.isnan(row.entropy)
        assert math.isnan(row.effective_keys)


def test_at_initialisation_relu_gives_half_its_weights_zero_and_the_others_size_1_over_l() -> None:
    """With qk-norm scores are about N(0, 1), for which E relu = 1/√(2π)."""
    torch.manual_seed(0)
    vit = ViT("Ti/4", num_classes=0, image_size=32, phi="relu/L", qk_norm=True).eval()
    statistics = row_statistics(vit, images(2))
    assert {row.layer for row in statistics} == set(range(12))
    assert {row.head for row in statistics} == set(range(3))
    first = [row for row in statistics if row.layer == 0]
    # Scores are only about normal: the patches of an image are alike, and a head has 32 dimensions.
    assert sum(row.zeros for row in first) / 3 == pytest.approx(0.5, abs=0.1)
    assert sum(row.row_sum for row in first) / 3 == pytest.approx(1 / math.sqrt(2 * math.pi), abs=0.15)
    for row in statistics:
        assert 0.05 < row.mean_weight * row.length < 3


@pytest.mark.parametrize("phi", ["gelu/L", "identity/L", "silu/L"])
def test_signed_weights_have_no_entropy_but_effective_keys(phi: str) -> None:
    for row in row_statistics(model(phi), images(2)):
        assert math.isnan(row.entropy)
        assert 1 <= row.effective_keys <= 16


@pytest.mark.parametrize("phi", ["softplus/L", "sigmoid(x-log L)", "relu2/L^2", "relu6/L", "relu(x-0.5*sqrt(2 log L))"])
def test_any_phi_with_weights_above_zero_has_an_entropy(phi: str) -> None:
    for row in row_statistics(model(phi, pool="tok", gate="silu"), images(2)):
        assert row.length == 17
        assert 0 <= row.entropy <= math.log(17) + 1e-9


def test_a_learned_gain_below_zero_leaves_no_entropy() -> None:
    vit = model("relu/L", learned_gain="head")
    with torch.no_grad():
        vit.blocks[0].attention.gain[1] = -1  # type: ignore[union-attr, index]
    first, second = row_statistics(vit, images(1))
    assert not math.isnan(first.entropy)
    assert math.isnan(second.entropy)
    assert second.row_sum < 0


def test_the_model_is_left_as_it_was() -> None:
    vit = model()
    before = vit(images(1)[0][None])
    row_statistics(vit, images(1))
    attention_maps(vit, images(1)[0])
    assert not vit.blocks[0].attention._forward_pre_hooks  # type: ignore[union-attr]
    assert torch.equal(vit(images(1)[0][None]), before)


def test_no_image_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        row_statistics(model(), [])


def test_maps_are_the_weights_of_the_query_over_the_patches() -> None:
    image = images(1)[0]
    for pool, first in (("tok", 1), ("gap", 0), ("0", 0)):
        vit = model("relu/L", pool=pool)
        kept: list[Tensor] = []
        vit.blocks[0].attention.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda module, given, kept=kept: kept.append(module.weights(given[0])[0])
        )
        maps = attention_maps(vit, image)
        assert maps.shape == (1, 2, 4, 4)
        expected = kept[0].mean(1) if pool == "gap" else kept[0][:, 0, first:]
        assert torch.allclose(maps[0].flatten(1), expected)
        patch = attention_maps(vit, image, (2, 1))
        assert torch.allclose(patch[0].flatten(1), kept[0][:, first + 2 * 4 + 1, first:])


def test_maps_keep_the_shape_of_oblong_images() -> None:
    torch.manual_seed(0)
    vit = ViT("mu/8", num_classes=0, image_size=(16, 40)).eval()
    assert attention_maps(vit, torch.zeros(3, 16, 40)).shape == (1, 2, 2, 5)


def test_a_query_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no class token"):
        attention_maps(model(), images(1)[0], "class")
    with pytest.raises(ValueError, match=r"query=\(4, 0\): the image has 4 rows and 4 columns"):
        attention_maps(model(), images(1)[0], (4, 0))


def test_everything_is_reachable_from_the_package() -> None:
    assert set(evaluate.__all__) <= set(dir(evaluate))
