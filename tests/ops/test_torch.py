"""A good citizen of torch: opcheck, gradcheck, compile, export, vmap, autocast and the flop counter."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import nomax
from nomax.ops import cpu
from nomax.phi import ACTIVATIONS

cpu.load()
OPERATORS = torch.ops.nomax


def tensors(count=3, shape=(2, 3, 20, 8), dtype=torch.float32, requires_grad=False):
    return [torch.randn(*shape, dtype=dtype, requires_grad=requires_grad) for _ in range(count)]


def arguments(requires_grad=True, rows=False, dropout=0.0, diagonal=None, mask=None):
    seed = torch.tensor(5) if dropout else None
    query, key, value = tensors(requires_grad=requires_grad)
    activation = list(ACTIVATIONS).index("softplus")
    return (query, key, value, mask, None, None, seed, None, None, activation, 0.3, 0.5, 0.1, diagonal, dropout, rows)


VARIANTS = {
    "plain": {},
    "rows": {"rows": True},
    "dropout": {"dropout": 0.25},
    "causal": {"diagonal": 0},
    "boolean mask": {"mask": torch.rand(2, 1, 1, 20) < 0.5},
    "bias": {"mask": torch.randn(1, 3, 20, 20)},
    "bias with gradient": {"mask": torch.randn(2, 1, 1, 20, requires_grad=True)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_the_operation(variant):
    torch.library.opcheck(OPERATORS.attend.default, arguments(**VARIANTS[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_without_gradients(variant):
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments(**VARIANTS[variant])]
    torch.library.opcheck(OPERATORS.attend_forward.default, tuple(plain))


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_the_backward(variant):
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments(**VARIANTS[variant])]
    wanted = plain[3] is not None and plain[3].is_floating_point()
    statistics = torch.randn(2, 2, 3, 20) if plain[-1] else None
    torch.library.opcheck(
        OPERATORS.attend_backward.default, (torch.randn(2, 3, 20, 8), statistics, *plain[:-1], wanted)
    )


@pytest.mark.parametrize("gain", [None, torch.tensor([[[0.25]]])])
def test_opcheck_of_the_linear_route(gain):
    torch.library.opcheck(OPERATORS.attend_linear.default, (*tensors(requires_grad=True), 0.7, gain))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_in_float64(activation):
    leaves = tensors(shape=(1, 2, 5, 3), dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)

    def call(query, key, value, bias):
        return nomax.attention(query, key, value, bias, phi=f"{activation}/L")

    assert torch.autograd.gradcheck(call, (*leaves, bias))
    assert torch.autograd.gradgradcheck(call, (*leaves, bias))


def test_a_second_derivative_on_the_kernels_is_refused_with_advice():
    leaves = tensors(requires_grad=True)
    out = nomax.attention(*leaves, backend="cpu")
    (grad,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r'backend="reference"'):
        grad.sum().backward()


CALLS = {
    "plain": lambda q, k, v: nomax.attention(q, k, v),
    "phi object": lambda q, k, v: nomax.attention(q, k, v, phi=nomax.Phi("gelu", alpha=0.5)),
    "causal": lambda q, k, v: nomax.attention(q, k, v, is_causal=True, phi="sigmoid(x-log L)"),
    "threshold": lambda q, k, v: nomax.attention(q, k, v, is_causal=True, phi="relu2(x-0.5*sqrt(2 log L))"),
    "identity": lambda q, k, v: nomax.attention(q, k, v, phi="identity/L"),
    "bias": lambda q, k, v: nomax.attention(q, k, v, (q @ k.mT).detach(), phi="softplus/L"),
    "rows": lambda q, k, v: nomax.attention(q, k, v, phi="relu/L", return_rows=True)[1].entropy,
    "softmax": lambda q, k, v: nomax.attention(q, k, v, phi="softmax"),
}


@pytest.mark.parametrize("name", CALLS)
def test_compiles_in_one_graph_with_dynamic_shapes(name):
    torch.compiler.reset()
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (20, 33):
        leaves = tensors(shape=(2, 3, length, 8), requires_grad=True)
        expected, got = call(*leaves), compiled(*leaves)
        torch.testing.assert_close(got, expected)
        grad = torch.randn_like(expected)
        for x, y in zip(
            torch.autograd.grad(got, leaves, grad, allow_unused=True),
            torch.autograd.grad(expected, leaves, grad, allow_unused=True),
            strict=True,
        ):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y)


@pytest.mark.parametrize("phi", ["identity/L", "relu/L", "2*identity/L^1.5"])
@pytest.mark.parametrize("how", ["dynamic", "static", "export", "vmap"])
def test_float16_does_not_overflow_where_the_length_is_a_number_of_the_graph(how, phi):
    """The factor 1/L is a tensor there, and must still come before the result is rounded."""
    query, key = torch.ones(1, 1, 2, 64).half(), torch.ones(1, 1, 4096, 64).half()
    value = torch.full((1, 1, 4096, 4), 4.0).half()

    class Call(torch.nn.Module):
        def forward(self, query, key, value):
            return nomax.attention(query, key, value, phi=phi)

    torch.compiler.reset()
    call = Call()
    match how:
        case "dynamic" | "static":
            compiled = torch.compile(call, fullgraph=True, dynamic=how == "dynamic", backend="aot_eager")
        case "export":
            length = torch.export.Dim("length", min=2, max=8192)
            shapes = (None, {2: length}, {2: length})
            compiled = torch.export.export(call, (query, key, value), dynamic_shapes=shapes).module()
        case "vmap":
            compiled = torch.func.vmap(call, in_dims=(None, 0, 0), out_dims=0)
    if how in ("export", "vmap"):  # without gradients
        several = (query, key, value) if how == "export" else (query, key[None], value[None])
        torch.testing.assert_close(compiled(*several).reshape(2, 4), call(query, key, value).reshape(2, 4))
        return
    leaves = [x.requires_grad_() for x in (query, key, value)]
    expected, got = call(*leaves), compiled(*leaves)
    assert expected.isfinite().all()
    torch.testing.assert_close(got, expected)
    grad = torch.ones_like(got)
    for x, y in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize("phi", ["relu/L", "identity/L", "sigmoid(x-log L)", "relu(x-0.5*sqrt(2 log L))", "gelu"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.* is deprecated")
def test_tracing_is_refused_with_advice(phi, backend):
    leaves = tuple(tensors())
    nomax.attention(*leaves)  # opens the short way for plain calls, which would keep the example's L
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace would keep the sizes.*torch\.export"):
        torch.jit.trace(lambda q, k, v: nomax.attention(q, k, v, phi=phi, backend=backend), leaves)


def test_compiles_with_inductor():
    torch.compiler.reset()

    def block(x, weight):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nomax.attention(q, k, v).transpose(1, 2).flatten(2)

    x, weight = torch.randn(2, 20, 16), torch.randn(16, 48, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), block(x, weight))
    grads = [torch.autograd.grad(f(x, weight).square().sum(), weight)[0] for f in (compiled, block)]
    torch.testing.assert_close(*grads)


class Block(torch.nn.Module):
    def forward(self, query, key, value):
        return nomax.attention(query, key, value, is_causal=True)


def test_exports_with_a_dynamic_length():
    leaves = tuple(tensors())
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Block(), leaves, dynamic_shapes=({2: length}, {2: length}, {2: length}))
    longer = tuple(tensors(shape=(2, 3, 50, 8)))
    torch.testing.assert_close(program.module()(*longer), Block()(*longer))


def in_fresh_process(program, folder, **environment):
    """What a program prints that has called nothing of nomax yet."""
    words = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


RUN = (
    "inputs, expected = torch.load('calls.pt'); torch.testing.assert_close(program(*inputs), expected); print('equal')"
)


@pytest.mark.parametrize("imports", ["import torch, nomax", "import nomax, torch"])
def test_an_exported_program_loads_in_a_fresh_process(imports, tmp_path):
    inputs = tuple(tensors())
    torch.save((inputs, Block()(*inputs)), tmp_path / "calls.pt")
    torch.export.save(torch.export.export(Block(), inputs), tmp_path / "program.pt2")
    load = "print(len(torch.ops.loaded_libraries)); program = torch.export.load('program.pt2').module()"
    assert in_fresh_process(f"{imports}; {load}; {RUN}", tmp_path) == ["0", "equal"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
def test_a_package_of_aotinductor_loads_in_a_fresh_process_after_a_call(tmp_path):
    inputs = tuple(tensors())
    torch.save((inputs, Block()(*inputs)), tmp_path / "calls.pt")
    with torch.no_grad():
        exported = torch.export.export(Block(), inputs)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "program.pt2"))
    load = "nomax.load_operators(); program = torch._inductor.aoti_load_package('program.pt2')"
    assert in_fresh_process(f"import nomax, torch; {load}; {RUN}", tmp_path) == ["equal"]


def test_torch_compile_may_be_the_first_to_call(tmp_path):
    call = "torch.compile(nomax.attention, fullgraph=True, backend='aot_eager')(*torch.ones(3, 1, 2, 4, 8))"
    assert in_fresh_process(f"import nomax, torch; print({call}.shape.numel())", tmp_path) == ["64"]


def test_importing_nomax_neither_imports_torch_nor_compiles_nor_loads_anything(tmp_path):
    unusable = {"CXX": "no-such-compiler", "NOMAX_CACHE": str(tmp_path / "cache")}
    look = "import sys, nomax; print('torch' in sys.modules); import torch; print(torch.ops.loaded_libraries)"
    assert in_fresh_process(look, tmp_path, **unusable) == ["False", "set()"]
    ask = """import nomax, torch
