"""nomax evaluate, probe, rows and maps: from folders to tables, files and pictures, and what they say to mistakes."""

import json
import math
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate_helpers import nomax
from PIL import Image
from precision import assert_rounded

from nomax import data, evaluate, models
from nomax.data.images.batches import evaluation_batches
from nomax.data.images.transforms import Augment
from nomax.data.source import part
from nomax.evaluate import accuracy, fewshot, probe, terminal
from nomax.evaluate.fewshot import features, probe_transform
from nomax.models import ViT
from nomax.train import VisionConfig
from nomax.train.config import to_json

COMMANDS = ("evaluate", "probe", "rows", "maps")
pytestmark = pytest.mark.usefixtures("in_folder")


def vit(phi: str = "relu/L", **settings: Any) -> ViT:
    torch.manual_seed(0)
    given = {"num_classes": 10, "image_size": 28, "channels": 1, "head_zero": False, "qk_norm": True, **settings}
    return ViT("mu/7", phi=phi, **given).eval()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a finished model."""
    model = vit()
    augment = Augment(28, "pad", channels=1)
    config = replace(VisionConfig(), model=model.config, data="fashion-mnist-small", augment=augment)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.json").write_text(to_json(config))
    models.save(model, tmp_path / "first" / "model")
    return tmp_path / "first"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved model, without a run."""
    models.save(vit("softmax", pool="tok"), tmp_path / "second")
    return tmp_path / "second"


def pictures(folder: Path, classes: int = 3, images: int = 4, splits: tuple[str, ...] = ("train", "test")) -> Path:
    """Image files of different sizes, and colours that tell their classes."""
    generator = np.random.default_rng(0)
    for split in splits:
        for label in range(classes):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for number in range(images):
                pixels = generator.integers(0, 60, (20 + 7 * number, 31, 3)).astype(np.uint8)
                pixels[..., label % 3] += 180
                Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def test_a_run_and_its_saved_model_are_the_same_model(run: Path) -> None:
    image = torch.zeros(1, 1, 28, 28)
    loaded, inside = evaluate.load(run), evaluate.load(run / "model")
    assert torch.equal(loaded.model(image), inside.model(image))
    assert not loaded.model.training
    assert loaded.data == "fashion-mnist-small"
    assert loaded.title == "first (relu/L)"
    assert replace(loaded, name="relu-L").title == "relu/L"  # as `nomax train` calls the folders of several φ
    with pytest.raises(ValueError, match="give one with --data"):
        _ = inside.data


