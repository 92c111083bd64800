"""`nomax train vit` as its users meet it."""

import json
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from precision import REORDERED

import nomax.data
from nomax import models
from nomax.cli import exit_code
from nomax.train import load_run, metrics
from nomax.train.cli import spelled
from nomax.train.config import settle
from nomax.train.distributed import World
from nomax.train.vision.command import TITLE, Options, run
from nomax.train.vision.config import for_images
from nomax.train.vision.task import VisionTask, load_images

# What the `nomax` script does.
NOMAX = [sys.executable, "-c", "import sys; from nomax.cli import main; sys.exit(main())", "train", "vit"]
SMALL = {"tensorboard": False, "threads": 1, "batch_size": 8, "model": "mu/8", "warmup": 1}


def lines(folder):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in metrics.read(folder)]


def losses(folder):
    return [line.get("evaluation", line)["loss"] for line in metrics.read(folder)]


def test_one_command_trains_two_phis_compares_them_and_says_what_to_do_next(tmp_path, data, capsys):
    options = Options(phi=("softmax", "relu/L"), data=data, out=tmp_path / "run", smoke=True, tensorboard=False)
    assert run(options) == 0
    told = capsys.readouterr().out
    for folder, phi in (("softmax", "softmax"), ("relu-L", "relu/L")):
        model, config = load_run(tmp_path / "run" / folder)
        assert config.model.phi == str(model.blocks[0].attention.phi) == phi
        result = json.loads((tmp_path / "run" / folder / "result.json").read_text())
        assert f"{result['test_accuracy']:.2%}" in told
        card = (tmp_path / "run" / folder / "model" / "README.md").read_text()
        for fact in (phi, data, "small", f"{result['test_accuracy']:.2%}", spelled(options, TITLE)):
            assert fact in card
        story = json.loads((tmp_path / "run" / folder / "run.json").read_text())
        assert {"command", "seed", "started", "versions", "machine"} <= set(story)
    table = (tmp_path / "run" / "comparison.md").read_text()
    assert table.index("softmax") < table.index("| relu/L |")
    assert "Next: " in told


def test_both_phis_start_from_the_same_weights_and_see_the_same_images(tmp_path, data):
    options = Options(phi=("softmax", "relu/L"), data=data, out=tmp_path, steps=2, **SMALL)
    assert run(options) == 0
    first = [lines(tmp_path / name)[0]["loss"] for name in ("softmax", "relu-L")]
    assert first[0] == first[1]  # the head starts at zero


def test_the_reported_accuracy_is_that_of_the_saved_model(tmp_path, data):
    assert run(Options(data=data, out=tmp_path / "run", steps=60, lr=3e-3, **SMALL)) == 0
    model, _ = load_run(tmp_path / "run")
    _, test = load_images(data)
    images = torch.from_numpy(test.images).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        right = (model(images).argmax(-1).numpy() == test.labels).mean()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["test_accuracy"] == pytest.approx(right)
    assert right > 0.5  # of four classes that are easy to tell apart


@pytest.mark.parametrize("chosen", [{"steps": 7}, {"epochs": 0.3}, {"steps": 1}, {"smoke": True, "steps": 2}])
def test_a_short_run_needs_no_warm_up_to_be_given(tmp_path, data, chosen):
    short = {name: value for name, value in SMALL.items() if name != "warmup"}
    assert run(Options(data=data, out=tmp_path / "run", **chosen, **short)) == 0
    _, config = load_run(tmp_path / "run")
    assert config.warmup == config.steps // 5
    assert config.steps == chosen.get("steps", round(0.3 * 64 / 8))


@pytest.mark.parametrize("recipe", ["i1k", "i21k"])
def test_the_papers_recipes_take_the_smallest_of_big_visions_models(tmp_path, data, recipe):
    options = Options(data=data, out=tmp_path / "run", recipe=recipe, model="Ti/16", smoke=True, tensorboard=False)
    assert run(options) == 0
    augment = load_run(tmp_path / "run")[1].augment
    assert augment.randaug == {"i1k": (2, 0), "i21k": None}[recipe]


