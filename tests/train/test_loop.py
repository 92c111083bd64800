"""The training loop on a toy: exact resume, accumulation, averaging, and what happens when numbers go wrong."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from precision import EPSILON, REORDERED
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from toy_task import CONFIG, Net, Points, loop, run

from nomax.models import ReLUFormer, ViT
from nomax.train import checkpoints, distributed, metrics
from nomax.train.console import Stop
from nomax.train.nonfinite import NonFiniteError

ALIKE = {"rtol": REORDERED, "atol": 8 * EPSILON}  # weights near zero have their own few roundings


def weights(folder):
    return checkpoints.newest(folder / "checkpoints")["model"]


def lines(folder):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in metrics.read(folder)]


class StopAfter(Stop):
    """Asks to stop at a certain step."""

    def __init__(self, task, step):
        super().__init__()
        self.task, self.left = task, step

    @property
    def asked(self):
        self.left -= 1
        return self.left < 0


def test_every_step_and_every_evaluation_has_its_line(tmp_path):
    outcome = run(tmp_path)
    written = lines(tmp_path)
    assert outcome.finished
    assert [line["step"] for line in written if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in written if "evaluation" in line] == [4, 8, 12]
    assert [line["points"] for line in written if "loss" in line] == [8 * step for step in range(1, 13)]
    assert outcome.evaluation == written[-1]["evaluation"]
    assert written[-1]["evaluation"]["loss"] < written[0]["loss"]


def test_the_first_loss_is_the_mean_over_the_batch(tmp_path):
    task = Points()
    points, labels = task.batch(0)
    expected = nn.functional.cross_entropy(task.model(points), labels).detach()
    run(tmp_path, task)
    assert lines(tmp_path)[0]["loss"] == pytest.approx(float(expected), rel=8 * EPSILON)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_stopped_anywhere_and_continued_the_run_is_the_same_to_the_bit(tmp_path, dropout, ema):
    config = replace(CONFIG, ema=ema)
    run(tmp_path / "whole", Points(config, dropout), config)
    finished = False
    for calls in (3, 1, 6, 2, 4, 4, 30):
        task = Points(config, dropout)
        finished = run(tmp_path / "pieces", task, config, StopAfter(task, calls)).finished
    assert finished
    whole, pieces = (checkpoints.newest(tmp_path / name / "checkpoints") for name in ("whole", "pieces"))
    for state in (whole, pieces):
        state["optimiser"] = state["optimiser"]["state"]
    names = ("step", "model", "optimiser") + (("average",) if ema else ())
    for name in names:
        torch.testing.assert_close(pieces[name], whole[name], rtol=0, atol=0)
    assert lines(tmp_path / "pieces") == lines(tmp_path / "whole")


def test_a_batch_in_parts_gives_the_same_run(tmp_path):
    for accumulate in (1, 4, 3):
        config = replace(CONFIG, accumulate=accumulate)
        run(tmp_path / str(accumulate), Points(config), config)
    for accumulate in ("4", "3"):
        torch.testing.assert_close(weights(tmp_path / accumulate), weights(tmp_path / "1"), **ALIKE)


def test_the_average_of_the_weights_is_what_is_evaluated_and_kept(tmp_path):
    config = replace(CONFIG, ema=0.5)
    task = Points(config)
    outcome = run(tmp_path, task, config)
    state = checkpoints.newest(tmp_path / "checkpoints")
    assert not torch.equal(state["average"]["head.weight"], state["model"]["head.weight"])
    averaged = Net()
    averaged.load_state_dict(state["average"])
    points, labels = task.batch(10_000)
    expected = nn.functional.cross_entropy(averaged(points), labels).detach()
    assert outcome.evaluation["loss"] == pytest.approx(float(expected), rel=REORDERED)


def test_half_precision_computes_in_bfloat16_and_keeps_float32_weights(tmp_path):
    config = replace(CONFIG, precision="bf16")
    run(tmp_path / "half", Points(config), config)
    run(tmp_path / "full")
    half, full = weights(tmp_path / "half"), weights(tmp_path / "full")
    assert {tensor.dtype for tensor in half.values()} == {torch.float32}
    assert not torch.equal(half["head.weight"], full["head.weight"])
    # Twelve steps of Adam move a weight by 0.6 at most; gradients of eight bits change that by a sixth.
    torch.testing.assert_close(half, full, rtol=0.2, atol=0.1)


def test_lines_written_after_the_checkpoint_are_taken_back(tmp_path):
    run(tmp_path)
    kept = lines(tmp_path)
    for file in (tmp_path / "checkpoints").glob("step-00000012*"):
        file.unlink()
    with (tmp_path / metrics.FILE).open("a") as file:
        file.write('{"step": 13, "lo')  # killed while writing
    run(tmp_path)
    assert lines(tmp_path) == kept
    assert json.loads((tmp_path / metrics.FILE).read_text().splitlines()[-1])["step"] == 12


@pytest.mark.parametrize("log_every", [1, 5])
def test_log_every_leaves_out_steps_but_never_the_last(tmp_path, log_every):
    config = replace(CONFIG, log_every=log_every)
    run(tmp_path, Points(config), config)
    steps = [line["step"] for line in lines(tmp_path) if "loss" in line]
    assert steps == sorted({*range(log_every, 13, log_every), 12})


def test_nan_in_the_data_stops_the_run_and_names_step_batch_and_place(tmp_path):
    task = Points()
    task.poisoned = 7
    with pytest.raises(NonFiniteError, match="step 8") as caught:
        run(tmp_path, task)
    assert caught.value.report["where"] == "the input of the model"
    assert caught.value.report["batch"] == {"points": list(range(56, 64))}
    assert checkpoints.newest(tmp_path / "checkpoints")["step"] == 5


class Overflowing(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3e38 * 10


class Sqrt(nn.Linear):
    """Finite forwards, with a gradient that is not: the square root of 0."""

    def forward(self, x):
        return super().forward(x) + (x - x).abs().sqrt().sum()


def test_the_layer_where_a_number_overflows_is_named(tmp_path):
    task = Points()
    task.model.layers[0] = Overflowing(3, 4)
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, task)
    assert caught.value.report["where"] == "the layer layers.0 (Overflowing): its input is finite"
    assert all(parameter.isfinite().all() for parameter in task.model.parameters())


def test_an_operation_between_layers_is_named_by_what_surrounds_it(tmp_path):
    task = Points()
    task.model.scale.data[:] = 3e38
    task.model.layers[1].weight.data[:] = 1e4
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, task)
    assert (
        caught.value.report["where"] == "an operation inside the model, in front of dropout, whose input is not finite"
    )


def test_a_gradient_that_is_not_finite_is_found_though_the_loss_is(tmp_path):
    task = Points()
    task.model.layers[0] = nn.Sequential(nn.Linear(3, 3), Sqrt(3, 4))
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, task)
    assert caught.value.report["where"] == (
        "the gradient of layers.0.0.bias: every layer's output and the loss are finite"
    )


def test_a_parameter_that_was_broken_before_is_named_first(tmp_path):
    task = Points()
    task.model.head.bias.data[0] = float("inf")
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, task)
    assert caught.value.report["where"] == "the parameter head.bias was not finite before the step"


def loss_and_gradients(model, inputs, **settings):
    torch.manual_seed(1)  # for dropout
    output = model(*inputs, **settings)
    parts = [output] if isinstance(output, torch.Tensor) else [output[0], *output[1]]
    loss = sum(part.square().sum() for part in parts)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def transformers():
    tokens = torch.arange(3, 39).view(2, 18)
    relu = ReLUFormer(40, dim=16, heads=2, encoder_layers=3, decoder_layers=3, slots=8, dropout=0.2)
    vit = ViT("nano/8", num_classes=3, image_size=16, dropout=0.2)
    return {"vit": (vit, [torch.randn(2, 3, 16, 16)], {}), "text": (relu, [tokens, tokens], {"penalties": "sequences"})}


@pytest.mark.parametrize("kind", ["vit", "text"])
def test_activations_computed_again_give_the_very_same_gradients(kind):
    model, inputs, settings = transformers()[kind]
    again = copy.deepcopy(model)
    distributed.checkpoint_activations(again)
    expected = loss_and_gradients(model, inputs, **settings)
    for actual, wanted in zip(loss_and_gradients(again, inputs, **settings), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "again", "graphs"), [("vit", False, 1), ("vit", True, 1), ("text", True, 2)])
def test_layers_of_one_shape_are_compiled_once(kind, again, graphs):
    torch._dynamo.reset()
    model, inputs, settings = transformers()[kind]
    counter = CompileCounterWithBackend("aot_eager")
    distributed.compile_layers(model, counter)
    if again:
        distributed.checkpoint_activations(model)
    loss_and_gradients(model, inputs, **settings)
    assert counter.frame_count == graphs


@pytest.mark.slow
def test_a_compiled_model_trains_alike_and_still_shows_its_layers(tmp_path):
    config = replace(CONFIG, compile=True, steps=3)
    plain = replace(CONFIG, steps=3)
    run(tmp_path / "compiled", Points(config), config)
    run(tmp_path / "plain", Points(plain), plain)
    torch.testing.assert_close(weights(tmp_path / "compiled"), weights(tmp_path / "plain"), **ALIKE)
    task = Points(config)
    task.model.layers[0] = Overflowing(3, 4)
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path / "broken", task, config)
    assert "layers.0" in caught.value.report["where"]


def test_the_loop_is_at_step_zero_where_there_is_no_checkpoint(tmp_path):
    fresh = loop(tmp_path)
    fresh.resume()
    assert fresh.step == 0
