"""`nomax finetune` of image models: from a run with softmax to labels learned with φ; killed, and on again."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_images
import torch

import nomax
from nomax.cli import main
from nomax.models import ViT


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Tiny images, a run with softmax that has learned some of them, and its conversion."""
    folder = tmp_path_factory.mktemp("images")
    data = tiny_images.write(folder / "tiny", train=128, test=64)
    train = ["train", "vit", "--data", data, "--model", "mu/4", "--phi", "softmax", "--out", str(folder / "run")]
    train += ["--steps", "60", "--batch-size", "16", "--lr", "4e-3", "--warmup", "5", "--no-tensorboard"]
    assert main([*train, "--crop", "none", "--no-flip", "--checkpoint-every", "60"]) == 0
    assert main(["convert", str(folder / "run"), "--phi", "relu/L", "--out", str(folder / "relu")]) == 0
    return folder


def finetune(places, out, *more):
    words = ["finetune", places / "relu", "--data", places / "tiny", "--out", out, "--batch-size", "16"]
    words += ["--calibration-images", "32", "--distil.steps", "12", "--distil.lr", "3e-3"]
    words += ["--labels.steps", "12", "--labels.lr", "3e-3"]
    return main([*map(str, words), *more])


def test_stages_of_an_image_model_and_what_a_killed_run_leaves(places, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert finetune(places, out) == 0
    printed = capsys.readouterr().out
    result = json.loads((out / "finetune.json").read_text())
    assert list(result["stages"]) == ["original", "converted", "calibrated", "distilled", "fine-tuned"]
    assert all(name in printed and set(each) == {"accuracy", "agreement"} for name, each in result["stages"].items())
    assert result["stages"]["original"]["agreement"] == 1
    run = json.loads((places / "run" / "result.json").read_text())
    assert result["stages"]["original"]["accuracy"] == pytest.approx(run["test_accuracy"])
    assert result["distillation"]["images"] == result["labels"]["images"] == 12 * 16
    assert result["labels"]["steps"][-1]["step"] == 12
    assert result["tests"] == {"inputs": 64}
    assert "--labels.steps 12" in result["command"]
    assert sorted(path.name for path in out.glob("checkpoints*")) == []
    model = nomax.from_pretrained(out)
    assert (model.config.phi, model.config.learned_gain, model.config.learned_shift) == ("relu/L", "head", "head")

    from nomax.train.distil import labelled as module

    def killed(*arguments, **options):
        def report(step):
            if step.step == 6 and options["folder"].name == "checkpoints-labels":
                raise KeyboardInterrupt

        return distil(*arguments, **options | {"report": report})

    distil, other = module.distil, tmp_path / "other"
    monkeypatch.setattr(module, "distil", killed)
    assert finetune(places, other) == 130
    monkeypatch.setattr(module, "distil", distil)
    assert finetune(places, other) == 0
    assert json.loads((other / "finetune.json").read_text())["stages"] == result["stages"]
    first, second = (nomax.from_pretrained(folder).state_dict() for folder in (out, other))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_labels_teach_what_the_original_does_not_know(places, tmp_path):
    rolled = Path(tiny_images.write(tmp_path / "rolled", train=128, test=64))
    np.save(rolled / "labels.npy", (np.load(rolled / "labels.npy") + 1) % 4)  # the same pictures under other names
    words = ["--data", str(rolled), "--distil.steps", "0", "--labels.steps", "60"]
    assert finetune(places, tmp_path / "out", *words) == 0
    stages = json.loads((tmp_path / "out" / "finetune.json").read_text())["stages"]
    assert list(stages) == ["original", "converted", "calibrated", "fine-tuned"]
    assert stages["calibrated"]["accuracy"] < 0.25 < 0.75 < stages["fine-tuned"]["accuracy"]


def test_held_out_images_are_measured_instead_of_the_test_split(places, tmp_path):
    only_calibrate = ["--held-out", "0.25", "--distil.steps", "0", "--labels.steps", "0"]
    assert finetune(places, tmp_path / "out", *only_calibrate) == 0
    result = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert 16 < result["tests"]["inputs"] < 48  # about a quarter of 128


def test_the_teacher_may_guide_the_labels(places, tmp_path):
    guided = ["--distil.steps", "0", "--labels.teacher-weight", "2", "--teacher", str(places / "run")]
    assert finetune(places, tmp_path / "out", *guided) == 0
    assert finetune(places, tmp_path / "alone", "--distil.steps", "0") == 0
    first, second = (nomax.from_pretrained(tmp_path / name).state_dict() for name in ("out", "alone"))
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_smoke_takes_few_steps_of_images(places, tmp_path):
    assert finetune(places, tmp_path / "out", "--smoke") == 0
    assert json.loads((tmp_path / "out" / "finetune.json").read_text())["labels"]["images"] == 3 * 8


def test_wrong_images_options_and_folders_say_what_to_do(places, tmp_path, capsys):
    def complaint(*more, folder=None):
        words = ["finetune", str(folder or places / "relu"), "--out", str(tmp_path / "never")]
        assert main([*words, *map(str, more)]) == 2
        return capsys.readouterr().err

    tiny = places / "tiny"
    assert "an image model learns from one data set" in complaint("--data", tiny, tiny)
    assert "--language is for texts" in complaint("--data", tiny, "--language", "en")
    large = tiny_images.write(tmp_path / "large", size=24)
    assert "its images are 24×24, but the model takes 16×16" in complaint("--data", large)
    more = tiny_images.write(tmp_path / "more", classes=8)
    assert "its classes are not the model's: 'class 4', 'class 5'" in complaint("--data", more)
    assert "is not converted: first run nomax convert" in complaint("--data", tiny, folder=places / "run")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "run.json").write_text("{}")
    (begun / "config.json").write_text("{}")
    assert "is a run without a model: its training has not ended" in complaint("--data", tiny, folder=begun)
    ViT("mu/4", image_size=16, num_classes=3, phi="relu/L").save_pretrained(tmp_path / "three")
    assert "has 4 classes, but the model's head 3" in complaint("--data", tiny, folder=tmp_path / "three")
    out = tmp_path / "trained"
    assert finetune(places, out, "--distil.steps", "0", "--labels.steps", "0") == 0
    capsys.readouterr()
    assert "name the original with --teacher" in complaint("--data", tiny, folder=out)


def test_a_phi_that_the_layers_cannot_take_is_refused(places, tmp_path, capsys):
    assert finetune(places, tmp_path / "calibrated", "--distil.steps", "0", "--labels.steps", "0") == 0
    capsys.readouterr()
    words = ["convert", str(tmp_path / "calibrated"), "--phi", "softmax", "--out", str(tmp_path / "softmax")]
    assert main(words) == 2
    assert "it learns gain and shift of φ, which softmax does not have" in capsys.readouterr().err


def test_the_tables_of_image_models_on_the_page_are_those_of_the_results():
    from nomax.train.distil.result import markdown

    root = Path(__file__).parents[2]
    page = (root / "docs" / "recover-vit.md").read_text()
    results = sorted((root / "results" / "convert").glob("vit*/finetune.json"))
    assert results
    for file in results:
        text = markdown(json.loads(file.read_text()))
        assert text == file.with_suffix(".md").read_text()
        assert text.partition("-->\n\n")[2] in page
