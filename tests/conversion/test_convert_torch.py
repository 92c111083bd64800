"""Layers of torch and models that call F.scaled_dot_product_attention, against PyTorch itself and a plain formula."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_attention import relu_over_length
from torch import Tensor, nn

import nomax
from nomax import _compat
from nomax.conversion import ConversionError
from nomax.nn import InnerAttention

DIM, HEADS, B, L, S = 12, 3, 2, 5, 7
CAUSAL = torch.ones(L, L).triu(1).bool()  # True hides, as in nn.MultiheadAttention
PADDING = torch.arange(L) >= torch.tensor([[L], [3]])
BIAS = torch.randn(B * HEADS, L, L, generator=torch.Generator().manual_seed(3))
MASKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(B, L).masked_fill(PADDING, -torch.inf)},
    "causal": {"attn_mask": CAUSAL},
    "causal, as a hint": {"attn_mask": CAUSAL, "is_causal": True},
    "causal and padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING, "is_causal": True},
    "a bias per head": {"attn_mask": BIAS},
    "bias and padding": {
        "attn_mask": BIAS,
        "key_padding_mask": torch.zeros(B, L).masked_fill(PADDING, -torch.inf),
    },
}


def layer(**settings: Any) -> nn.MultiheadAttention:
    made = nn.MultiheadAttention(DIM, HEADS, **{"batch_first": True, **settings}).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4)
    return made


def formula(module: nn.MultiheadAttention, x: Tensor, masks: dict[str, Any]) -> Tensor:
    """relu/L attention of x to itself, from the weights of the layer."""
    q, k, v = (
        y.reshape(B, L, HEADS, -1).transpose(1, 2)
        for y in (x @ module.in_proj_weight.T + module.in_proj_bias).chunk(3, -1)
    )
    mask = torch.zeros(B, HEADS, L, L)
    for name, given in masks.items():
        if name == "is_causal":
            continue
        added = torch.zeros(given.shape).masked_fill(given, -torch.inf) if given.dtype == torch.bool else given
        mask = mask + (added[:, None, None] if name == "key_padding_mask" else added.reshape(-1, HEADS, L, L) if added.dim() == 3 else added)  # fmt: skip # noqa: E501
    heads = relu_over_length(q, k, v, mask)
    return heads.transpose(1, 2).flatten(2) @ module.out_proj.weight.T + module.out_proj.bias


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_multihead_attention_under_every_mask(masks: dict[str, Any]) -> None:
    module = layer()
    x = torch.randn(B, L, DIM)
    for settings in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        with torch.no_grad():
            out, weights = module(x, x, x, **masks, **settings)
            converted = copy.deepcopy(module)
            nomax.convert(converted, "softmax")
            ours, our_weights = converted(x, x, x, **masks, **settings)
            torch.testing.assert_close(ours, out)
            assert (weights is None) == (our_weights is None)
            if weights is not None:
                torch.testing.assert_close(our_weights, weights)
            nomax.convert(converted, "relu/L")
            torch.testing.assert_close(converted(x, x, x, **masks, **settings)[0], formula(module, x, masks))


@pytest.mark.parametrize(
    "settings",
    [{"batch_first": False}, {"bias": False}, {"kdim": 8, "vdim": 10}, {"kdim": 8, "vdim": 10, "bias": False}],
)
def test_multihead_attention_of_other_shapes(settings: dict[str, Any]) -> None:
    module = layer(**settings)
    query, key, value = (torch.randn(B, n, dim) for n, dim in ((L, DIM), (S, module.kdim), (S, module.vdim)))
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    with torch.no_grad():
        out = module(query, key, value)[0]
        single = module(*(x[0] if module.batch_first else x[:, 0] for x in (query, key, value)))
        report = nomax.convert(module, "softmax")
        assert [(x.kind, x.num_heads, x.before) for x in report.converted] == [("multihead", HEADS, "softmax")]
        torch.testing.assert_close(module(query, key, value)[0], out)
        ours = module(*(x[0] if module.batch_first else x[:, 0] for x in (query, key, value)))
        for mine, theirs in zip(ours, single, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_multihead_attention_drops_weights_only_in_training() -> None:
    module = layer(dropout=0.5)
    x = torch.randn(B, L, DIM)
    nomax.convert(module)
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.train()
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"add_bias_kv": True}, "add_bias_kv=True"), ({"add_zero_attn": True}, "add_zero_attn=True")],
)
def test_extra_keys_are_refused(settings: dict[str, Any], reason: str) -> None:
    module = layer(**settings)
    with pytest.raises(ConversionError, match=reason):
        nomax.convert(module)
    assert type(module) is nn.MultiheadAttention


def encoder(**settings: Any) -> nn.TransformerEncoder:
    made = nn.TransformerEncoderLayer(DIM, 2, 24, batch_first=True, **settings)
    return nn.TransformerEncoder(made, 2).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_the_fast_path_of_encoders_does_not_go_around_phi(padding: Tensor | None) -> None:
    model = encoder()
    x = torch.randn(B, L, DIM)
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=padding)  # nested tensors and one operator for a layer
        nomax.convert(model, "softmax")
        kept = slice(None) if padding is None else ~padding
        torch.testing.assert_close(model(x, src_key_padding_mask=padding)[kept], fast[kept])

        nomax.convert(model, "relu/L")
        calls = []
        for module in model.modules():
            if isinstance(module, InnerAttention):
                module.register_forward_hook(lambda *call: calls.append(call))
        relu = model(x, src_key_padding_mask=padding)
        assert len(calls) == 2
    with torch.enable_grad():
        slow = model(x.clone().requires_grad_(), src_key_padding_mask=padding)
    torch.testing.assert_close(relu[kept], slow[kept].detach())
    assert not torch.allclose(relu[kept], fast[kept])
    with torch.no_grad():
        nomax.revert(model)
        again = model(x, src_key_padding_mask=padding)
        assert torch.equal(again, fast)


def test_without_hooks_the_fast_path_is_closed_as_well() -> None:
    model = encoder()
    x = torch.randn(B, L, DIM)
    nomax.convert(model, "relu/L")
    with torch.no_grad():
        quick = model(x)
    torch.testing.assert_close(quick, model(x.requires_grad_()).detach())


def test_decoders_and_whole_transformers() -> None:
    torch.manual_seed(1)
    model = nn.Transformer(DIM, 2, 1, 2, 24, batch_first=True).eval()
    source, target = torch.randn(B, S, DIM), torch.randn(B, L, DIM)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    with torch.no_grad():
        out = model(source, target, tgt_mask=causal, tgt_is_causal=True)
        report = nomax.convert(model, "softmax")
        assert len(report.converted) == 1 + 2 * 2
        torch.testing.assert_close(model(source, target, tgt_mask=causal, tgt_is_causal=True), out)
        nomax.convert(model, "relu/L")
        out = model(source, target, tgt_mask=causal)
        changed = torch.cat([target[:, :3], torch.randn(B, L - 3, DIM)], 1)
        assert torch.equal(model(source, changed, tgt_mask=causal)[:, :3], out[:, :3])  # it does not look ahead
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        assert nomax.convert(kind(DIM, 2, 24)).converted


def test_torchvision() -> None:
    models = _compat.torchvision().models
    model = models.VisionTransformer(32, 8, 2, 2, DIM, 24, num_classes=5).eval()
    nn.init.normal_(model.heads.head.weight)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        out = model(x)
        nomax.convert(model, "softmax")
        torch.testing.assert_close(model(x), out)
        report = nomax.convert(model, "relu/L")
        assert [layer.kind for layer in report.converted] == ["multihead"] * 2
        assert not torch.allclose(model(x), out)
    with pytest.raises(ConversionError, match="softmax itself"):
        nomax.convert(models.SwinTransformer([4, 4], 8, [2], [2], [4, 4]), inputs=torch.randn(1, 3, 32, 32))


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Twice(nn.Module):
    """Calls attention twice in its own forward pass, and once in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)
        self.part = Part()

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        y = self.project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        y = y + F.scaled_dot_product_attention(y, y, value=y, is_causal=causal, scale=0.7)
        y = y + torch.nn.functional.scaled_dot_product_attention(query=y, key=y, value=y)
        return self.part(y).transpose(1, 2).flatten(2)