@pytest.mark.parametrize(
    ("command", "output", "message"),
    [
        ("evaluate", "/dev/null", "is not a file"),
        ("probe", "/dev/null", "is not a file"),
        ("evaluate", "/proc/1/mine.json", "cannot be written"),
        ("evaluate", "there/mine.json", "there cannot be written to"),
    ],
)
def test_results_that_could_not_be_written_are_not_computed(
    command: str,
    output: str,
    message: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("a file, not a folder")
    assert nomax(command, run, "--output", output, "--smoke", *(("--on", "digits") if command == "probe" else ())) > 0
    assert message in capsys.readouterr().err
    assert Path("/dev/null").is_char_device()


def test_accuracy_is_that_of_the_logits_one_by_one(run: Path, tmp_path: Path) -> None:
    assert nomax("evaluate", run, "--output", tmp_path / "new" / "out.json", "--batch-size", 300) == 0
    (result,) = json.loads((tmp_path / "new" / "out.json").read_text())["results"]
    source = data.load("fashion-mnist-small", "test")
    assert result["accuracy"]["images"] == len(source) == 2000
    pixels = torch.from_numpy(np.stack([np.array(source.image(index)) for index in range(2000)]))
    with torch.no_grad():
        logits = vit()(pixels[:, None] / 127.5 - 1)
    assert result["accuracy"]["accuracy"] == pytest.approx(float(np.mean(logits.argmax(1).numpy() == source.labels)))
    assert result["subset_accuracy"] is None


def test_a_subset_counts_the_images_of_its_classes_and_its_columns(run: Path, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("7\n2\n5\n")
    assert nomax("evaluate", run, "--subset", tmp_path / "some.txt", "--output", tmp_path / "out.json") == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    source = data.load("fashion-mnist-small", "test")
    inside = np.isin(source.labels, [7, 2, 5])
    pixels = torch.from_numpy(np.stack([np.array(source.image(index)) for index in np.flatnonzero(inside)]))
    with torch.no_grad():
        logits = vit()(pixels[:, None] / 127.5 - 1)[:, [2, 5, 7]].argmax(1)
    expected = np.mean(np.array([2, 5, 7])[logits.numpy()] == source.labels[inside])
    assert result["subset_accuracy"]["images"] == 600
    assert result["subset_accuracy"]["accuracy"] == pytest.approx(float(expected))


def test_a_data_set_with_the_classes_of_the_subset_is_matched_by_name(tmp_path: Path) -> None:
    """As ImageNet-1k for a head of 21,843 classes: here 3 folders for a head of 8, in another order than theirs."""
    folder = pictures(tmp_path / "pictures", images=2, splits=("test",))
    model = vit(num_classes=8, image_size=28, channels=3)
    subset = evaluate.LabelMap("s", np.array([6, 1, -1]), 8, ("class2", "class0", "class1"))
    source = data.load(folder, "test")
    transform = evaluate.TrainedImageModel("x", model).transform
    whole, among = evaluate.classify(model, source, transform, subset, batch_size=4)
    assert whole.images == 6
    assert among is not None
    assert among.images == 6
    right, right_among = 0, 0
    with torch.no_grad():
        for index, label in enumerate(source.labels):
            one = part(source, np.array([index]))
            logits = model(next(evaluation_batches(one, transform, 1))[0])[0]
            column = {"class0": 1, "class1": None, "class2": 6}[source.classes[label]]
            right += int(logits.argmax()) == column
            right_among += (6 if logits[6] > logits[1] else 1) == column
    assert (whole.right, among.right) == (right, right_among)


def test_the_icons_subset_comes_with_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path))
    (tmp_path / "icons").mkdir()
    meta = {"name": "icons", "classes": ["arrow", "bell", "car"], "splits": {"test": [0, 1]}, "subset": [2, 0]}
    (tmp_path / "icons" / "meta.json").write_text(json.dumps(meta))
    np.save(tmp_path / "icons" / "images.npy", np.zeros((1, 32, 32), np.uint8))
    subset = accuracy.frequent_icons()
    assert (subset.columns.tolist(), subset.head, subset.names) == ([2, 0], 3, ("car", "arrow"))


def test_probe_prints_and_writes_every_run_data_set_and_shot(
    run: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pictures(tmp_path / "pictures")
    options = ("--on", "digits", f"mine={folder}", "--shots", 1, 3, "--seeds", 2, "--output", tmp_path / "out.json")
    assert nomax("probe", run, saved, *options) == 0
    out = capsys.readouterr().out
    for text in ("first (relu/L)", "second (softmax)", "digits", "mine", "average", "1 shot ", "3 shots"):
        assert text in out
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(entry["on"], entry["run"]) for entry in results] == [
        (name, title) for name in ("digits", "mine") for title in ("first (relu/L)", "second (softmax)")
    ]
    # The features of all images, given to the function, come to the same.
    source = [data.load("digits", split) for split in ("train", "test")]
    given = [tensor for part in source for tensor in features(evaluate.load(run).model, part)]
    expected = fewshot.accuracies(*given, shots=(1, 3), seeds=(0, 1))
    assert results[0]["accuracy"] == {"1": expected[0, :, 0].tolist(), "3": expected[1, :, 0].tolist()}


def test_probe_skips_broken_images_as_if_the_data_set_did_not_have_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(tmp_path / "whole", images=6)
    shutil.copytree(tmp_path / "whole", tmp_path / "fewer")
    for name in ("train/class0/0.png", "train/class0/3.png", "train/class1/2.png", "test/class2/1.png"):
        (tmp_path / "whole" / name).write_bytes(b"broken")
        (tmp_path / "fewer" / name).unlink()
    accuracies = []
    for name in ("whole", "fewer"):
        options = ("--on", f"mine={tmp_path / name}", "--shots", 1, 4, "--output", tmp_path / "out.json")
        assert nomax("probe", run, *options, "--on-error", "skip") == 0
        accuracies.append(json.loads((tmp_path / "out.json").read_text())["results"][0]["accuracy"])
    assert accuracies[0] == accuracies[1]
    capsys.readouterr()
    assert nomax("probe", run, "--on", f"mine={tmp_path / 'whole'}", "--shots", 5) == 2
    assert "0.png is not a JPEG" in capsys.readouterr().err
    for path in (tmp_path / "whole" / "train").glob("*/*"):
        path.write_bytes(b"broken")
    assert nomax("probe", run, "--on", f"mine={tmp_path / 'whole'}", "--on-error", "skip") == 2
    assert "none of the training images can be read" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "probe --on digits", "rows", "maps"])
