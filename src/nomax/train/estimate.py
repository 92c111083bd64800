"""`nomax estimate`: memory and time of the papers' trainings, from their numbers of operations. Nothing is measured.

A multiply-add is two operations, and the backward pass takes twice as many as the forward pass. What autograd keeps
for it is counted in numbers per token and layer.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from nomax.console import Console, Table
from nomax.models import ReLUFormer, ReLUFormerConfig, ViT, ViTConfig
from nomax.train import distributed
from nomax.train.config import count_steps
from nomax.train.text.config import TextConfig, iwslt
from nomax.train.vision.config import VisionConfig, i1k, i21k

# Training images of the papers' splits.
IMAGES = {"i1k": 1_268_355, "i21k": 14_145_922}
MODELS = ("S/32", "S/16", "S/8", "B/32", "B/16", "L/16")
COLUMNS = ("model", "parameters", "operations", "time", "ddp", "fsdp", "activations", "checkpointed")
WEIGHT, GRADIENT, MOMENTS, BUCKETS = 4, 4, 8, 4  # bytes of a parameter; ddp copies gradients into buckets


@dataclass(frozen=True)
class Options:
    """Estimate the memory and the time of the papers' trainings on GPUs.

    Nothing is run: the estimate is the number of operations divided by the speed that you give, and the sizes of
    weights, gradients, Adam's moments and activations. It leaves out data loading, communication, and what libraries
    and memory allocators take for themselves, so real runs need more of both. Memory is per GPU: ddp and fsdp are that
    of weights, gradients and optimiser; activations come on top; checkpointed, with --activation-checkpointing, they
    are fewer, and the time is a third longer.
    """

    recipe: Literal["i1k", "i21k", "iwslt"] = "i1k"
    """The recipe: ImageNet-1k or -21k with the ViTs of Wortsman et al., or IWSLT14 with a ReLUFormer."""
    models: tuple[str, ...] = MODELS
    """ViTs to list."""
    gpus: int = 8
    """Number of GPUs, over all machines."""
    tflops: float = 100.0
    """Speed that each GPU reaches in this training, in 10¹² operations per second: often a third of its peak."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Precision of the activations."""
    accumulate: int = 1
    """Parts in which each batch is computed: activations are those of one part."""


@dataclass(frozen=True)
class Estimate:
    """What a training takes."""

    model: str
    parameters: int
    flop: float
    seconds: float
    state: dict[str, float]
    """Bytes of weights, gradients and optimiser per GPU, by how they are distributed."""
    activations: float
    """Bytes of a GPU's part of a batch."""
    checkpointed: float
    """The same with activation checkpointing."""


def run(options: Options) -> int:
    """Print the estimates."""
    if options.gpus < 1 or options.accumulate < 1 or not options.tflops > 0:
        raise ValueError("--gpus, --tflops and --accumulate must be above 0.")
    estimates = estimate(options)
    table = Table(title=f"Estimates for {options.recipe}: nothing of this was measured")
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for each in estimates:
        table.add_row(*row(each))
    Console().print(table)
    return 0


def estimate(options: Options) -> list[Estimate]:
    """Return an estimate for each model of a recipe."""
    half = options.precision == "bf16"
    if options.recipe == "iwslt":
        config = iwslt()
        units = config.batch_size * config.steps
        return [_estimate(options, config, config.model.macs * units, text_numbers(config.model, half))]
    estimates = []
    for model in options.models:
        vision = (i1k if options.recipe == "i1k" else i21k)(model)
        units = vision.batch_size * count_steps(vision.epochs, IMAGES[options.recipe] / vision.batch_size)
        macs = vit_macs(vision.model) * units
        estimates.append(_estimate(options, vision, macs, vit_numbers(vision.model, half)))
    return estimates


def vit_macs(model: ViTConfig) -> int:
    """Return the multiply-adds of an image: those of the encoder, and of the layers before and after it."""
    width, patches = model.size.width, model.grid[0] * model.grid[1]
    rep_size = width if model.rep_size is True else int(model.rep_size)
    with torch.device("meta"):
        encoder = ViT.from_config(model).macs()
    return (
        encoder
        + patches * model.channels * model.patch**2 * width
        + width * rep_size
        + (rep_size or width) * model.num_classes
    )


