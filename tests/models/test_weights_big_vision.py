"""Weights of big_vision: with softmax, the models compute what they did at home."""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from precision import assert_precise

from nomax import models
from nomax.models import ViT

Array = NDArray[Any]

WIDTH, HEADS, MLP, PATCH, CLASSES = 32, 2, 128, 4, 6
BLOCK = "Transformer/encoderblock_0"


def images(batch: int = 2, size: tuple[int, int] = (48, 48), channels: int = 3) -> torch.Tensor:
    return torch.rand(batch, channels, *size) * 2 - 1


def checkpoint(
    pool: str = "gap", rep_size: int | None = None, qk_norm: bool = False, side: int = 3
) -> dict[str, Array]:
    """A mu/4 of big_vision with random weights, by today's names."""
    random = np.random.default_rng(0)
    attention = f"{BLOCK}/MultiHeadDotProductAttention_0"
    d = WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (PATCH, PATCH, 3, WIDTH),
        "embedding/bias": (WIDTH,),
        "pos_embedding": (1, side * side, WIDTH),
        f"{BLOCK}/LayerNorm_0/scale": (WIDTH,),
        f"{BLOCK}/LayerNorm_0/bias": (WIDTH,),
        f"{BLOCK}/LayerNorm_1/scale": (WIDTH,),
        f"{BLOCK}/LayerNorm_1/bias": (WIDTH,),
        f"{BLOCK}/MlpBlock_0/Dense_0/kernel": (WIDTH, MLP),
        f"{BLOCK}/MlpBlock_0/Dense_0/bias": (MLP,),
        f"{BLOCK}/MlpBlock_0/Dense_1/kernel": (MLP, WIDTH),
        f"{BLOCK}/MlpBlock_0/Dense_1/bias": (WIDTH,),
        f"{attention}/out/kernel": (HEADS, d, WIDTH),
        f"{attention}/out/bias": (WIDTH,),
        "Transformer/encoder_norm/scale": (WIDTH,),
        "Transformer/encoder_norm/bias": (WIDTH,),
        "head/kernel": (rep_size or WIDTH, CLASSES),
        "head/bias": (CLASSES,),
    }
    for name in ("query", "key", "value"):
        shapes |= {f"{attention}/{name}/kernel": (WIDTH, HEADS, d), f"{attention}/{name}/bias": (HEADS, d)}
    if pool == "tok":
        shapes["cls"] = (1, 1, WIDTH)
    if rep_size:
        shapes |= {"pre_logits/kernel": (WIDTH, rep_size), "pre_logits/bias": (rep_size,)}
    if qk_norm:
        shapes |= {f"{attention}/query_ln/scale": (d,), f"{attention}/key_ln/scale": (d,)}
    return {name: random.normal(0.02, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def flax_forward(p: dict[str, Array], image: Array, pool: str = "gap") -> dict[str, Array]:
    """What big_vision's ViT finds, by its formulas and names, in numpy and the precision of the image, which is [batch,
    height, width, channels].
    """
    p = {name: array.astype(image.dtype) for name, array in p.items()}
    out: dict[str, Array] = {}

    def norm(x: Array, name: str) -> Array:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p[f"{name}/scale"]
        return x + p.get(f"{name}/bias", 0.0)

    batch, height, width, _ = image.shape
    rows, columns = height // PATCH, width // PATCH
    patches = image.reshape(batch, rows, PATCH, columns, PATCH, 3)
    out["stem"] = np.einsum("nhpwqc,pqcd->nhwd", patches, p["embedding/kernel"]) + p["embedding/bias"]
    x = out["with_posemb"] = out["stem"].reshape(batch, rows * columns, WIDTH) + p["pos_embedding"]
    if "cls" in p:
        x = np.concatenate([np.tile(p["cls"], (batch, 1, 1)), x], axis=1)

    attention = f"{BLOCK}/MultiHeadDotProductAttention_0"
    y = norm(x, f"{BLOCK}/LayerNorm_0")
    q, k, v = (
        np.einsum("nld,dhe->nlhe", y, p[f"{attention}/{name}/kernel"]) + p[f"{attention}/{name}/bias"]
        for name in ("query", "key", "value")
    )
    if f"{attention}/query_ln/scale" in p:
        q, k = norm(q, f"{attention}/query_ln"), norm(k, f"{attention}/key_ln")
    scores = np.einsum("nihe,njhe->nhij", q / math.sqrt(WIDTH // HEADS), k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("nhij,njhe->nihe", weights, v)
    y = np.einsum("nihe,hed->nid", heads, p[f"{attention}/out/kernel"]) + p[f"{attention}/out/bias"]
    out["encoder/block00/sa"], out["encoder/block00/+sa"] = y, x + y
    x = x + y

    y = norm(x, f"{BLOCK}/LayerNorm_1")
    y = y @ p[f"{BLOCK}/MlpBlock_0/Dense_0/kernel"] + p[f"{BLOCK}/MlpBlock_0/Dense_0/bias"]
    y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    y = y @ p[f"{BLOCK}/MlpBlock_0/Dense_1/kernel"] + p[f"{BLOCK}/MlpBlock_0/Dense_1/bias"]
    out["encoder/block00/mlp"], out["encoder/block00/+mlp"] = y, x + y
    out["encoder/pre_ln"] = x + y

    encoded = out["encoded"] = norm(x + y, "Transformer/encoder_norm")
    x = out["head_input"] = encoded.mean(1) if "cls" not in p and pool == "gap" else encoded[:, 0]
    two = encoded[:, int("cls" in p) :].reshape(batch, rows, columns, WIDTH)
    if "pre_logits/kernel" in p:
        x, two = (np.tanh(y @ p["pre_logits/kernel"] + p["pre_logits/bias"]) for y in (x, two))
    out["pre_logits"], out["pre_logits_2d"] = x, two
    if "head/kernel" in p:
        out["logits"], out["logits_2d"] = (y @ p["head/kernel"] + p["head/bias"] for y in (x, two))
    return out


def saved(folder: Path, arrays: dict[str, Array], prefix: str = "params/") -> Path:
    path = folder / "checkpoint.npz"
    np.savez(path, **{f"{prefix}{name}": array for name, array in arrays.items()})
    return path


def converted(folder: Path, arrays: dict[str, Array], prefix: str = "params/", **options: Any) -> ViT:
    """The model of a checkpoint, which has the mean of its patches pooled unless it has a class token."""
    options = {"pool": None if "cls" in arrays else "gap", **options}
    return models.from_big_vision(saved(folder, arrays, prefix), **options)


def assert_same(model: ViT, arrays: dict[str, Array], size: tuple[int, int] = (12, 12)) -> None:
    """Compare the result and all that comes before it, by big_vision's names."""
    x = images(size=size)
    plain, want = (
        flax_forward(arrays, x.permute(0, 2, 3, 1).to(dtype).numpy(), model.config.pool)
        for dtype in (torch.float32, torch.float64)
    )
    with torch.no_grad():
        result, named = model(x, intermediates=True)
        assert torch.equal(result, model(x))
    assert named.keys() == want.keys()
    assert torch.equal(result, named["logits" if "logits" in want else "pre_logits"])
    for name, array in want.items():
        assert_precise(named[name], torch.from_numpy(plain[name]), torch.from_numpy(array))


@pytest.mark.parametrize("prefix", ["params/", "opt/target/", ""])
@pytest.mark.parametrize(
    "settings",
    [{}, {"pool": "tok", "rep_size": WIDTH}, {"pool": "tok", "rep_size": 10, "qk_norm": True}, {"qk_norm": True}],
)
def test_a_big_vision_checkpoint_computes_what_it_did(tmp_path: Path, settings: dict[str, Any], prefix: str) -> None:
    arrays = checkpoint(**settings)
    model = converted(tmp_path, arrays, prefix)
    config = model.config
    assert (config.variant, config.image_size, config.num_classes, config.gelu) == ("mu/4", 12, CLASSES, "tanh")
    assert config.pool == settings.get("pool", "gap")
    assert config.rep_size == {None: False, WIDTH: True, 10: 10}[settings.get("rep_size")]
    assert_same(model, arrays)
    assert converted(tmp_path, arrays, prefix, phi="relu/L").config.phi == "relu/L"


def test_optimiser_state_beside_the_parameters_is_left_alone(tmp_path: Path) -> None:
    arrays = checkpoint()
    path = tmp_path / "checkpoint.npz"
    np.savez(path, **{f"params/{n}": a for n, a in arrays.items()}, **{f"opt/0/mu/{n}": a for n, a in arrays.items()})
    assert_same(models.from_big_vision(path, pool="gap"), arrays)


def test_what_a_model_without_class_token_pools_is_asked_for_and_not_guessed(tmp_path: Path) -> None:
    """pool_type="0" has the same arrays as "gap"."""
    arrays = checkpoint()
    path = saved(tmp_path, arrays)
    with pytest.raises(ValueError, match=r"pool=None must be 'gap' or '0': .*checkpoint.npz has no class token"):
        models.from_big_vision(path)
    with pytest.raises(ValueError, match=r"pool='tok' must be 'gap' or '0'"):
        models.from_big_vision(path, pool="tok")
    mean, first = models.from_big_vision(path, pool="gap"), models.from_big_vision(path, pool="0")
    assert_same(mean, arrays)
    assert_same(first, arrays)
    x = images(size=(12, 12))
    assert not torch.allclose(mean(x), first(x), atol=1e-2)  # far beyond rounding
    models.save(first, tmp_path / "first")
    assert torch.equal(models.load(tmp_path / "first")(x), first(x))
    path = saved(tmp_path, checkpoint(pool="tok"))
    with pytest.raises(ValueError, match=r"pool='gap' cannot be: .* has a class token"):
        models.from_big_vision(path, pool="gap")
    assert models.from_big_vision(path, pool="tok").config == models.from_big_vision(path).config


def test_a_variant_of_other_heads_is_refused(tmp_path: Path) -> None:
    arrays = checkpoint()
    attention = f"{BLOCK}/MultiHeadDotProductAttention_0"
    for name in ("query", "key", "value"):
        arrays[f"{attention}/{name}/kernel"] = arrays[f"{attention}/{name}/kernel"].reshape(WIDTH, 4, 8)
        arrays[f"{attention}/{name}/bias"] = arrays[f"{attention}/{name}/bias"].reshape(4, 8)
    arrays[f"{attention}/out/kernel"] = arrays[f"{attention}/out/kernel"].reshape(4, 8, WIDTH)
    with pytest.raises(ValueError, match=r"\(32, 1, 128, 4\) .*, but variant='mu/4' is \(32, 1, 128, 2\)"):
        converted(tmp_path, arrays, variant="mu/4")


def test_blocks_stacked_by_a_scan_are_unstacked(tmp_path: Path) -> None:
    arrays = checkpoint()
    stacked = {
        name.replace("encoderblock_0", "encoderblock"): a[None] if "encoderblock" in name else a
        for name, a in arrays.items()
    }
    assert_same(converted(tmp_path, stacked), arrays)


@pytest.mark.parametrize(
    "place", ["Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding", "pos_embedding"]
)
def test_old_names_and_the_old_position_of_the_class_token_are_understood(tmp_path: Path, place: str) -> None:
    arrays = checkpoint(pool="tok")
    old = {
        name.replace("LayerNorm_1", "LayerNorm_2")
        .replace("MlpBlock_0", "MlpBlock_3")
        .replace("Attention_0", "Attention_1"): a
        for name, a in arrays.items()
        if name != "pos_embedding"
    }
    own = np.full((1, 1, WIDTH), 0.3, np.float32)
    old[place] = np.concatenate([own, arrays["pos_embedding"]], axis=1)
    arrays["cls"] = arrays["cls"] + own
    assert_same(converted(tmp_path, old, ""), arrays)


def test_bfloat16_arrays_are_read(tmp_path: Path) -> None:
    arrays = checkpoint()
    halves = {name: torch.from_numpy(a).bfloat16().view(torch.int16).numpy().view("V2") for name, a in arrays.items()}
    rounded = {name: torch.from_numpy(a).bfloat16().float().numpy() for name, a in arrays.items()}
    assert_same(converted(tmp_path, halves), rounded)


def test_fixed_positions_rectangles_and_a_missing_head(tmp_path: Path) -> None:
    arrays = checkpoint(side=4)
    assert_same(converted(tmp_path, arrays, image_size=(8, 32)), arrays, (8, 32))
    del arrays["pos_embedding"], arrays["head/kernel"], arrays["head/bias"]
    model = converted(tmp_path, arrays, image_size=12)
    assert (model.config.posemb, model.config.num_classes) == ("sincos2d", 0)
    assert_same(model, {**arrays, "pos_embedding": model.posemb.numpy()})


def changed(**changes: Array | None) -> dict[str, Array]:
    arrays = {**checkpoint(), **{name.replace("__", "/"): array for name, array in changes.items()}}
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed(embedding__kernel=None), "no array embedding/kernel"),
        (changed(head__bias=None), r"missing: head.bias \[6\]"),
        (changed(head__bias=np.zeros(7)), r"head.bias is \[7\], the model's is \[6\]"),
        (changed(MAPHead_0__probe=np.zeros(3)), "attention head of its own"),
        (changed(t=np.zeros(3)), r"unexpected: t \[3\]"),
        (changed(pos_embedding=np.zeros((1, 10, WIDTH))), "has 10 positions, which do not fit images of 12×12"),
        (changed(embedding__kernel=np.zeros((4, 8, 3, WIDTH))), "patches of 4×8 pixels"),
        (changed(embedding__kernel=np.zeros((4, 4, 3, 40))), r"\(40, 1, 128, 2\) .*, which is none of our sizes"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_words(
    tmp_path: Path, arrays: dict[str, Array], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        converted(tmp_path, arrays)


def test_files_that_are_no_checkpoint_are_refused_and_no_pickle_is_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        models.from_big_vision(tmp_path / "nothing.npz")
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    for content in (b"", b"not a zip", buffer.getvalue()):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad.npz is not a checkpoint of a big_vision ViT"):
            models.from_big_vision(tmp_path / "bad.npz")
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as file:
        file.writestr("embedding/kernel.npy", b"\x93NUMPY broken")
    with pytest.raises(ValueError, match="not a checkpoint"):
        models.from_big_vision(tmp_path / "bad.npz")
    np.savez_compressed(tmp_path / "bad.npz", **{"embedding/kernel": np.zeros((4, 4, 3, 32))})
    content = bytearray((tmp_path / "bad.npz").read_bytes())
    content[80:90] = b"\xff" * 10
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(ValueError, match="not a checkpoint"):
        models.from_big_vision(tmp_path / "bad.npz")
    np.savez(tmp_path / "bad.npz", **{"embedding/kernel": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match="not a checkpoint"):
        models.from_big_vision(tmp_path / "bad.npz")


@pytest.mark.parametrize("name", ["head/bias", "params/head/bias"])
def test_a_checkpoint_that_expands_far_beyond_its_size_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bomb.npz"
    prefix = name.removesuffix("head/bias")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, array in ((f"{prefix}embedding/kernel", np.zeros(1)), (name, np.zeros(2**24, np.float64))):
            with archive.open(f"{member}.npy", "w") as file:
                np.lib.format.write_array(file, array)
    with pytest.raises(ValueError, match=r"bomb.npz is not .*: its arrays would expand to 134,\d+,\d+ bytes"):
        models.from_big_vision(path, pool="gap")


def test_an_array_that_claims_more_than_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "claim.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for member, size in (("embedding/kernel", 1), ("head/bias", 2**60)):
            with archive.open(f"{member}.npy", "w") as file:
                header = {"descr": "<f4", "fortran_order": False, "shape": (size,)}
                np.lib.format.write_array_header_1_0(file, header)
                file.write(b"1234")
    with pytest.raises(ValueError, match=r"claim.npz is not a checkpoint"):
        models.from_big_vision(path, pool="gap")


def test_optimiser_state_does_not_count_to_what_a_checkpoint_expands_to(tmp_path: Path) -> None:
    arrays = {f"params/{name}": array for name, array in checkpoint().items()}
    np.savez_compressed(tmp_path / "all.npz", **arrays, **{"opt/momentum": np.zeros(2**25)})
    assert_same(models.from_big_vision(tmp_path / "all.npz", pool="gap"), checkpoint())
