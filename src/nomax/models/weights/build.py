"""Build a ViT from weights under our names, whose shapes give its config."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nomax.models.hub import fill
from nomax.models.vit import SIZES, ViT, parse_variant
from nomax.phi import Phi


def build(
    source: str,
    variant: str | None,
    phi: str | Phi,
    tensors: dict[str, Tensor],
    settings: dict[str, Any],
    options: dict[str, Any],
) -> ViT:
    """Make a ViT from weights under our names, whose shapes give the rest of its config.

    settings: fields of ViTConfig known from the source, and maybe "heads"; options: fields that the caller sets.
    """
    require(source, tensors, "embedding.weight", "blocks.0.mlp.up.weight")
    width, channels, patch, patch_width = tensors["embedding.weight"].shape
    if patch != patch_width:
        raise ValueError(f"{source} has patches of {patch}×{patch_width} pixels, but ViT needs square ones.")
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    shape = (width, depth, len(tensors["blocks.0.mlp.up.weight"]))
    heads = settings.pop("heads", None)
    sizes = [name for name, size in SIZES.items() if size[:3] == shape and heads in (None, size.heads)]
    has = f"{source} has (width, depth, MLP, heads) = {(*shape, heads or '?')} and patches of {patch} pixels"
    if variant is None:
        if not sizes:
            known = "; ".join(f"{name} {tuple(size)}" for name, size in SIZES.items())
            raise ValueError(f"{has}, which is none of our sizes: {known}.")
        if heads is None:
            raise ValueError(f"{has}: pass the variant with its number of heads, such as {sizes[0]}/{patch}.")
        variant = f"{sizes[0]}/{patch}"
    size, pixels = parse_variant(variant)
    if (*size[:3], pixels) != (*shape, patch) or heads not in (None, size.heads):
        raise ValueError(f"{has}, but variant={variant!r} is {tuple(size)} with patches of {pixels}.")
    settings["num_classes"] = len(tensors["head.weight"]) if "head.weight" in tensors else 0
    if "pre_logits.weight" in tensors:
        rep_size = len(tensors["pre_logits.weight"])
        settings["rep_size"] = True if rep_size == width else rep_size
    settings["posemb"] = "learn" if "posemb" in tensors else "sincos2d"
    settings |= {"channels": channels, "phi": phi} | options
    if "posemb" in tensors:
        _settle_positions(source, tensors, settings, patch)
    model = ViT(variant, **settings)
    fill(model, tensors, source)
    return model.eval()


def _settle_positions(source: str, tensors: dict[str, Tensor], settings: dict[str, Any], patch: int) -> None:
    """Find the image size, and add the class token's position, if it has one, to the token."""
    positions = tensors["posemb"].reshape(1, -1, tensors["posemb"].shape[-1])
    count = positions.shape[1]
    size = settings.setdefault("image_size", math.isqrt(count) * patch)
    height, width = (size, size) if isinstance(size, int) else size
    rows, columns = height // patch, width // patch
    if rows * patch != height or columns * patch != width:
        raise ValueError(
            f"{source} takes images of {height}×{width} pixels and ignores pixels beyond the last whole patch of "
            f"{patch}. Pass image_size=({rows * patch}, {columns * patch}), and crop images at the right and bottom."
        )
    patches = rows * columns
    if count == patches + 1 and "class_token" in tensors:
        tensors["class_token"] = tensors["class_token"] + positions[:, :1]
        positions = positions[:, 1:]
    elif count != patches:
        raise ValueError(
            f"{source} has {count} positions, which do not fit images of {height}×{width} pixels and patches of "
            f"{patch}. Pass image_size=(height, width) as it was when the model was trained."
        )
    tensors["posemb"] = positions


def require(source: str, tensors: Mapping[str, Tensor], embedding: str, mlp: str) -> None:
    """Raise unless two of the weights have the shapes of a vision transformer."""
    for name, dimensions in ((embedding, 4), (mlp, 2)):
        if name not in tensors or tensors[name].dim() != dimensions:
            raise ValueError(
                f"{source} has no {name} of {dimensions} dimensions: it is not a standard vision transformer."
            )
