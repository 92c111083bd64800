"""convert and revert: the report, the choice of layers, and what is refused without leaving a trace."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import VIT

import nomax
from nomax import models
from nomax.conversion import ConversionError
from nomax.nn import Attention, InnerAttention


def made(**settings: Any) -> Any:
    return nomax.timm_model("vit_tiny_patch16_224", **{**VIT, **settings}).eval()


def phis(model: nn.Module) -> list[str | None]:
    return [
        str(block.attn.inner_attention.phi) if hasattr(block.attn, "inner_attention") else None
        for block in model.blocks
    ]


def test_the_report_is_a_table_and_has_attributes() -> None:
    model = made(depth=3)
    report = nomax.convert(model, "relu/L", layers=[0, -1])
    assert [layer.name for layer in report.converted] == ["blocks.0.attn", "blocks.2.attn"]
    (left,) = report.left
    assert (left.name, left.module, left.kind, left.num_heads) == ("blocks.1.attn", "Attention", "sdpa", 4)
    assert (left.before, left.after, left.reason) == ("softmax", "softmax", "not in layers=…")
    text = str(report)
    assert text.startswith("VisionTransformer: 2 of 3 attention layers converted")
    for word in ("blocks.1.attn", "φ before", "relu/L", "not in layers=…"):
        assert word in text


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (1, [False, True, False]),
        ([0, 2], [True, False, True]),
        ("blocks.[01].*", [True, True, False]),
        (["blocks.0.attn", -1], [True, False, True]),
    ],
)
def test_layers_are_chosen_by_index_or_pattern(layers: Any, expected: list[bool]) -> None:
    model = made(depth=3)
    nomax.convert(model, "relu/L", layers=layers)
    assert [phi is not None for phi in phis(model)] == expected


def test_a_choice_that_is_none_is_an_error() -> None:
    model = made()
    with pytest.raises(ValueError, match=r"matches 'encoder\.\*'\. There are blocks\.0\.attn, blocks\.1\.attn"):
        nomax.convert(model, layers="encoder.*")
    with pytest.raises(ValueError, match="there is no layer 7; the model has 2"):
        nomax.convert(model, layers=7)
    for empty in ([], ()):
        with pytest.raises(ValueError, match="layers is empty"):
            nomax.convert(model, layers=empty)
    for wrong in (True, [None]):
        with pytest.raises(TypeError, match="must be indices or patterns of names"):
            nomax.convert(model, layers=wrong)  # type: ignore[arg-type]
    assert phis(model) == [None, None]


def test_layers_may_have_different_phi_and_are_converted_again() -> None:
    model = made()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        original = model(x)
    nomax.convert(model, "relu/L")
    model.blocks[1].attn.inner_attention.learn(torch.ones(4), torch.zeros(4))
    report = nomax.convert(model, "gelu/L", layers=[1])
    assert phis(model) == ["relu/L", "gelu/L"]
    assert [layer.before for layer in (*report.converted, *report.left)] == ["relu/L", "relu/L"]
    assert model.blocks[1].attn.inner_attention.gain is not None
    with pytest.raises(ConversionError, match="has learned a shift"):
        nomax.convert(model, "softmax")
    assert phis(model) == ["relu/L", "gelu/L"]
    nomax.revert(model)
    with torch.no_grad():
        assert torch.equal(model(x), original)
    with pytest.raises(ConversionError, match="was not converted"):
        nomax.revert(model)


def test_qk_norm_is_added_in_the_dtype_of_the_model() -> None:
    model = made().to(torch.bfloat16)
    keys = set(model.state_dict())
    nomax.convert(model, "relu/L", qk_norm=True)
    more = set(model.state_dict()) - keys
    assert len(more) == 4
    assert {model.state_dict()[name].dtype for name in more} == {torch.bfloat16}
    with pytest.raises(ConversionError, match="qk_norm cannot be changed"):
        nomax.convert(model, qk_norm=False)


def test_the_probe_leaves_no_trace() -> None:
    model = made(drop_rate=0.5).train()
    model.blocks[0].eval()
    state = torch.get_rng_state()
    nomax.convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.blocks[0].training
    assert model.blocks[1].attn.inner_attention.training
    assert all(x.grad is None for x in model.parameters())


class Branch(nn.Module):
    """Softmax goes on unless the layer is asked twice: what a probe is for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x * self.weight
        if self.calls > 1:
            return (x @ x.mT).softmax(-1) @ x
        return F.scaled_dot_product_attention(x, x, x)


def test_fewer_calls_of_phi_than_of_attention_are_an_error() -> None:
    model = Branch()
    with pytest.raises(ConversionError, match=r"attended 1 times, but called φ 0 times"):
        nomax.convert(model, inputs=torch.randn(1, 2, 3, 4))
    assert type(model) is Branch
    assert not hasattr(model, "inner_attention")


