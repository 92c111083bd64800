"""The layers of a converted model between which its sequence can be split, and what each of them may be told.

Between layers, positions must not meet but in attention. What cannot be split exactly is refused by name.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nomax.nn.inner_attention import InnerAttention
from nomax.phi import ROW_MAPS

Cut = Callable[[Tensor, int], Tensor]  # a tensor of the whole sequence, and the dimension of its positions

# Arguments of layers, by the names that transformers, timm and torch give them. Masks stay whole: attention takes its
# own rows of them.
MASKS = ("attention_mask", "attn_mask", "mask", "src_mask", "key_padding_mask", "src_key_padding_mask")
CUT = {"position_embeddings": 1, "position_ids": -1, "cache_position": -1}  # and the dimension of their positions
# Positions that leave out some of the sequence, such as class tokens, or that are in no order of it.
UNKNOWN = ("rope", "shared_rel_pos", "alibi")
CACHES = ("past_key_values", "past_key_value", "layer_past")
# Modules that mix positions, or numbers of them.
MIXING = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def converted_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that `nomax.convert` changed; none if it is no such model. Refuse what cannot be."""
    names = [name for name, module in model.named_modules() if isinstance(module, InnerAttention)]
    if not names:
        return []
    # Attention that is in no list, such as that of a pooling head, comes after the layers and sees whole sequences.
    containers = {name: None for name in (_container(model, name) for name in names) if name}
    if not containers:
        raise ValueError(
            f"{type(model).__name__} has no list of layers that attend: give them, such as layers=model.blocks."
        )
    if len(containers) > 1:
        listed = ", ".join(repr(name) for name in containers)
        raise ValueError(
            f"{type(model).__name__} attends in several stacks of layers ({listed}), and parallelize splits the "
            "sequence of one. Give the layers of one stack that attends to itself, such as layers=model.encoder.layers."
        )
    name = next(iter(containers))
    layers: list[nn.Module] = list(model.get_submodule(name).children())
    for number, layer in enumerate(layers):
        _check_layer(f"{name}.{number}", layer)
    return layers


def _container(model: nn.Module, name: str) -> str:
    """Return the name of the innermost list of modules around a module; nothing if there is none."""
    while name:
        name = name.rpartition(".")[0]
        if isinstance(model.get_submodule(name), nn.ModuleList | nn.Sequential):
            return name
    return name


def _check_layer(name: str, layer: nn.Module) -> None:
    reason = ""
    attentions = [module for module in layer.modules() if isinstance(module, InnerAttention)]
    if not attentions:
        reason = "its attention was not converted, and would see this rank's positions only"
    for place, module in layer.named_modules():
        kind = type(module).__name__
        if isinstance(module, InnerAttention) and module.phi.activation in ROW_MAPS:
            reason = f"{place} has phi={str(module.phi)!r}, which normalises whole rows"
        elif getattr(module, "inner_attention", layer) is None:
            reason = f"{place} ({kind}) was not converted, and would see this rank's positions only"
        elif isinstance(module, MIXING) or "Pool" in kind:
            reason = f"{place} ({kind}) mixes positions outside attention"
        elif isinstance(module, nn.MultiheadAttention) and not hasattr(module, "inner_attention"):
            reason = f"{place} ({kind}) was not converted, and would see this rank's positions only"
        elif isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            reason = f"{place} ({kind}) has batch_first=False: positions must be dimension 1"
    if reason:
        raise ValueError(f"the sequence cannot be split in {name}, a {type(layer).__name__}: {reason}.")


def own_arguments(
    layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], length: int, cut: Cut
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with this rank's part of those that have a number for each position.

    length: of the whole sequence. The first argument, the sequence itself, stays as it is.
    """
    parameters = list(inspect.signature(layer.forward).parameters)
    first = "" if inputs else "hidden_states"
    positional = [
        each if place == 0 else _own(layer, parameters[place] if place < len(parameters) else "", each, length, cut)
        for place, each in enumerate(inputs)
    ]
    keyword = {name: x if name == first else _own(layer, name, x, length, cut) for name, x in named.items()}
    return tuple(positional), keyword


def _own(layer: nn.Module, name: str, value: Any, length: int, cut: Cut) -> Any:
    if name in MASKS or name in CACHES:
        return value
    if isinstance(value, tuple | list) and name in CUT:
        return type(value)(_own(layer, name, each, length, cut) for each in value)
    if not isinstance(value, Tensor):
        return value
    if name in CUT and value.dim() >= 1 + max(CUT[name], 0) and value.shape[CUT[name]] == length:
        return cut(value, CUT[name])
    if name in CUT or name in UNKNOWN or (length > 1 and length in value.shape):
        raise ValueError(
            f"the sequence cannot be split: a {type(layer).__name__} is told {name or 'of something'} "
            f"{list(value.shape)}, and how that belongs to its {length} positions is not known. Masks can be split, "
            f"and {', '.join(CUT)} that have an entry for each position."
        )
    return value


def check_cache(layer: nn.Module, named: dict[str, Any]) -> None:
    """Refuse a cache that holds something: its keys would be this rank's only."""
    for name in CACHES:
        cache = named.get(name)
        if cache is not None and getattr(cache, "get_seq_length", lambda: 1)() > 0:
            raise ValueError(
                "a model whose sequences are split takes no key-value cache: call it with whole texts, or decode with "
                "a copy of the model that is not split."
            )


def local_length(x: Tensor) -> int:
    """Return the number of positions of a sequence [batch, positions, dim]."""
    if not isinstance(x, torch.Tensor) or x.dim() != 3:
        shape = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"the first layer got {shape}, but a sequence to split is [batch, positions, dim].")
    return x.shape[1]
