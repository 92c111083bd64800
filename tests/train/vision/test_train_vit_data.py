"""`nomax train vit` and its data: the user's own images, how they are shown, and where a run finds them again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_images
import torch
import torch.nn.functional as F
from pictures import fill

from nomax.cli import exit_code, main
from nomax.train import load_run
from nomax.train.distributed import World
from nomax.train.vision.command import Options, run
from nomax.train.vision.task import VisionTask, load_images

SMALL = {"tensorboard": False, "threads": 1, "batch_size": 8, "model": "mu/8", "warmup": 1}


OWN = ["--model", "mu/8", "--batch-size", "8", "--steps", "4", "--threads", "1", "--no-tensorboard"]


@pytest.fixture
def own(tmp_path):
    """A user's images: class folders, no splits, sizes of their own; an odd name that JSON and shells must keep."""
    return fill(tmp_path / "my [images] é", {"cat": 20, "dog": 15, "owl": 10})


def test_a_folder_without_a_test_split_trains_with_a_share_held_out(tmp_path, own, capsys):
    words = ["train", "vit", "--data", str(own), "--image-size", "16", "--out", str(tmp_path / "run"), *OWN]
    assert main(words) == 2
    assert "Or hold out a share of the training images: --held-out 0.1." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--held-out", "0.3"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    _, config = load_run(tmp_path / "run")
    task = VisionTask(config, *load_images(str(own), "raise", 0.3))
    shown = {name for step in range(4) for name in task.describe(step)["names"]}
    held_out = {task.test.name(index) for index in range(len(task.test))}
    assert config.held_out == 0.3
    assert shown
    assert not shown & held_out
    assert main(["evaluate", str(tmp_path / "run"), "--output", str(tmp_path / "results.json")]) == 0
    (evaluated,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert evaluated["accuracy"] == {
        "accuracy": result["test_accuracy"],
        "right": evaluated["accuracy"]["right"],
        "images": len(held_out),
    }
    saved = ["evaluate", str(tmp_path / "run" / "model"), "--data", str(own), "--output", str(tmp_path / "saved.json")]
    assert main(saved) == 2
    assert main([*saved, "--held-out", "0.3"]) == 0
    assert main(["rows", str(tmp_path / "run"), "--smoke", "--output", str(tmp_path / "rows")]) == 0
    assert "30% held out" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert main([*words, "--held-out", "0.2"]) == 2
    assert "held_out: 0.3 there, 0.2 now" in capsys.readouterr().err


def batches_of(folder, steps):
    _, config = load_run(folder)
    task = VisionTask(config, *load_images(config.data, config.on_error, config.held_out))
    return task, [batch for batch, _ in zip(task.batches(0, World(torch.device("cpu"))), range(steps), strict=False)]


LEVEL = {"rtol": 0, "atol": 1.01 / 127.5}  # which pixels are shown is what counts here, not how they are rounded


def as_float(images, size):
    """Whole images, resized by torch's own antialiased bilinear to bytes, as a batch of floats."""
    pixels = [torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None] for image in images]
    resized = [F.interpolate(each, (size, size), mode="bilinear", antialias=True) for each in pixels]
    return torch.cat(resized) / 127.5 - 1


def test_images_may_be_shown_whole_and_never_mirrored(tmp_path, own):
    words = ["train", "vit", "--data", str(own), "--image-size", "16", "--held-out", "0.3", *OWN]
    assert main([*words, "--out", str(tmp_path / "whole"), "--no-flip", "--crop", "resize"]) == 0
    task, shown = batches_of(tmp_path / "whole", 4)
    for batch in shown:
        _, indices = task.order.batch(batch.step)
        expected = as_float([task.train.image(index) for index in indices.tolist()], 16)
        torch.testing.assert_close(batch.images, expected, **LEVEL)
    assert main([*words, "--out", str(tmp_path / "flipped"), "--crop", "resize"]) == 0  # folders are flipped by default
    _, flipped = batches_of(tmp_path / "flipped", 4)
    pairs = [pair for a, b in zip(shown, flipped, strict=True) for pair in zip(a.images, b.images, strict=True)]
    assert {torch.equal(a, b) for a, b in pairs} == {True, False}
    assert all(torch.equal(a, b) or torch.equal(a.flip(-1), b) for a, b in pairs)


def test_crops_may_be_kept_large(tmp_path, own, capsys):
    words = ["train", "vit", "--data", str(own), "--image-size", "16", "--held-out", "0.3", "--no-flip", *OWN]
    assert main([*words, "--out", str(tmp_path / "whole"), "--min-crop-area", "1"]) == 0
    task, shown = batches_of(tmp_path / "whole", 2)
    for batch in shown:
        _, indices = task.order.batch(batch.step)
        expected = as_float([task.train.image(index) for index in indices.tolist()], 16)
        torch.testing.assert_close(batch.images, expected, **LEVEL)
    assert main([*words, "--out", str(tmp_path / "half"), "--min-crop-area", "0.5"]) == 0
    augment = load_run(tmp_path / "half")[1].augment
    assert (augment.crop, augment.area, augment.flip) == ("inception", (0.5, 1.0), False)
    boxes = [augment.box(40, 30, 0, position) for position in range(200)]
    areas = [(right - left) * (bottom - top) / 1200 for left, top, right, bottom in boxes]
    assert 0.48 < min(areas) < 0.6  # whole pixels
    capsys.readouterr()


