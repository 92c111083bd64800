"""Export to ONNX: onnxruntime computes what the model computes."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from precision import assert_precise, doubled
from torch import nn

import nomax
from nomax import _compat
from nomax.conversion.calibrate import inner_attentions
from nomax.conversion.export import decompositions, export_onnx
from nomax.models import ReLUFormer, ViT
from nomax.nn import Attention

TORCHS_OWN = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # as it copies programs


class Calls(nn.Module):
    """One attention after the other, as one program: exporting takes longer than running."""

    def __init__(self, *phis, **settings):
        super().__init__()
        self.phis, self.settings = phis, settings

    def forward(self, query, key, value, attn_mask=None):
        return tuple(nomax.attention(query, key, value, attn_mask, phi=phi, **self.settings) for phi in self.phis)


class WithRows(nn.Module):
    def forward(self, query, key, value):
        out, rows = nomax.attention(query, key, value, phi="relu/L", return_rows=True)
        return out, rows.sum, rows.entropy


class Encode(nn.Module):
    def __init__(self, translator):
        super().__init__()
        self.translator = translator

    def forward(self, source):
        return self.translator.encode(source).states


def tensors(heads=4, key_heads=4, length=17):
    torch.manual_seed(0)
    return (torch.randn(2, heads, length, 8), *torch.randn(2, 2, key_heads, length, 8).unbind(0))


def in_onnxruntime(path, *inputs):
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path)
    given = {node.name: x.numpy() for node, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(np.array(x)) for x in session.run(None, given)]


def check(model, inputs, path, others=None, **options):
    """Export with some inputs, run with the same or others, and compare with float64 by twice PyTorch's own error."""
    file = export_onnx(model, inputs, path / "model.onnx", **options)
    domains = {node.domain for node in onnx.load(file).graph.node}
    assert domains == {""}  # standard operators only
    inputs = inputs if others is None else others
    outs = in_onnxruntime(file, *inputs)
    with torch.no_grad():
        plain = model(*inputs)
        exact = doubled(model)(*(x.double() if x.is_floating_point() else x for x in inputs))
    plain, exact = ((x,) if isinstance(x, torch.Tensor) else x for x in (plain, exact))
    for out, usual, precise in zip(outs, plain, exact, strict=True):
        assert_precise(out, usual, precise)


PHIS = (
    "relu/L", "relu/L^0.5", "1.5*relu2/L^2", "gelu/L", "softplus/L", "identity/L", "relu6/L", "sigmoid(x-log L)",
    "silu/L", "cube/L^0.5", "relu(x+0.5)/L, L=keys", "relu2(x-0.5*sqrt(2 log L))", "softmax", "sparsemax",
)  # fmt: skip


def test_every_kind_of_phi(tmp_path):
    check(Calls(*PHIS), tensors(), tmp_path)


@pytest.mark.parametrize(
    "mask",
    [torch.arange(17) < torch.tensor([17, 9]).view(2, 1, 1, 1), torch.randn(1, 4, 17, 17).tril()],
    ids=["padding", "bias"],
)
def test_masks(mask, tmp_path):
    check(Calls("relu/L", "gelu/L", "sigmoid(x-log L)"), (*tensors(), mask), tmp_path)


def test_grouped_heads_that_look_back_only(tmp_path):
    check(Calls("relu/L", "identity/L", is_causal=True, enable_gqa=True), tensors(key_heads=2), tmp_path)


def test_the_length_stays_open(tmp_path):
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({2: length},) * 3
    check(
        Calls("relu/L", "relu(x-0.5*sqrt(2 log L))", is_causal=True),
        tensors(),
        tmp_path,
        tensors(length=31),
        dynamic_shapes=shapes,
    )


def test_rows(tmp_path):
    results = in_onnxruntime(export_onnx(WithRows(), tensors(), tmp_path / "rows.onnx"), *tensors())
    torch.testing.assert_close(tuple(results), WithRows()(*tensors()))


