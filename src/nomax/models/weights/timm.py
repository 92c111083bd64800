"""Convert timm's vision transformers to a ViT with any φ."""

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from nomax.models.vit import SIZES, ViT, ViTConfig
from nomax.models.weights.build import build, require
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

PRE_NORM = "a norm before the first block (pre_norm), as CLIP has"
EMBED_NORM = "a norm of the embedded patches (embed_norm_layer)"
# Weights that have no place in a ViT, by their names in timm.
UNSUPPORTED = {
    r"reg_token": "register tokens (reg_tokens)",
    r"dist_token|head_dist\..+": "a distillation token with a head of its own, as distilled DeiT has",
    r"norm_pre\..+": PRE_NORM,
    r"attn_pool\..+": "attention pooling (attn_pool)",
    r"patch_embed\.backbone\..+": "convolutions before the patches (embed_layer)",
    r"patch_embed\.norm\..+": EMBED_NORM,
    r"blocks\.\d+\.attn\.norm\..+": "a norm of the joined heads (scale_attn_norm)",
    r"blocks\.\d+\.attn\.(lambda_|sub_norm).+": "differential attention (attn_layer='diff')",
    r"blocks\.\d+\.attn\.gate\..+": "gated attention",
    r"blocks\.\d+\.mlp\.norm\..+": "a norm within the MLP (scale_mlp_norm)",
    r"blocks\.\d+\.mlp\.(fc1_[gx]|w\d+)\..+": "a gated MLP (mlp_layer)",
    r"blocks\.\d+\.(in_proj|attns|ffns)\..+": "attention and MLPs side by side in a block (block_fn)",
}
ASSUMED = (
    "a state_dict does not show, so from_timm assumes: that blocks normalise before attention and MLP, not after "
    "(block_fn=ResPostBlock); that norms are LayerNorm with an eps of 1e-6; that the activation is GELU; and that the "
    "mean excludes the class token (pool_include_prefix=False). from_timm(model) checks all of this."
)


