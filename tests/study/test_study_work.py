"""One run of a study, from the configuration to its outcome."""

import errno
import json
import signal
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import tiny_images
import torch

from nomax import data, models
from nomax.console import Console
from nomax.evaluate import fewshot, load, subset_accuracy
from nomax.evaluate.fewshot import features
from nomax.models import ViTConfig
from nomax.study.engine.experiment import ImageExperiment
from nomax.study.engine.publish import to_csv
from nomax.study.engine.store import Store
from nomax.study.engine.worker import BUSY, run_to_outcome
from nomax.study.images import gate
from nomax.study.images.setup import Setup
from nomax.train import VisionConfig, metrics
from nomax.train.console import Stop


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    tiny = tiny_images.write(tmp_path_factory.mktemp("data") / "tiny")
    return Setup("tiny", tiny, models=("mu",), patches=(8, 4), image_size=16, steps=6, batch_size=8, warmup=1)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def do(run, store, stop=None, retry=False):
    return run_to_outcome(run, store, "nomax study toy", stop or Stop(), Console(quiet=True), retry)


class StopAfter(Stop):
    """Somebody presses Ctrl-C once a run has come to a step."""

    def __init__(self, folder, step):
        super().__init__()
        self.folder, self.step = folder, step

    @property
    def exit_code(self):
        return 128 + signal.SIGINT if metrics.last(self.folder).get("step", 0) >= self.step else 0


def losses(folder):
    return [(line["step"], line["loss"]) for line in metrics.read(folder) if "loss" in line]


def test_the_key_is_of_what_is_run_and_not_of_how(setup):
    run = setup.run("relu/L")
    assert len(run.key) == 16
    assert int(run.key, 16) >= 0
    same = ImageExperiment(replace(run.config, threads=3, checkpoint_every=1, workers=2, device="cpu", keep=9))
    assert same.key == run.key == setup.run("relu / L^1.0").key
    others = [
        setup.run("relu"),
        setup.run("relu/L", seed=1),
        setup.run("relu/L", patch=4),
        setup.run("relu/L", qk_norm=False),
    ]
    others += [ImageExperiment(run.config, ("digits",)), ImageExperiment(run.config, subset="icons")]
    others += [setup.run("relu/L", gate="silu")]
    others += [replace(setup, **{name: 5}).run("relu/L") for name in ("steps", "batch_size", "warmup", "test_images")]
    assert len({run.key, *(other.key for other in others)}) == len(others) + 1


def test_data_by_a_relative_path_keep_their_key_and_are_found_from_elsewhere(setup, store, tmp_path, monkeypatch):
    tiny_images.write(tmp_path / "here" / "photos")
    monkeypatch.chdir(tmp_path / "here")
    run = replace(setup, data="photos").run("relu/L")
    assert run.identity()["config"]["data"] == "photos"  # so that stores of several machines merge
    assert "classes" not in run.identity()["config"]["model"]
    assert do(run, store) == 0
    monkeypatch.chdir(tmp_path)
    trained = load(store.folder(run.key))
    assert trained.data == str(tmp_path / "here" / "photos")
    assert len(trained.images()) == 24
    assert trained.model.config.classes == ("class 0", "class 1", "class 2", "class 3")


def test_a_run_is_still_known_when_configurations_have_new_fields(setup):
    @dataclass(frozen=True)
    class Later(VisionConfig):
        invented: float = 0.5

    run = setup.run("relu/L")
    settings = {field.name: getattr(run.config, field.name) for field in fields(run.config)}
    assert ImageExperiment(Later(**settings)).key == run.key
    assert ImageExperiment(Later(**settings, invented=1.0)).key != run.key


def test_a_run_ends_with_an_outcome_that_says_what_the_saved_model_can_do(setup, store):
    run = replace(setup, steps=60, lr=3e-3).run("relu/L", patch=4, gate="silu")
    assert do(run, store) == 0
    result, folder = store.outcome(run.key), store.folder(run.key)
    test = data.load(setup.data, "test")
    images = torch.from_numpy(test.images).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        logits = models.load(folder / "model")(images)
    labels = torch.from_numpy(test.labels)
    assert result.accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    wanted = torch.nn.functional.one_hot(labels, 4).float()
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(1).mean()
    assert result.loss == pytest.approx(bce.item(), rel=1e-4)
    assert result.accuracy > 0.5
    # µ: 32 wide, one layer; 16 tokens; q, k, v, out and the gate, the MLP, two products of attention
    assert result.macs == 16 * (5 * 32 * 32 + 2 * 32 * 128 + 2 * 32 * 16)
    assert result.train_flops == 6 * result.macs * 8 * 60
    assert (result.status, result.phi, result.activation, result.alpha, result.gate) == (
        "done",
        "relu/L",
        "relu",
        1.0,
        "silu",
    )
    assert (result.variant, result.size, result.patch, result.tokens, result.classes) == ("mu/4", "mu", 4, 16, 4)
    assert result.seconds > 0
    assert result.core_seconds > 0
    assert (result.subset_accuracy, result.ten_shot, result.probes) == (None, None, {})
    assert not (folder / "checkpoints").exists()


def test_a_finished_run_is_not_done_again(setup, store):
    run = setup.run("softmax")
    assert do(run, store) == 0
    before = (store.folder(run.key) / "outcome.json").stat().st_mtime_ns
    assert do(run, store, retry=True) == 0
    assert (store.folder(run.key) / "outcome.json").stat().st_mtime_ns == before


