"""What is particular to the Triton backend. What it computes is tested with the other backends'.

Without a GPU the kernels are interpreted: TRITON_INTERPRET=1 pytest -m triton tests/ops
"""

import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from precision import assert_precise
from semantics import no_triton, on_gpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import nomax
from nomax.ops import backends
from nomax.ops.arguments import canonical
from nomax.ops.registration import Arguments
from nomax.ops.triton import backend as triton
from nomax.ops.triton import tuning
from nomax.ops.triton.tuning import Config
from nomax.phi import ACTIVATIONS

with_triton = pytest.mark.skipif(bool(no_triton), reason=no_triton)


def tensors(count=3, shape=(1, 2, 20, 8), dtype=torch.float32, requires_grad=False):
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for _ in range(count)]


# Dispatch: with or without triton.


def test_on_the_cpu_it_refuses_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = [x.cpu() for x in tensors()]
    with pytest.raises(ValueError, match="query is on cpu, but the kernels run on GPUs"):
        nomax.attention(*inputs, backend="triton")
    assert "run on GPUs" in nomax.explain(*inputs).reasons["triton"][0]


@pytest.mark.parametrize(
    ("missing", "shape", "dtype", "reason"),
    [
        (None, (1, 2, 5, 8), torch.float16, None),
        ("triton cannot be imported (no such module)", (1, 2, 5, 8), torch.float16, "cannot be imported"),
        (None, (1, 2, 5, 8), torch.float64, "query is float64"),
        (None, (1, 2, 5, 257), torch.float16, "query's head dimension is 257, but the kernels go up to 256"),
    ],
)
def test_what_a_gpu_gets(missing, shape, dtype, reason, monkeypatch):
    """Tensors without memory stand for a GPU's."""
    monkeypatch.setattr(triton, "DEVICES", ("meta",))
    monkeypatch.setattr(triton, "_missing", lambda: missing)
    problem, _ = canonical(*(torch.empty(shape, device="meta", dtype=dtype) for _ in range(3)))
    assert backends.choose(None, problem) == ("triton" if reason is None else "reference")
    if reason is not None:
        assert any(reason in line for line in triton.unsupported(problem))
        with pytest.raises(ValueError, match=reason):
            backends.choose("triton", problem)
    explanation = nomax.explain(problem.query, problem.key, problem.value)
    assert explanation.backend == ("triton" if reason is None else "reference")
    assert "kernels run on the CPU" in str(explanation)


def test_nothing_imports_triton_before_a_call_needs_it():
    program = "import sys, torch, nomax; nomax.attention(*torch.ones(3, 1, 1, 2, 4)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "nomax.ops.triton.backend" in done.stdout.split(), done.stderr
    assert not {"nomax.ops.triton.tile", "nomax.ops.triton.launch"} & set(done.stdout.split())


# Numbers that are not finite, or too large for float16.


def run(query, key, value, grad, **arguments):
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = nomax.attention(*leaves, backend="triton", **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.triton
@with_triton
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
@pytest.mark.parametrize("kind", ["causal", "boolean", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_a_row_does_not_see_changes_no_bit_of_it(dtype, kind, poison):
    length, dim, value_dim = 40, 8, 20
    query, key = (torch.randn(1, 2, length, dim).to(dtype) for _ in range(2))
    value, grad = (torch.randn(1, 2, length, value_dim).to(dtype) for _ in range(2))
    sees = torch.ones(length, length, dtype=torch.bool).tril() if kind == "causal" else torch.rand(length, length) < 0.5
    sees = torch.rand(1, length).lt(0.5).expand(length, length) if kind == "padding" else sees
    masking = {"is_causal": True} if kind == "causal" else {"attn_mask": sees[:1] if kind == "padding" else sees}
    rows = torch.randperm(length)[:3]
    marked = torch.zeros(length, dtype=torch.bool)
    marked[rows] = True

    def poisoned(x):
        x = x.clone()
        x[:, :, rows] = poison
        return x

    masking["phi"] = "gelu/L"
    clean = run(query, key, value, grad, **masking)
    everything = torch.ones(length, dtype=torch.bool)
    looks_at_marked, seen_by_marked = (sees & marked).any(1), (sees & marked[:, None]).any(0)
    # For each poisoned input: which rows of the output and of the gradients of query, key and value it cannot reach.
    cases = [
        ((poisoned(query), key, value, grad), (~marked, ~marked, ~seen_by_marked, ~seen_by_marked)),
        ((query, poisoned(key), value, grad), (~looks_at_marked, ~looks_at_marked, ~marked, ~marked)),
        ((query, key, poisoned(value), grad), (~looks_at_marked, ~looks_at_marked, ~marked, everything)),
        ((query, key, value, poisoned(grad)), (everything, ~marked, ~seen_by_marked, ~seen_by_marked)),
    ]
    for inputs, out_of_reach in cases:
        for got, expected, safe in zip(run(*inputs, **masking), clean, out_of_reach, strict=True):
            assert torch.equal(got[:, :, safe], expected[:, :, safe])


@pytest.mark.triton
@with_triton
def test_infinity_that_is_seen_stays_infinity():
    query, key, value = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    value[0, 0, 1] = math.inf
    out = nomax.attention(query, key, value, is_causal=True, backend="triton")
    assert out[0, 0, :, 0].tolist() == [2.0, math.inf, math.inf]


@pytest.mark.triton
@with_triton
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}], ids=str)
def test_weights_too_large_for_float16_are_summed_all_the_same(arguments):
    """Scores of about 200 make weights of 40,000 and 8,000,000; the values are small, and so are the results."""
    query = (50 + torch.rand(1, 2, 20, 8)).half()
    key, value = (1 + torch.rand(1, 2, 40, 8)).half(), (torch.randn(1, 2, 40, 8) * 1e-5).half()
    for phi in ("relu2", "cube"):
        out = nomax.attention(query, key, value, **arguments, phi=phi, backend="triton")
        assert out.isfinite().all()
        plain = nomax.attention(query, key, value, **arguments, phi=phi, backend="reference")
        exact = nomax.attention(query.double(), key.double(), value.double(), **arguments, phi=phi, backend="reference")
        assert_precise(out, plain, exact)


