"""Calibration and distillation of nomax's own models: what they learn is theirs, is saved with them, and reverts."""

import pytest
import torch

import nomax
from nomax.conversion.own import as_converted
from nomax.models import ReLUFormer, ViT
from nomax.nn import Attention
from nomax.train.distil.distillation import DistilConfig


def peaked(model):
    """Make the scores of a model far from uniform, as those of trained models are."""
    for module in model.modules():
        if isinstance(module, Attention):
            if module.query_norm is not None:
                module.query_norm.weight.data *= 4
            else:
                queries = module.qkv if module.context_dim is None else module.q
                queries.weight.data[: module.dim] *= 6
    return model.eval()


def vit(phi="softmax", **settings):
    torch.manual_seed(0)
    sizes = {"image_size": 16, "channels": 1, "num_classes": 5, "head_zero": False}
    return peaked(ViT("mu/4", phi=phi, **sizes, **settings))


def distance(model, original, x):
    with torch.no_grad():
        return float((model(x) - original(x)).norm())


@pytest.mark.parametrize("settings", [{}, {"qk_norm": True}, {"qk_norm": True, "gate": "silu"}], ids=str)
def test_a_vit_comes_closer_to_its_original_step_by_step_and_reverts(settings, tmp_path):
    model, original, x = vit(**settings), vit(**settings), torch.randn(10, 8, 1, 16, 16)
    nomax.convert(model, "relu/L")
    converted = distance(model, original, x[0])
    (fit,) = nomax.calibrate(model, x[:3])
    assert fit.name == "blocks.0.attention.inner_attention"
    calibrated = distance(model, original, x[0])
    nomax.distil(model, original, 8 * list(x), DistilConfig(steps=80, lr=1e-3))
    assert converted > calibrated > distance(model, original, x[0])

    attention = model.blocks[0].attention
    assert [name for name, _ in model.named_modules() if "inner_attention" in name] == []
    assert attention.gain.shape == attention.shift.shape == (2,)
    assert (model.config.phi, model.config.learned_gain, model.config.learned_shift) == ("relu/L", "head", "head")
    model.save_pretrained(tmp_path / "model")
    again = nomax.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(again(x[0]), model(x[0]))
    nomax.revert(model)
    assert model.config == original.config
    assert model.state_dict().keys() == original.state_dict().keys()


def test_reverting_a_calibrated_model_gives_the_original_to_the_bit():
    model, original, x = vit(), vit(), torch.randn(4, 1, 16, 16)
    nomax.convert(model, "relu/L")
    nomax.calibrate(model, [x])
    nomax.revert(model)
    with torch.no_grad():
        assert torch.equal(model(x), original(x))


def test_the_gain_of_phi_itself_counts_once():
    one, two, x = vit(), vit(), torch.randn(4, 1, 16, 16)
    nomax.convert(one, "relu/L")
    nomax.convert(two, "2*relu/L")
    (fit,) = nomax.calibrate(one, [x])
    nomax.calibrate(two, [x])
    gain = one.blocks[0].attention.gain
    assert torch.equal(gain.detach(), fit.gain)
    torch.testing.assert_close(two.blocks[0].attention.gain, gain)
    with torch.no_grad():
        torch.testing.assert_close(two(x), one(x))


@pytest.mark.parametrize("learned", [{}, {"learned_gain": "layer"}, {"learned_gain": "head", "learned_shift": "head"}])
def test_the_form_of_converted_attention_computes_the_same(learned):
    model, x = vit("1.5*relu(x+0.25)/L", **learned), torch.randn(4, 1, 16, 16)
    for name, parameter in model.named_parameters():
        if name.endswith(("gain", "shift")):
            parameter.data += 0.3
    before = model(x)
    with as_converted(model), as_converted(model):  # inside of itself it changes nothing
        assert "blocks.0.attention.inner_attention" in dict(model.named_modules())
        torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(model(x), before)
    # A number for the whole layer has become one for each head.
    per_head = {f"learned_{name}": "head" for name in ("gain", "shift") if f"learned_{name}" in learned}
    assert {
        name: value for name, value in vars(model.config).items() if name.startswith("learned_") and value
    } == per_head


def test_a_text_model_calibrates_and_is_saved(tmp_path):
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "slots": 32, "max_length": 32}
    model = peaked(ReLUFormer(vocabulary=20, phi="softmax", learned_gain=None, **sizes))
    source, target = torch.randint(3, 20, (4, 9)), torch.randint(3, 20, (4, 7))
    nomax.convert(model, "relu/L")
    fits = nomax.calibrate(model, [(source, target)])
    assert len(fits) == 3  # of the encoder, of the decoder, and from it to the source
    model.save_pretrained(tmp_path / "model")
    again = nomax.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(again(source, target), model(source, target), rtol=0, atol=0)


def test_a_learned_power_of_l_is_fitted_too_and_saved(tmp_path):
    model, x = vit("relu/L", learned_alpha="layer"), torch.randn(2, 1, 16, 16)
    fits = nomax.calibrate(model, [x])
    for block, fit in zip(model.blocks, fits, strict=True):
        assert torch.equal(block.attention.alpha, fit.alpha)
    assert model.config.learned_alpha == "head"
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(nomax.from_pretrained(tmp_path / "model")(x), model(x))


def test_an_error_in_between_leaves_the_model_as_it_was():
    model = vit()
    nomax.convert(model, "relu/L")
    with pytest.raises(ValueError, match="images must be"):
        nomax.calibrate(model, [torch.randn(2, 1, 8, 8)])
    assert [name for name, _ in model.named_modules() if "inner_attention" in name] == []
    assert "_attend" not in vars(model.blocks[0].attention)


def test_softmax_cannot_be_calibrated_or_distilled():
    model = vit()
    with pytest.raises(ValueError, match="convert it first"):
        nomax.calibrate(model, [torch.randn(2, 1, 16, 16)])
    with pytest.raises(ValueError, match="convert it first"):
        nomax.distil(model, vit(), [torch.randn(2, 1, 16, 16)], DistilConfig(steps=1))


def test_fine_tuning_without_a_teacher_needs_a_loss():
    model = vit()
    nomax.convert(model, "relu/L")
    with pytest.raises(ValueError, match="without a teacher, pass an output_loss"):
        nomax.distil(model, None, [torch.randn(2, 1, 16, 16)], DistilConfig(steps=1))
