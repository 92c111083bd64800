"""One rank, two or four, whole models or shards: the same run, to rounding. The ranks are processes under torchrun."""

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_images
import torch
import torch.distributed as dist
from precision import EPSILON, REORDERED
from safetensors.torch import load_file
from toy_task import CONFIG, HERE, Points, run

from nomax import models
from nomax.train import checkpoints, distributed, load_run, metrics
from nomax.train.loop import Loop
from nomax.train.vision.command import Options
from nomax.train.vision.command import run as vit_run

pytestmark = pytest.mark.slow
SETTINGS = {"ema": 0.9, "accumulate": 2}
KINDS = ("ddp", "fsdp")
# Mixup and RandAugment included, whose partners sit on the other rank.
VIT = {"model": "mu/8", "steps": 6, "warmup": 2, "batch_size": 16, "augmentation": "light2", "ema": 0.9, "threads": 1}
VIT |= {"checkpoint_every": 2, "tensorboard": False}
VITS = {"ddp": {"distribute": "ddp"}, "fsdp": {"distribute": "fsdp", "activation_checkpointing": True}}
# For weights: Adam divides a gradient by its own size, and so magnifies the rounding of those that nearly cancel.
MAGNIFIED = 10 * REORDERED


def test_restarted_ranks_do_not_see_the_addresses_of_those_before():
    """torchrun keeps its store: ranks that come before rank 0 find the words of the round before there."""
    shared, word = dist.HashStore(), None
    for number, generation in enumerate(("old", "new", "newer")):
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(distributed.new_round, shared, rank, 3) for rank in (1, 2)]
            hello = f"nomax/{number}/hello/1"  # the number is still that of the round before
            while not shared.check([hello]) or shared.get(hello) == word:
                pass
            assert not any(other.done() for other in others)  # rank 0 is not there yet
            stores = [each.result() for each in (pool.submit(distributed.new_round, shared, 0, 3), *others)]
        word = shared.get(f"nomax/{number + 1}/hello/1")
        for rank, store in enumerate(stores):
            store.set(f"address of {rank}", f"{generation} {rank}")
            assert {other.get(f"address of {rank}").decode() for other in stores} == {f"{generation} {rank}"}


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
    torchrun(2, jobs, [{**vit, "out": folder / f"vit {kind}", **settings} for kind, settings in VITS.items()])
    return folder


@pytest.fixture(scope="module")
def four(folder):
    """What four ranks make of it, on two "machines": runs of their own, and runs that two ranks began."""
    jobs = [(folder / f"four {kind}", {**SETTINGS, "distribute": kind}, None) for kind in KINDS]
    begun(folder / "vit fsdp", folder / "vit chain", 2)
    vit = {**VIT, "data": str(folder / "data"), **VITS["fsdp"]}
    reloads = [(folder / "fsdp", {**SETTINGS, "distribute": kind}, folder / f"held by {kind}.pt") for kind in KINDS]
    torchrun(2, jobs, [{**vit, "out": folder / name} for name in ("vit four", "vit chain")], reloads, machines=2)
    return folder


def torchrun(ranks, jobs, vits, reloads=(), machines=1):
    """Let so many ranks on so many machines do the work of toy_ranks.py; all machines are this one."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}", f"--nproc-per-node={ranks}"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"]
    command += ["--local-addr=127.0.0.1", str(Path(__file__).with_name("toy_ranks.py"))]
    work = [json.dumps(each, default=str) for each in (jobs, vits, reloads)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen([*command, *work], env=environment) for _ in range(machines)]
    assert [agent.wait() for agent in agents] == [0] * machines


def without_last_checkpoint(source, target):
    begun(source, target, 11)


def begun(source, target, step):
    """Copy a run as it was at a checkpoint: without later ones, and without its end."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model", "result.json"))
    for path in (target / "checkpoints").glob("step-*"):
        if int(path.name[5:13]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


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
def test_four_ranks_train_as_one_does(four, kind):
    assert losses(four / f"four {kind}") == pytest.approx(losses(four / "one"), rel=REORDERED)
    assert losses(four / "vit four") == pytest.approx(losses(four / "vit one"), rel=REORDERED)


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_and_one_hold_the_very_numbers_that_two_have_saved(four, tmp_path, kind):
    held = torch.load(four / f"held by {kind}.pt", weights_only=True)
    saved = checkpoints.newest(four / "fsdp" / "checkpoints")
    assert saved["path"].is_dir()
    config = replace(CONFIG, **SETTINGS)
    alone = Loop(Points(config), config, four / "fsdp", HERE)
    alone.resume()
    assert alone.step == saved["step"]
    torch.testing.assert_close(alone.model.state_dict(), saved["model"], rtol=0, atol=0)
    for name in ("model", "average"):
        torch.testing.assert_close(held[name], saved[name], rtol=0, atol=0)
    torch.testing.assert_close(held["optimiser"]["state"], saved["optimiser"]["state"], rtol=0, atol=0)


def test_a_run_goes_from_two_ranks_to_four_to_one(four, tmp_path):
    begun(four / "vit chain", tmp_path / "run", 4)
    assert vit_run(Options(**{**VIT, "data": str(four / "data")}, out=tmp_path / "run")) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(four / "vit one"), rel=REORDERED)
    ranks = [json.loads((tmp_path / "run" / "run.json").read_text())["continued"][i]["command"] for i in (0, 1)]
    assert ranks[0].startswith("torchrun --nnodes 2 --nproc-per-node 2 -m nomax.cli train vit ")
    assert "torchrun" not in ranks[1]


def test_an_unfinished_sharded_run_is_exported_as_safetensors(folder, tmp_path):
    begun(folder / "vit fsdp", tmp_path / "run", 4)
    model, _ = load_run(tmp_path / "run")
    models.save(model, tmp_path / "model")
    saved = checkpoints.newest(tmp_path / "run" / "checkpoints")
    assert saved["step"] == 4
    torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors"), saved["average"], rtol=0, atol=0)


def test_torchrun_restarts_after_a_rank_was_killed_and_the_weights_are_the_same(folder, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    options = {**VIT, "data": folder / "data", "out": tmp_path / "run", "distribute": "fsdp"}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = [*words[: words.index("--tensorboard")], *words[words.index("--tensorboard") + 2 :]]
    script = str(Path(__file__).with_name("killed_rank.py"))
    subprocess.run(
        [*command, script, "train", "vit", *words, "--no-tensorboard", "--activation-checkpointing"],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["continued"]) == 1
    killed, whole = (load_run(place)[0].state_dict() for place in (tmp_path / "run", folder / "vit fsdp"))
    torch.testing.assert_close(killed, whole, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_agree_on_what_went_wrong(folder, kind):
    report = json.loads((folder / f"poisoned {kind}" / "nonfinite.json").read_text())
    assert report["step"] == 8
    assert report["where"] == "the input of the model"