# Blocks that a mask empties.


@pytest.mark.triton
@with_triton
@pytest.mark.parametrize("diagonal", [None, 0, 20, -30])
def test_blocks_without_a_visible_key_are_not_in_the_lists(diagonal):
    from nomax.ops.triton.launch import Run

    mask = torch.zeros(1, 2, 40, 100, dtype=torch.bool)
    mask[0, 0, 3, 5] = mask[0, 0, 39, 70] = mask[0, 1, 16:32, 64:] = True
    query, key = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 100, 8)
    settings = (0, 1.0, 1.0, 0.0, diagonal, 0.0, False)
    work = Run(Arguments(query, key, key, mask, *(None,) * 5, *settings))
    config = Config(16, 32, 4, 1)
    seen = mask if diagonal is None else mask & torch.ones(40, 100, dtype=torch.bool).tril(diagonal)
    for of_keys in (False, True):
        tiles = work.tiles(config, of_keys=of_keys)
        order, count = tiles.order.data, tiles.counts.data
        matrix, sizes = (seen.mT, (32, 16)) if of_keys else (seen, (16, 32))
        for head in range(2):
            for block, rows in enumerate(matrix[0, head].split(sizes[0])):
                filled = [n for n, tile in enumerate(rows.split(sizes[1], dim=1)) if tile.any()]
                visited = order[0, head, block, : count[0, head, block]].tolist()
                assert visited == sorted(visited)
                assert set(filled) <= set(visited)
                if diagonal is None:
                    assert visited == filled
    assert work.visits(config).sum() < 3 * 4 * 2


# A good citizen of torch.


def arguments(requires_grad=True, rows=False, dropout=0.0, diagonal=None, mask=None):
    triton.load()
    seed = torch.tensor(5, device="cpu") if dropout else None
    query, key, value = tensors(requires_grad=requires_grad)
    activation = list(ACTIVATIONS).index("softplus")
    settings = (activation, 0.3, 0.5, 0.1, diagonal, dropout, rows)
    return (query, key, value, mask, None, None, seed, None, None, *settings)


VARIANTS = {
    "rows": {"rows": True},
    "dropout": {"dropout": 0.25, "diagonal": 0},
    "boolean mask": {"mask": torch.rand(1, 1, 1, 20) < 0.5},
    "bias with gradient": {"mask": torch.randn(1, 1, 20, 20, requires_grad=True)},
}


@pytest.mark.triton
@with_triton
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_the_operation(variant):
    call = arguments(**VARIANTS[variant])
    torch.library.opcheck(torch.ops.nomax_triton.attend.default, call)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in call]
    wanted = plain[3] is not None and plain[3].is_floating_point()
    statistics = torch.randn(2, 1, 2, 20) if plain[-1] else None
    backward = (torch.randn(1, 2, 20, 8), statistics, *plain[:-1], wanted)
    torch.library.opcheck(torch.ops.nomax_triton.attend_backward.default, backward)