def test_a_command_whose_output_nobody_reads_ends_quietly(run: Path, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    name, *options = command.split()
    words = [sys.executable, "-m", "nomax.cli", name, str(run), *options, "--smoke"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_features_of_files_are_those_of_the_pixels_resized_by_hand(tmp_path: Path) -> None:
    source = data.load(pictures(tmp_path / "pictures"), "train")
    model = vit(channels=3)
    x, labels = features(model, source, batch_size=5)
    assert x.shape == (12, 32)
    assert labels.tolist() == source.labels.tolist()
    for index in (0, 7, 11):
        shown = np.array(source.image(index).convert("RGB").resize((28, 28), Image.Resampling.BILINEAR))
        with torch.no_grad():
            expected = model.features(torch.from_numpy(shown).permute(2, 0, 1)[None] / 127.5 - 1)
        assert_rounded(x[index], expected[0], 80)  # products in batches of other sizes


def test_large_models_see_the_centre_of_a_square_without_antialiasing() -> None:
    transform = probe_transform(vit(image_size=224, channels=3))
    assert (transform.size, transform.crop, transform.antialias) == (224, "square", False)


def test_grey_images_suit_models_of_colours_and_the_other_way_round(tmp_path: Path) -> None:
    digits = data.load("digits", "test")
    grey, _ = features(vit(channels=3), terminal.first_images(digits, 2, 2))
    assert grey.shape == (4, 32)
    colours = data.load(pictures(tmp_path / "pictures"), "test")
    x, _ = features(vit(channels=1), colours)
    assert torch.isfinite(x).all()


def test_the_papers_sets_without_a_test_split_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path / "pictures", images=5, splits=("train",)) / "train"
    monkeypatch.setitem(probe.PAPER, "uc_merced", replace(probe.PAPER["uc_merced"], cut=9))
    ((train, test),) = probe.probe_sets([f"uc_merced={folder}"]).values()
    assert (len(train), len(test)) == (9, 6)
    names = [part.name(index) for part in (train, test) for index in range(len(part))]
    assert len(set(names)) == 15
    assert set(train.labels) == {0, 1, 2}  # the folder's order is by class, so it was shuffled


def test_a_class_that_only_one_split_has_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pictures(tmp_path / "pictures")
    (folder / "test" / "class1").rename(folder / "test" / "class9")
    assert nomax("probe", run, "--on", f"mine={folder}") == 2
    assert "mine: its train and test images have different classes: class1, class9" in capsys.readouterr().err


def test_rows_writes_a_table_and_a_figure(
    run: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--data", "fashion-mnist-small", "--images", 3, "--output", tmp_path / "out")
    assert nomax("rows", run, saved, *options) == 0
    out = capsys.readouterr().out
    assert "first (relu/L)" in out
    assert "effective keys" in out
    assert "L = 17" in out  # 16 patches and the class token of the second
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert [row["row_sum"] for row in rows["second (softmax)"]] == pytest.approx([1, 1])
    assert {row["length"] for row in rows["first (relu/L)"]} == {16}
    root = ElementTree.parse(tmp_path / "out" / "rows.svg").getroot()
    words = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("desc"))
    assert "second (softmax), mean weight × L (= mean row sum): 1." in words


def test_rows_shows_what_is_not_defined_as_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.save(vit("gelu/L"), tmp_path / "signed")
    options = ("--data", "digits", "--heads", "--smoke", "--output", tmp_path)
    assert nomax("rows", tmp_path / "signed", *options) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["1", "2"])
    assert row.split()[6] == "–"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["signed (gelu/L)"][0]["entropy"] is None
    assert math.isfinite(rows["signed (gelu/L)"][0]["effective_keys"])


def test_maps_draws_runs_side_by_side(run: Path, saved: Path, tmp_path: Path) -> None:
    assert nomax("maps", run, saved, "--index", 7, "--output", tmp_path / "maps.png") == 0
    with Image.open(tmp_path / "maps.png") as picture:
        assert picture.format == "PNG"
        assert "first (relu/L), layer 1: strongest at row" in picture.info["Description"]
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.jpg")
    options = ("--image", tmp_path / "red.jpg", "--query", 2, 3, "--heads", 1, "--output", tmp_path / "m.svg")
    assert nomax("maps", run, *options) == 0
    text = (tmp_path / "m.svg").read_text()
    assert "the patch in row 2, column 3" in text
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_pictures_go_into_the_folder_of_the_first_run_and_replace_nothing_else(
    run: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nomax("maps", run, saved, "--index", 7) == 0
    assert f"Written: {run}/maps-7.png (" in capsys.readouterr().out
    assert nomax("maps", run, "--index", 7) == 0
    assert f"Written, in place of an earlier one: {run}/maps-7.png (" in capsys.readouterr().out
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red $x$.jpg")
    assert nomax("maps", saved, "--image", tmp_path / "red $x$.jpg") == 0
    assert f"Written: {saved}/maps-red $x$.png" in capsys.readouterr().out
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.png")
    before = (tmp_path / "photo.png").read_bytes()
    assert nomax("maps", run, "--output", "photo.png") == 2
    assert "photo.png is there, and nomax maps did not write it" in capsys.readouterr().err
    assert (tmp_path / "photo.png").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "photo.png", "red $x$.jpg", "second"]


