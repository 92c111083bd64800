"""Weights of timm: with softmax, the models compute what they did at home."""

import re
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from precision import assert_precise, doubled

from nomax import _compat, models

Array = NDArray[Any]


def timm_model(name: str = "vit_tiny_patch16_224", **settings: Any) -> Any:
    """A timm model of which every weight is random, also those that start at zero or one."""
    model = _compat.timm().create_model(name, **{"img_size": 48, "num_classes": 11, "depth": 12, **settings}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.01, std=0.1)
    return model


def images(batch: int = 2, size: tuple[int, int] = (48, 48), channels: int = 3) -> torch.Tensor:
    return torch.rand(batch, channels, *size) * 2 - 1


TIMM = {
    "class token": {},
    "small": {"name": "vit_small_patch16_224"},
    "mean, norm after it": {"global_pool": "avg"},
    "mean, norm before it": {"global_pool": "avg", "fc_norm": False},
    "mean without class token": {"global_pool": "avg", "class_token": False},
    "no position for the class token": {"no_embed_class": True},
    "no biases of query, key, value": {"qkv_bias": False},
    "no biases of projections and MLPs": {"proj_bias": False, "init_values": 0.1},
    "no positions": {"pos_embed": "none"},
    "no positions, rectangular, mean": {"pos_embed": "none", "img_size": (32, 64), "global_pool": "avg"},
    "the other GELU": {"act_layer": "gelu_tanh"},
    "GELU by name": {"act_layer": "gelu"},
    "a mean that would take in a class token if there were one": {
        "global_pool": "avg",
        "pool_include_prefix": True,
        "class_token": False,
    },
    "class token, norm after it": {"fc_norm": True},
    "images of any size": {"dynamic_img_size": True},
    "layer scale": {"init_values": 0.1},
    "no head": {"num_classes": 0},
    "one channel, rectangular": {"in_chans": 1, "img_size": (32, 64)},
}


@pytest.mark.parametrize("case", TIMM)
def test_a_timm_model_computes_what_it_did(case: str) -> None:
    theirs = timm_model(**TIMM[case])
    ours = models.from_timm(theirs)
    x = images(size=theirs.patch_embed.img_size, channels=theirs.patch_embed.proj.in_channels)
    with torch.no_grad():
        assert_precise(ours(x), theirs(x), doubled(theirs)(x.double()))
    assert ours.config.phi == "softmax"
    assert ours.config.variant == ("S/16" if case == "small" else "Ti/16")


# Part of a name in timm, and what its model has that no ViT does. All other models of vision_transformer.py convert.
REFUSED = {
    "aimv2_": "SwiGLU instead of Mlp",
    "beit3_": "a norm of the joined heads",
    "test_vit[234]|_reg[14]_": "register tokens",
    "_18x2_": "ParallelThingsBlock instead of Block",
    "_xp_": "ParallelScalingBlock instead of Block",
    "_clip_": "a norm before the first block",
    "_rpn_": "ResPostBlock instead of Block",
    "_siglip_(?!gap)|_map_": "global_pool='map' instead of 'token' or 'avg'",
    "giant_patch14_dinov2": "a gated MLP",
    "intern300m": "no norm after the last block",
    "_distilled_": "a distillation token",
}