CALLS = {
    "plain": lambda q, k, v: nomax.attention(q, k, v, backend="triton"),
    "causal": lambda q, k, v: nomax.attention(q, k, v, is_causal=True, phi="sigmoid(x-log L)", backend="triton"),
    "threshold": lambda q, k, v: nomax.attention(q, k, v, phi="relu2(x-0.5*sqrt(2 log L))", backend="triton"),
    "rows": lambda q, k, v: nomax.attention(q, k, v, return_rows=True, backend="triton")[1].entropy,
}


@pytest.mark.triton
@with_triton
@pytest.mark.parametrize("name", CALLS)
def test_compiles_in_one_graph_with_dynamic_shapes(name):
    torch.compiler.reset()
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (20, 33):
        leaves = tensors(shape=(1, 2, length, 8), requires_grad=True)
        expected, got = CALLS[name](*leaves), compiled(*leaves)
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


@pytest.mark.triton
@with_triton
def test_a_second_derivative_is_refused_with_advice():
    leaves = tensors(requires_grad=True)
    out = nomax.attention(*leaves, backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r'backend="reference"'):
        grad.sum().backward()


@pytest.mark.triton
@with_triton
def test_flops_are_counted():
    triton.load()
    query, key, value = (torch.randn(1, 2, n, d, requires_grad=True) for n, d in ((20, 8), (30, 8), (30, 16)))
    with FlopCounterMode(display=False) as counter:
        nomax.attention(query, key, value, backend="triton").sum().backward()
    one = 2 * 1 * 2 * 20 * 30
    assert counter.get_total_flops() == one * (8 + 16) + one * (3 * 8 + 2 * 16)


@pytest.mark.triton
@with_triton
@pytest.mark.parametrize("dim", [7, 16, 59, 80, 256])
def test_any_head_dimension_up_to_256(dim):
    query, key, value, grad = tensors(4, (1, 1, 18, dim))
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def results(backend, dtype):
        converted = [x.to(dtype).detach().requires_grad_() for x in leaves]
        out = nomax.attention(*converted, is_causal=True, phi="silu/L", backend=backend)
        return [out, *torch.autograd.grad(out, converted, grad.to(dtype))]

    got, plain = results("triton", torch.float32), results("reference", torch.float32)
    for x, y, z in zip(got, plain, results("reference", torch.float64), strict=True):
        assert_precise(x, y, z)


@pytest.mark.triton
@with_triton
def test_dropout_in_a_part_is_that_of_the_whole():
    problem, _ = canonical(*tensors(shape=(1, 2, 20, 8)), dropout=0.4)
    problem = backends.replace(problem, seed=torch.tensor(77, device="cpu"))
    whole, *_ = triton.attend(problem)
    parts = [problem.part((8, 20), keys) for keys in ((0, 7), (7, 20))]
    torch.testing.assert_close(sum(triton.attend_part(part)[0] for part in parts), whole[:, :, 8:])
    grad = torch.randn_like(whole[:, :, 8:])
    for part in parts:
        expected = backends.part_gradients(part, grad, backend="reference")
        for x, y in zip(triton.part_gradients(part, grad, None, False)[:3], expected[:3], strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.triton
@with_triton
def test_parts_in_half_precision_are_float32():
    problem, _ = canonical(*tensors(shape=(1, 2, 20, 8), dtype=torch.float16))
    out, *_ = backends.attend_part(problem, "triton")
    expected, *_ = backends.attend_part(problem, "reference")
    assert out.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)  # weights are rounded once, sums are not
    grad = torch.randn_like(problem.query)
    got, right = (backends.part_gradients(problem, grad, backend=name)[:3] for name in ("triton", "reference"))
    for x, y in zip(got, right, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


@pytest.mark.triton
@with_triton
def test_addresses_outgrow_32_bits():
    """Rows so far apart that the last one lies beyond 2^31 numbers; the memory between them is never touched."""
    apart = 2**27 + 64
    far = torch.empty(apart * 17 + 8, dtype=torch.float16).as_strided((1, 1, 18, 8), (0, 0, apart, 1))
    near = torch.randn(1, 1, 18, 8).half()
    far.copy_(near)
    key, value = tensors(2, (1, 1, 18, 8), torch.float16)
    mask = torch.empty(apart * 17 + 18, dtype=torch.bool).as_strided((1, 1, 18, 18), (0, 0, apart, 1))
    mask.copy_(torch.rand(18, 18) < 0.5)
    for inputs in ((far, key, value), (key, far, value), (key, value, far)):
        close = [near if x is far else x for x in inputs]
        got = nomax.attention(*inputs, mask, backend="triton")
        assert torch.equal(got, nomax.attention(*close, mask.clone(), backend="triton"))


@pytest.mark.triton
@with_triton
def test_autocast_chooses_the_dtype():
    leaves = tensors()
    with torch.autocast(leaves[0].device.type, dtype=torch.float16):
        got = nomax.attention(*leaves, backend="triton")
    assert got.dtype == torch.float16
    assert torch.equal(got, nomax.attention(*(x.half() for x in leaves), backend="triton"))


@pytest.mark.triton
@with_triton
@pytest.mark.slow
def test_compiles_with_inductor():
    torch.compiler.reset()

    def block(x, weight):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nomax.attention(q, k, v, is_causal=True, backend="triton").transpose(1, 2).flatten(2)

    x, weight = torch.randn(2, 20, 16), torch.randn(16, 48, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), block(x, weight))
    grads = [torch.autograd.grad(f(x, weight).square().sum(), weight)[0] for f in (compiled, block)]
    torch.testing.assert_close(*grads)