def test_a_run_that_somebody_holds_is_left_alone(setup, store):
    run = setup.run("softmax")
    with store.claim(run.key):
        assert do(run, store) == BUSY
    assert not store.folder(run.key).exists()


def test_an_interrupted_run_goes_on_and_its_time_counts_from_the_beginning(setup, store, tmp_path):
    run = replace(setup, steps=40).run("relu/L")
    folder = store.folder(run.key)
    assert do(run, store, StopAfter(folder, 17)) == 130
    assert store.outcome(run.key) is None
    spent = json.loads((folder / "spent.json").read_text())
    assert spent["core_seconds"] > 0
    (folder / "spent.json").write_text(json.dumps({"seconds": 1e9, "core_seconds": 5e8}))
    assert do(run, store) == 0
    result = store.outcome(run.key)
    assert 1e9 < result.seconds < 1.1e9
    assert 5e8 < result.core_seconds < 6e8
    (folder / "outcome.json").write_text("damaged")
    assert do(run, store) == 0  # it is measured again, and its training has still taken its time
    assert store.outcome(run.key).core_seconds > 5e8
    whole = Store(tmp_path / "whole")
    assert do(run, whole) == 0
    assert losses(folder) == losses(whole.folder(run.key))
    assert result.accuracy == whole.outcome(run.key).accuracy


def test_a_run_that_diverges_is_a_result_with_its_step(setup, store):
    run = setup.run("relu2")
    run = replace(run, config=replace(run.config, lr=1e38))
    assert do(run, store) == 0
    result = store.outcome(run.key)
    assert (result.status, result.accuracy) == ("diverged", None)
    assert 1 <= result.diverged_at <= 6
    assert f"step {result.diverged_at}" in result.error
    assert do(run, store, retry=True) == 0
    assert store.outcome(run.key) == result


def test_a_run_that_fails_is_a_result_and_tried_again_only_when_told_so(setup, store, tmp_path):
    run = setup.run("relu/L")
    run = replace(run, config=replace(run.config, data=str(tmp_path / "later")))
    assert do(run, store) == 0
    result = store.outcome(run.key)
    assert result.status == "failed"
    assert result.error.startswith("FileNotFoundError")
    assert "later" in result.error
    tiny_images.write(tmp_path / "later")
    assert do(run, store) == 0
    assert store.outcome(run.key) == result
    assert do(run, store, retry=True) == 0
    assert store.outcome(run.key).status == "done"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "no room"), MemoryError(), RuntimeError("I/O error (os error 28)")]
)
def test_what_the_machine_fails_is_no_outcome_and_done_when_the_machine_can(setup, store, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    run = setup.run("relu/L")
    monkeypatch.setattr("nomax.study.engine.worker.train", fail)
    with pytest.raises(type(error)):
        do(run, store)
    assert store.outcome(run.key) is None
    monkeypatch.undo()
    assert do(run, store) == 0
    assert store.outcome(run.key).status == "done"


def test_probes_and_the_label_subset_are_measured_as_the_evaluation_does(setup, store, tmp_path):
    (tmp_path / "some.txt").write_text("1\n3\n")
    measured = replace(
        setup, probes=(f"near={setup.data}", "digits"), probe_images=20, subset=str(tmp_path / "some.txt")
    )
    run = measured.run("relu/L", measure=True)
    assert run.key != setup.run("relu/L").key == measured.run("relu/L").key
    assert do(run, store) == 0
    result = store.outcome(run.key)
    assert result.status == "done", result.error
    model = models.load(store.folder(run.key) / "model").eval()
    train, test = (data.load(setup.data, split) for split in ("train", "test"))
    test_x, test_y = features(model, test)
    chosen = np.linspace(0, len(test) - 1, 20).astype(int)
    train_x, train_y = features(model, train)
    found = [fewshot.accuracy(train_x, train_y, test_x[chosen], test_y[chosen], 10, seed) for seed in range(3)]
    assert result.probes["near"] == pytest.approx(np.mean(found))
    assert set(result.probes) == {"near", "digits"}
    assert result.ten_shot == pytest.approx(np.mean(list(result.probes.values())))
    with torch.no_grad():
        logits = model(torch.from_numpy(test.images).permute(0, 3, 1, 2) / 127.5 - 1)
    inside = np.isin(test.labels, [1, 3])
    places = torch.from_numpy((test.labels[inside] == 3).astype(np.int64))
    assert result.subset_accuracy == pytest.approx(subset_accuracy(logits[inside], places, [1, 3]))


def test_a_measurement_is_a_run_with_its_raw_numbers_in_the_store(store):
    cost = gate.GateCost(ViTConfig("mu/8", image_size=16, phi="relu/L"), "silu", rounds=3, step_tokens=8)
    assert do(cost, store) == 0
    (result,) = store.results()
    assert (result.key, result.status, result.label) == (cost.key, "done", "gate-cost of mu/8, 4 tokens")
    assert len(result.numbers[gate.RATIOS]) == 3
    assert result.settings["gate"] == "silu"
    before = (store.folder(cost.key) / "outcome.json").read_bytes()
    assert do(cost, store) == 0
    assert (store.folder(cost.key) / "outcome.json").read_bytes() == before
    assert cost.key != replace(cost, rounds=4).key
    assert to_csv([result]).startswith("key,status,measurement,")


def test_a_measurement_that_is_asked_to_stop_has_no_outcome(store):
    cost = gate.GateCost(ViTConfig("mu/8", image_size=16, phi="relu/L"), "silu", rounds=3, step_tokens=8)
    assert do(cost, store, StopAfter(store.folder(cost.key), 0)) == 130
    assert store.results() == []
