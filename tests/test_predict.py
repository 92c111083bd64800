"""A trained classifier and its user: class names and preprocessing in the model, nomax predict, names in evaluation."""

import csv
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from nomax import data, evaluate, models
from nomax.cli import main
from nomax.data.images import DataError
from nomax.models import Preprocessing, ViT
from nomax.train import load_run
from nomax.train.vit import Options, run

COLOURS = {"blue [b]": (0, 0, 250), "green": (0, 250, 0), "red": (250, 0, 0)}
# Too few steps to learn anything, but the head is no longer zero.
SMALL: dict[str, Any] = {"tensorboard": False, "threads": 1, "batch_size": 8, "model": "mu/4", "image_size": 8}
SMALL |= {"steps": 8, "warmup": 1, "lr": 1e-2}


def nomax(command: str, *arguments: object) -> int:
    return main([command, *map(str, arguments)])


def picture(path: Path, colour: tuple[int, int, int], seed: int, size: tuple[int, int] = (13, 9)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-60, 60, (size[1], size[0], 3))
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(path)
    return path


def pictures(folder: Path, classes: dict[str, tuple[int, int, int]] = COLOURS) -> Path:
    for split in ("train", "test"):
        for name, colour in classes.items():
            for number in range(6):
                picture(folder / split / name / f"{number}.png", colour, number)
    return folder


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    assert run(Options(data=str(photos), out=folder, **SMALL)) == 0
    return folder


def logits_by_hand(folder: Path, path: Path) -> torch.Tensor:
    """Of an 8-pixel model: the shorter side to 256/224 of 8, that is 9, then the centre, from -1 to 1."""
    model = models.load(folder / "model")
    image = Image.open(path)
    assert image.size == (13, 9)
    pixels = np.array(image)[0:8, 2:10]  # so that no pixel has to be interpolated: (9 - 8) // 2 and (13 - 8) // 2
    with torch.no_grad():
        return model(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1)[0].double()


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
    found = evaluate.load(folder).predict(path)
    order = sorted(range(3), key=lambda label: -float(expected[label]))
    assert [guess.label for guess in found] == order
    assert [guess.name for guess in found] == [list(COLOURS)[label] for label in order]
    assert [guess.probability for guess in found] == pytest.approx(
        [float(expected[label]) for label in order], abs=1e-6
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
        found = list(evaluate.predict(one, paths, top=3, batch_size=4, workers=workers))
        assert [prediction.image for prediction in found] == list(map(str, paths))
        for path, prediction in zip(paths, found, strict=True):
            single = one.predict(Image.open(path), top=3)
            assert [guess.name for guess in single] == [guess.name for guess in prediction.guesses]
            assert [guess.probability for guess in single] == pytest.approx(
                [guess.probability for guess in prediction.guesses], abs=1e-6
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
        assert second["guesses"][0]["probability"] == pytest.approx(guesses[0].probability, abs=1e-6)
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
    monkeypatch.setattr("nomax.evaluate.commands.predict.SHOWN", 2)
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
    found = json.loads((tmp_path / "out.json").read_text())["results"][0]["guesses"]
    assert {guess["class"] for guess in found} == set(names)
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
    found, _ = evaluate.classify(one.model, shuffled, one.transform)
    assert found == expected
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


def guesses(one: evaluate.Run, photos: Path) -> list[int]:
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
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    source, one = data.load(folder, "test"), evaluate.load(trained)
    right = 0
    for index, label in enumerate(source.labels):
        shares = {guess.name: guess.probability for guess in one.predict(source.image(index))}
        right += max(two, key=lambda name: shares[name]) == source.classes[label]
    assert found["subset_accuracy"]["right"] == right
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
        evaluate.classify(model, source, evaluate.Run("large", model).transform)
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


def test_a_run_whose_classes_were_renamed_does_not_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pictures(tmp_path / "photos")
    options = Options(data=str(folder), out=tmp_path / "run", checkpoint_every=4, **SMALL)
    assert run(options) == 0
    (tmp_path / "run" / "result.json").unlink()  # as if it were not finished
    for split in ("train", "test"):
        (folder / split / "green").rename(folder / split / "turquoise")
    assert run(options) == 2
    assert "the classes: 'green' there, 'turquoise' now" in capsys.readouterr().err
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
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["accuracy"]["images"] == 17
    assert nomax("evaluate", "run", "--smoke") == 0  # the first images of each class, as a part of the data set
    assert nomax("rows", "run", "--output", "rows") == 0
    assert nomax("maps", "run", "--index", 0) == 0
    capsys.readouterr()
    assert nomax("maps", "run", "--index", 6) == 2
    assert "0.png is a broken image: choose another" in capsys.readouterr().err
    assert nomax("evaluate", "run", "--data", folder) == 2
    assert "0.png" in capsys.readouterr().err
    assert nomax("evaluate", "run", "--data", folder, "--on-error", "skip") == 0