@pytest.mark.slow
def test_each_of_timms_vision_transformers_computes_what_it_did_or_is_refused_for_what_it_has() -> None:
    timm = _compat.timm()
    names = [*timm.list_models(module="vision_transformer"), *timm.list_models(module="deit")]
    assert len(names) > 150
    tiny = {"embed_dim": 64, "depth": 4, "num_heads": 2, "mlp_ratio": 4, "patch_size": 16, "img_size": 32}
    x, refused = images(size=(32, 32)), []
    for name in names:
        theirs = timm_model(name, **tiny)
        given = {"pool": "tok" if theirs.global_pool == "token" else "gap"}
        given["gelu"] = "tanh" if "GELUTanh" in str(theirs.blocks) else "exact"
        reasons = [reason for part, reason in REFUSED.items() if re.search(part, name)]
        if reasons:
            with pytest.raises(ValueError, match="this timm model cannot become a ViT: it has ") as refusal:
                models.from_timm(theirs)
            assert all(reason in str(refusal.value) for reason in reasons), name
            if "_rpn_" in name:  # of which the weights tell nothing
                with pytest.warns(UserWarning, match="from_timm assumes: that blocks normalise before"):
                    models.from_timm(theirs.state_dict(), "pico/16", **given)
            else:
                with pytest.raises(ValueError, match="this timm model cannot become a ViT: it has "):
                    models.from_timm(theirs.state_dict(), "pico/16", **given)
            refused.append(name)
            continue
        ours = models.from_timm(theirs)
        with torch.no_grad():
            assert_precise(ours(x), theirs(x), doubled(theirs)(x.double()))
        with pytest.warns(UserWarning, match="from_timm assumes"):
            again = models.from_timm(theirs.state_dict(), "pico/16", **given)
        assert again.config == ours.config
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    if timm.__version__ == "1.0.30":  # of which docs/conversion.md speaks
        assert (len(names) - len(refused), len(refused)) == (71, 102)


def test_a_state_dict_is_enough_with_what_it_does_not_tell() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"pool": "tok", "gelu": "exact"}),
        ({"global_pool": "avg"}, {"pool": "gap", "gelu": "exact"}),
        ({"global_pool": "avg", "fc_norm": False}, {"pool": "gap", "gelu": "exact"}),
        ({"act_layer": "gelu_tanh"}, {"pool": "tok", "gelu": "tanh"}),
        ({"img_size": (32, 64)}, {"pool": "tok", "gelu": "exact", "image_size": (32, 64)}),
        ({"pos_embed": "none"}, {"pool": "tok", "gelu": "exact", "image_size": 48}),
    ]
    for settings, told in cases:
        theirs = timm_model(**settings)
        with pytest.warns(UserWarning, match=r"eps of 1e-6.*pool_include_prefix=False.*from_timm\(model\) checks"):
            ours = models.from_timm(theirs.state_dict(), "Ti/16", **told)
        x = images(size=theirs.patch_embed.img_size)
        with torch.no_grad():
            assert_precise(ours(x), theirs(x), doubled(theirs)(x.double()))


def test_a_state_dict_is_not_guessed_at() -> None:
    """These are other models with weights of the same names and shapes, so none of them may pass without a word."""
    told = {"variant": "Ti/16", "pool": "tok", "gelu": "exact"}
    for settings in ({"num_heads": 2}, {"global_pool": "avg", "fc_norm": False}, {"act_layer": "gelu_tanh"}):
        weights = timm_model(**settings).state_dict()
        for name, words in {
            "variant": "'Ti/16' for 3",
            "pool": "'gap' for the mean",
            "gelu": "'tanh' for act_",
        }.items():
            with pytest.raises(ValueError, match=rf"does not show .*: pass {name}.*{words}.*; or pass the model"):
                models.from_timm(weights, **{key: value for key, value in told.items() if key != name})
    for settings in (
        {"global_pool": "avgmax"},
        {"global_pool": ""},
        {"global_pool": "avg", "pool_include_prefix": True},
    ):
        with pytest.raises(ValueError, match=r"pass variant.*, pool.*, gelu"):
            models.from_timm(timm_model(**settings).state_dict())
    with pytest.raises(ValueError, match=r"pass image_size \(it has no positions"):
        models.from_timm(timm_model(pos_embed="none").state_dict(), **told)
    theirs = timm_model(qk_norm=True, num_heads=2)  # here they tell the number of heads
    with pytest.raises(ValueError, match=r"\(192, 12, 768, 2\).*but variant='Ti/16' is \(192, 12, 768, 3\)"):
        models.from_timm(
            {name: tensor for name, tensor in theirs.state_dict().items() if "_norm.bias" not in name or "fc" in name},
            **told,
        )


