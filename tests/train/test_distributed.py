"""One rank or two, whole models or shares: the same run, to rounding. The ranks are processes under torchrun."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_images
import torch
from precision import EPSILON, REORDERED
from toy_task import CONFIG, Points, run

from nomax.train import checkpoints, load_run, metrics
from nomax.train.vision.command import Options
from nomax.train.vision.command import run as vit_run

pytestmark = pytest.mark.slow
SETTINGS = {"ema": 0.9, "accumulate": 2}
KINDS = ("ddp", "fsdp")
# Mixup and RandAugment included, whose partners sit on the other rank.
VIT = {"model": "mu/8", "steps": 6, "warmup": 2, "batch_size": 16, "augmentation": "light2", "ema": 0.9, "threads": 1}
VIT |= {"tensorboard": False}
# For weights: Adam divides a gradient by its own size, and so magnifies the rounding of those that nearly cancel.
MAGNIFIED = 10 * REORDERED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs of two ranks, made by one torchrun, and the same run of one."""
    folder = tmp_path_factory.mktemp("ranks")
    config = replace(CONFIG, **SETTINGS)
    run(folder / "one", Points(config), config)
    jobs = [(folder / kind, {**SETTINGS, "distribute": kind}, None) for kind in KINDS]
    for kind in KINDS:
        without_last_checkpoint(folder / "one", folder / f"one, then {kind}")
        jobs.append((folder / f"one, then {kind}", {**SETTINGS, "distribute": kind}, None))
        jobs.append((folder / f"poisoned {kind}", {"distribute": kind}, 7))
    vit = {**VIT, "data": tiny_images.write(folder / "data")}
    assert vit_run(Options(**vit, out=folder / "vit one")) == 0
    vits = [{**vit, "out": str(folder / f"vit {kind}"), "distribute": kind} for kind in KINDS]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, str(Path(__file__).with_name("toy_ranks.py")), json.dumps(jobs, default=str), json.dumps(vits)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return folder


def without_last_checkpoint(source, target):
    shutil.copytree(source, target)
    for file in (target / "checkpoints").glob("step-00000012*"):
        file.unlink()


def losses(folder):
    return [line.get("evaluation", line)["loss"] for line in metrics.read(folder)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_does(folder, kind):
    assert losses(folder / kind) == pytest.approx(losses(folder / "one"), rel=REORDERED)
    one, two = (checkpoints.newest(folder / name / "checkpoints") for name in ("one", kind))
    for name in ("model", "average"):
        assert set(two[name]) == set(one[name])
        torch.testing.assert_close(two[name], one[name], rtol=MAGNIFIED, atol=8 * EPSILON)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_a_vit_as_one_does(folder, kind):
    assert losses(folder / f"vit {kind}") == pytest.approx(losses(folder / "vit one"), rel=REORDERED)
    one, two = (load_run(folder / f"vit {name}")[0].state_dict() for name in ("one", kind))
    torch.testing.assert_close(two, one, rtol=10 * MAGNIFIED, atol=REORDERED)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_go_on_with_what_one_has_begun(folder, kind):
    assert losses(folder / f"one, then {kind}") == pytest.approx(losses(folder / "one"), rel=REORDERED)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_goes_on_with_what_two_have_begun(folder, tmp_path, kind):
    without_last_checkpoint(folder / kind, tmp_path / "run")
    config = replace(CONFIG, **SETTINGS)
    run(tmp_path / "run", Points(config), config)
    assert losses(tmp_path / "run") == pytest.approx(losses(folder / "one"), rel=REORDERED)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_agree_on_what_went_wrong(folder, kind):
    report = json.loads((folder / f"poisoned {kind}" / "nonfinite.json").read_text())
    assert report["step"] == 8
    assert report["where"] == "the input of the model"