def from_timm(
    source: nn.Module | Mapping[str, Tensor], variant: str | None = None, phi: str | Phi = "softmax", **options: Any
) -> ViT:
    """Make a ViT with the weights of a timm VisionTransformer, given as a model or as a state_dict.

    With phi="softmax" it computes the same as timm's; any other φ changes only its attention. An error names whatever
    timm's model does that ViT cannot. `options` are fields of ViTConfig.

    A state_dict shows less than a model. The rest has to be given: a variant with the right number of heads, pool, gelu
    ("exact" unless timm's act_layer says otherwise), and image_size if there are no positions. A warning lists what is
    assumed besides.
    """
    settings: dict[str, Any] = {}
    problems: list[str] = []
    if isinstance(source, nn.Module):
        settings, problems = _inspect(source)
        weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    elif isinstance(source, Mapping) and all(isinstance(tensor, Tensor) for tensor in source.values()):
        weights = {name: tensor.detach() for name, tensor in source.items()}
    else:
        inner = ", whose values are not all tensors" if isinstance(source, Mapping) else ""
        raise TypeError(
            f"source must be a timm VisionTransformer or its state_dict, got a {type(source).__name__}{inner}."
        )
    if problems := list(dict.fromkeys([*problems, *_unsupported(weights)])):
        raise ValueError(
            f"this timm model cannot become a ViT: it has {', and '.join(problems)}. ViT does not do that, and would "
            "compute something else with these weights. Choose another model."
        )
    require("the timm model", weights, "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
    embedding = weights["patch_embed.proj.weight"]
    settings["norm"] = "pooled" if "fc_norm.weight" in weights else "tokens"
    settings["class_token"] = "cls_token" in weights
    if (query_norm := weights.get("blocks.0.attn.q_norm.weight")) is not None:
        settings["qk_norm"] = True
        settings.setdefault("heads", len(embedding) // len(query_norm))
    if not isinstance(source, nn.Module):
        _require_settings(weights, variant, settings, options)
    _simplify(weights)
    if "pos_embed" not in weights and options.get("posemb") != "sincos2d":
        # Positions of zeros change nothing.
        size: Any = options.get("image_size", settings.get("image_size"))
        grid = ViTConfig(f"mu/{embedding.shape[-1]}", image_size=size).grid
        weights["pos_embed"] = embedding.new_zeros(1, math.prod(grid), len(embedding))
    ours = {_our_name(name): tensor for name, tensor in weights.items()}
    model = build("the timm model", variant, phi, ours, settings, options)
    if not isinstance(source, nn.Module):
        warnings.warn(ASSUMED, stacklevel=2)
    return model


def _inspect(model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a model that its weights do not show, and its features that ViT lacks."""
    kind = type(model)
    if not any(base.__name__ == "VisionTransformer" and base.__module__.startswith("timm.") for base in kind.__mro__):
        raise TypeError(
            "source must be a timm VisionTransformer or its state_dict, got a "
            f"{kind.__name__} of {kind.__module__.partition('.')[0]}."
        )
    timm: Any = model
    pool, blocks = timm.global_pool, []
    problems = {
        f"a forward pass of its own ({kind.__name__})": kind.__name__ != "VisionTransformer",
        f"global_pool={pool!r} instead of 'token' or 'avg'": pool not in ("token", "avg"),
        "a mean that takes in the class token (pool_include_prefix)": (
            pool == "avg" and timm.num_prefix_tokens > 0 and getattr(timm, "pool_include_prefix", False)
        ),
    }
    for block in timm.blocks:
        parts = (block, getattr(block, "attn", None), getattr(block, "mlp", None))
        names = {usual: type(part).__name__ for usual, part in zip(("Block", "Attention", "Mlp"), parts, strict=True)}
        for usual, actual in names.items():
            problems[f"{actual} instead of {usual}"] = actual not in (usual, "NoneType")
        if all(usual == actual for usual, actual in names.items()):
            blocks.append(block)
            act = block.mlp.act
            problems[f"the activation {type(act).__name__} instead of GELU"] = _gelu(act) is None
    variants = {(block.attn.num_heads, _gelu(block.mlp.act)) for block in blocks}
    problems["blocks with different numbers of heads or activations"] = len(variants) > 1
    norms = [timm.norm, timm.fc_norm]
    norms += [norm for block in blocks for norm in (block.norm1, block.norm2, block.attn.q_norm, block.attn.k_norm)]
    for words, norm in ((PRE_NORM, timm.norm_pre), (EMBED_NORM, getattr(timm.patch_embed, "norm", nn.Identity()))):
        problems[words] = not isinstance(norm, nn.Identity)
    for norm in norms:
        is_usual = isinstance(norm, nn.LayerNorm | nn.Identity)
        problems[f"norms of the kind {type(norm).__name__} instead of LayerNorm"] = not is_usual
        eps = getattr(norm, "eps", 1e-6)
        problems[f"an eps of {eps:g} instead of 1e-6 in its norms"] = eps != 1e-6
    heads, gelu = variants.pop() if variants else (None, None)
    settings = {"pool": "tok" if pool == "token" else "gap", "gelu": gelu, "heads": heads}
    settings["image_size"] = tuple(timm.patch_embed.img_size)
    return settings, [text for text, wrong in problems.items() if wrong]


def _gelu(activation: nn.Module) -> str | None:
    """Return which GELU an activation is, torch's own or timm's; None if it is something else."""
    if isinstance(activation, nn.GELU):
        return "tanh" if activation.approximate == "tanh" else "exact"
    kind = type(activation)
    return {"GELU": "exact", "GELUTanh": "tanh"}.get(kind.__name__) if kind.__module__.startswith("timm.") else None


def _unsupported(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the features that the weights show and ViT lacks."""
    problems = [words for pattern, words in UNSUPPORTED.items() if any(re.fullmatch(pattern, name) for name in weights)]
    if "norm.weight" in weights and "fc_norm.weight" in weights:
        problems.append("a norm of the tokens and another one of what was pooled (norm and fc_norm)")
    up, down = (weights.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    if up is not None and down is not None and len(up) == 2 * down.shape[-1]:
        problems.append("a gated MLP (mlp_layer)")
    if "patch_embed.proj.weight" in weights and not {"norm.weight", "fc_norm.weight"} & weights.keys():
        problems.append("no norm after the last block (final_norm)")
    return problems


def _require_settings(
    weights: Mapping[str, Tensor], variant: str | None, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise unless everything is given whose default could be silently wrong."""
    width, patch = len(weights["patch_embed.proj.weight"]), weights["patch_embed.proj.weight"].shape[-1]
    mlp = len(weights["blocks.0.mlp.fc1.weight"])
    known = [
        f"'{name}/{patch}' for {size.heads}" for name, size in SIZES.items() if (size.width, size.mlp) == (width, mlp)
    ]
    if not known:
        return  # none of our sizes, whatever else is given
    wanted = {
        f"variant, for its number of heads ({', '.join(known)})": variant is None and "heads" not in settings,
        "pool ('tok' for the class token, 'gap' for the mean of the patches)": "pool" not in options,
        "gelu ('exact', or 'tanh' for act_layer='gelu_tanh')": "gelu" not in options,
        "image_size (it has no positions to tell)": "pos_embed" not in weights and "image_size" not in options,
    }
    if missing := [name for name, wrong in wanted.items() if wrong]:
        raise ValueError(
            f"a state_dict does not show everything about timm's model: pass {', '.join(missing)}; or pass the model."
        )


def _simplify(weights: dict[str, Tensor]) -> None:
    """Replace what ViT lacks by equivalent weights: add absent biases as zeros, and fold in the scales of layers."""
    for name in [name for name in weights if re.search(r"\.[qk]_norm\.bias$", name)]:
        if weights.pop(name).any():
            raise ValueError(
                f"{name} is not zero, but qk_norm has a scale only, so these weights cannot be used: choose a model "
                "without biases in q_norm and k_norm."
            )
    layers: dict[str, list[str]] = {}
    for block, layer in re.findall(r"^(blocks\.\d+)\.(.+)\.weight$", "\n".join(weights), flags=re.MULTILINE):
        layers.setdefault(layer, []).append(f"{block}.{layer}")
    for layer, names in layers.items():
        # If a model has no such biases, no block has them; if only some blocks lack them, something was lost.
        if layer not in ("attn.q_norm", "attn.k_norm") and not any(f"{name}.bias" in weights for name in names):
            weights |= {
                f"{name}.bias": weights[f"{name}.weight"].new_zeros(len(weights[f"{name}.weight"])) for name in names
            }
    scales = [name for name in weights if re.fullmatch(r"blocks\.\d+\.ls[12]\.gamma", name)]
    if scales and len(scales) != 2 * len(layers["mlp.fc1"]):
        raise ValueError(f"there are {len(scales)} scales ls1.gamma and ls2.gamma, but there should be two per block.")
    for name in scales:
        scale = weights.pop(name)
        layer = name.replace("ls1.gamma", "attn.proj").replace("ls2.gamma", "mlp.fc2")
        for part in (f"{layer}.weight", f"{layer}.bias"):
            if part in weights:
                weights[part] = weights[part] * scale.reshape(-1, *[1] * (weights[part].dim() - 1))


def _our_name(name: str) -> str:
    """Turn "blocks.3.attn.proj.bias" into "blocks.3.attention.out.bias"; an unknown name stays as it is."""
    block, middle, end = re.findall(r"^(blocks\.\d+\.)?(.+?)(\.weight|\.bias)?$", name)[0]
    return f"{block}{TIMM_NAMES.get(middle, middle)}{end}"