@pytest.mark.triton
@with_triton
@pytest.mark.skipif(on_gpu, reason="one process with gloo stands for the ranks")
def test_dtensors():
    from nomax.parallel import dtensor

    dtensor.register_operators()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = tensors(requires_grad=True)
        expected = nomax.attention(*whole, backend="triton")
        expected.sum().backward()
        parts = [distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in whole]
        out = nomax.attention(*parts, backend="triton")
        out.sum().backward()
        torch.testing.assert_close(out.full_tensor(), expected)
        for x, y in zip(parts, whole, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    finally:
        dist.destroy_process_group()


# Which tiles: chosen by the clock, and kept.


def test_the_fastest_that_fits_is_chosen():
    choices = tuning.candidates("forward", torch.float16, 64)
    launched = []

    def launch(config):
        launched.append(config)
        if config == choices[0]:
            raise MemoryError

    def time(call):
        call()
        return {choices[1]: 2.0, choices[2]: 1.0}[launched[-1]]

    assert tuning.fastest(choices, launch, time, MemoryError) == choices[2]
    assert tuning.fastest(choices[:1], launch, time, MemoryError) is None


@pytest.mark.parametrize("kernel", ["forward", "query_gradient", "key_gradients", "bias_gradient"])
@pytest.mark.parametrize("dtype", triton.DTYPES)
@pytest.mark.parametrize("width", [8, 64, 80, 128, 256])
def test_the_list_of_tiles_is_short(kernel, dtype, width):
    choices = tuning.candidates(kernel, dtype, width)
    assert 1 <= len(choices) <= 3
    assert len(set(choices)) == len(choices)


@pytest.fixture
def tiles_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NOMAX_CACHE", str(tmp_path))
    yield tmp_path
    tuning.known.cache_clear()


def test_choices_are_kept_for_each_gpu_version_and_source(tiles_folder, monkeypatch):
    config = Config(64, 32, 4, 2)
    path = tuning.place("a GPU", "3.7.1")
    tuning.remember(path, "forward", config)
    tuning.known.cache_clear()  # as in another process
    assert tuning.known(path) == {"forward": config}
    assert path.parent == tiles_folder
    assert len({path, tuning.place("another GPU", "3.7.1"), tuning.place("a GPU", "3.8")}) == 3
    monkeypatch.setattr(tuning, "SOURCES", tuning.SOURCES[1:])
    assert tuning.place("a GPU", "3.7.1") != path


@pytest.mark.parametrize("content", ["", "{", "[]", '{"forward": 3}', '{"forward": [1, 2]}', '{"forward": ["x"]}'])
def test_damaged_choices_are_ignored_with_a_warning(tiles_folder, content):
    path = tuning.place("a GPU", "3.7.1")
    path.write_text(content)
    with pytest.warns(RuntimeWarning, match="which is damaged"):
        assert tuning.known(path) == {}
    tuning.remember(path, "forward", Config(64, 32, 4, 2))
    tuning.known.cache_clear()
    assert tuning.known(path) == {"forward": Config(64, 32, 4, 2)}


def test_without_a_place_for_them_choices_last_as_long_as_the_process(monkeypatch):
    monkeypatch.setenv("NOMAX_CACHE", "relative/folder")
    assert tuning.place("a GPU", "3.7.1") is None
    tuning.remember(None, "forward", Config(64, 32, 4, 2))
    assert tuning.known(None) == {"forward": Config(64, 32, 4, 2)}
    tuning.known.cache_clear()