def test_a_finished_run_is_left_as_it_is(tmp_path, data, capsys):
    options = Options(data=data, out=tmp_path / "run", steps=2, **SMALL)
    assert run(options) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"}
    capsys.readouterr()
    assert run(options) == 0
    assert "is finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_that_is_not_finished_gives_its_newest_checkpoint(tmp_path, data):
    assert run(Options(data=data, out=tmp_path / "run", steps=4, checkpoint_every=2, **SMALL)) == 0
    whole, config = load_run(tmp_path / "run")
    (tmp_path / "run" / "model").rename(tmp_path / "elsewhere")
    model, _ = load_run(tmp_path / "run")
    assert not model.training
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert config.steps == 4
    with pytest.raises(FileNotFoundError, match="not the folder of a run"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"phi": ("relux/L",)}, "did you mean 'relu/L'"),
        ({"phi": ("relu/L", "relu / L")}, "the same φ is there twice"),
        ({"data": "cifar100"}, "nomax data list"),
        ({"model": "S16"}, "did you mean 'S/16'"),
        ({"model": "mu/5"}, "multiple of the patch"),
        ({"steps": 5, "epochs": 2.0}, "--steps and --epochs"),
        ({"steps": 5, "warmup": 5}, "warmup=5 must be less than steps=5"),
        ({"lr": -1.0}, "lr=-1.0 must be a number of at least 0"),
        ({"recipe": "i1k", "model": "Ti/8"}, "--augmentation"),
        ({"augmentation": "heavy"}, "none, light1"),
        ({"held_out": 1.5}, "held_out is 1.5; it must be a share of the images"),
        ({"crop": "resize", "min_crop_area": 0.5}, "--min-crop-area is for --crop inception"),
        ({"crop": "inception", "min_crop_area": 0.0}, "--min-crop-area 0 must be above 0"),
        ({"crop": "none", "image_size": 32}, "is 16×16, and the model takes 32×32: give --crop resize"),
    ],
)
def test_wrong_options_are_told_before_anything_is_written(tmp_path, data, capsys, wrong, words):
    options = Options(**{"data": data, "out": tmp_path / "run", "smoke": False, **wrong})
    assert exit_code("nomax train vit", lambda: run(options)) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_another_configuration_in_the_folder_is_refused(tmp_path, data, capsys):
    assert run(Options(data=data, out=tmp_path / "run", steps=2, **SMALL)) == 0
    options = Options(data=data, out=tmp_path / "run", steps=3, phi=("softmax",), **SMALL)
    assert exit_code("nomax train vit", lambda: run(options)) == 2
    told = capsys.readouterr().err
    assert "steps: 2 there, 3 now" in told
    assert "model.phi: 'relu/L' there, 'softmax' now" in told


def test_a_loss_that_is_not_finite_ends_the_run_with_step_batch_and_layer(tmp_path, data, capsys):
    options = Options(data=data, out=tmp_path / "run", steps=9, lr=1e38, clip=0.0, checkpoint_every=1, **SMALL)
    assert run(options) == 1
    report = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    told = capsys.readouterr().err
    assert f"step {report['step']} " in told
    assert report["where"] in told
    assert len(report["batch"]["indices"]) == len(report["batch"]["positions"]) == 8
    assert "image" in report["batch"]["names"][0]
    assert lines(tmp_path / "run")[-1]["step"] == report["step"] - 1
    assert (tmp_path / "run" / "checkpoints" / f"step-{report['step'] - 1:08}.pt").exists()


def test_a_full_disk_ends_the_run_with_a_clear_error_and_it_goes_on_later(tmp_path, data, capsys):
    options = Options(data=data, out=tmp_path / "run", steps=4, checkpoint_every=2, **SMALL)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # enough for all but checkpoints
    try:
        assert run(options) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step-00000002.pt could not be written" in capsys.readouterr().err
    assert run(options) == 0


@pytest.mark.parametrize("recipe", ["i1k", "i21k"])
def test_the_papers_recipes_run_in_tiny(tmp_path, data, recipe):
    options = Options(data=data, out=tmp_path / "run", recipe=recipe, model="B/32", smoke=True, tensorboard=False)
    assert run(options) == 0
    model, config = load_run(tmp_path / "run")
    assert config.mixup > 0
    assert config.augment.randaug is not None
    assert model.config.pool == ("tok" if recipe == "i1k" else "gap")


def test_ranks_share_the_test_images_between_them(tmp_path, data):
    assert run(Options(data=data, out=tmp_path / "run", steps=2, **SMALL)) == 0
    _, config = load_run(tmp_path / "run")
    task = VisionTask(config, *load_images(data))
    for size in (1, 3, 5, 30):
        parts = [list(task.evaluation(World(torch.device("cpu"), rank, size))) for rank in range(size)]
        assert len({len(part) for part in parts}) == 1
        labels = torch.cat([batch.targets for part in parts for batch in part])
        assert labels.sort().values.tolist() == sorted(task.test.labels.tolist())
    empty = parts[-1][-1]
    assert task.size(empty) == 0
    assert task.measure(task.model, empty)["loss"] == 0


def test_a_batch_in_slices_is_the_batch(tmp_path, data):
    assert run(Options(data=data, out=tmp_path / "whole", steps=3, **SMALL)) == 0
    assert run(Options(data=data, out=tmp_path / "sliced", steps=3, accumulate=3, **SMALL)) == 0
    assert losses(tmp_path / "sliced") == pytest.approx(losses(tmp_path / "whole"), rel=REORDERED)


