"""The vision transformer: the paper's sizes, big_vision's details, any image, and its citizenship of torch."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from precision import assert_precise, doubled, five_errors
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nomax import _compat
from nomax.evaluate.attention_weights import attention_weights
from nomax.models import ViT, ViTConfig
from nomax.ops import cpu

# variant, width, depth, MLP, tokens of 224 pixels with gap, encoder GMAC per image, and what a gate adds
PAPER = [
    ("S/32", 384, 12, 1536, 49, "1.06", "8.2%"),
    ("S/16", 384, 12, 1536, 196, "4.52", "7.7%"),
    ("S/8", 384, 12, 1536, 784, "22.3", "6.2%"),
    ("B/32", 768, 12, 3072, 49, "4.21", "8.2%"),
    ("B/16", 768, 12, 3072, 196, "17.4", "8.0%"),
    ("L/16", 1024, 24, 4096, 196, "61.1", "8.1%"),
]


def on_meta(variant: str, **settings: object) -> ViT:
    with torch.device("meta"):
        return ViT(variant, **settings)


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def images(model: ViT, batch: int = 2) -> Tensor:
    return torch.rand(batch, model.config.channels, *model.config.image) * 2 - 1


def randomised(model: ViT) -> ViT:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.02, std=0.2)
    return model


@pytest.mark.parametrize(("variant", "width", "depth", "mlp", "tokens", "gmacs", "gate"), PAPER)
def test_the_papers_models_have_its_multiply_adds_and_parameters(
    variant: str, width: int, depth: int, mlp: int, tokens: int, gmacs: str, gate: str
) -> None:
    model = on_meta(variant)
    assert f"{model.macs() / 1e9:.3g}" == gmacs
    assert f"{on_meta(variant, gate='silu').macs() / model.macs() - 1:.1%}" == gate

    patch = int(variant.split("/")[1])
    embedding = 3 * patch * patch * width + width + tokens * width
    block = 4 * (width * width + width) + 2 * width * mlp + mlp + width + 4 * width
    whole = embedding + depth * block + 2 * width + 1000 * (width + 1)
    assert parameters(model) == whole
    assert parameters(on_meta(variant, pool="tok")) == whole + width
    assert parameters(on_meta(variant, pool="tok", rep_size=True)) == whole + width + width * (width + 1)
    assert parameters(on_meta(variant, gate="silu")) == whole + depth * width * (width + 1)
    assert parameters(on_meta(variant, qk_norm=True)) == whole + depth * 2 * 64
    assert parameters(on_meta(variant, posemb="sincos2d")) == whole - tokens * width
    assert on_meta(variant, pool="tok").config.tokens == tokens + 1


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("Ti/16", "vit_tiny_patch16_224"),
        ("S/16", "vit_small_patch16_224"),
        ("B/32", "vit_base_patch32_224"),
        ("L/16", "vit_large_patch16_224"),
        ("H/14", "vit_huge_patch14_224"),
        ("g/14", "vit_giant_patch14_224"),
        ("G/14", "vit_gigantic_patch14_224"),
    ],
)
def test_sizes_are_those_of_timm(variant: str, name: str) -> None:
    timm = _compat.timm()
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=1000)
    # timm has a position for the class token, too, where ours (and big_vision's) has none.
    assert parameters(on_meta(variant, pool="tok")) == parameters(theirs) - theirs.embed_dim
    assert on_meta(variant).blocks[0].attention.heads == theirs.blocks[0].attn.num_heads


@pytest.mark.parametrize("settings", [{}, {"gate": "silu"}, {"pool": "tok", "phi": "gelu/L"}])
def test_macs_are_what_torch_counts(settings: dict[str, object]) -> None:
    model = ViT("mu/4", image_size=(8, 16), num_classes=5, **settings)
    cpu.load()  # a counter knows the operators that there are when it is made
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images(model, batch=3))
    width, patches = 32, 2 * 4
    outside = patches * 3 * 4 * 4 * width + width * 5
    assert counter.get_total_flops() == 2 * 3 * (model.macs() + outside)


def test_every_intermediate_has_big_visions_name() -> None:
    model = randomised(ViT("Ti/16", image_size=32, num_classes=7, pool="tok", rep_size=True))
    x = images(model)
    logits, named = model(x, intermediates=True)
    blocks = [f"encoder/block{i:02d}/{part}" for i in range(12) for part in ("sa", "+sa", "mlp", "+mlp")]
    names = ["stem", "with_posemb", *blocks, "encoder/pre_ln", "encoded", "head_input"]
    names += ["pre_logits_2d", "pre_logits", "logits_2d", "logits"]
    assert sorted(named) == sorted(names)
    assert torch.equal(named["logits"], logits)
    assert torch.equal(logits, model(x))
    assert torch.equal(named["pre_logits"], model.features(x))
    assert list(named["stem"].shape) == [2, 2, 2, 192]
    assert list(named["with_posemb"].shape) == [2, 4, 192]
    assert list(named["encoded"].shape) == [2, 5, 192]
    before = named["encoder/block03/+mlp"]
    assert torch.equal(named["encoder/block04/+sa"], before + named["encoder/block04/sa"])
    assert torch.equal(named["head_input"], named["encoded"][:, 0])
    assert torch.equal(named["encoder/pre_ln"], named["encoder/block11/+mlp"])
    assert list(named["pre_logits_2d"].shape) == [2, 2, 2, 192]
    for patch in range(4):  # those in 2d are what the head makes of each patch
        one = torch.tanh(model.pre_logits(named["encoded"][:, 1 + patch]))
        torch.testing.assert_close(named["pre_logits_2d"][:, patch // 2, patch % 2], one)
        torch.testing.assert_close(named["logits_2d"][:, patch // 2, patch % 2], model.head(one))


def test_positions_are_added_to_patches_only_and_the_class_token_comes_first() -> None:
    model = randomised(ViT("mu/4", image_size=8, pool="tok", num_classes=0))
    x = images(model)
    _, named = model(x, intermediates=True)
    torch.testing.assert_close(named["with_posemb"], named["stem"].flatten(1, 2) + model.posemb)
    tokens = torch.cat([model.class_token.expand(2, 1, 32), named["with_posemb"]], 1)
    torch.testing.assert_close(named["encoder/block00/+sa"], tokens + named["encoder/block00/sa"])
    assert model.posemb.shape == (1, 4, 32)


def test_gap_is_the_mean_of_the_normed_tokens_and_norm_pooled_the_norm_of_their_mean() -> None:
    model = randomised(ViT("mu/4", image_size=8, num_classes=0))
    x = images(model)
    out, named = model(x, intermediates=True)
    last = named["encoder/block00/+mlp"]
    torch.testing.assert_close(out, model.norm(last).mean(1))
    other = ViT.from_config(replace(model.config, norm="pooled"))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model.norm(last.mean(1)))
    torch.testing.assert_close(other(x, intermediates=True)[1]["pre_logits_2d"], model.norm(last).unflatten(1, (2, 2)))


def test_the_first_patch_can_be_pooled_as_big_vision_does() -> None:
    model = randomised(ViT("mu/4", image_size=8, num_classes=0, pool="0"))
    x = images(model)
    out, named = model(x, intermediates=True)
    assert model.class_token is None
    assert torch.equal(out, named["encoded"][:, 0])


def test_a_model_starts_as_big_visions_does() -> None:
    model = ViT("S/16", image_size=64, num_classes=9, head_bias=-6.9, pool="tok", rep_size=True)
    block = model.blocks[3]
    assert not model.head.weight.any()
    assert torch.equal(model.head.bias, torch.full((9,), -6.9))
    assert not model.class_token.any()
    assert float(model.posemb.detach().std()) == pytest.approx(
        1 / math.sqrt(384), rel=five_errors(model.posemb.numel())
    )
    for kernel, fan_in in ((model.embedding.weight, 3 * 16 * 16), (model.pre_logits.weight, 384)):
        assert float(kernel.detach().std()) == pytest.approx(1 / math.sqrt(fan_in), rel=five_errors(kernel.numel()))
        assert kernel.abs().max() <= 2 / 0.87962566 / math.sqrt(fan_in)
    for kernel in (block.mlp.up.weight, block.mlp.down.weight):
        bound = math.sqrt(6 / (384 + 1536))
        assert 0.99 * bound < kernel.abs().max() <= bound
    for bias in (block.mlp.up.bias, block.mlp.down.bias):
        assert float(bias.detach().std()) == pytest.approx(1e-6, rel=five_errors(bias.numel()))
    for bias in (model.embedding.bias, model.pre_logits.bias, block.attention.qkv.bias, block.attention.out.bias):
        assert not bias.any()
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-6}
    head = ViT("mu/8", image_size=8, head_zero=False).head.weight.detach()
    assert float(head.std()) == pytest.approx(1 / math.sqrt(32), rel=five_errors(head.numel()))
    assert ViT("mu/8", image_size=8, rep_size=6, num_classes=2).head.weight.shape == (2, 6)


def test_sincos_positions_are_big_visions_formula() -> None:
    model = ViT("mu/2", image_size=(6, 10), posemb="sincos2d")
    assert "posemb" not in model.state_dict()
    for position, row in enumerate(model.posemb[0]):
        y, x = divmod(position, 5)
        omega = [1 / 10_000 ** (i / 7) for i in range(8)]
        want = [f(place * o) for place in (x, y) for f in (math.sin, math.cos) for o in omega]
        torch.testing.assert_close(row, torch.tensor(want))


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_the_mlp_has_the_gelu_asked_for(gelu: str) -> None:
    mlp = ViT("mu/4", image_size=8, gelu=gelu).blocks[0].mlp
    x = torch.randn(5, 32)
    y = mlp.up(x).double()
    inner = (
        torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)) if gelu == "tanh" else torch.erf(y / math.sqrt(2))
    )
    want = (0.5 * y * (1 + inner)).float()
    torch.testing.assert_close(mlp(x), mlp.down(want))


def test_a_resized_model_has_resampled_positions_and_counts_its_new_keys() -> None:
    layers = _compat.timm().layers
    model = randomised(ViT("mu/4", image_size=(16, 24), pool="tok", num_classes=5, learned_alpha="layer")).eval()
    larger = model.resized((32, 20))
    want = layers.resample_abs_pos_embed(model.posemb, (8, 5), (4, 6), num_prefix_tokens=0)
    torch.testing.assert_close(larger.posemb, want)
    assert larger.config == replace(model.config, image_size=(32, 20))
    assert not larger.training
    for name, tensor in model.state_dict().items():
        assert name == "posemb" or torch.equal(tensor, larger.state_dict()[name])
    x = torch.randn(1, 41, 32)
    attention = larger.blocks[0].attention
    torch.testing.assert_close(
        attention.weights(x, attn_mask=torch.arange(41) < 25)[..., :25],
        attention.weights(x)[..., :25] * (41 / 25) ** attention.alpha.detach(),
    )
    assert larger(images(larger)).shape == (2, 5)
    back = model.resized((16, 24))
    same = images(model)
    torch.testing.assert_close(back(same), model(same))
    sincos = ViT("mu/4", image_size=8, posemb="sincos2d").resized(12)
    assert torch.equal(sincos.posemb, ViT("mu/4", image_size=12, posemb="sincos2d").posemb)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [12, (8, 20)])
def test_any_image_size_and_channel_count(size: int | tuple[int, int], channels: int) -> None:
    model = ViT("mu/4", image_size=size, channels=channels, num_classes=6)
    assert model(images(model, batch=3)).shape == (3, 6)
    assert ViT("mu/4", image_size=size, num_classes=0)(torch.zeros(3, 3, *model.config.image)).shape == (3, 32)


def test_phi_gate_and_learned_scales_reach_every_block() -> None:
    settings = {
        "phi": "1.5*relu/L^0.5",
        "gate": "sigmoid",
        "qk_norm": True,
        "learned_gain": "head",
        "learned_alpha": "layer",
    }
    model = randomised(ViT("Ti/8", image_size=16, num_classes=3, **settings))
    for block in model.blocks:
        assert str(block.attention.phi) == "1.5*relu/L^0.5"
    model(images(model)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_dropout_is_for_training_only() -> None:
    model = randomised(ViT("mu/4", image_size=8, dropout=0.3, num_classes=4))
    x = images(model)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize("settings", [{}, {"pool": "tok", "qk_norm": True, "gate": "silu", "learned_alpha": "head"}])
def test_a_compiled_model_is_the_same(settings: dict[str, object]) -> None:
    model = randomised(ViT("mu/4", image_size=16, num_classes=5, **settings))
    x = images(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    for out in (model(x), compiled(x)):
        out.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    exact = doubled(model)
    model(x).square().sum().backward()
    exact(x.double()).square().sum().backward()
    for twice, parameter, wide in zip(grads, model.parameters(), exact.parameters(), strict=True):
        assert_precise(twice, 2 * parameter.grad, 2 * wide.grad)


def test_penalties_are_means_over_images_heads_and_blocks() -> None:
    model = randomised(ViT("pico/4", image_size=16, num_classes=5, phi="softplus/L", pool="tok")).double()
    x = images(model, 3).double()
    logits, whole = model(x, penalties=True)
    _, each = model(x, penalties="sequences")
    torch.testing.assert_close(logits, model(x))
    weights = [w.weights for image in x for w in attention_weights(model, image)]
    size = torch.stack([w.sum(-1).mean() for w in weights]).view(3, model.config.size.depth)
    torch.testing.assert_close(each.l1, size.mean(1))
    torch.testing.assert_close(whole.l1, size.mean())
    entropy = torch.stack([(torch.special.entr(w).sum(-1) - 0.7 * math.log(17)).clamp(min=0).mean() for w in weights])
    torch.testing.assert_close(whole.entropy, entropy.mean())
    torch.testing.assert_close(whole.normalisation, torch.stack([w.sum(-1).log().abs().mean() for w in weights]).mean())
    whole.l1.backward()
    assert all(block.attention.qkv.weight.grad.any() for block in model.blocks)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, penalties=True)[1], whole)
    with pytest.raises(ValueError, match="call the model twice"):
        model(x, intermediates=True, penalties=True)


def test_autocast_to_bfloat16_trains_and_is_right_to_rounding() -> None:
    model = ViT("mu/4", image_size=16, num_classes=5, qk_norm=True, gate="silu", head_zero=False)
    x = images(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    want = model(x)
    # A number has 8 bits, so that a rounding is 2^-9; those of one block add up to less than sixteen of them.
    assert (out - want).abs().max() < 16 * 2**-9 * want.abs().max()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_config_survives_json_and_makes_the_same_model() -> None:
    config = ViTConfig("B/32", image_size=(64, 96), phi=" 2 * relu / L^0.50", rep_size=True, gate="silu", pool="tok")
    assert config.phi == "2*relu/L^0.5"
    assert ViTConfig(**json.loads(json.dumps(asdict(config)))) == config
    assert ViTConfig(image_size=(224, 224)) == ViTConfig(image_size=224)
    assert ViT.from_config(ViTConfig("mu/8", image_size=8)).config == ViTConfig("mu/8", image_size=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "s/16"}, "variant='s/16' is unknown; did you mean 'S/16'?"),
        ({"variant": "S16"}, "did you mean 'S/16'?"),
        ({"variant": "ti/4"}, "did you mean 'Ti/4'?"),
        ({"variant": "SO400M/14"}, "did you mean 'So400m/14'?"),
        ({"variant": "S"}, "Write size/patch, such as 'S/16'"),
        ({"variant": "S/0"}, "variant='S/0' is unknown"),
        ({"variant": 16}, "variant=16 must be a string"),
        ({"image_size": 225}, "image_size=225 must be a multiple of the patch, 16 in 'S/16'"),
        ({"image_size": (224, 8)}, r"image_size=\(224, 8\) must be a multiple"),
        ({"image_size": (1, 2, 3)}, r"image_size=\(1, 2, 3\) must be an integer or \(an integer, an integer\)"),
        ({"image_size": "224"}, "image_size='224' must be an integer"),
        ({"pool": "map"}, "pool='map' must be 'gap' or 'tok' or '0'"),
        ({"posemb": "rope"}, "posemb='rope' must be 'learn' or 'sincos2d'"),
        ({"gate": "relu"}, "gate='relu' must be 'silu' or 'sigmoid' or 'identity' or None"),
        ({"phi": "relu/l"}, "did you mean 'relu/L'"),
        ({"num_classes": -1}, "num_classes=-1 must be at least 0"),
        ({"num_classes": True}, "num_classes=True must be an integer"),
        ({"qk_norm": "no"}, "qk_norm='no' must be True or False"),
        ({"dropout": 1.5}, "dropout=1.5 must be a probability"),
        ({"pool": "tok", "class_token": False}, "class_token=False"),
    ],
)
def test_a_slip_in_the_config_is_answered_in_words(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        ViTConfig(**settings)


@pytest.mark.parametrize("shape", [(2, 1, 16, 16), (2, 3, 16, 20), (3, 16, 16)])
def test_images_that_do_not_fit_are_named_with_those_that_do(shape: tuple[int, ...]) -> None:
    model = ViT("mu/4", image_size=16)
    with pytest.raises(ValueError, match=rf"images must be \[batch, 3, 16, 16\].*got \[{', '.join(map(str, shape))}\]"):
        model(torch.zeros(shape))