@dataclass(frozen=True)
class Kept:
    """Bytes that the backward pass needs: of the layers' inputs, and of all else in them, per image or token."""

    inputs: float
    rest: float
    largest: float
    """The rest of the largest layer, which is computed again on its own."""
    outside: float
    """Before and after the layers: logits and their gradients."""


def vit_numbers(model: ViTConfig, half: bool) -> Kept:
    """Return what a ViT keeps of an image.

    Per block and token, in units of its width: x (twice, before either part, in float32), the normalised x (twice),
    queries, keys, values, the output of attention, and of the MLP's hidden layer what goes into GELU and what comes
    out; the normalised queries and keys with qk-norm; three for a gate.
    """
    width, depth, mlp, _ = model.size
    other = 6 + 2 * mlp / width + (2 if model.qk_norm else 0) + (3 if model.gate else 0)
    x, block = 4.0 * width * model.tokens, (4 + other * (2 if half else 4)) * width * model.tokens
    return Kept(depth * x, depth * block, block, 3 * 4.0 * model.num_classes)


def text_numbers(model: ReLUFormerConfig, half: bool) -> Kept:
    """Return what a ReLUFormer keeps of a token of each side; padding counts as tokens.

    Per encoder layer, in units of its width: x (twice, in float32), the normalised x (twice), queries, keys, values,
    the output of attention, that before a learned gain, and the memory's weights. A decoder layer also has all that
    for its attention to the source, and the source itself.
    """
    size, width = 2 if half else 4, model.dim
    memory, gain = model.slots / width, model.learned_gain is not None
    x = 4.0 * width
    encoder = x + (6 + gain + memory) * width * size
    decoder = encoder + ((x + (6 + gain) * width * size) if model.encoder_layers else 0)
    layers = model.encoder_layers * encoder + model.decoder_layers * decoder
    inputs = (model.encoder_layers + model.decoder_layers) * x
    return Kept(inputs, layers, decoder, 3 * 4.0 * model.vocabulary)


def _estimate(options: Options, config: VisionConfig | TextConfig, macs: float, kept: Kept) -> Estimate:
    model = _meta(config)
    layers = distributed.layers(model)
    parameters, flop = _count(model), 6.0 * macs
    copies = parameters * (2.0 if options.precision == "bf16" else 0.0)  # autocast's, of the weights
    alone = (WEIGHT + GRADIENT + MOMENTS) * parameters
    # Two layers are gathered at a time, one of them ahead; what is outside of the layers, all the time.
    gathered = (WEIGHT + GRADIENT) * (2 * max(map(_count, layers)) + parameters - sum(map(_count, layers)))
    state = {
        "ddp": alone + copies + (BUCKETS * parameters if options.gpus > 1 else 0),
        "fsdp": alone / options.gpus + (gathered if options.gpus > 1 else copies),
    }
    units = config.batch_size / options.gpus / options.accumulate
    return Estimate(
        model=config.model.variant if isinstance(config, VisionConfig) else "ReLUFormer",
        parameters=parameters,
        flop=flop,
        seconds=flop / (options.gpus * options.tflops * 1e12),
        state=state,
        activations=units * (kept.inputs + kept.rest + kept.outside),
        checkpointed=units * (kept.inputs + kept.largest + kept.outside),
    )


def row(each: Estimate) -> list[str]:
    """Return an estimate in words, by COLUMNS."""
    hours = each.seconds / 3600
    time = f"{60 * hours:.0f} minutes" if hours < 1 else f"{hours:.1f} hours"
    time = f"{hours / 24:.1f} days" if hours >= 48 else time
    return [
        each.model,
        f"{each.parameters / 1e6:.1f} M",
        f"{each.flop:.1e}",
        time,
        *(f"{bytes_ / 1e9:.2f} GB" for bytes_ in (*each.state.values(), each.activations, each.checkpointed)),
    ]


def _meta(config: VisionConfig | TextConfig) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = (
            ViT.from_config(config.model) if isinstance(config, VisionConfig) else ReLUFormer.from_config(config.model)
        )
    return made


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