try:
    torch.ops.nomax.attend
except nomax.ops.build.BuildError as error:
    print("no-such-compiler" in str(error))"""
    assert in_fresh_process(ask, tmp_path, **unusable) == ["True"]


@pytest.mark.parametrize("phi", ["relu/L", "identity/L"])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, None), (None, 2, 0)])
def test_vmap_equals_a_loop(phi, in_dims):
    leaves = [
        torch.randn(2, 3, 20, 8) if dim is None else torch.randn(4, 2, 3, 20, 8).movedim(0, dim) for dim in in_dims
    ]
    got = torch.func.vmap(lambda q, k, v: nomax.attention(q, k, v, phi=phi), in_dims=in_dims)(*leaves)
    for i in range(4):
        alone = [x if dim is None else x.select(dim, i) for x, dim in zip(leaves, in_dims, strict=True)]
        torch.testing.assert_close(got[i], nomax.attention(*alone, phi=phi))


def test_vmap_with_masks():
    query, key, value = tensors(shape=(4, 2, 3, 20, 8))
    masks = torch.rand(4, 2, 1, 1, 20) < 0.6
    got = torch.func.vmap(lambda q, k, v, m: nomax.attention(q, k, v, m))(query, key, value, masks)
    for i in range(4):
        torch.testing.assert_close(got[i], nomax.attention(query[i], key[i], value[i], masks[i]))


def test_per_sample_gradients():
    query, key, value = tensors(shape=(4, 1, 2, 10, 8))
    bias = torch.randn(1, 2, 10, 10)

    def loss(bias, q, k, v):
        return nomax.attention(q, k, v, bias, phi="gelu/L").square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(bias, query, key, value)
    for i in range(4):
        torch.testing.assert_close(got[i], torch.func.grad(loss)(bias, query[i], key[i], value[i]))


def test_autocast_chooses_the_dtype_that_sdpa_has():
    leaves = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, theirs = nomax.attention(*leaves), F.scaled_dot_product_attention(*leaves)
    assert got.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(got, nomax.attention(*(x.bfloat16() for x in leaves)))


@pytest.mark.parametrize("grad", [False, True])
def test_flops_are_counted(grad):
    query, key, value = torch.randn(2, 3, 20, 8), torch.randn(2, 3, 30, 8), torch.randn(2, 3, 30, 16)
    for x in (query, key, value):
        x.requires_grad_(grad)
    cpu.load()  # a counter knows the operators that there are when it is made
    with FlopCounterMode(display=False) as counter:
        out = nomax.attention(query, key, value, backend="cpu")
        if grad:
            out.sum().backward()
    one = 2 * 2 * 3 * 20 * 30
    assert counter.get_total_flops() == one * (8 + 16) + grad * one * (3 * 8 + 2 * 16)
