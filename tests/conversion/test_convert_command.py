"""`nomax convert` on folders of transformers, timm and nomax, and on folders that are none or unsafe."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import TRANSFORMERS, VIT, words

import nomax
from nomax import _compat, models
from nomax.cli import main


def folder_of_transformers(path: Path) -> Any:
    model = next(entry for entry in TRANSFORMERS if entry.name == "BertModel").model()
    model.save_pretrained(path)
    (path / "vocab.txt").write_text("a\nb\n")
    return model


def test_a_folder_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder_of_transformers(tmp_path / "bert")
    assert main(["convert", str(tmp_path / "bert"), "--phi", "relu/L", "--out", str(tmp_path / "relu")]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 attention layers converted" in out
    assert (tmp_path / "relu" / "vocab.txt").read_text() == "a\nb\n"
    again = nomax.from_pretrained(tmp_path / "relu")
    nomax.convert(model, "relu/L")
    with torch.no_grad():
        assert torch.equal(again(words(2, 5))[0], model(words(2, 5))[0])

    # A converted folder is converted again, to another φ.
    command = ["convert", str(tmp_path / "relu"), "--phi", "gelu/L", "--layers", "1", "--out", str(tmp_path / "mixed")]
    assert main(command) == 0
    mixed = json.loads((tmp_path / "mixed" / "config.json").read_text())["nomax"]["layers"]
    assert [layer["phi"] for layer in mixed.values()] == ["relu/L", "gelu/L"]
    assert main(command) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err


def test_a_folder_of_timm(tmp_path: Path) -> None:
    timm = _compat.timm()
    model = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    timm.models.save_for_hf(model, str(tmp_path / "vit"), model_args=VIT, safe_serialization=True)
    command = ["convert", str(tmp_path / "vit"), "--out", str(tmp_path / "relu"), "--qk-norm"]
    assert main(command) == 0
    again = nomax.from_pretrained(tmp_path / "relu")
    nomax.convert(model, "relu/L", qk_norm=True)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_a_folder_of_nomax(tmp_path: Path) -> None:
    vit = models.ViT("mu/4", image_size=8, num_classes=3, phi="softmax")
    models.save(vit, tmp_path / "vit")
    assert main(["convert", str(tmp_path / "vit"), "--phi", "relu/L", "--out", str(tmp_path / "relu")]) == 0
    again = nomax.from_pretrained(tmp_path / "relu")
    assert again.config.phi == "relu/L"
    assert torch.equal(again.embedding.weight, vit.embedding.weight)


def broken(path: Path, kind: str) -> None:
    folder_of_transformers(path)
    config = json.loads((path / "config.json").read_text())
    match kind:
        case "empty":
            shutil.rmtree(path)
            path.mkdir()
        case "without weights":
            (path / "model.safetensors").unlink()
        case "pickle":
            (path / "model.safetensors").rename(path / "pytorch_model.bin")
        case "no JSON":
            (path / "config.json").write_text("{")
        case "list":
            (path / "config.json").write_text("[]")
        case "unknown library":
            (path / "config.json").write_text("{}")
        case "unknown class":
            (path / "config.json").write_text(json.dumps({**config, "architectures": ["BertModelNext"]}))
        case "newer nomax":
            described = {"version": "99.0", "layers": {}, "left": []}
            (path / "config.json").write_text(json.dumps({**config, "nomax": described}))
        case "cut off":
            content = (path / "model.safetensors").read_bytes()
            (path / "model.safetensors").write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "has no config.json"),
        ("without weights", "has no weights: there should be a model.safetensors"),
        ("pickle", "pytorch_model.bin is a pickle, which can run any code"),
        ("no JSON", "config.json"),
        ("list", "must hold a JSON object"),
        ("unknown library", "none of nomax, timm and transformers"),
        ("unknown class", "asks for the class BertModelNext, which transformers"),
        ("newer nomax", "was written by nomax 99.0, but this is"),
        ("cut off", "model.safetensors"),
    ],
)
def test_a_folder_that_cannot_be_converted(
    kind: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(tmp_path / "bert", kind)
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "bert"), "--out", str(tmp_path / "relu")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "relu").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "hf-hub:somebody/model"}, "is none of timm"),
        ({"model_args": {"checkpoint_path": "other.pth"}}, "may not have checkpoint_path"),
        ({"nomax": []}, "must be an object"),
        ({"nomax": {"version": "0.1.0", "layers": {"x": {"head_dim": 10**12}}, "left": []}}, "the layer 'x'"),
        ({"nomax": {"version": "0.1.0", "layers": ["x"], "left": []}}, "what stands under 'layers'"),
        ({"nomax": {"version": "0.1.0", "layers": {}, "left": []}}, "what stands under 'layers'"),
        ({"nomax": {"version": "0.1.0", "layers": {"x": {}}, "left": None}}, "what stands under 'left'"),
        ({"nomax": {"version": "0.1.0", "layers": {"x": {}}, "left": [1]}}, "what stands under 'left'"),
        ({"nomax": {"version": None, "layers": {"x": {}}, "left": []}}, "the version None"),
        ({"nomax": {"version": "99.0", "layers": {"x": {}}, "left": []}}, "install a newer nomax"),
    ],
)
def test_a_config_cannot_reach_beyond_its_folder(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timm = _compat.timm()
    model = timm.create_model("vit_tiny_patch16_224", **VIT)
    timm.models.save_for_hf(model, str(tmp_path / "vit"), model_args=VIT, safe_serialization=True)
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    (tmp_path / "vit" / "config.json").write_text(json.dumps({**config, **change}))
    assert main(["convert", str(tmp_path / "vit"), "--out", str(tmp_path / "relu")]) == 2
    assert said in capsys.readouterr().err


def test_a_phi_or_layer_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of_transformers(tmp_path / "bert")
    for more, said in ((["--phi", "rellu/L"], "did you mean 'relu/L'?"), (["--layers", "9"], "there is no layer 9")):
        assert main(["convert", str(tmp_path / "bert"), "--out", str(tmp_path / "relu"), *more]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "relu").exists()


def test_a_model_that_has_no_folder_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has no config that could make it again"):
        nomax.save_pretrained(torch.nn.Linear(2, 2), tmp_path)
