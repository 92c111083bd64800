"""What must not change a result: to the bit where the order of the sums is the same, else to rounding."""

import math

import pytest
import torch
from precision import assert_precise

import nomax

DTYPES = [torch.float32, torch.bfloat16]
PHIS = ["relu/L", "gelu/L", "identity/L", "sigmoid(x-log L)", "relu2(x-0.5*sqrt(2 log L))"]
KINDS = ["plain", "causal", "padding", "boolean"]


def inputs(batch=3, heads=2, queries=150, keys=1100, dim=40, dtype=torch.float32):
    query = torch.randn(batch, heads, queries, dim).to(dtype)
    key, value = (torch.randn(batch, heads, keys, dim).to(dtype) for _ in range(2))
    return query, key, value


def masking(kind, batch, queries, keys):
    match kind:
        case "causal":
            return {"is_causal": True}
        case "padding":
            return {"attn_mask": (torch.arange(keys) < torch.randint(1, keys, (batch, 1)))[:, None, None]}
        case "boolean":
            return {"attn_mask": torch.rand(batch, 1, queries, keys) < 0.5}
    return {}


def run(query, key, value, phi, **arguments):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = nomax.attention(*leaves, phi=phi, backend="cpu", **arguments)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape[1:], generator=generator).to(out.dtype).expand(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_same_bits(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phi", PHIS)
def test_one_and_two_and_three_threads_give_the_same_bits(phi, kind, dtype, threads):
    tensors = inputs(batch=1, dtype=dtype)
    arguments = masking(kind, 1, 150, 1100)
    threads(1)
    expected = run(*tensors, phi, **arguments)
    for count in (2, 3):
        threads(count)
        assert_same_bits(run(*tensors, phi, **arguments), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phi", PHIS)
def test_a_sequence_alone_and_in_a_batch_give_the_same_bits(phi, kind, dtype):
    tensors = inputs(dtype=dtype)
    arguments = masking(kind, 3, 150, 1100)
    together = run(*tensors, phi, **arguments)
    for i in range(3):
        of_one = {k: v[i : i + 1] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        alone = run(*(x[i : i + 1] for x in tensors), phi, **of_one)
        assert_same_bits([x[i : i + 1] for x in together], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phi", PHIS)
def test_a_query_alone_and_among_others_gives_the_same_bits(phi, dtype):
    query, key, value = inputs(batch=1, dtype=dtype)
    together = nomax.attention(query, key, value, phi=phi, backend="cpu")
    for i in (0, 5, 77, 149):
        alone = nomax.attention(query[:, :, i : i + 1], key, value, phi=phi, backend="cpu")
        assert torch.equal(together[:, :, i : i + 1], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 40, 13])
@pytest.mark.parametrize("shift", [5.0, 0.0, -0.6, -1.3, -2.3, -60.0])  # from no zeros to nothing else
@pytest.mark.parametrize("few", [1, 2, 5, 6])
def test_few_queries_give_the_bits_of_many_however_many_weights_are_zero(few, shift, dim, dtype, every_instruction_set):
    query, key, value = inputs(batch=1, queries=20, keys=333, dim=dim, dtype=dtype)
    mask = torch.rand(1, 1, 1, 333) < 0.9
    for phi, arguments in ((f"relu(x{shift:+g})/L", {}), (f"relu2(x{shift:+g})", {"attn_mask": mask})):
        many = nomax.attention(query, key, value, phi=phi, backend="cpu", **arguments)
        alone = nomax.attention(query[:, :, :few], key, value, phi=phi, backend="cpu", **arguments)
        assert torch.equal(many[:, :, :few], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_queries_do_not_read_values_whose_weights_are_all_zero(dtype):
    query, key, value = inputs(batch=1, heads=1, queries=2, keys=300, dim=32, dtype=dtype)
    phi = "relu(x-1.3)/L"
    expected = nomax.attention(query, key, value, phi=phi, backend="cpu")
    scores = (query.double() @ key.double().transpose(-2, -1)) * 32**-0.5
    unused = (scores < 1.2).all(-2)[0, 0]  # none of them is near the edge
    assert 0.5 < unused.double().mean() < 0.9
    value[0, 0, unused] = torch.nan
    assert torch.equal(nomax.attention(query, key, value, phi=phi, backend="cpu"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phi", PHIS[:2])
def test_padding_changes_no_bit(phi, dtype):
    query, key, value = inputs(batch=1, keys=130, dtype=dtype)
    mask = torch.zeros(1, 1, 1, 200, dtype=torch.bool)
    mask[..., :130] = True
    longer = [torch.cat([x, torch.full_like(x[:, :, :70], torch.nan)], dim=2) for x in (key, value)]
    expected, padded = run(query, key, value, phi), run(query, *longer, phi, attn_mask=mask)
    assert_same_bits([x[:, :, : y.shape[2]] for x, y in zip(padded, expected, strict=True)], expected)
    for grad in padded[2:]:
        assert (grad[:, :, 130:] == 0).all()


def test_memory_layout_changes_no_bit():
    joint = torch.randn(2, 97, 3, 4, 24)
    views = joint.permute(2, 0, 3, 1, 4).unbind(0)
    assert_same_bits(run(*views, "relu/L"), run(*(x.contiguous() for x in views), "relu/L"))


def test_grouped_heads_equal_repeated_heads():
    query, key, value = torch.randn(2, 6, 50, 32), torch.randn(2, 2, 70, 32), torch.randn(2, 2, 70, 32)
    grouped = nomax.attention(query, key, value, enable_gqa=True, backend="cpu")
    repeated = (x.repeat_interleave(3, dim=1) for x in (key, value))
    assert torch.equal(grouped, nomax.attention(query, *repeated, backend="cpu"))


@pytest.mark.parametrize("phi", PHIS)
def test_the_order_of_the_keys_does_not_matter(phi):
    query, key, value = inputs(keys=300)
    order = torch.randperm(300)
    got = nomax.attention(query, key[:, :, order], value[:, :, order], phi=phi, backend="cpu")
    torch.testing.assert_close(got, nomax.attention(query, key, value, phi=phi, backend="cpu"))


@pytest.mark.parametrize("activation", ["relu", "gelu", "identity", "sigmoid", "cube"])
def test_parts_of_the_keys_add_up_to_the_whole(activation):
    """No row maximum and no row sum: this is what makes sequence parallelism a plain sum."""
    query, key, value = inputs(keys=300)
    whole = nomax.attention(query, key, value, phi=activation, backend="cpu")
    parts = [
        nomax.attention(query, key[:, :, a:b], value[:, :, a:b], phi=activation, backend="cpu")
        for a, b in ((0, 1), (1, 129), (129, 300))
    ]
    doubles = [x.double() for x in (query, key, value)]
    exact = nomax.attention(*doubles, phi=activation, backend="reference")
    assert_precise(sum(parts), whole, exact)


@pytest.mark.parametrize("phi", PHIS)
def test_run_to_run_gives_the_same_bits(phi):
    tensors = inputs()
    assert_same_bits(run(*tensors, phi, dropout_p=0.0), run(*tensors, phi, dropout_p=0.0))


# NaN and infinity where a row does not look.


def poisoned(x, rows, poison):
    x = x.clone()
    x[:, :, rows] = poison
    return x


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["causal", "boolean"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("sizes", [(13, 8, 8), (150, 40, 24), (300, 16, 7)], ids=str)
def test_what_a_row_does_not_see_changes_no_bit_of_it(sizes, dtype, kind, poison, every_instruction_set, threads):
    """NaN or infinity in a query, key, value or gradient reaches those that see it, and nobody else."""
    length, dim, value_dim = sizes
    query, key = (torch.randn(1, 2, length, dim).to(dtype) for _ in range(2))
    value, grad = (torch.randn(1, 2, length, value_dim).to(dtype) for _ in range(2))
    sees = torch.rand(length, length) < 0.5 if kind == "boolean" else torch.ones(length, length).tril().bool()
    masking = {"attn_mask": sees} if kind == "boolean" else {"is_causal": True}
    rows = torch.randperm(length)[:3]
    marked = torch.zeros(length, dtype=torch.bool)
    marked[rows] = True

    def run(query, key, value, grad):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = nomax.attention(*leaves, phi="gelu/L", backend="cpu", **masking)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    clean = run(query, key, value, grad)
    everything = torch.ones(length, dtype=torch.bool)
    looks_at_marked, seen_by_marked = (sees & marked).any(1), (sees & marked[:, None]).any(0)
    # For each poisoned input: which rows of the output and of the gradients of query, key and value it cannot reach.
    cases = [
        ((poisoned(query, rows, poison), key, value, grad), (~marked, ~marked, ~seen_by_marked, ~seen_by_marked)),
        ((query, poisoned(key, rows, poison), value, grad), (~looks_at_marked, ~looks_at_marked, ~marked, ~marked)),
        ((query, key, poisoned(value, rows, poison), grad), (~looks_at_marked, ~looks_at_marked, ~marked, everything)),
        ((query, key, value, poisoned(grad, rows, poison)), (everything, ~marked, ~seen_by_marked, ~seen_by_marked)),
    ]
    for inputs, out_of_reach in cases:
        for count in (1, 2, 3):
            threads(count)
            for got, expected, safe in zip(run(*inputs), clean, out_of_reach, strict=True):
                assert torch.equal(got[:, :, safe], expected[:, :, safe])
            assert not run(*inputs)[0 if inputs[3] is grad else 1].isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("phi", PHIS)
def test_a_causal_row_alone_and_in_its_sequence_gives_the_same_bits(phi, dtype, every_instruction_set):
    query, key, value = inputs(batch=1, queries=140, keys=140, dtype=dtype)
    value[:, :, 50:] = math.nan
    whole = nomax.attention(query, key, value, phi=phi, is_causal=True, backend="cpu")
    assert not whole[:, :, :50].isnan().any()
    for i in (0, 5, 44, 49, 50):
        alone = nomax.attention(query[:, :, : i + 1], key, value, phi=phi, is_causal=True, backend="cpu")[:, :, i:]
        assert torch.equal(whole[:, :, i : i + 1].nan_to_num(7), alone.nan_to_num(7))