def test_images_of_the_right_size_may_be_taken_as_they_are(tmp_path, data):
    assert main(["train", "vit", "--data", data, "--out", str(tmp_path / "run"), "--crop", "none", *OWN]) == 0
    task, (batch,) = batches_of(tmp_path / "run", 1)
    _, indices = task.order.batch(0)
    expected = torch.from_numpy(task.train.images[indices]).permute(0, 3, 1, 2) / 127.5 - 1
    torch.testing.assert_close(batch.images, expected)


def test_the_older_configurations_have_nothing_held_out(tmp_path, data):
    assert run(Options(data=data, out=tmp_path / "run", steps=2, **SMALL)) == 0
    path = tmp_path / "run" / "config.json"
    content = json.loads(path.read_text())
    assert content.pop("held_out") == 0
    path.write_text(json.dumps(content))
    assert load_run(tmp_path / "run")[1].held_out == 0
    assert run(Options(data=data, out=tmp_path / "run", steps=2, **SMALL)) == 0


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with data and an unfinished run, begun in it with a relative path."""
    folder = tmp_path / "project"
    tiny_images.write(folder / "photos")
    monkeypatch.chdir(folder)
    begin()
    return folder


def begin(data="photos", out=Path("runs/a")):
    """Train the run from the beginning or from where it is, and leave it as if it had been stopped on the way."""
    options = Options(data=data, out=out, steps=4, checkpoint_every=2, **SMALL)
    code = exit_code("nomax train vit", lambda: run(options))
    for name in ("result.json", "model/config.json", "checkpoints/step-00000004.pt"):
        (Path(out) / name).unlink(missing_ok=True)
    return code


def test_a_run_finds_its_data_from_every_working_directory(project, tmp_path, monkeypatch, capsys):
    assert begin() == 0
    monkeypatch.chdir(tmp_path)
    _, config = load_run("project/runs/a")
    assert config.data == str(project / "photos")
    capsys.readouterr()
    assert main(["evaluate", "project/runs/a"]) == 0
    assert main(["evaluate", str(project / "runs" / "a")]) == 0
    # However the place is called, it is the same run.
    (tmp_path / "link").symlink_to(project / "photos")
    for data in ("project/photos", str(project / "photos"), "./project/../project/photos/", "link"):
        assert begin(data, Path("project/runs/a")) == 0
    card = (project / "runs" / "a" / "model" / "README.md").read_text()
    assert "| data | link |" in card  # as it was typed: a card is for others, who have other folders


def test_the_same_words_for_data_at_another_place_are_refused(project, tmp_path, monkeypatch, capsys):
    tiny_images.write(tmp_path / "other" / "photos")
    monkeypatch.chdir(tmp_path / "other")
    assert begin(out=project / "runs" / "a") == 2
    assert f"data: '{project}/photos' there, '{tmp_path}/other/photos' now" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_run_that_moved_together_with_its_data_goes_on(project, tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    if how == "moved":
        project.rename(tmp_path / "new")
    else:
        shutil.copytree(project, tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")
    assert begin() == 0
    if how == "moved":
        monkeypatch.chdir(tmp_path)
        assert load_run("new/runs/a")[1].data == str(tmp_path / "new" / "photos")
        assert main(["evaluate", "new/runs/a"]) == 0


def test_a_run_of_an_earlier_version_goes_on_where_it_was_begun(project, tmp_path, monkeypatch, capsys):
    """Its configuration has the path as it was typed, and its story neither folder nor classes."""
    path, story = project / "runs" / "a" / "config.json", project / "runs" / "a" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "photos"}))
    for file in (project / "runs" / "a" / "checkpoints").iterdir():
        file.unlink()  # they belong to the configuration with the other path
    told = json.loads(story.read_text())
    story.write_text(json.dumps({name: told[name] for name in told if name not in ("folder", "classes")}))
    assert begin() == 0
    assert begin(str(project / "photos")) == 0
    assert load_run("runs/a")[0].config.classes == ("class 0", "class 1", "class 2", "class 3")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["evaluate", "project/runs/a"]) == 2
    told = capsys.readouterr().err
    assert "a was trained on photos." in told
    assert "give --data" in told
    assert main(["evaluate", "project/runs/a", "--data", "project/photos"]) == 0


def test_data_that_are_gone_are_named_with_what_to_do(project, capsys):
    (project / "photos").rename(project / "pictures")
    assert main(["evaluate", "runs/a"]) == 2
    told = capsys.readouterr().err
    assert f"a was trained on {project}/photos." in told
    assert "Or give --data." in told
    assert main(["evaluate", "runs/a", "--data", "pictures"]) == 0
