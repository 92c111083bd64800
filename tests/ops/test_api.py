"""The public door: signatures, errors for people, explain, the choice of a backend, and citizenship in PyTorch."""

import inspect
import json
import math
import shutil
import subprocess
import sys
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F
from precision import assert_rounded
from torch.nn.attention.bias import causal_lower_right

import nomax
from nomax import Phi
from nomax.ops import backends, cpu
from nomax.ops.build import BuildError
from nomax.ops.problem import Problem

no_compiler = not any(map(shutil.which, ("c++", "g++", "clang++")))


def tensors(*shape, dtype=torch.float32):
    return tuple(torch.randn(shape or (2, 4, 5, 8), dtype=dtype) for _ in range(3))


# Signatures.


def test_the_public_names():
    operation = ["attention", "explain", "load_operators", "varlen_attention", "visible_keys"]
    conversion = ["convert", "revert", "from_pretrained", "save_pretrained", "timm_model"]
    recovery = ["calibrate", "distil", "export_onnx"]
    assert sorted(nomax.__all__) == sorted(["Phi", "Rows", "__version__", *operation, *conversion, *recovery])
    assert all(hasattr(nomax, name) for name in nomax.__all__)


def test_attention_has_the_arguments_of_sdpa_in_its_order_and_three_more():
    sdpa = " ".join(F.scaled_dot_product_attention.__doc__.split()).partition("(")[2].partition(")")[0]
    ours = ", *, phi='relu/L', backend=None, return_rows=False"
    assert untyped(nomax.attention) == untyped(nomax.explain) == f"({sdpa}{ours})"


def test_the_other_signatures():
    assert untyped(nomax.varlen_attention) == (
        "(query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_p=0.0, is_causal=False, scale=None, "
        "enable_gqa=False, *, phi='relu/L', backend=None, return_rows=False)"
    )
    assert untyped(nomax.visible_keys) == "(query, key, attn_mask=None, is_causal=False, enable_gqa=False)"
    assert untyped(Phi) == "(activation, alpha=0.0, gain=1.0, shift=0.0, length='visible', threshold=0.0)"
    assert nomax.Rows._fields == ("sum", "entropy")
    assert untyped(nomax.convert) == "(model, phi='relu/L', qk_norm=None, layers=None, *, inputs=None)"
    assert untyped(nomax.revert) == "(model)"
    assert untyped(nomax.from_pretrained) == "(name, **options)"
    assert untyped(nomax.timm_model) == "(name, phi=None, **settings)"


def untyped(function):
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_import_is_light():
    heavy = ["timm", "transformers", "torchvision", "triton", "matplotlib", "rich", "tyro", "torch._dynamo"]
    program = "import sys, json, nomax; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = json.loads(result.stdout)
    assert "nomax" in loaded
    assert [name for name in heavy if name in loaded] == []


# Errors.


q, k, v = tensors()

