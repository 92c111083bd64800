"""nomax predict: the probabilities of a trained classifier, by hand, and what it says to mistakes."""

import csv
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate_helpers import COLOURS, SMALL, nomax, picture, pictures
from PIL import Image
from precision import EPSILON

from nomax import evaluate, models
from nomax.data.source import DataError
from nomax.models import ViT
from nomax.train.vision.command import Options, run

pytestmark = pytest.mark.usefixtures("in_folder")


def logits_by_hand(folder: Path, path: Path) -> torch.Tensor:
    """Of an 8-pixel model: the shorter side to 256/224 of 8, that is 9, then the centre, from -1 to 1."""
    model = models.load(folder / "model")
    image = Image.open(path)
    assert image.size == (13, 9)
    pixels = np.array(image)[0:8, 2:10]  # so that no pixel has to be interpolated: (9 - 8) // 2 and (13 - 8) // 2
    with torch.no_grad():
        return model(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1)[0].double()


def test_the_cards_example_runs(trained: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = (trained / "model" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace("path of this folder, or its id on the hub", str(trained / "model"))
    exec(code.replace("photo.jpg", str(photos / "test" / "red" / "0.png")), {})
    first, *others = capsys.readouterr().out.splitlines()
    assert len(others) == 2
    assert first.partition("% ")[2] in COLOURS


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
def test_probabilities_are_those_of_the_logits_by_hand(
    loss: Any, trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run(Options(data=str(photos), out=folder, loss=loss, **SMALL)) == 0
    path = photos / "test" / "green" / "3.png"
    logits = logits_by_hand(folder, path)
    expected = 1 / (1 + (-logits).exp()) if loss == "sigmoid" else logits.exp() / logits.exp().sum()
    guesses = evaluate.load(folder).predict(path)
    order = sorted(range(3), key=lambda label: -float(expected[label]))
    assert [guess.label for guess in guesses] == order
    assert [guess.name for guess in guesses] == [list(COLOURS)[label] for label in order]
    assert [guess.probability for guess in guesses] == pytest.approx(
        [float(expected[label]) for label in order], abs=8 * EPSILON
    )
    capsys.readouterr()
    assert nomax("predict", folder, path, "--top", 2) == 0
    out = capsys.readouterr().out
    for label in order[:2]:
        assert f"{list(COLOURS)[label]} " in out  # brackets are no markup
        assert f"{float(expected[label]):.2%}" in out
    assert list(COLOURS)[order[2]] not in out


def test_a_run_its_model_and_its_checkpoint_say_the_same(trained: Path, photos: Path, tmp_path: Path) -> None:
    path = photos / "test" / "red" / "1.png"
    assert evaluate.load(trained).predict(path) == evaluate.load(trained / "model").predict(path)
    assert run(Options(data=str(photos), out=tmp_path / "run", checkpoint_every=4, **SMALL)) == 0
    finished = evaluate.load(tmp_path / "run").predict(path)
    (tmp_path / "run" / "model").rename(tmp_path / "elsewhere")
    assert evaluate.load(tmp_path / "run").predict(path) == finished


def test_predictions_of_many_are_those_of_each_and_pillows_images_are_taken(trained: Path, photos: Path) -> None:
    one = evaluate.load(trained)
    paths = sorted((photos / "test").rglob("*.png"))
    for workers in (0, 2):
        predictions = list(evaluate.predict(one, paths, top=3, batch_size=4, workers=workers))
        assert [prediction.image for prediction in predictions] == list(map(str, paths))
        for path, prediction in zip(paths, predictions, strict=True):
            single = one.predict(Image.open(path), top=3)
            assert [guess.name for guess in single] == [guess.name for guess in prediction.guesses]
            assert [guess.probability for guess in single] == pytest.approx(
                [guess.probability for guess in prediction.guesses], abs=8 * EPSILON
            )


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_a_broken_image_is_named_and_the_others_go_on(
    suffix: str, trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = picture(tmp_path / "mine" / "deep" / "good.PNG", (250, 0, 0), 1)
    broken = tmp_path / "mine" / "broken.png"
    broken.write_bytes(good.read_bytes()[:60])
    (tmp_path / "mine" / "notes.txt").write_text("no image")
    (tmp_path / "mine" / ".hidden.png").write_text("no image")
    output = tmp_path / "new" / f"out{suffix}"
    assert nomax("predict", trained, "mine", "missing.png", "--batch-size", 1, "--output", output) == 1
    told = capsys.readouterr()
    assert "nomax predict: mine/broken.png is a broken image" in told.err
    assert "nomax predict: missing.png cannot be read: No such file or directory." in told.err
    assert "2 of 3 images could not be read" in told.err
    assert "mine/deep/good.PNG" in told.out
    guesses = evaluate.load(trained).predict(good)
    if suffix == ".json":
        first, second, third = json.loads(output.read_text())["results"]
        assert (first["image"], first["guesses"]) == ("mine/broken.png", [])
        assert "broken image" in first["error"]
        assert [guess["class"] for guess in second["guesses"]] == [guess.name for guess in guesses]
        assert second["guesses"][0]["probability"] == pytest.approx(guesses[0].probability, abs=8 * EPSILON)
        assert "cannot be read" in third["error"]
    else:
        rows = list(csv.DictReader(output.read_text().splitlines()))
        assert [row["image"] for row in rows] == ["mine/broken.png", *["mine/deep/good.PNG"] * 3, "missing.png"]
        assert [row["class"] for row in rows] == ["", *(guess.name for guess in guesses), ""]
        assert [row["rank"] for row in rows] == ["", "1", "2", "3", ""]
        assert "broken image" in rows[0]["error"]
    with pytest.raises(DataError, match=r"missing.png cannot be read"):
        evaluate.load(trained).predict("missing.png")


def test_a_file_with_all_predictions_leaves_a_short_table(
    trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The function of the same name hides the module from its path.
    monkeypatch.setattr(sys.modules["nomax.evaluate.predict"], "SHOWN", 2)
    assert nomax("predict", trained, photos / "test", "--output", tmp_path / "out.json") == 0
    out = capsys.readouterr().out
    assert out.count(".png") == 2
    assert "The table has the first 2." in out
    assert len(json.loads((tmp_path / "out.json").read_text())["results"]) == 18


def test_names_cannot_act_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("\x1b[31mred", "[/b]", os.fsdecode(b"\xff"))
    model = ViT("mu/4", num_classes=3, image_size=8, channels=3, classes=names, head_zero=False)
    models.save(model, tmp_path / "odd")
    path = picture(tmp_path / "a [red].png", (1, 2, 3), 0, (8, 8))
    assert nomax("predict", "odd", path, "--output", "out.json") == 0
    out = capsys.readouterr().out
    assert "\x1b[31m" not in out
    for shown in ("\\x1b[31mred", "[/b]", "\\udcff", "a [red].png"):
        assert shown in out
    guesses = json.loads((tmp_path / "out.json").read_text())["results"][0]["guesses"]
    assert {guess["class"] for guess in guesses} == set(names)
    assert models.load("odd").config.classes == names


def test_a_model_that_says_nothing_about_itself_is_used_with_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those that were saved before models had names, whose config.json has no such keys."""
    models.save(ViT("mu/4", num_classes=3, image_size=8, channels=3), tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    for key in ("classes", "probabilities", "preprocessing"):
        del config[key]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    assert nomax("predict", "old", picture(tmp_path / "a.png", (1, 2, 3), 0)) == 0
    out = capsys.readouterr().out
    assert "33.33%" in out
    for told in ("these are their numbers", "how it wants images", "probabilities are a softmax"):
        assert told in out
    assert nomax("evaluate", "old", "--data", pictures(tmp_path / "photos")) == 0
    assert "does not say what its classes are called" in capsys.readouterr().out


MISTAKES: list[tuple[Callable[[Path], tuple[object, ...]], str]] = [
    (lambda run: (run,), "give at least one image"),
    (lambda run: (run, "empty"), "empty has no image files"),
    (lambda run: (run, "a.png", "--top", 0), "top=0"),
    (lambda run: (run, "a.png", "--output", "out.txt"), "must end in .json or .csv"),
    (lambda run: (run, "a.png", "--device", "nowhere"), "device 'nowhere' cannot be used"),
    (lambda run: ("./nowhere", "a.png"), "there is no such folder"),
    (lambda run: ("headless", "a.png"), "has no head"),
]


@pytest.mark.parametrize(("arguments", "answer"), MISTAKES)
def test_a_mistake_is_told_in_one_line(
    arguments: Callable[[Path], tuple[object, ...]],
    answer: str,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    picture(tmp_path / "a.png", (1, 2, 3), 0)
    models.save(ViT("mu/4", num_classes=0, image_size=8), tmp_path / "headless")
    capsys.readouterr()
    assert nomax("predict", *arguments(trained)) == 2
    told = capsys.readouterr().err
    assert told.startswith("nomax predict: ")
    assert answer in told


def test_a_model_that_computes_nan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ViT("mu/4", num_classes=3, image_size=8, channels=3)
    torch.nn.init.constant_(model.head.bias, float("nan"))  # type: ignore[union-attr]
    models.save(model, tmp_path / "sick")
    assert nomax("predict", "sick", picture(tmp_path / "a.png", (1, 2, 3), 0), "--output", "out.csv") == 2
    assert "not finite" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