class Own(nn.Module):
    """A softmax by a module, dropped out and rearranged before it is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax, self.drop, self.linear = nn.Softmax(-1), nn.Dropout(0.1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        weights = self.drop(self.softmax(x @ x.mT)).float().reshape(x.shape[0], -1, x.shape[1])
        return torch.einsum("bij,bjd->bid", weights, x)


class Router(nn.Module):
    """A softmax that is not attention: it weighs experts, and one call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.linear(x).softmax(-1).topk(2)
        y = sum(shares[..., i : i + 1] * x * chosen[..., i : i + 1] for i in range(2))
        return self.linear(F.scaled_dot_product_attention(y, y, y))


def test_a_softmax_is_attention_if_its_result_is_multiplied_with_a_matrix() -> None:
    with pytest.raises(ConversionError, match=r"\(Own\): it computes a softmax itself"):
        nomax.convert(Own(), inputs=torch.randn(2, 3, 4))
    report = nomax.convert(Router(), inputs=torch.randn(2, 1, 3, 4))
    assert [layer.kind for layer in report.converted] == ["sdpa"]


def test_models_that_cannot_be_proved_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got a str"):
        nomax.convert("bert")  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match="convert the model first, then compile it"):
        nomax.convert(torch.compile(made()))
    with pytest.raises(ConversionError, match="nothing was converted"):
        nomax.convert(nn.Sequential(nn.Linear(4, 4)), inputs=torch.randn(1, 4))
    with pytest.raises(ConversionError, match=r"failed\. Pass inputs=.*RuntimeError"):
        nomax.convert(made(), inputs=torch.randn(1, 5, 32, 32))
    with pytest.raises(TypeError, match="inputs must be a tensor, a tuple or a dictionary"):
        nomax.convert(made(), inputs=3)
    with pytest.raises(ValueError, match="cannot be read"):
        nomax.convert(made(), "rellu/L")


def test_weights_on_several_kinds_of_devices_are_refused() -> None:
    model = made()
    model.head.to("meta")
    with pytest.raises(ConversionError, match=r"weights are on cpu and meta.*move them with model\.to"):
        nomax.convert(model)
    assert phis(model) == [None, None]


def test_our_own_models_change_their_phi_and_their_config() -> None:
    vit = models.ViT("pico/4", image_size=8, num_classes=3, phi="softmax").eval()
    x = torch.randn(1, 3, 8, 8)
    report = nomax.convert(vit, "gelu/L")
    assert {layer.kind for layer in report.converted} == {"nomax"}
    assert vit.config.phi == "gelu/L"
    other = models.ViT("pico/4", image_size=8, num_classes=3, phi="gelu/L").eval()
    other.load_state_dict(vit.state_dict())
    assert torch.equal(vit(x), other(x))
    with pytest.raises(ConversionError, match="one φ in all its layers"):
        nomax.convert(vit, "relu/L", layers=[0])
    nomax.revert(vit)
    assert vit.config.phi == "softmax"
    assert {str(layer.phi) for layer in vit.modules() if isinstance(layer, Attention)} == {"softmax"}


@pytest.mark.parametrize("encoder_layers", [0, 1])
def test_our_own_text_models(encoder_layers: int) -> None:
    settings = {
        "vocabulary": 20,
        "dim": 8,
        "heads": 2,
        "encoder_layers": encoder_layers,
        "decoder_layers": 1,
        "slots": 8,
    }
    model = models.ReLUFormer(**settings, gamma=2.0, learned_gain=None).eval()
    nomax.convert(model, "gelu/L")
    other = models.ReLUFormer(**settings, gamma=2.0, learned_gain=None, phi="gelu/L").eval()
    other.load_state_dict(model.state_dict())
    text = torch.arange(3, 9).view(1, 6)
    arguments = (text, text) if encoder_layers else (text,)
    assert torch.equal(model(*arguments), other(*arguments))
    learned = models.ReLUFormer(**settings)
    with pytest.raises(ConversionError, match="it learns gain of φ, which softmax does not have"):
        nomax.convert(learned, "softmax")


def test_importing_nomax_imports_no_other_library() -> None:
    code = (
        "import sys, nomax; nomax.convert; "
        "print([x for x in ('timm', 'transformers', 'torchvision') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_hooks_on_inner_attention_see_every_layer() -> None:
    model = made()
    nomax.convert(model)
    seen: list[torch.Size] = []
    for module in model.modules():
        if isinstance(module, InnerAttention):
            module.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model(torch.randn(2, 3, 32, 32))
    assert seen == [torch.Size([2, 4, 17, 8])] * 2
