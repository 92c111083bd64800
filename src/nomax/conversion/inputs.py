"""Small inputs for a forward pass that shows a model's attention, as far as its kind lets us make them up."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 6
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class NoInputs(ValueError):
    """Nothing is known about what a model takes."""


def made_up(model: nn.Module) -> Inputs:
    """Return arguments for the model's forward pass, of its device and dtype."""
    parameter = next((x for x in model.parameters() if x.is_floating_point()), torch.empty(0))
    numbers = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(parameter)

    config = getattr(model, "config", None)
    package = type(model).__module__.partition(".")[0]
    if hasattr(config, "_attn_implementation_internal"):
        named = _for_transformers(model, config, normal)
        return (), {name: x.to(parameter.device) for name, x in named.items()}
    if package == "nomax":
        return tuple(x.to(parameter.device) for x in _for_nomax(model, config, normal)), {}
    if package == "timm":
        return (normal(1, *_image_of_timm(model)),), {}
    if package == "torchvision" and isinstance(size := getattr(model, "image_size", None), int):
        return (normal(1, 3, size, size),), {}
    return _for_torch(model, normal), {}


def given(inputs: Any) -> Inputs:
    """Read the `inputs` of convert: a tensor, a tuple of arguments, or a dictionary of named ones."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if hasattr(inputs, "keys"):
        return (), dict(inputs)
    raise TypeError(f"inputs must be a tensor, a tuple or a dictionary of them, got a {type(inputs).__name__}.")


def _for_transformers(model: Any, config: Any, normal: Any) -> dict[str, Tensor]:
    takes = inspect.signature(model.forward).parameters
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or 0
    # The smallest numbers are often special tokens, and the end of a text changes what some models do.
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % max(vocabulary - 6, 1) + 5 if vocabulary > 8 else None
    inputs: dict[str, Tensor] = {}
    main = getattr(model, "main_input_name", "input_ids")
    if "pixel_values" in takes:
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or getattr(
            getattr(vision, "backbone_config", None), "image_size", 224
        )
        height, width = (size, size) if isinstance(size, int) else tuple(size or (224, 224))[-2:]
        inputs["pixel_values"] = normal(
            2 if "input_ids" in takes else 1, getattr(vision, "num_channels", 3), height, width
        )
    if "input_features" in takes:
        frames = 2 * getattr(config, "max_source_positions", 50)
        inputs["input_features"] = normal(1, getattr(config, "num_mel_bins", 80), frames)
    if main == "input_values" and "input_values" in takes:
        bins, length = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
        inputs["input_values"] = normal(1, length, bins) if bins and length else normal(1, 4000)
    if ids is not None:
        if "input_ids" in takes and "input_features" not in inputs:
            inputs["input_ids"] = ids
        if "decoder_input_ids" in takes:
            count = 1 if "input_features" in inputs or "input_values" in inputs else 2
            inputs["decoder_input_ids"] = ids[:count, : TOKENS - 1]
    if not inputs:
        raise NoInputs(f"its main input is {main}")
    return inputs


def _for_nomax(model: nn.Module, config: Any, normal: Any) -> tuple[Tensor, ...]:
    if hasattr(config, "image"):
        return (normal(1, config.channels, *config.image),)
    if hasattr(config, "encoder_layers"):
        text = torch.arange(TOKENS).view(1, TOKENS) % config.vocabulary
        return (text, text) if config.encoder_layers else (text,)
    raise NoInputs(f"it is a {type(model).__name__} of nomax")


def _image_of_timm(model: Any) -> tuple[int, ...]:
    size = tuple(getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224)))
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), size[0])
    sizes = (getattr(module, "img_size", None) for module in model.modules())
    image = next((size for size in sizes if size), size[1:])
    return (channels, *image) if isinstance(image, tuple | list) else (channels, image, image)


def _for_torch(model: Any, normal: Any) -> tuple[Any, ...]:
    def sequences(layer: nn.MultiheadAttention, dim: int | None = None) -> Tensor:
        shape = (2, TOKENS) if layer.batch_first else (TOKENS, 2)
        return normal(*shape, dim or layer.embed_dim)

    match model:
        case nn.MultiheadAttention():
            return sequences(model), sequences(model, model.kdim), sequences(model, model.vdim)
        case nn.TransformerEncoderLayer():
            return (sequences(model.self_attn),)
        case nn.TransformerEncoder():
            return (sequences(model.layers[0].self_attn),)
        case nn.TransformerDecoderLayer():
            return sequences(model.self_attn), sequences(model.self_attn)
        case nn.TransformerDecoder():
            return (sequences(model.layers[0].self_attn),) * 2
        case nn.Transformer():
            return (sequences(model.encoder.layers[0].self_attn),) * 2
    raise NoInputs("only models of timm, transformers, torchvision and nomax, and layers of torch, are known")
