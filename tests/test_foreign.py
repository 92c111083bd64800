"""Weights of timm and of big_vision: with softmax, the models compute what they did at home."""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nomax import _compat, models
from nomax.models import ViT

Array = NDArray[Any]


def timm_model(name: str = "vit_tiny_patch16_224", **settings: Any) -> Any:
    """A timm model of which every weight is random, also those that start at zero or one."""
    model = _compat.timm().create_model(name, **{"img_size": 48, "num_classes": 11, "depth": 12, **settings}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.01, std=0.1)
    return model


def images(batch: int = 2, size: tuple[int, int] = (48, 48), channels: int = 3) -> torch.Tensor:
    return torch.rand(batch, channels, *size) * 2 - 1


TIMM = {
    "class token": {},
    "small": {"name": "vit_small_patch16_224"},
    "mean, norm after it": {"global_pool": "avg"},
    "mean, norm before it": {"global_pool": "avg", "fc_norm": False},
    "mean without class token": {"global_pool": "avg", "class_token": False},
    "no position for the class token": {"no_embed_class": True},
    "no biases of query, key, value": {"qkv_bias": False},
    "layer scale": {"init_values": 0.1},
    "no head": {"num_classes": 0},
    "one channel, rectangular": {"in_chans": 1, "img_size": (32, 64)},
}


@pytest.mark.parametrize("case", TIMM)
def test_a_timm_model_computes_what_it_did(case: str) -> None:
    theirs = timm_model(**TIMM[case])
    ours = models.from_timm(theirs)
    x = images(size=theirs.patch_embed.img_size, channels=theirs.patch_embed.proj.in_channels)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert ours.config.phi == "softmax"
    assert ours.config.variant == ("S/16" if case == "small" else "Ti/16")


def test_a_state_dict_is_enough() -> None:
    theirs = timm_model(global_pool="avg")
    x = images()
    with torch.no_grad():
        torch.testing.assert_close(models.from_timm(theirs.state_dict())(x), theirs(x), rtol=1e-5, atol=1e-5)
        wide = timm_model(img_size=(32, 64))
        other = models.from_timm(wide.state_dict(), "Ti/16", image_size=(32, 64))
        x = images(size=(32, 64))
        torch.testing.assert_close(other(x), wide(x), rtol=1e-5, atol=1e-5)


def test_another_phi_changes_attention_and_nothing_else() -> None:
    theirs = timm_model()
    softmax, relu = models.from_timm(theirs), models.from_timm(theirs, phi="relu/L")
    assert all(torch.equal(a, b) for a, b in zip(softmax.parameters(), relu.parameters(), strict=True))
    assert relu.config.phi == "relu/L"
    x = images()
    with torch.no_grad():
        _, before = softmax(x, intermediates=True)
        _, after = relu(x, intermediates=True)
        assert torch.equal(before["with_posemb"], after["with_posemb"])
        assert not torch.allclose(before["encoder/block00/sa"], after["encoder/block00/sa"], atol=1e-3)
        block = relu.blocks[0]
        tokens = after["encoder/block00/+sa"] - after["encoder/block00/sa"]
        weights = block.attention.weights(block.attention_norm(tokens))
        assert (weights == 0).float().mean() > 0.05


def test_imported_weights_are_copies() -> None:
    theirs = timm_model()
    ours = models.from_timm(theirs)
    torch.nn.init.zeros_(theirs.head.weight)
    assert ours.head.weight.any()


def test_qk_norm_maps_where_it_is_a_scale_only_and_is_named_where_not() -> None:
    theirs = timm_model(qk_norm=True)
    for block in theirs.blocks:
        torch.nn.init.zeros_(block.attn.q_norm.bias)
        torch.nn.init.zeros_(block.attn.k_norm.bias)
    ours, x = models.from_timm(theirs), images()
    assert ours.config.qk_norm
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    torch.nn.init.ones_(theirs.blocks[7].attn.k_norm.bias)
    with pytest.raises(ValueError, match=r"blocks.7.attn.k_norm.bias is not zero"):
        models.from_timm(theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: timm_model(reg_tokens=4), r"has 14 positions|unexpected: reg_token"),
        (lambda: timm_model(reg_tokens=4, no_embed_class=True), r"unexpected: reg_token \[1, 4, 192\]"),
        (lambda: timm_model(pre_norm=True), "unexpected: norm_pre.weight"),
        (lambda: timm_model(act_layer="relu"), "the activation ReLU instead of GELU"),
        (lambda: timm_model(global_pool="max"), "global_pool='max' instead of 'token' or 'avg'"),
        (lambda: timm_model(num_heads=6), r"\(192, 12, 768, 6\), which is none of our sizes: mu"),
        (lambda: timm_model(depth=2), r"\(192, 2, 768, 3\), which is none of our sizes"),
        (lambda: {"weight": torch.zeros(2)}, "not a vision transformer"),
        (
            lambda: {n: p for n, p in timm_model().state_dict().items() if n != "blocks.3.norm2.bias"},
            "missing: blocks.3.mlp_norm.bias",
        ),
    ],
)
def test_a_timm_model_that_does_not_map_is_refused_in_words(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.from_timm(make())


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="got a Linear"):
        models.from_timm(torch.nn.Linear(2, 2))


WIDTH, HEADS, MLP, PATCH, CLASSES = 32, 2, 128, 4, 6
BLOCK = "Transformer/encoderblock_0"


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