def test_a_variant_must_be_that_of_the_weights() -> None:
    with pytest.raises(ValueError, match=r"\(192, 12, 768, 6\) and .* 16 pixels, but variant='Ti/16' is .*, 3\)"):
        models.from_timm(timm_model(num_heads=6), "Ti/16")
    with pytest.raises(ValueError, match=r"patches of 16 pixels, but variant='Ti/8' is .* with patches of 8"):
        models.from_timm(timm_model(), "Ti/8")
    with pytest.raises(ValueError, match=r"\(192, 12, 768, 3\) .*, but variant='S/16' is \(384, 12, 1536, 6\)"):
        models.from_timm(timm_model(), "S/16")


def test_pixels_beyond_the_last_whole_patch_are_told_of() -> None:
    theirs = timm_model(img_size=(50, 40))
    with pytest.raises(ValueError, match=r"50×40 pixels and ignores .* Pass image_size=\(48, 32\), and crop"):
        models.from_timm(theirs)
    x = images(size=(50, 40))
    with torch.no_grad():
        ours = models.from_timm(theirs, image_size=(48, 32))
        assert_precise(ours(x[:, :, :48, :32]), theirs(x), doubled(theirs)(x.double()))


def test_what_one_block_lacks_or_does_is_not_overlooked() -> None:
    weights = timm_model(init_values=0.1).state_dict()
    told = {"variant": "Ti/16", "pool": "tok", "gelu": "exact"}
    for lost, message in (
        ("blocks.3.attn.qkv.bias", r"missing: blocks.3.attention.qkv.bias"),
        ("blocks.3.mlp.fc1.bias", r"missing: blocks.3.mlp.up.bias"),
        ("patch_embed.proj.bias", r"missing: embedding.bias"),
        ("blocks.5.ls2.gamma", "23 scales ls1.gamma and ls2.gamma"),
    ):
        with pytest.raises(ValueError, match=message):
            models.from_timm({name: tensor for name, tensor in weights.items() if name != lost}, **told)
    for change, message in (
        (lambda block: setattr(block.mlp, "act", torch.nn.ReLU()), "the activation ReLU instead of GELU"),
        (lambda block: setattr(block.mlp, "act", torch.nn.GELU("tanh")), "different numbers of heads or activations"),
        (lambda block: setattr(block.norm2, "eps", 1e-5), "an eps of 1e-05 instead of 1e-6"),
        (lambda block: setattr(block.attn, "num_heads", 6), "different numbers of heads"),
    ):
        theirs = timm_model()
        change(theirs.blocks[7])
        with pytest.raises(ValueError, match=message):
            models.from_timm(theirs)


def test_another_phi_changes_attention_and_nothing_else() -> None:
    theirs = timm_model()
    softmax, relu = models.from_timm(theirs), models.from_timm(theirs, phi="relu/L")
    assert all(torch.equal(a, b) for a, b in zip(softmax.parameters(), relu.parameters(), strict=True))
    assert relu.config.phi == "relu/L"
    x = images()
    with torch.no_grad():
        _, before = softmax(x, intermediates=True)
        _, after = relu(x, intermediates=True)
        assert torch.equal(before["with_posemb"], after["with_posemb"])
        # Far beyond rounding.
        assert not torch.allclose(before["encoder/block00/sa"], after["encoder/block00/sa"], atol=1e-3)
        block = relu.blocks[0]
        tokens = after["encoder/block00/+sa"] - after["encoder/block00/sa"]
        weights = block.attention.weights(block.attention_norm(tokens))
        assert (weights == 0).float().mean() > 0.05


def test_imported_weights_are_copies() -> None:
    theirs = timm_model()
    ours = models.from_timm(theirs)
    torch.nn.init.zeros_(theirs.head.weight)
    assert ours.head.weight.any()