def test_a_vit_with_an_open_batch(tmp_path):
    torch.manual_seed(0)
    model = ViT("pico/4", image_size=16, num_classes=5, phi="relu/L", qk_norm=True, head_zero=False)
    images, others = torch.randn(2, 3, 16, 16), torch.randn(3, 3, 16, 16)
    check(model, (images,), tmp_path, (others,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))


def test_reluformers_encoder_with_padding(tmp_path):
    torch.manual_seed(0)
    translator = ReLUFormer(vocabulary=50, dim=16, heads=2, encoder_layers=2, decoder_layers=1).eval()
    source = torch.randint(4, 50, (2, 9))
    source[1, 5:] = translator.config.padding
    check(Encode(translator), (source,), tmp_path)


def test_a_model_stays_in_training_and_is_exported_as_in_evaluation(tmp_path):
    layer = Attention(16, 2, dropout=0.5).train()
    x = torch.randn(1, 6, 16)
    (out,) = in_onnxruntime(export_onnx(layer, (x,), tmp_path / "layer.onnx"), x)
    assert layer.training
    torch.testing.assert_close(out, layer.eval()(x).detach())


def test_what_cannot_be_exported_says_so(tmp_path):
    with pytest.raises(ValueError, match="opset_version=12 must be at least 18"):
        export_onnx(Calls("relu/L"), tensors(), tmp_path / "old.onnx", opset_version=12)

    class Packed(nn.Module):
        def forward(self, x, bounds):
            return nomax.varlen_attention(x, x, x, bounds, bounds)

    with pytest.raises(Exception, match="pad the sequences"):
        export_onnx(Packed(), (torch.randn(7, 2, 8), torch.tensor([0, 3, 7])), tmp_path / "packed.onnx")
    assert not list(tmp_path.iterdir())


@TORCHS_OWN
def test_decomposed_programs_hold_nothing_of_nomax():
    program = torch.export.export(Calls("relu/L"), tensors())
    names = {str(node.target) for node in program.graph.nodes}
    assert any("nomax" in name for name in names)
    plain = program.run_decompositions(decompositions())
    assert not any("nomax" in str(node.target) for node in plain.graph.nodes)
    torch.testing.assert_close(plain.module()(*tensors()), Calls("relu/L")(*tensors()))


class Encoder(nn.Module):
    """A converted BERT whose heads have gains and shifts, as one tensor to another."""

    def __init__(self):
        super().__init__()
        transformers = _compat.transformers()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = transformers.BertModel(transformers.BertConfig(vocab_size=50, initializer_range=0.2, **sizes))
        nomax.convert(self.model.eval(), "relu/L")
        for layer in inner_attentions(self.model).values():
            layer.add_gain_and_shift(1 + torch.rand(4), torch.rand(4))

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return Encoder().eval().requires_grad_(False)


TEXT = (torch.arange(18).view(2, 9), (torch.arange(9) < torch.tensor([[9], [5]])).long())


def test_a_converted_bert_in_onnxruntime(encoder, tmp_path):
    check(encoder, TEXT, tmp_path)


@TORCHS_OWN
def test_a_converted_bert_through_torch_export(encoder, tmp_path):
    program = torch.export.export(encoder, TEXT)
    assert sum("nomax.attend" in str(node.target) for node in program.graph.nodes) == 2
    torch.export.save(program, tmp_path / "bert.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "bert.pt2").module()(*TEXT), encoder(*TEXT))


@TORCHS_OWN
@pytest.mark.slow
def test_a_converted_bert_through_aotinductor(encoder, tmp_path):
    with torch.no_grad():
        program = torch.export.export(encoder, TEXT)
        file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "bert.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(file)(*TEXT), encoder(*TEXT))


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_linear_layers_of_a_converted_bert_quantise_to_int8(encoder):
    small = torch.ao.quantization.quantize_dynamic(encoder, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is nn.Linear for module in small.model.encoder.modules())
    out, exact = small(*TEXT)[TEXT[1].bool()], encoder(*TEXT)[TEXT[1].bool()]
    assert 0 < (out - exact).norm() < 0.05 * exact.norm()