def flax_forward(p: dict[str, Array], image: Array) -> Array:
    """big_vision's ViT by its formula, in numpy and float64; images are [batch, height, width, channels]."""
    p = {name: array.astype(np.float64) for name, array in p.items()}

    def norm(x: Array, name: str) -> Array:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p[f"{name}/scale"]
        return x + p.get(f"{name}/bias", 0.0)

    batch, height, width, _ = image.shape
    rows, columns = height // PATCH, width // PATCH
    patches = image.reshape(batch, rows, PATCH, columns, PATCH, 3)
    x = np.einsum("nhpwqc,pqcd->nhwd", patches, p["embedding/kernel"]) + p["embedding/bias"]
    x = x.reshape(batch, rows * columns, WIDTH) + p["pos_embedding"]
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
    x = x + np.einsum("nihe,hed->nid", heads, p[f"{attention}/out/kernel"]) + p[f"{attention}/out/bias"]

    y = norm(x, f"{BLOCK}/LayerNorm_1")
    y = y @ p[f"{BLOCK}/MlpBlock_0/Dense_0/kernel"] + p[f"{BLOCK}/MlpBlock_0/Dense_0/bias"]
    y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    x = x + y @ p[f"{BLOCK}/MlpBlock_0/Dense_1/kernel"] + p[f"{BLOCK}/MlpBlock_0/Dense_1/bias"]

    x = norm(x, "Transformer/encoder_norm")
    x = x[:, 0] if "cls" in p else x.mean(1)
    if "pre_logits/kernel" in p:
        x = np.tanh(x @ p["pre_logits/kernel"] + p["pre_logits/bias"])
    return x @ p["head/kernel"] + p["head/bias"] if "head/kernel" in p else x


def saved(folder: Path, arrays: dict[str, Array], prefix: str = "params/") -> Path:
    path = folder / "checkpoint.npz"
    np.savez(path, **{f"{prefix}{name}": array for name, array in arrays.items()})
    return path


def assert_same(model: ViT, arrays: dict[str, Array], size: tuple[int, int] = (12, 12)) -> None:
    x = images(size=size)
    want = flax_forward(arrays, x.permute(0, 2, 3, 1).double().numpy())
    torch.testing.assert_close(model(x).detach().double(), torch.from_numpy(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prefix", ["params/", "opt/target/", ""])
@pytest.mark.parametrize(
    "settings",
    [{}, {"pool": "tok", "rep_size": WIDTH}, {"pool": "tok", "rep_size": 10, "qk_norm": True}, {"qk_norm": True}],
)
def test_a_big_vision_checkpoint_computes_what_it_did(tmp_path: Path, settings: dict[str, Any], prefix: str) -> None:
    arrays = checkpoint(**settings)
    path = saved(tmp_path, arrays, prefix)
    model = models.from_big_vision(path)
    config = model.config
    assert (config.variant, config.image_size, config.num_classes, config.gelu) == ("mu/4", 12, CLASSES, "tanh")
    assert config.pool == settings.get("pool", "gap")
    assert config.rep_size == {None: False, WIDTH: True, 10: 10}[settings.get("rep_size")]
    assert_same(model, arrays)
    assert models.from_big_vision(path, phi="relu/L").config.phi == "relu/L"


def test_optimiser_state_beside_the_parameters_is_left_alone(tmp_path: Path) -> None:
    arrays = checkpoint()
    path = tmp_path / "checkpoint.npz"
    np.savez(path, **{f"params/{n}": a for n, a in arrays.items()}, **{f"opt/0/mu/{n}": a for n, a in arrays.items()})
    assert_same(models.from_big_vision(path), arrays)


def test_blocks_stacked_by_a_scan_are_unstacked(tmp_path: Path) -> None:
    arrays = checkpoint()
    stacked = {
        name.replace("encoderblock_0", "encoderblock"): a[None] if "encoderblock" in name else a
        for name, a in arrays.items()
    }
    assert_same(models.from_big_vision(saved(tmp_path, stacked)), arrays)


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
    assert_same(models.from_big_vision(saved(tmp_path, old, "")), arrays)


def test_bfloat16_arrays_are_read(tmp_path: Path) -> None:
    arrays = checkpoint()
    halves = {name: torch.from_numpy(a).bfloat16().view(torch.int16).numpy().view("V2") for name, a in arrays.items()}
    rounded = {name: torch.from_numpy(a).bfloat16().float().numpy() for name, a in arrays.items()}
    assert_same(models.from_big_vision(saved(tmp_path, halves)), rounded)


def test_fixed_positions_rectangles_and_a_missing_head(tmp_path: Path) -> None:
    arrays = checkpoint(side=4)
    assert_same(models.from_big_vision(saved(tmp_path, arrays), image_size=(8, 32)), arrays, (8, 32))
    del arrays["pos_embedding"], arrays["head/kernel"], arrays["head/bias"]
    model = models.from_big_vision(saved(tmp_path, arrays), image_size=12)
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
        (changed(embedding__kernel=np.zeros((4, 4, 3, 40))), r"\(40, 1, 128, 2\), which is none of our sizes"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_words(
    tmp_path: Path, arrays: dict[str, Array], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        models.from_big_vision(saved(tmp_path, arrays))


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
    np.savez(tmp_path / "bad.npz", **{"embedding/kernel": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match="not a checkpoint"):
        models.from_big_vision(tmp_path / "bad.npz")
