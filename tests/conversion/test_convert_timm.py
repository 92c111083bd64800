"""timm: class swap and attn_layer, its options kept, and checkpoints of either kind in the other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_attention import in_place_of_softmax
from torch import nn
from zoo import VIT, stirred

import nomax
from nomax import _compat
from nomax.conversion.timm import attn_layer
from nomax.nn import InnerAttention

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def made(**settings: Any) -> Any:
    torch.manual_seed(0)
    return stirred(nomax.timm_model("vit_tiny_patch16_224", **{**VIT, **settings})).eval()


def test_a_model_with_phi_from_the_start() -> None:
    relu, softmax = made(phi="relu/L"), made()
    assert relu.state_dict().keys() == softmax.state_dict().keys()
    assert [str(x.phi) for x in relu.modules() if isinstance(x, InnerAttention)] == ["relu/L"] * 2
    assert not any(isinstance(x, InnerAttention) for x in softmax.modules())
    with torch.no_grad(), in_place_of_softmax(softmax):
        torch.testing.assert_close(softmax(IMAGES), relu(IMAGES))


def test_attn_layer_in_the_table_of_timm_and_checkpoints_of_either_kind() -> None:
    swapped, built = made(phi="gelu/L"), made(attn_layer=attn_layer("gelu/L"), qk_norm=False)
    original = made()
    with torch.no_grad():
        for model in (swapped, built):
            model.load_state_dict(original.state_dict())
        assert torch.equal(swapped(IMAGES), built(IMAGES))
        before = original(IMAGES)
        original.load_state_dict(built.state_dict())
        assert torch.equal(original(IMAGES), before)
    assert nomax.convert(built, "softmax").converted[0].before == "gelu/L"
    with torch.no_grad():
        torch.testing.assert_close(built(IMAGES), before)


@pytest.mark.parametrize(
    "settings",
    [{"gated": True}, {"qk_norm": True}, {"scale_norm": True}, {"gated": True, "scale_norm": True, "proj_bias": False}],
)
@pytest.mark.parametrize("mask", [None, "boolean", "float", "causal"])
def test_options_and_masks_of_the_layer_are_kept(settings: dict[str, Any], mask: str | None) -> None:
    kind = _compat.timm().layers.Attention
    layer = stirred(kind(12, 3, norm_layer=nn.LayerNorm, **settings)).eval()
    x = torch.randn(2, 5, 12)
    given = {
        None: {},
        "boolean": {"attn_mask": torch.rand(2, 1, 5, 5) > 0.3},
        "float": {"attn_mask": torch.randn(2, 3, 5, 5)},
        "causal": {"is_causal": True},
    }[mask]
    with torch.no_grad():
        out = layer(x, **given)
        nomax.convert(layer, "softmax", inputs=x)
        torch.testing.assert_close(layer(x, **given), out)
        nomax.convert(layer, "relu/L", inputs=x)
        ours = layer(x, **given)
        nomax.revert(layer)
        with in_place_of_softmax(layer):
            torch.testing.assert_close(ours, layer(x, **given))
    assert type(layer) is kind


def test_the_way_without_the_fused_operation_is_closed() -> None:
    model = made()
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad():
        before = model(IMAGES)
        nomax.convert(model, "relu/L")
        assert torch.equal(model(IMAGES), made(phi="relu/L")(IMAGES))
        nomax.revert(model)
        assert torch.equal(model(IMAGES), before)
    assert not any(block.attn.fused_attn for block in model.blocks)


def test_differential_attention_has_phi_in_both_of_its_parts() -> None:
    model = made(attn_layer="diff")
    with torch.no_grad():
        report = nomax.convert(model, "relu/L")
        assert {layer.module for layer in report.converted} == {"DiffAttention"}
        out = model(IMAGES)
        nomax.revert(model)
        with in_place_of_softmax(model):
            torch.testing.assert_close(out, model(IMAGES))


def test_a_folder_is_timms_own_layout_but_not_loaded_as_softmax(tmp_path: Path) -> None:
    model = made(phi="relu/L")
    nomax.save_pretrained(model, tmp_path)
    code = f"import nomax._compat as c; c.timm().create_model('local-dir:{tmp_path}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Unknown model (nomax_from_pretrained)" in done.stderr
    other = _compat.timm().create_model("vit_tiny_patch16_224", **VIT)
    with pytest.raises(ValueError, match=r"Pass settings="):
        nomax.save_pretrained(other, tmp_path / "other")
    nomax.save_pretrained(other, tmp_path / "softmax", VIT)
    with pytest.raises(ValueError, match=r"softmax still.*nomax convert"):
        nomax.from_pretrained(tmp_path / "softmax")


def test_a_folder_of_a_model_that_takes_any_attn_layer_is_not_loaded_as_softmax_either(tmp_path: Path) -> None:
    """Blocks that compute attention and MLP in parallel have no use for attn_layer, and do not look at it."""
    model = stirred(nomax.timm_model("vit_base_patch16_xp_224", **VIT)).eval()
    nomax.convert(model, "relu/L")
    nomax.save_pretrained(model, tmp_path)
    with pytest.raises(RuntimeError, match="Unknown model"):
        _compat.timm().create_model(f"local-dir:{tmp_path}")
    with torch.no_grad():
        assert torch.equal(nomax.from_pretrained(tmp_path)(IMAGES), model(IMAGES))


def test_an_attn_layer_of_timms_is_kept_in_the_folder(tmp_path: Path) -> None:
    model = made(attn_layer="diff", phi="relu/L")
    nomax.save_pretrained(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(nomax.from_pretrained(tmp_path)(IMAGES), model(IMAGES))


def test_a_folder_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its config asked for an attn_layer that timm does not have."""
    model = made(phi="relu/L")
    nomax.save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architecture"] = config["nomax"].pop("architecture")
    config["model_args"]["attn_layer"] = "nomax"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(nomax.from_pretrained(tmp_path)(IMAGES), model(IMAGES))


@pytest.mark.slow
def test_a_converted_model_compiles_in_one_graph() -> None:
    model = made(phi="relu/L")
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(IMAGES), model(IMAGES))
