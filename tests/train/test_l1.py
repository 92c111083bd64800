"""The L1 penalties: their ramp against ProSparse's formula, their values in float64, and what they do."""

import copy
import json
import math
from dataclasses import replace

import pytest
import tiny_images
import torch
from precision import REORDERED
from toy_text import TRANSLATE, tales

from nomax.cli import exit_code
from nomax.evaluate.attention_weights import attention_weights, row_statistics
from nomax.nn import Attention, Memory
from nomax.train import load_run, metrics
from nomax.train.config import sine_stages
from nomax.train.distributed import World
from nomax.train.text.command import Translate, configure
from nomax.train.text.config import fit
from nomax.train.text.data import Corpora, examples, load_corpus, stages
from nomax.train.text.task import TextTask, load_text_run
from nomax.train.vision.command import Options, run
from nomax.train.vision.config import for_images
from nomax.train.vision.task import VisionTask, load_images

HERE = World(torch.device("cpu"))
STAGES = (0.25, 0.5, 3.0)
IMAGES = {"tensorboard": False, "threads": 1, "batch_size": 16, "model": "mu/4", "warmup": 1, "lr": 3e-3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_images.write(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    pytest.importorskip("sentencepiece")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOMAX_DATA", str(tmp_path_factory.mktemp("cache")))
        yield tales(tmp_path_factory.mktemp("data") / "tales")


def vision_task(data, model=None, **changes):
    images = load_images(data)
    config = for_images("small", images[0], data=data, variant="mu/4", head_zero=False, **(model or {}))
    task = VisionTask(replace(config, steps=90, batch_size=16, warmup=1, **changes), *images)
    task.model.train()
    return task


def text_task(data, **changes):
    corpora = Corpora(*(load_corpus(data, split, "translate") for split in ("train", "valid")))
    config = configure(Translate(**{**TRANSLATE, "dropout": 0.0, "steps": 90, "penalty": 0.0}), "relu/L", "translate")
    config = replace(fit(config, corpora), **changes)
    tokenizer = corpora.learn(config.model.vocabulary)
    task = TextTask(config, stages(config, corpora.train, tokenizer), examples(config, corpora.valid, tokenizer))
    task.model.train()
    return task


@pytest.fixture(params=["images", "text"])
def make_task(request):
    task = {"images": vision_task, "text": text_task}[request.param]
    return lambda **changes: task(request.getfixturevalue({"images": "data", "text": "text"}[request.param]), **changes)


@pytest.mark.parametrize(("steps", "values"), [(90, STAGES), (100, (0.0, 2.0, 1.0)), (7, (1.0, 2.0)), (2, STAGES)])
def test_a_first_stage_is_constant_and_the_others_rise_along_a_sine(steps, values):
    stage = steps / len(values)
    for step in range(steps):
        now = int(step / stage + 1e-9)
        expected = values[0]
        if now:  # ProSparse: λ_{i-1} + (λ_i - λ_{i-1}) · ½ (sin(-π/2 + π (t - T_{i-1}) / (T_i - T_{i-1})) + 1)
            share = step / stage - now
            wave = (math.sin(-math.pi / 2 + math.pi * share) + 1) / 2
            expected = values[now - 1] + (values[now] - values[now - 1]) * wave
        assert sine_stages(values, step, steps) == pytest.approx(expected, abs=1e-12)


def test_stages_meet_where_they_are_flat():
    ramp = [sine_stages(STAGES, step, 3000) for step in range(3000)]
    assert ramp[:1001] == [0.25] * 1001
    assert ramp[1500] == pytest.approx((0.25 + 0.5) / 2)
    assert ramp[2000] == 0.5
    assert ramp == sorted(ramp)
    assert 2.99 < ramp[-1] < 3.0
    assert max(abs(ramp[place + 1] - ramp[place]) for place in (1000, 1999, 2000, 2998)) < 1e-4
    assert [sine_stages((0.7,), step, 5) for step in range(5)] == [0.7] * 5


@torch.no_grad()
def test_a_vits_penalty_is_the_mean_of_its_rows_sizes_in_float64(data):
    task = vision_task(data, {"learned_gain": "head"}, attention_l1=STAGES)
    for block in task.model.blocks:
        block.attention.gain.copy_(torch.tensor([-1.5, 0.5]))  # sizes, not sums
    batch = next(task.batches(45, HERE))
    measured = task.measure(task.model, batch)
    exact = copy.deepcopy(task.model).double().eval()
    expected = 0.0
    for image in batch.images:
        means = [float(each.weights.abs().sum(-1).mean()) for each in attention_weights(exact, image.double())]
        expected += sum(means) / len(means)
    assert float(measured["l1"]) == pytest.approx(expected, rel=REORDERED)
    assert expected > 0


@torch.no_grad()
def test_the_loss_of_a_step_has_the_penalty_with_the_weight_of_that_step(make_task):
    task, plain = make_task(attention_l1=STAGES), make_task()
    for step, weight in ((3, 0.25), (45, 0.375), (60, 0.5), (75, 1.75)):
        batch = next(task.batches(step, HERE))
        measured, without = task.measure(task.model, batch), plain.measure(plain.model, batch)
        total = float(without["loss"]) + weight * float(measured["l1"])
        assert float(measured["l1"]) > 0
        assert float(measured["loss"]) == pytest.approx(total, rel=REORDERED)
        parts = [task.measure(task.model, part) for part in task.split(batch, 3)]
        for name in ("l1", "loss"):
            assert float(sum(part[name] for part in parts)) == pytest.approx(float(measured[name]), rel=REORDERED)


@torch.no_grad()
def test_an_evaluation_has_no_penalty(make_task):
    task, plain = make_task(attention_l1=STAGES), make_task()
    batch = next(task.batches(80, HERE))
    for each in (task, plain):
        each.model.eval()
    measured, without = task.measure(task.model, batch), plain.measure(plain.model, batch)
    assert {name: float(value) for name, value in measured.items()} == {
        name: float(value) for name, value in without.items()
    }


@pytest.mark.parametrize("off", [(), (0.0, 0.0)])
def test_by_default_no_attention_is_asked_for_rows(make_task, monkeypatch, off):
    asked, forward = [], Attention.forward
    monkeypatch.setattr(
        Attention, "forward", lambda *given, **named: asked.append(named.get("return_rows")) or forward(*given, **named)
    )
    for task, rows in ((make_task(attention_l1=off), {None}), (make_task(attention_l1=STAGES), {True})):
        asked.clear()
        task.measure(task.model, next(task.batches(0, HERE)))
        assert set(asked) == rows


def test_a_run_with_the_penalty_has_more_zeros_and_says_so_on_the_way(data, tmp_path):
    _, test = load_images(data)
    images = torch.from_numpy(test.images).permute(0, 3, 1, 2) / 127.5 - 1
    left, sizes = {}, {}
    for name, l1 in (("plain", None), ("pressed", (0.03, 0.3))):
        assert run(Options(data=data, out=tmp_path / name, steps=60, attention_l1=l1, **IMAGES)) == 0
        model, config = load_run(tmp_path / name)
        assert config.attention_l1 == (l1 or ())
        rows = row_statistics(model, images)
        left[name] = sum(1 - row.zeros for row in rows) / len(rows)
        sizes[name] = sum(row.row_sum for row in rows) / len(rows)
    lines = [line for line in metrics.read(tmp_path / "pressed") if "evaluation" not in line]
    assert all("l1" in line for line in lines)
    assert not any("l1" in line for line in metrics.read(tmp_path / "plain"))
    assert 0 < left["pressed"] < left["plain"] / 2
    assert sizes["pressed"] < sizes["plain"]


def test_the_penalty_is_the_same_where_blocks_run_again_in_the_backward_pass(data, tmp_path):
    curves = []
    for name, again in (("kept", False), ("again", True)):
        settings = {**IMAGES, "steps": 4, "attention_l1": (0.1, 1.0), "activation_checkpointing": again}
        assert run(Options(data=data, out=tmp_path / name, **settings)) == 0
        lines = [line for line in metrics.read(tmp_path / name) if "evaluation" not in line]
        curves.append([(line["loss"], line["l1"], line["norm"]) for line in lines])
    assert curves[0] == curves[1]


@torch.no_grad()
def test_the_loss_has_the_penalty_of_memories_too_and_either_alone(text):
    both = text_task(text, attention_l1=STAGES, memory_l1=(0.0, 0.02))
    memory, plain = text_task(text, memory_l1=(0.0, 0.02)), text_task(text)
    inputs = []
    for name, module in memory.model.named_modules():
        if isinstance(module, Memory):
            module.register_forward_pre_hook(lambda module, given, name=name: inputs.append((name, given[0])))
    exact = copy.deepcopy(memory.model).double()
    for step, weight in ((20, 0.0), (66, 0.02 * (1 - math.cos(math.pi * 21 / 45)) / 2)):
        batch = next(memory.batches(step, HERE))
        inputs.clear()
        found, without = memory.measure(memory.model, batch), plain.measure(plain.model, batch)
        sides = {"encoder": batch.source, "decoder": batch.target[:, :-1]}
        labels = batch.target[:, 1:] != 0
        expected = 0.0
        for name, x in inputs:
            side = name.split(".")[0]
            tokens = sides[side] != 0 if side == "encoder" else labels
            sizes = exact.get_submodule(name).weights(x.double()).abs().sum(-1) * tokens
            expected += float((sizes.sum(-1) / tokens.sum(-1).clamp(min=1) * labels.sum(-1)).sum()) / len(inputs)
        assert float(found["memory_l1"]) == pytest.approx(expected, rel=REORDERED)
        total = float(without["loss"]) + weight * expected
        assert float(found["loss"]) == pytest.approx(total, rel=REORDERED)
        assert "l1" not in found
        measured = both.measure(both.model, batch)
        assert float(measured["memory_l1"]) == pytest.approx(expected, rel=REORDERED)
        total += sine_stages(STAGES, step, 90) * float(measured["l1"])
        assert float(measured["loss"]) == pytest.approx(total, rel=REORDERED)


def test_a_model_with_softmax_learns_a_small_memory(text, tmp_path):
    options = {**TRANSLATE, "steps": 30, "lr": 3e-3, "warmup": 1, "dropout": 0.0, "phi": ("softmax",), "penalty": 0.0}
    assert Translate(data=text, out=tmp_path / "run", **options, memory_l1=(0.3, 3.0)).run() == 0
    assert load_text_run(tmp_path / "run")[2].memory_l1 == (0.3, 3.0)
    lines = [line for line in metrics.read(tmp_path / "run") if "evaluation" not in line]
    assert not any("l1" in line for line in lines)
    assert 0 < lines[-1]["memory_l1"] < lines[0]["memory_l1"] / 3


def test_memories_that_normalise_have_no_penalty(text, tmp_path, capsys):
    wrong = {**TRANSLATE, "memory_phi": "softmax", "memory_l1": (0.1,)}
    assert exit_code("nomax train", lambda: Translate(data=text, out=tmp_path / "run", **wrong).run()) == 2
    assert "memory_phi='softmax' has rows that always sum to 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_learned_shifts_and_the_penalty_are_options_of_both_commands(data, text, tmp_path):
    options = {"learned_shift": "head", "attention_l1": (0.1, 0.2), "phi": ("relu(x-1)/L",)}
    settings = {"steps": 2, **IMAGES}
    assert run(Options(data=data, out=tmp_path / "images", **settings, **options)) == 0
    assert Translate(data=text, out=tmp_path / "text", **{**TRANSLATE, "steps": 2, **options}).run() == 0
    for name in ("images", "text"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["model"]["learned_shift"] == "head"
        assert config["model"]["phi"] == "relu(x-1)/L"
        assert config["attention_l1"] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"phi": ("softmax",), "attention_l1": (1.0,)}, "phi='softmax' has rows that always sum to 1"),
        ({"phi": ("gelu/L",), "attention_l1": (1.0,)}, "phi='gelu/L' has weights below zero"),
        ({"phi": ("-1*relu/L",), "attention_l1": (1.0,)}, "phi='-1*relu/L' has weights below zero"),
        ({"attention_l1": (0.1, -1.0)}, "attention_l1=(0.1, -1.0) must be numbers of at least 0"),
        ({"attention_l1": (math.nan,)}, "attention_l1=(nan,) must be numbers of at least 0"),
    ],
)
def test_a_penalty_without_meaning_is_told_before_anything_is_written(data, text, tmp_path, capsys, wrong, words):
    for command in (
        lambda: run(Options(data=data, out=tmp_path / "run", steps=4, **{**IMAGES, **wrong})),
        lambda: Translate(data=text, out=tmp_path / "run", **{**TRANSLATE, "steps": 4, **wrong}).run(),
    ):
        assert exit_code("nomax train", command) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
