"""What is recorded about attention during training."""

import json
from dataclasses import replace

import pytest
import torch

from nomax.models import ViT
from nomax.train.vision import diagnostics
from nomax.train.vision.command import Options, run


def test_steps_to_record_begin_with_the_first_and_end_with_the_last():
    steps = diagnostics.steps_to_record(1000, 12)
    assert {0, 999} <= steps
    assert len(steps) <= 12
    assert diagnostics.steps_to_record(1000, 0) == frozenset()
    assert diagnostics.steps_to_record(3, 50) == {0, 1, 2}


@pytest.mark.parametrize("pool", ["gap", "tok"])
def test_each_layer_tells_its_row_sums_sizes_gradients_and_scale(pool):
    torch.manual_seed(0)
    model = ViT("pico/4", image_size=16, channels=1, num_classes=3, phi="softmax", qk_norm=True, pool=pool)
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(4, 1, 16, 16)
    model(images).square().sum().backward()
    layers = diagnostics.diagnose(model, images)
    assert model.training
    assert len(layers) == len(model.blocks)
    for layer, block in zip(layers, model.blocks, strict=True):
        assert layer["row_sum"] == pytest.approx(1)  # softmax's, by definition
        assert layer["zeros"] == 0
        assert layer["scale"] == 1  # where it starts
        whole = block.attention.qkv.weight.grad.norm()
        parts = torch.tensor([layer[name] for name in ("query", "key", "value")])
        assert parts.norm() == pytest.approx(whole)
        assert layer["out"] == pytest.approx(block.attention.out.weight.grad.norm())
        assert layer["output"] > 0
        assert layer["residual"] > 0


def test_a_training_records_the_asked_steps_and_replaces_lines_of_an_interrupted_one(tmp_path):
    options = {"data": "fashion-mnist-small", "model": "mu/14", "smoke": True, "diagnose": 3}
    assert run(Options(**options, out=tmp_path / "run", phi=("relu",))) == 0
    lines = diagnostics.read(tmp_path / "run")
    assert [line["step"] for line in lines] == sorted(diagnostics.steps_to_record(6, 3))
    # Without the length scaling a row of 4 keys sums to about 4 · 0.4.
    assert 0.5 < lines[0]["layers"][0]["row_sum"] < 4
    diagnostics.write(tmp_path / "run", 2, lines[0]["layers"])
    assert [line["step"] for line in diagnostics.read(tmp_path / "run")] == [0, 1, 2]


def test_diagnosing_does_not_make_another_run_of_it(tmp_path):
    options = {"data": "fashion-mnist-small", "model": "mu/14", "smoke": True, "phi": ("relu/L",)}
    assert run(Options(**options, out=tmp_path / "plain")) == 0
    assert run(Options(**options, out=tmp_path / "looked", diagnose=4)) == 0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("plain", "looked")]
    assert results[0]["test_loss"] == results[1]["test_loss"]


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / diagnostics.FILE).write_text("{")
    with pytest.raises(ValueError, match=r"diagnostics\.jsonl is damaged"):
        diagnostics.read(tmp_path)


def test_sharded_models_are_not_looked_into(tmp_path):
    from nomax.train.distributed import World
    from nomax.train.vision.config import small
    from nomax.train.vision.task import VisionTask

    config = replace(small("mu/4"), diagnose=2, distribute="fsdp", data="fashion-mnist-small")
    with pytest.raises(ValueError, match="--distribute ddp"):
        VisionTask.open(config, tmp_path, World(torch.device("cpu"), rank=0, size=2))
