"""What a trained classifier knows about itself: class names and preprocessing in the model, names in evaluation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate_helpers import COLOURS, SMALL, nomax, pictures

from nomax import data, evaluate, models
from nomax.models import Preprocessing, ViT
from nomax.train import load_run
from nomax.train.vision.command import Options, run

pytestmark = pytest.mark.usefixtures("in_folder")


def test_a_trained_model_says_its_classes_its_preprocessing_and_its_probabilities(trained: Path) -> None:
    config = json.loads((trained / "model" / "config.json").read_text())
    assert config["classes"] == ["blue [b]", "green", "red"]
    assert config["preprocessing"] == {"crop": "small", "antialias": True, "range": [-1.0, 1.0]}
    assert (config["image_size"], config["channels"], config["probabilities"]) == (8, 3, "sigmoid")
    card = (trained / "model" / "README.md").read_text()
    assert "| classes | 0: blue [b], 1: green, 2: red |" in card
    assert "the shorter side resized to 9 pixels, the aspect kept; the central 8×8 pixels; RGB, values from -1" in card
    assert "the sigmoid of the logits" in card
    loaded = models.load(trained / "model")
    assert loaded.config.classes == ("blue [b]", "green", "red")
    assert loaded.resized(16).config.classes == loaded.config.classes


def test_class_folders_renamed_are_an_error_that_names_them(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = dict(zip(("a red", "green", "z blue"), COLOURS.values(), strict=True))
    folder = pictures(tmp_path / "renamed", renamed)
    assert nomax("evaluate", trained, "--data", folder) == 2
    told = capsys.readouterr().err
    assert "2 of 3 classes do not match: 'blue [b]', 'red' of the model, 'a red', 'z blue' of the data set." in told
    assert "--match-classes order" in told
    assert nomax("evaluate", trained, "--data", folder, "--match-classes", "order") == 0
    assert "Classes count in their order" in capsys.readouterr().out


def test_classes_in_another_order_are_matched_by_name(
    trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = evaluate.load(trained)
    test = data.load(photos, "test")
    pixels = np.stack([np.array(test.image(index)) for index in range(len(test))])
    order = [2, 0, 1]
    names = [test.classes[label] for label in order]
    shuffled = data.ArraySource(pixels, np.argsort(order)[test.labels], names, "shuffled")
    assert [shuffled.classes[label] for label in shuffled.labels] == [test.classes[label] for label in test.labels]
    expected, _ = evaluate.classify(one.model, test, one.transform)
    score, _ = evaluate.classify(one.model, shuffled, one.transform)
    assert score == expected
    by_order, _ = evaluate.classify(one.model, shuffled, one.transform, match="order")
    right = [guess == label for guess, label in zip(guesses(one, photos), shuffled.labels, strict=True)]
    assert by_order.right == sum(right)
    subset = evaluate.LabelMap("two", np.array([2, 0]), 3, ("red", "blue [b]"))
    among, expected_among = (
        evaluate.classify(one.model, source, one.transform, subset)[1] for source in (shuffled, test)
    )
    assert among == expected_among
    # The same through the door: shards whose classes.json has another order.
    assert nomax("data", "pack", photos, "shards", "--split", "test") == 0
    capsys.readouterr()
    listed = json.loads((tmp_path / "shards" / "classes.json").read_text())
    assert listed == list(COLOURS)
    (tmp_path / "shards" / "classes.json").write_text(json.dumps(["red", "blue [b]", "green"]))
    assert nomax("evaluate", trained, "--data", "shards", "--output", "out.json") == 0
    assert "in another order: they are matched by name" in capsys.readouterr().out


def guesses(one: evaluate.TrainedImageModel, photos: Path) -> list[int]:
    paths = sorted((photos / "test").rglob("*.png"))
    return [prediction.guesses[0].label for prediction in evaluate.predict(one, paths, top=1)]


def test_classes_that_are_missing_are_an_error_and_a_subset_by_name_serves_them(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = {name: colour for name, colour in COLOURS.items() if name != "green"}
    folder = pictures(tmp_path / "two", two)
    assert nomax("evaluate", trained, "--data", folder) == 2
    told = capsys.readouterr().err
    assert "the model's head has 3 classes, the data set 2." in told
    assert "--subset" in told
    (tmp_path / "some.txt").write_text("red\nblue [b]\n")
    assert nomax("evaluate", trained, "--data", folder, "--subset", "some.txt", "--output", "out.json") == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    source, one = data.load(folder, "test"), evaluate.load(trained)
    right = 0
    for index, label in enumerate(source.labels):
        shares = {guess.name: guess.probability for guess in one.predict(source.image(index))}
        right += max(two, key=lambda name: shares[name]) == source.classes[label]
    assert result["subset_accuracy"]["right"] == right
    other = pictures(tmp_path / "other", {"violet": (250, 0, 250), "red": (250, 0, 0)})
    assert nomax("evaluate", trained, "--data", other, "--subset", "some.txt") == 2
    assert "'violet' of the data set" in capsys.readouterr().err


def test_a_thousand_classes_make_no_long_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = tuple(f"class number {number} {'with a long name ' * 9}" for number in range(1000))
    model = ViT("mu/4", num_classes=1000, image_size=8, channels=3, classes=names, probabilities="softmax")
    model.save_pretrained(tmp_path / "large")
    assert len((tmp_path / "large" / "README.md").read_text()) < 8000
    assert "and 980 more in config.json" in (tmp_path / "large" / "README.md").read_text()
    assert len(repr(model.config)) < 1000
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert config["classes"] == list(names)
    source = data.ArraySource(np.zeros((1000, 8, 8, 3), np.uint8), np.arange(1000), [n.upper() for n in names], "x")
    with pytest.raises(ValueError, match="1,000 of 1,000 classes do not match") as error:
        evaluate.classify(model, source, evaluate.TrainedImageModel("large", model).transform)
    assert len(str(error.value)) < 800
    with pytest.raises(ValueError, match="classes has 999 names for num_classes=1,000") as error:
        replace(model.config, classes=names[1:])
    assert len(str(error.value)) < 200
    with pytest.raises(ValueError, match="must be a list") as error:
        replace(model.config, classes=[*names[1:], 7])  # type: ignore[arg-type]
    assert len(str(error.value)) < 400


def test_a_preprocessing_that_nomax_does_not_do_is_refused(tmp_path: Path) -> None:
    models.save(ViT("mu/4", num_classes=3, image_size=8, preprocessing=Preprocessing("resize")), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wrong: list[tuple[Any, str]] = [
        ({"range": [0, 1]}, "with values from -1 to 1 only"),
        ({"crop": "middle"}, "crop='middle' must be"),
        ({"mean": 0.5}, "unknown keys: mean; known are crop, antialias, range"),
    ]
    for changes, message in wrong:
        (tmp_path / "config.json").write_text(json.dumps({**config, "preprocessing": changes}))
        with pytest.raises(ValueError, match=message):
            models.load(tmp_path)


def test_a_run_whose_classes_were_renamed_does_not_go_on(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos")
    options = Options(data=str(folder), out=tmp_path / "run", checkpoint_every=4, **SMALL)
    assert run(options) == 0
    (tmp_path / "run" / "result.json").unlink()  # as if it were not finished
    for split in ("train", "test"):
        (folder / split / "green").rename(folder / split / "turquoise")
    with pytest.raises(ValueError, match="the classes: 'green' there, 'turquoise' now"):
        run(options)
    for split in ("train", "test"):
        (folder / split / "turquoise").rename(folder / split / "green")
    assert run(options) == 0
    assert load_run(tmp_path / "run")[0].config.classes == tuple(COLOURS)


def test_what_training_skips_evaluation_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pictures(tmp_path / "photos")
    for split in ("train", "test"):
        (folder / split / "green" / "0.png").write_bytes(b"broken")
    assert run(Options(data=str(folder), out=tmp_path / "run", on_error="skip", **SMALL)) == 0
    assert nomax("evaluate", "run", "--output", "out.json") == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["accuracy"]["images"] == 17
    assert nomax("evaluate", "run", "--smoke") == 0  # the first images of each class, as a part of the data set
    assert nomax("rows", "run", "--output", "rows") == 0
    assert nomax("maps", "run", "--index", 0) == 0
    capsys.readouterr()
    assert nomax("maps", "run", "--index", 6) == 2
    assert "0.png is a broken image: choose another" in capsys.readouterr().err
    assert nomax("evaluate", "run", "--data", folder) == 2
    assert "0.png" in capsys.readouterr().err
    assert nomax("evaluate", "run", "--data", folder, "--on-error", "skip") == 0
