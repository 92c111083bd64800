"""Convert big_vision checkpoints (.npz), old and new, to a ViT with any φ."""

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nomax.models.vit import Pool, ViT
from nomax.models.weights.build import build
from nomax.phi import Phi

BLOCK = "Transformer/encoderblock"
# A checkpoint may expand to ten times its file size plus 64 MiB: weights hardly compress, unless they are zeros.
MOST_EXPANSION, EXPANSION_SLACK = 10, 2**26
# Raised by numpy for files that are damaged or something else.
UNREADABLE = (AttributeError, TypeError, ValueError, MemoryError, OSError, EOFError, zipfile.BadZipFile, zlib.error)


def from_big_vision(
    path: str | Path,
    variant: str | None = None,
    phi: str | Phi = "softmax",
    pool: Pool | None = None,
    **options: Any,
) -> ViT:
    """Make a ViT with the weights of a big_vision checkpoint (.npz).

    Size, patch, classes, class token and learned positions follow from the arrays. How a model without a class token
    pools does not, so it has to be given:

    pool: big_vision's pool_type: "gap", its default, for the mean of the patches, or "0" for the first patch.
    options: fields of ViTConfig that the arrays do not show, e.g. image_size if positions are fixed or images are not
      square.
    """
    arrays = _read_npz(Path(path))
    if strange := [name for name in arrays if name == "probe" or name.startswith("MAPHead")]:
        raise ValueError(f"{path} pools with an attention head of its own ({strange[0]}, …), which ViT does not have.")
    if "cls" in arrays and pool not in ("tok", None):
        raise ValueError(f"pool={pool!r} cannot be: {path} has a class token (cls), which is what its model pools.")
    if "cls" not in arrays and pool not in ("gap", "0"):
        raise ValueError(
            f"pool={pool!r} must be 'gap' or '0': {path} has no class token, and its arrays do not tell what the model "
            "pools instead. Pass big_vision's pool_type: 'gap', its default, is the mean of the patches, '0' the first."
        )
    settings: dict[str, Any] = {"pool": pool or "tok"}
    query = arrays.get(f"{BLOCK}_0/MultiHeadDotProductAttention_0/query/kernel")
    if query is not None and query.dim() == 3:
        settings["heads"] = query.shape[1]

    tensors: dict[str, Tensor] = {}
    for name in ("embedding", "pre_logits", "head"):
        tensors |= _dense(arrays, name, name)
    tensors |= _norm(arrays, "Transformer/encoder_norm", "norm")
    for theirs, ours in {"cls": "class_token", "pos_embedding": "posemb"}.items():
        if theirs in arrays:
            tensors[ours] = arrays.pop(theirs)
    for i in sorted({int(number) for name in arrays for number in re.findall(rf"^{BLOCK}_(\d+)/", name)}):
        tensors |= _block(arrays, f"{BLOCK}_{i}/", f"blocks.{i}.")
    settings["qk_norm"] = "blocks.0.attention.query_norm.weight" in tensors
    # Arrays that are left have no place in a ViT; the error names them.
    return build(str(path), variant, phi, {**tensors, **arrays}, settings, options)


def _read_npz(path: Path) -> dict[str, Tensor]:
    """Return the parameters under big_vision's current names, without the optimiser's state."""
    try:
        with np.load(path, allow_pickle=False) as file:
            prefixes = [prefix for prefix in ("params/", "opt/target/", "") if f"{prefix}embedding/kernel" in file]
            if not prefixes:
                raise ValueError("it has no array embedding/kernel")
            names = [name for name in file if name.startswith(prefixes[0])]
            _check_expansion(path, names)
            arrays = {name.removeprefix(prefixes[0]): file[name] for name in names}
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(path)!r}.") from None
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a checkpoint of a big_vision ViT: {error}.") from None
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        name = re.sub(r"^Transformer/(posembed_input/)?pos_embedding$", "pos_embedding", name)
        if name.startswith(f"{BLOCK}/"):  # all blocks stacked, for a scan over them
            inner = name.removeprefix(BLOCK)
            tensors |= {f"{BLOCK}_{i}{inner}": _tensor(layer) for i, layer in enumerate(array)}
        else:
            tensors[name] = _tensor(array)
    return _renumbered(tensors)