def test_any_model_that_calls_the_operation() -> None:
    model = Twice()
    x = torch.randn(B, L, DIM)
    with pytest.raises(ConversionError, match="Pass inputs="):
        nomax.convert(model)
    before = model(x)
    report = nomax.convert(model, "relu/L", inputs=x)
    assert [(layer.name, layer.kind) for layer in report.converted] == [("", "sdpa"), ("part", "sdpa")]
    y = model.project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    y = y + relu_over_length(y, y, y, is_causal=True, scale=0.7)
    y = y + relu_over_length(y, y, y)
    out = model(x, causal=True)
    torch.testing.assert_close(out, relu_over_length(y, y, y).transpose(1, 2).flatten(2))
    out.sum().backward()
    assert model.project.weight.grad.any()
    assert torch.equal(F.scaled_dot_product_attention(y, y, y), F.scaled_dot_product_attention(y, y, y, None))

    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), model(x))
        nomax.revert(copied)
        assert torch.equal(copied(x), before)
        assert type(copied) is Twice
    assert not torch.equal(model(x), before)  # the copy was reverted alone
    nomax.revert(model)
    assert torch.equal(model(x), before)
    assert type(model) is Twice


@pytest.mark.slow
def test_converted_models_compile_and_export() -> None:
    x = torch.randn(B, L, DIM)
    for model, inputs in ((Twice(), x), (encoder(), None), (layer(), None)):
        nomax.convert(model, "relu/L", inputs=inputs)
        args = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
        with torch.no_grad():
            out = model(*args)
            out = out[0] if isinstance(out, tuple) else out
            for other in (
                torch.compile(model, fullgraph=True, backend="aot_eager"),
                torch.export.export(model, args).module(),
            ):
                again = other(*args)
                torch.testing.assert_close(again[0] if isinstance(again, tuple) else again, out)


def test_nested_tensors_and_masks_that_cannot_be_taken_are_clear_errors() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    nomax.convert(layer, "relu/L", inputs=(torch.randn(1, 3, 8),) * 3)
    strided = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(ValueError, match="jagged layout"):
        layer(strided, strided, strided, need_weights=False)
    x = torch.randn(1, 3, 8)
    with pytest.raises(TypeError, match=r"must be boolean or floating point, got torch\.int64"):
        layer(x, x, x, key_padding_mask=torch.zeros(1, 3, dtype=torch.long))