def test_qk_norm_maps_where_it_is_a_scale_only_and_is_named_where_not() -> None:
    theirs = timm_model(qk_norm=True)
    for block in theirs.blocks:
        torch.nn.init.zeros_(block.attn.q_norm.bias)
        torch.nn.init.zeros_(block.attn.k_norm.bias)
    ours, x = models.from_timm(theirs), images()
    assert ours.config.qk_norm
    with torch.no_grad():
        assert_precise(ours(x), theirs(x), doubled(theirs)(x.double()))
    torch.nn.init.ones_(theirs.blocks[7].attn.k_norm.bias)
    with pytest.raises(ValueError, match=r"blocks.7.attn.k_norm.bias is not zero"):
        models.from_timm(theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: timm_model(reg_tokens=4), "has register tokens"),
        (lambda: timm_model(reg_tokens=4).state_dict(), "has register tokens"),
        (lambda: timm_model(reg_tokens=4, no_embed_class=True), "has register tokens"),
        (lambda: timm_model("deit_tiny_distilled_patch16_224"), "a distillation token with a head of its own"),
        (lambda: timm_model("deit_tiny_distilled_patch16_224").state_dict(), "a distillation token with a head"),
        (lambda: timm_model("vit_small_patch16_18x2_224", depth=2), "ParallelThingsBlock instead of Block"),
        (lambda: timm_model("vit_base_patch16_xp_224", depth=2), "ParallelScalingBlock instead of Block"),
        (lambda: timm_model("vit_base_patch16_xp_224", depth=2).state_dict(), "attention and MLPs side by side"),
        (lambda: timm_model("vit_tiny_r_s16_p8_224", img_size=128, depth=2), "convolutions before the patches"),
        (lambda: timm_model(pre_norm=True), "a norm before the first block"),
        (lambda: timm_model(embed_norm_layer=bare_norm), "a norm of the embedded patches"),
        (lambda: timm_model(final_norm=False), "no norm after the last block"),
        (lambda: timm_model(act_layer="relu"), "the activation ReLU instead of GELU"),
        (lambda: timm_model(act_layer="quick_gelu"), "the activation QuickGELU instead of GELU"),
        (lambda: timm_model(norm_layer="rmsnorm"), "norms of the kind RmsNorm instead of LayerNorm"),
        (lambda: timm_model(global_pool="max"), "global_pool='max' instead of 'token' or 'avg'"),
        (lambda: timm_model(global_pool="avgmax"), "global_pool='avgmax' instead of 'token' or 'avg'"),
        (lambda: timm_model(global_pool=""), "global_pool='' instead of 'token' or 'avg'"),
        (lambda: timm_model(global_pool="avg", pool_include_prefix=True), "a mean that takes in the class token"),
        (lambda: {**timm_model().state_dict(), "fc_norm.weight": torch.ones(192)}, "norm and fc_norm"),
        (lambda: timm_model(num_heads=6), r"\(192, 12, 768, 6\) .*, which is none of our sizes: mu"),
        (lambda: timm_model(depth=2), r"\(192, 2, 768, 3\) .*, which is none of our sizes"),
        (lambda: timm_model(embed_dim=48).state_dict(), r"\(48, 12, 192, '\?'\) .*, which is none of our sizes"),
        (lambda: {"weight": torch.zeros(2)}, "not a standard vision transformer"),
        (
            lambda: {**timm_model().state_dict(), "patch_embed.proj.weight": torch.zeros(192, 768)},
            "not a standard vision",
        ),
    ],
)
def test_a_timm_model_that_does_not_map_is_refused_in_words(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.from_timm(make())


def bare_norm(width: int, **_: Any) -> torch.nn.Module:
    """A norm without weights, so that only the model tells of it."""
    return torch.nn.LayerNorm(width, elementwise_affine=False)


def test_something_else_is_refused() -> None:
    for source, message in (
        (torch.nn.Linear(2, 2), "got a Linear of torch"),
        (_compat.torchvision().models.VisionTransformer(32, 16, 1, 2, 32, 64), "got a VisionTransformer of torch"),
        ({"model": timm_model().state_dict()}, "got a dict, whose values are not all tensors"),
        ("vit_tiny_patch16_224", "got a str"),
    ):
        with pytest.raises(TypeError, match=f"source must be a timm VisionTransformer or its state_dict, {message}"):
            models.from_timm(source)
