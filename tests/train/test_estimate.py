"""`nomax estimate`: its formulas are what autograd keeps and what a profiler counts."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nomax.cli import main
from nomax.models import ReLUFormer, ReLUFormerConfig, ViT, ViTConfig
from nomax.models.reluformer import Tally, View
from nomax.models.vit import Recorder
from nomax.train import estimate
from nomax.train.estimate import Options

SMALL_CHANGE = 0.02  # means and deviations of norms, a number for each token: 1/width of what is counted, or so


def kept(call, model):
    """Bytes that autograd keeps for the backward pass, except weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = (storage.nbytes(), storage)  # kept alive: a freed address would be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    return sum(size for size, _ in sizes.values())


@pytest.mark.parametrize("settings", [{}, {"qk_norm": True}, {"phi": "softmax"}, {"gate": "silu"}])
def test_the_activations_of_a_vit_are_those_that_autograd_keeps(settings):
    model = ViT("S/16", num_classes=10, image_size=64, **settings)
    x = torch.randn(3, model.config.tokens, 384, requires_grad=True)
    formula = estimate.vit_numbers(model.config, half=False)
    one = (formula.inputs + formula.rest) / model.config.size.depth
    others = (Recorder(False), "", Tally(False), View())
    assert kept(lambda: model.blocks[0](x, *others), model) / 3 == pytest.approx(one, rel=SMALL_CHANGE)


@pytest.mark.parametrize("settings", [{}, {"phi": "softmax", "learned_gain": None}, {"norm": "post"}])
def test_the_activations_of_a_reluformer_are_those_that_autograd_keeps(settings):
    config = ReLUFormerConfig(50, dim=256, slots=512, encoder_layers=1, decoder_layers=1, dropout=0.0, **settings)
    model, tally = ReLUFormer.from_config(config), Tally(False)
    x, source = (torch.randn(2, 16, 256, requires_grad=True) for _ in range(2))
    formula = estimate.text_numbers(config, half=False)
    both = kept(lambda: model.encoder[0](x, tally, View()), model)
    both += kept(lambda: model.decoder[0](x, tally, View(is_causal=True), View(context=source)), model)
    assert both / 32 == pytest.approx(formula.inputs + formula.rest, rel=SMALL_CHANGE)


def test_the_operations_of_an_image_are_those_that_torch_counts():
    config = ViTConfig("S/16", num_classes=100, image_size=64, rep_size=True, phi="relu/L")
    model, images = ViT.from_config(config), torch.randn(2, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert counter.get_total_flops() == 2 * 2 * estimate.vit_macs(config)


def test_more_gpus_share_time_activations_and_shards():
    one, eight = (estimate.estimate(Options(models=("B/16",), gpus=gpus))[0] for gpus in (1, 8))
    assert one.flop == eight.flop == pytest.approx(4.0e19, rel=0.05)
    assert one.seconds == pytest.approx(8 * eight.seconds)
    assert one.activations == pytest.approx(8 * eight.activations)
    assert eight.state["fsdp"] < eight.state["ddp"] / 4
    assert eight.checkpointed < eight.activations / 4
    halved = estimate.estimate(Options(models=("B/16",), accumulate=2))[0]
    assert halved.activations == pytest.approx(eight.activations / 2)


def test_the_parameters_are_those_of_the_model():
    (each,) = estimate.estimate(replace(Options(), recipe="iwslt"))
    assert each.parameters == sum(p.numel() for p in ReLUFormer.from_config(estimate.iwslt().model).parameters())


def test_it_says_that_nothing_was_measured(capsys):
    assert main(["estimate", "--recipe", "iwslt", "--gpus", "1"]) == 0
    assert "nothing of this was measured" in capsys.readouterr().out
    assert main(["estimate", "--gpus", "0"]) == 2
    assert "must be above 0" in capsys.readouterr().err
