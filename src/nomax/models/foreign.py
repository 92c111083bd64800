"""Weights that others trained, as a ViT of ours, with any φ: what all of them need, and timm's vision transformers."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from nomax import _compat
from nomax.models.hub import fill
from nomax.models.vit import ViT
from nomax.models.vit_config import SIZES
from nomax.phi import Phi

TIMM_NAMES = {
    "patch_embed.proj": "embedding",
    "cls_token": "class_token",
    "pos_embed": "posemb",
    "norm1": "attention_norm",
    "attn.qkv": "attention.qkv",
    "attn.q_norm": "attention.query_norm",
    "attn.k_norm": "attention.key_norm",
    "attn.proj": "attention.out",
    "norm2": "mlp_norm",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
    "fc_norm": "norm",
}


def timm_model(name: str, **settings: Any) -> nn.Module:
    """Make a model of timm, as timm.create_model does, also beside a torchvision that was made for another torch.

    There `import timm` alone fails: "operator torchvision::nms does not exist".
    """
    model: nn.Module = _compat.timm().create_model(name, **settings)
    return model


def from_timm(
    source: nn.Module | Mapping[str, Tensor], variant: str | None = None, phi: str | Phi = "softmax", **options: Any
) -> ViT:
    """Make a ViT with the weights of a timm VisionTransformer, given as model or as state_dict.

    With phi="softmax" it computes what timm's does; any other φ changes its attention only. What a state_dict does not
    tell is taken to be as usual in timm (exact GELU; the class token is pooled where there is one); `options` are
    fields of ViTConfig that say otherwise, e.g. pool="gap", or image_size=(height, width) where that is no square.
    """
    settings: dict[str, Any] = {"gelu": "exact"}
    if isinstance(source, nn.Module):
        settings |= _timm_settings(source)
        source = source.state_dict()
    tensors = {name: tensor.detach() for name, tensor in source.items()}
    settings["norm"] = "pooled" if "fc_norm.weight" in tensors else "tokens"
    settings["class_token"] = "cls_token" in tensors
    settings.setdefault("pool", "tok" if settings["class_token"] and settings["norm"] == "tokens" else "gap")
    settings["qk_norm"] = "blocks.0.attn.q_norm.weight" in tensors
    _simplify(tensors)
    renamed = {_our_name(name): tensor for name, tensor in tensors.items()}
    return build("the timm model", variant, phi, renamed, settings, options)


def build(
    source: str,
    variant: str | None,
    phi: str | Phi,
    tensors: dict[str, Tensor],
    settings: dict[str, Any],
    options: dict[str, Any],
) -> ViT:
    """Make a ViT from weights under our names, whose shapes tell the rest of its config.

    settings: what else the source tells, fields of ViTConfig and maybe "heads"; options: what the caller wants.
    """
    for name in ("embedding.weight", "blocks.0.mlp.up.weight"):
        if name not in tensors:
            raise ValueError(f"{source} has nothing for our {name}: it is not a vision transformer of the usual form.")
    width, channels, patch, patch_width = tensors["embedding.weight"].shape
    if patch != patch_width:
        raise ValueError(f"{source} has patches of {patch}×{patch_width} pixels, but those of ViT are squares.")
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    shape = (width, depth, len(tensors["blocks.0.mlp.up.weight"]))
    heads = settings.pop("heads", None)
    sizes = [name for name, size in SIZES.items() if size[:3] == shape and heads in (None, size.heads)]
    if variant is None and not sizes:
        known = "; ".join(f"{name} {tuple(size)}" for name, size in SIZES.items())
        raise ValueError(
            f"{source} has (width, depth, MLP, heads) = {(*shape, heads or '?')}, which is none of our sizes: {known}."
        )
    settings["num_classes"] = len(tensors["head.weight"]) if "head.weight" in tensors else 0
    if "pre_logits.weight" in tensors:
        rep_size = len(tensors["pre_logits.weight"])
        settings["rep_size"] = True if rep_size == width else rep_size
    settings["posemb"] = "learn" if "posemb" in tensors else "sincos2d"
    settings |= {"channels": channels, "phi": phi} | options
    if "posemb" in tensors:
        _settle_positions(source, tensors, settings, patch)
    model = ViT(variant or f"{sizes[0]}/{patch}", **settings)
    fill(model, tensors, source)
    return model.eval()


def _settle_positions(source: str, tensors: dict[str, Tensor], settings: dict[str, Any], patch: int) -> None:
    """Find the size of the images; a position of the class token becomes part of it, to which it is always added."""
    positions = tensors["posemb"].reshape(1, -1, tensors["posemb"].shape[-1])
    count = positions.shape[1]
    size = settings.setdefault("image_size", math.isqrt(count) * patch)
    height, width = (size, size) if isinstance(size, int) else size
    patches = (height // patch) * (width // patch)
    if count == patches + 1 and "class_token" in tensors:
        tensors["class_token"] = tensors["class_token"] + positions[:, :1]
        positions = positions[:, 1:]
    elif count != patches:
        raise ValueError(
            f"{source} has {count} positions, which do not fit images of {height}×{width} pixels and patches of "
            f"{patch}. Pass image_size=(height, width) as it was when the model was trained."
        )
    tensors["posemb"] = positions


def _timm_settings(model: nn.Module) -> dict[str, Any]:
    """What a model tells beyond its weights; an error if that is something which ViT cannot do."""
    if type(model).__name__ != "VisionTransformer":
        raise TypeError(f"source must be timm's VisionTransformer or its state_dict, got a {type(model).__name__}.")
    timm: Any = model
    block, pool = timm.blocks[0], timm.global_pool
    activation = block.mlp.act
    norms = [block.norm1, block.attn.q_norm, block.attn.k_norm, block.norm2, timm.norm, timm.fc_norm]
    norms = [norm for norm in norms if not isinstance(norm, nn.Identity)]
    problems = {
        f"global_pool={pool!r} instead of 'token' or 'avg'": pool not in ("token", "avg"),
        f"blocks of the kind {type(block).__name__}": type(block).__name__ != "Block",
        f"the activation {type(activation).__name__} instead of GELU": not isinstance(activation, nn.GELU),
        "norms other than LayerNorm": any(not isinstance(norm, nn.LayerNorm) for norm in norms),
        "an eps other than 1e-6 in its norms": any(getattr(norm, "eps", None) != 1e-6 for norm in norms),
    }
    if found := [text for text, wrong in problems.items() if wrong]:
        raise ValueError(f"this timm model cannot become a ViT: it has {', and '.join(found)}.")
    return {
        "pool": "tok" if pool == "token" else "gap",
        "gelu": "tanh" if activation.approximate == "tanh" else "exact",
        "image_size": tuple(timm.patch_embed.img_size),
        "heads": block.attn.num_heads,
    }


def _simplify(tensors: dict[str, Tensor]) -> None:
    """Replace what timm has and ViT has not by weights that do the same: absent biases, and scales of a layer."""
    for name in [name for name in tensors if re.search(r"\.[qk]_norm\.bias$", name)]:
        if tensors.pop(name).any():
            raise ValueError(f"{name} is not zero, but qk_norm has a scale only, so these weights cannot be used.")
    for name in [name for name in tensors if re.search(r"\.(qkv|proj)\.weight$", name)]:
        bias = name.removesuffix("weight") + "bias"
        tensors.setdefault(bias, tensors[name].new_zeros(len(tensors[name])))
    for name in [name for name in tensors if re.search(r"\.ls[12]\.gamma$", name)]:
        scale = tensors.pop(name)
        layer = name.replace("ls1.gamma", "attn.proj").replace("ls2.gamma", "mlp.fc2")
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"] * scale[:, None]
        tensors[f"{layer}.bias"] = tensors[f"{layer}.bias"] * scale


def _our_name(name: str) -> str:
    """ "blocks.3.attn.proj.bias" to "blocks.3.attention.out.bias"; a name that we do not know stays as it is."""
    block, middle, end = re.findall(r"^(blocks\.\d+\.)?(.+?)(\.weight|\.bias)?$", name)[0]
    return f"{block}{TIMM_NAMES.get(middle, middle)}{end}"