def test_a_missing_tensorboard_is_mentioned_once_for_all_phis(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    metrics._say_that_tensorboard_is_missing.cache_clear()
    numbers = {**SMALL, "tensorboard": True}
    assert run(Options(phi=("softmax", "relu/L"), data=data, out=tmp_path, steps=2, **numbers)) == 0
    errors = capsys.readouterr().err
    assert errors.count("TensorBoard is not installed, so the metrics are in metrics.jsonl only.") == 1
    assert not list(tmp_path.rglob("tensorboard"))


def test_tensorboard_gets_the_metrics(tmp_path, data):
    pytest.importorskip("tensorboard")
    assert run(Options(data=data, out=tmp_path / "run", steps=2, **{**SMALL, "tensorboard": True})) == 0
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()
    assert b"test/accuracy" in events.read_bytes()


def test_python_comes_to_the_config_that_the_command_makes(tmp_path, data):
    numbers = {"steps": 3, "lr": 0.01, "beta2": 0.98, "batch_size": 8, "threads": 1}
    options = Options(
        phi=("softmax",), data=data, out=tmp_path, model="mu/8", gate="silu", tensorboard=False, **numbers
    )
    assert run(options) == 0
    images, _ = load_images(data)
    config = for_images("small", images, data=data, variant="mu/8", phi="softmax", gate="silu")
    config = settle(replace(config, **numbers), lambda: len(images) / config.batch_size, numbers)
    assert load_run(tmp_path)[1] == config


def test_images_are_loaded_once_for_all_phis(tmp_path, data, monkeypatch):
    loaded, plain = [], nomax.data.load

    def load(name, split, **settings):
        loaded.append(split)
        return plain(name, split, **settings)

    monkeypatch.setattr(nomax.data, "load", load)
    assert run(Options(phi=("softmax", "relu/L"), data=data, out=tmp_path, steps=2, **SMALL)) == 0
    assert loaded == ["train", "test"]


def test_the_command_is_spelled_as_it_could_be_typed():
    options = Options(
        phi=("softmax", "relu/L"), data="a folder", steps=5, qk_norm=False, parallel=True, tensorboard=False
    )
    assert spelled(options, TITLE) == (
        "nomax train vit --phi softmax relu/L --data 'a folder' --steps 5 --no-qk-norm --no-tensorboard --parallel"
    )


ARGUMENTS = "--model mu/8 --batch-size 8 --steps 200 --warmup 5 --checkpoint-every 7 --evaluate-every 50 --threads 1"


def start(data, folder):
    words = [*NOMAX, "--data", data, "--out", str(folder), *ARGUMENTS.split(), "--no-tensorboard"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_stopped_by_any_signal_at_any_step_the_result_is_the_same_to_the_bit(tmp_path, data):
    undisturbed = start(data, tmp_path / "whole")
    dice = random.Random()  # really at random: any step must do
    steps = sorted(dice.sample(range(5, 100), 4))
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT]
    for wanted, number in zip(steps, signals, strict=True):
        # A step that no process before it has reached shows that this one is up and hears signals.
        step = max(wanted, metrics.last(tmp_path / "pieces").get("step", 0) + 1)
        process = start(data, tmp_path / "pieces")
        while process.poll() is None and metrics.last(tmp_path / "pieces").get("step", 0) < step:
            time.sleep(0.005)
        process.send_signal(number)
        told, _ = process.communicate()
        expected = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
        assert process.returncode == expected, told
        if number != signal.SIGKILL:
            last = metrics.last(tmp_path / "pieces")["step"]
            assert (tmp_path / "pieces" / "checkpoints" / f"step-{last:08}.pt").exists()
            assert f"stopped after step {last}" in told
    process = start(data, tmp_path / "pieces")
    told, _ = process.communicate()
    assert process.returncode == 0, told
    assert undisturbed.wait() == 0, undisturbed.stdout.read()
    undisturbed.stdout.close()
    assert lines(tmp_path / "pieces") == lines(tmp_path / "whole"), f"stopped at {steps}"
    pieces, whole = (models.load(tmp_path / name / "model").state_dict() for name in ("pieces", "whole"))
    torch.testing.assert_close(pieces, whole, rtol=0, atol=0)


@pytest.mark.slow
def test_in_parallel_the_runs_are_the_same_as_one_after_the_other(tmp_path, data, capsys):
    for name, parallel in (("parallel", True), ("after", False)):
        options = Options(
            phi=("softmax", "relu/L"), data=data, out=tmp_path / name, steps=20, parallel=parallel, **SMALL
        )
        assert run(options) == 0
    for phi in ("softmax", "relu-L"):
        side, after = (losses(tmp_path / name / phi) for name in ("parallel", "after"))
        assert side == after
    assert "is finished" in Path(tmp_path / "parallel" / "relu-L.log").read_text()


def test_a_phi_that_fails_does_not_keep_the_others_from_training(tmp_path, data, capsys):
    (tmp_path / "run" / "softmax").mkdir(parents=True)
    with FileLock(tmp_path / "run" / "softmax" / ".lock"):
        options = Options(phi=("softmax", "relu/L"), data=data, out=tmp_path / "run", steps=2, **SMALL)
        assert run(options) == 1
    told = capsys.readouterr()
    assert "another process is training" in told.err
    assert "relu/L" in (tmp_path / "run" / "comparison.md").read_text()
    load_run(tmp_path / "run" / "relu-L")