def test_a_dollar_sign_in_the_name_of_a_run_is_no_formula(tmp_path: Path) -> None:
    models.save(vit(), tmp_path / "a$x^$b")
    assert nomax("rows", tmp_path / "a$x^$b", "--data", "digits", "--smoke") == 0
    assert "a$x^$b (relu/L)" in (tmp_path / "a$x^$b" / "rows.svg").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_smoke_tries_a_command_on_next_to_nothing(command: str, run: Path) -> None:
    assert nomax(command, run, "--smoke") == 0


MISTAKES: list[tuple[str, Callable[[Path], tuple[object, ...]], str]] = [
    ("evaluate", lambda run: (run.parent,), "Give one or more of them: "),
    ("evaluate", lambda run: (run / "model" / "..", run / "empty"), "is neither a run folder nor a saved model"),
    ("evaluate", lambda run: ("./missing",), "there is no such folder"),
    ("evaluate", lambda run: (), "give at least one run"),
    ("evaluate", lambda run: (run, "--device", "nowhere"), "device 'nowhere' cannot be used"),
    ("evaluate", lambda run: (run, run), "the same run is named twice"),
    ("evaluate", lambda run: (run / "model",), "give one with --data"),
    ("evaluate", lambda run: (run, "--data", "fashion-minst"), "did you mean fashion-mnist"),
    ("evaluate", lambda run: (run, "--subset", "imagenet"), "nor one of the subsets imagenet1k, icons"),
    ("evaluate", lambda run: (run, "--subset", "imagenet1k"), "is of a head with 21,843 classes; this model's has 10"),
    ("probe", lambda run: (run, "--on", "birds"), "Give its folder: --on birds=PATH"),
    ("probe", lambda run: (run, "--on", "digits", "digits"), "names 'digits' twice"),
    ("probe", lambda run: (run, "--on", "digits", "--shots", "0"), "shots=0 must be an integer of at least 1"),
    ("probe", lambda run: (run, "--seeds", "0"), "seed is empty"),
    ("rows", lambda run: (run, "--images", "0"), "--images 0 must be at least 1"),
    ("maps", lambda run: (run, "--index", "2000"), "the test split has the images 0 to 1999"),
    ("maps", lambda run: (run, "--layers", "2"), "has the layers 1 to 1"),
    ("maps", lambda run: (run, "--heads", "3"), "has the heads 1 to 2"),
    ("maps", lambda run: (run, "--query", "5", "1"), "the image has 4 rows and 4 columns"),
    ("maps", lambda run: (run, "--output", "maps.gif"), "a picture ends in .svg or .png"),
    ("maps", lambda run: (run, "--image", "none.png"), "none.png cannot be read"),
    ("maps", lambda run: (run, "--image", "a.png", "--data", "digits"), "give one of them"),
]


@pytest.mark.parametrize(("command", "arguments", "answer"), MISTAKES)
def test_a_mistake_is_told_in_one_line(
    command: str,
    arguments: Callable[[Path], tuple[object, ...]],
    answer: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert nomax(command, *arguments(run)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"nomax {command}: ")
    assert answer in err
    assert "Traceback" not in err


def test_a_model_without_a_head_is_sent_to_the_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.save(vit(num_classes=0), tmp_path / "headless")
    assert nomax("evaluate", tmp_path / "headless", "--data", "digits") == 2
    assert "`nomax probe` takes its features" in capsys.readouterr().err


def test_a_model_in_bfloat16_is_taken(tmp_path: Path) -> None:
    models.save(vit().bfloat16(), tmp_path / "half")
    assert nomax("evaluate", tmp_path / "half", "--data", "digits", "--smoke") == 0
    assert nomax("rows", tmp_path / "half", "--data", "digits", "--smoke") == 0
    assert nomax("probe", tmp_path / "half", "--on", "digits", "--smoke") == 0