def _check_expansion(path: Path, names: list[str]) -> None:
    """Raise, before reading any, if these arrays would expand far beyond the size of the file."""
    with zipfile.ZipFile(path) as archive:
        expanded = sum(
            member.file_size for member in archive.infolist() if member.filename.removesuffix(".npy") in names
        )
    most = MOST_EXPANSION * path.stat().st_size + EXPANSION_SLACK
    if expanded > most:
        raise ValueError(f"its arrays would expand to {expanded:,} bytes, of at most {most:,} for a file of this size")


def _tensor(array: "np.ndarray[Any, Any]") -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bfloat16, which numpy does not know
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32))


def _renumbered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Number each kind of module in a block separately (…_0); old checkpoints count them together (…_1, …_3)."""
    module = re.compile(rf"^({BLOCK}_\d+/[A-Za-z]+)_(\d+)/")
    numbers: dict[str, set[int]] = {}
    for name in tensors:
        for kind, number in module.findall(name):
            numbers.setdefault(kind, set()).add(int(number))
    rank = {f"{kind}_{n}/": f"{kind}_{i}/" for kind, used in numbers.items() for i, n in enumerate(sorted(used))}
    return {module.sub(lambda match: rank[match[0]], name): tensor for name, tensor in tensors.items()}


def _block(arrays: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    attention = f"{theirs}MultiHeadDotProductAttention_0"
    if f"{attention}/out/kernel" in arrays:  # [heads, head dimension, width]
        arrays[f"{attention}/out/kernel"] = arrays[f"{attention}/out/kernel"].flatten(0, 1)
    tensors = {
        **_norm(arrays, f"{theirs}LayerNorm_0", f"{ours}attention_norm"),
        **_norm(arrays, f"{attention}/query_ln", f"{ours}attention.query_norm"),
        **_norm(arrays, f"{attention}/key_ln", f"{ours}attention.key_norm"),
        **_dense(arrays, f"{attention}/out", f"{ours}attention.out"),
        **_norm(arrays, f"{theirs}LayerNorm_1", f"{ours}mlp_norm"),
        **_dense(arrays, f"{theirs}MlpBlock_0/Dense_0", f"{ours}mlp.up"),
        **_dense(arrays, f"{theirs}MlpBlock_0/Dense_1", f"{ours}mlp.down"),
    }
    for flax_name, name in {"kernel": "weight", "bias": "bias"}.items():
        parts = [f"{attention}/{part}/{flax_name}" for part in ("query", "key", "value")]
        if all(part in arrays for part in parts):  # [width, heads, head dimension], or without width
            projections = [arrays.pop(part).flatten(-2).movedim(-1, 0) for part in parts]
            tensors[f"{ours}attention.qkv.{name}"] = torch.cat(projections)
    return tensors


def _dense(arrays: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """Take out a dense layer or a convolution: the outputs of a kernel come last in flax and first in torch."""
    tensors = {}
    if f"{theirs}/kernel" in arrays:
        kernel = arrays.pop(f"{theirs}/kernel")
        tensors[f"{ours}.weight"] = kernel.permute(3, 2, 0, 1) if kernel.dim() == 4 else kernel.movedim(-1, 0)
    if f"{theirs}/bias" in arrays:
        tensors[f"{ours}.bias"] = arrays.pop(f"{theirs}/bias")
    return tensors


def _norm(arrays: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    names = {"scale": "weight", "bias": "bias"}
    return {f"{ours}.{new}": arrays.pop(f"{theirs}/{old}") for old, new in names.items() if f"{theirs}/{old}" in arrays}