BAD_CALLS = {
    "rank": ((q[0, 0, 0], k, v), {}, ValueError, r"query must have at least 2 dimensions.*\[8\]"),
    "not a tensor": ((q, k.numpy(), v), {}, TypeError, "key must be a torch.Tensor, got a ndarray"),
    "nothing": ((q, k, None), {}, TypeError, "value must be a torch.Tensor, got a NoneType"),
    "head dimension": ((q, k[..., :7], v), {}, ValueError, "same head dimension.*8 and 7"),
    "positions": ((q, k, v[:, :, :3]), {}, ValueError, "same number of positions, got 5 and 3"),
    "dtype": ((q, k.double(), v), {}, ValueError, r"one dtype.*torch\.float64.*autocast"),
    "integers": (
        (q.int(), k.int(), v.int()),
        {},
        ValueError,
        r"query must have a floating-point dtype.*int32.*\.float",
    ),
    "complex": ((q, k, v.cfloat()), {}, ValueError, "value must have a floating-point dtype"),
    "device": ((q, k, v.to("meta")), {}, ValueError, r"value on meta.*\.to\('cpu'\)"),
    "batch": ((q, k.repeat(2, 1, 1, 1)[:3], v), {}, ValueError, r"leading dimensions.*\[3, 4, 5, 8\]"),
    "heads": ((q, k[:, :3], v[:, :3]), {}, ValueError, "query has 4 heads, key 3 and value 3.$"),
    "heads that divide": ((q, k[:, :2], v[:, :2]), {}, ValueError, "query has 4 heads.*enable_gqa=True"),
    "gqa that does not divide": ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}, ValueError, "multiple.*4 heads, key 3"),
    "gqa with two counts": ((q, k[:, :2], v), {"enable_gqa": True}, ValueError, "same number of heads.*value 4"),
    "mask shape": ((q, k, v, torch.ones(2, 3, 5, 5) > 0), {}, ValueError, r"\[2, 3, 5, 5\].*\[2, 4, 5, 5\]"),
    "mask rank": ((q[0], k[0], v[0], torch.ones(1, 4, 5, 5) > 0), {}, ValueError, r"\[1, 4, 5, 5\].*\[4, 5, 5\]"),
    "mask dtype": ((q, k, v, torch.ones(5, 5, dtype=torch.int64)), {}, ValueError, r"attn_mask.*int64.*\.bool\(\)"),
    "mask device": ((q, k, v, torch.ones(5, 5, device="meta")), {}, ValueError, "attn_mask is on meta"),
    "mask type": ((q, k, v, [[True]]), {}, TypeError, "attn_mask must be a torch.Tensor or None, got a list"),
    "mask and causal": ((q, k, v, torch.ones(5, 5) > 0), {"is_causal": True}, ValueError, "exclude each other"),
    "bias and causal": ((q, k, v, causal_lower_right(5, 5)), {"is_causal": True}, ValueError, "exclude each other"),
    "bias size": ((q, k, v, causal_lower_right(5, 6)), {}, ValueError, "lower_right.*5 queries and 6 keys.*5 keys"),
    "dropout above": ((q, k, v), {"dropout_p": 1.5}, ValueError, r"dropout_p=1\.5.*from 0 to 1"),
    "dropout below": ((q, k, v), {"dropout_p": -0.1}, ValueError, r"dropout_p=-0\.1"),
    "dropout nan": ((q, k, v), {"dropout_p": math.nan}, ValueError, "dropout_p=nan"),
    "scale nan": ((q, k, v), {"scale": math.nan}, ValueError, "scale=nan.*1/sqrt"),
    "scale inf": ((q, k, v), {"scale": -math.inf}, ValueError, "scale=-inf"),
    "phi": ((q, k, v), {"phi": "rellu/L"}, ValueError, "did you mean 'relu/L'"),
    "phi type": ((q, k, v), {"phi": torch.relu}, TypeError, "phi=.*must be a string"),
    "backend": ((q, k, v), {"backend": "CPU"}, ValueError, "backend='CPU' is unknown; did you mean cpu"),
    "backend of softmax": ((q, k, v), {"phi": "softmax", "backend": "cpu"}, ValueError, "does not apply.*softmax"),
    "backend that cannot": (
        (q.double(), k.double(), v.double()),
        {"backend": "cpu"},
        ValueError,
        r"(?s)backend='cpu' cannot serve.*query \[2, 4, 5, 8\].*float64.*  - .*backend=None",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("function", [nomax.attention, nomax.explain])
def test_bad_arguments_are_named_with_what_to_do(function, name):
    arguments, settings, kind, words = BAD_CALLS[name]
    with pytest.raises(kind, match=words):
        function(*arguments, **settings)


packed = tensors(5, 4, 8)
offsets = torch.tensor([0, 2, 5])

BAD_PACKED_CALLS = {
    "rank": ((*tensors(), offsets, offsets), "query must have 3 dimensions"),
    "list": ((*packed, [0, 2, 5], offsets), "cu_seqlens_q must be a one-dimensional int32 or int64 tensor.*list"),
    "floats": ((*packed, offsets, offsets.float()), "cu_seqlens_k.*torch.float32"),
    "two dimensions": ((*packed, offsets[None], offsets), r"cu_seqlens_q.*\[1, 3\]"),
    "start": ((*packed, torch.tensor([1, 2, 5]), offsets), r"cu_seqlens_q=\[1, 2, 5\] must start at 0"),
    "order": ((*packed, offsets, torch.tensor([0, 6, 5])), "cu_seqlens_k.*never decrease"),
    "end": ((*packed, offsets, torch.tensor([0, 2, 4])), "cu_seqlens_k.*end at 5, the number of positions in key"),
    "empty": ((*packed, torch.tensor([], dtype=torch.int64), offsets), r"cu_seqlens_q=\[\]"),
    "many": ((*packed, torch.arange(30), offsets), r"\[0, 1, 2, 3, 4, 5, \.\.\., 27, 28, 29\]"),
    "number": ((*packed, torch.tensor([0, 5]), offsets), "same number of sequences, got 1 and 2"),
    "positions": ((packed[0], packed[1], packed[2][:4], offsets, offsets), "same number of positions, got 5 and 4"),
    "heads": ((packed[0], packed[1][:, :2], packed[2][:, :2], offsets, offsets), "enable_gqa=True"),
}


@pytest.mark.parametrize("name", BAD_PACKED_CALLS)
def test_bad_packed_arguments_are_named(name):
    arguments, words = BAD_PACKED_CALLS[name]
    with pytest.raises(ValueError, match=words):
        nomax.varlen_attention(*arguments)


# The choice of a backend.


def test_inputs_that_the_kernels_do_not_take_run_on_the_reference():
    doubles = tensors(dtype=torch.float64)
    torch.testing.assert_close(nomax.attention(*doubles), oracle.attention(*doubles)[0])
    explanation = nomax.explain(*doubles)
    assert explanation.backend == "reference"
    query, key, value = doubles
    assert explanation.reasons["cpu"] == cpu.unsupported(Problem(query=query, key=key, value=value)) != []


@pytest.fixture
def broken_kernels(monkeypatch):
    def load():
        raise BuildError("no compiler here, install one")

    monkeypatch.setattr(cpu, "load", load)
    monkeypatch.setattr(backends, "_build_error", None)


def test_kernels_that_do_not_compile_warn_once_and_leave_the_reference(broken_kernels, no_short_way):
    assert nomax.explain(q, k, v).reasons["cpu"] == ["no compiler here, install one"]
    with pytest.warns(RuntimeWarning, match="no compiler here") as caught:
        out = nomax.attention(q, k, v)
    assert caught[0].filename == __file__
    assert_rounded(out, oracle.attention(q, k, v)[0], 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(nomax.attention(q, k, v), out)
        nomax.varlen_attention(*packed, offsets, offsets)
    explanation = nomax.explain(q, k, v)
    assert explanation.backend == "reference"
    assert explanation.reasons["cpu"] == ["no compiler here, install one"]


def test_insisting_on_kernels_that_do_not_compile_raises(broken_kernels, no_short_way):
    with pytest.raises(BuildError, match="no compiler here"):
        nomax.attention(q, k, v, backend="cpu")
    with pytest.raises(BuildError, match="no compiler here"):
        nomax.explain(q, k, v, backend="cpu")


# Explain.


def test_explain_says_what_will_run():
    explanation = nomax.explain(q, k, v, is_causal=True, phi="2*sigmoid(x-log L)/L^0.5", backend="reference")
    text = str(explanation)
    assert explanation.backend == "reference"
    assert explanation.reasons == {name: ["backend='reference' was asked for"] for name in ("cpu", "triton")}
    assert "the reference backend" in text
    assert "out_i = 2 · L^-0.5 · Σ_j sigmoid(0.353553·q_i·k_j - log L)·v_j" in text
    assert "j runs over the 1 to 5 keys that query i may see, and L is their number" in text
    assert "query [2, 4, 5, 8]" in text
    assert "2×4×5×5 matrix of weights, 800 B" in text


def test_explain_writes_a_threshold_and_counts_its_length():
    text = str(nomax.explain(q, k, v, is_causal=True, phi="relu2(x+1-0.5*sqrt(2 log L))"))
    assert "relu2(0.353553·q_i·k_j +1 -0.5·√(2 log L))·v_j" in text
    assert "and L is their number" in text


def test_explain_counts_as_attention_does():
    mask = torch.zeros(2, 1, 1, 5)
    mask[0, ..., 3:] = -math.inf
    text = str(nomax.explain(q, k, v, mask, phi="relu(x+0.5)/L", backend="reference"))
    assert "relu(0.353553·q_i·k_j + mask_ij +0.5)" in text
    assert "the 3 to 5 keys that query i may see, and L is their number" in text
    assert "L = 5, all key positions" in str(nomax.explain(q, k, v, mask, phi="relu/L, L=keys", backend="reference"))
    assert "L = 196, fixed by φ" in str(nomax.explain(q, k, v, mask, phi="relu/L, L=196", backend="reference"))
    assert "L " not in str(nomax.explain(q, k, v, mask, phi="relu", backend="reference"))


@pytest.mark.skipif(no_compiler, reason="no C++ compiler")
def test_explain_of_the_kernels_names_their_instruction_set():
    explanation = nomax.explain(*tensors(1, 2, 4096, 64))
    assert explanation.backend == "cpu"
    assert list(explanation.reasons) == ["reference", "triton"]
    assert f"the cpu backend, {cpu.instruction_set()} kernels" in str(explanation)
    assert "instead of the 1×2×4096×4096 matrix of weights, 134 MB" in str(explanation)


def test_one_warning_where_no_fused_kernel_serves_a_device(monkeypatch):
    monkeypatch.setattr(backends, "_warned_of_matrix", False)
    large = [torch.empty(2, 4, 2048, 8, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    small = tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nomax.attention(*large)  # no memory at all
        # What a GPU's tensors are, as far as the choice of a backend can see.
        monkeypatch.setattr(torch.Tensor, "is_meta", False)
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
        nomax.attention(*large, backend="reference")
        nomax.attention(*small, phi="gelu")
        nomax.attention(*large, phi="softmax")
    with pytest.warns(
        RuntimeWarning,
        match=r"no fused kernel for this call \(query is on meta, .*\).*2×4×2048×2048 .* 134,217,728 bytes",
    ) as caught:
        nomax.attention(*large)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nomax.attention(*large)


def test_explain_of_softmax_names_pytorch():
    explanation = nomax.explain(q, k, v, phi="softmax")
    assert explanation.backend == "torch"
    assert "scaled_dot_product_attention" in str(explanation)


# Citizenship in PyTorch (the kernels' own part of it is tested beside them).


SETTINGS = [{}, {"is_causal": True}, {"phi": Phi("sigmoid", shift="-log L")}, {"return_rows": True}, {"phi": "softmax"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_graph_serves_every_size(settings):
    def function(query, key, value):
        return nomax.attention(query, key, value, **settings, backend=backend)

    backend = None if settings.get("phi") == "softmax" else "reference"
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*tensors())
    with torch._dynamo.config.patch(error_on_recompile=True):
        Phi.parse("relu/L^0.123")
        for length in (7, 11):
            inputs = tensors(3, 4, length, 8)
            torch.testing.assert_close(compiled(*inputs), function(*inputs))


def test_compiled_with_masks_and_dropout():
    torch._dynamo.reset()
    mask = torch.rand(2, 1, 1, 5) > 0.4
    compiled = torch.compile(nomax.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = nomax.attention(q, k, v, mask, backend="reference")
    torch.testing.assert_close(compiled(q, k, v, mask, backend="reference"), expected)
    bias = causal_lower_right(5, 5)
    expected = nomax.attention(q, k, v, bias, backend="reference")
    torch.testing.assert_close(compiled(q, k, v, bias, backend="reference"), expected)
    torch.manual_seed(1)
    dropped = nomax.attention(q, k, v, dropout_p=0.5, backend="reference")
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(q, k, v, dropout_p=0.5, backend="reference"), dropped)


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_length_open(strict):
    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return nomax.attention(query, key, value, phi="relu/L", backend="reference")

    length = torch.export.Dim("length")
    shapes = ({2: length},) * 3
    program = torch.export.export(Model(), tensors(), dynamic_shapes=shapes, strict=strict)
    longer = tensors(2, 4, 9, 8)
    torch.testing.assert_close(program.module()(*longer), Model()(*longer))


def test_vmap_over_a_batch_is_the_batch():
    mask = torch.rand(2, 1, 1, 5) > 0.4
    function = torch.func.vmap(lambda *inputs: nomax.attention(*inputs, backend="reference"))
    torch.testing.assert_close(function(q, k, v, mask), nomax.attention(q, k, v, mask, backend="reference"))


def test_per_sample_gradients():
    def loss(query, key, value):
        return nomax.attention(query, key, value, phi="gelu/L", backend="reference").square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    query = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(query, k, v), query)
    torch.testing.assert_close(gradients, expected)
