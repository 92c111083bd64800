"""nn.Memory against a feed-forward layer and its formula, and its blocks against the whole."""

import copy
import math

import pytest
import torch
from precision import assert_precise, doubled, five_errors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nomax.nn import Memory, memory

PHIS = (
    "relu", "softmax", "gelu", "relu2/L^2", "1.5*softplus(x-0.3)/L^0.5", "sigmoid(x-log L)", "relu(x-sqrt(2 log L))",
    "relu/L, L=7",
)  # fmt: skip


def formula(module: Memory, x: Tensor) -> Tensor:
    """φ of the scores, from the definition."""
    scores, slots = x @ module.keys.T, module.slots
    return {
        "relu": lambda: scores.clamp(min=0),
        "softmax": lambda: scores.exp() / scores.exp().sum(-1, keepdim=True),
        "gelu": lambda: scores * 0.5 * torch.erfc(-scores / math.sqrt(2)),
        "relu2/L^2": lambda: scores.clamp(min=0) ** 2 / slots**2,
        "1.5*softplus(x-0.3)/L^0.5": lambda: 1.5 * torch.log1p((scores - 0.3).exp()) / math.sqrt(slots),
        "sigmoid(x-log L)": lambda: 1 / (1 + slots * (-scores).exp()),
        "relu(x-sqrt(2 log L))": lambda: (scores - math.sqrt(2 * math.log(slots))).clamp(min=0),
        "relu/L, L=7": lambda: scores.clamp(min=0) / 7,
    }[str(module.phi)]()


@pytest.mark.parametrize("block", [None, 5, 16, 32])
def test_a_relu_memory_is_linear_relu_linear_weight_for_weight(block: int | None) -> None:
    ours = Memory(12, 32, block=block).double()
    theirs = nn.Sequential(nn.Linear(12, 32, bias=False), nn.ReLU(), nn.Linear(32, 12, bias=False)).double()
    with torch.no_grad():
        theirs[0].weight.copy_(ours.keys)
        theirs[2].weight.copy_(ours.values.T)
    x, weight = torch.randn(2, 7, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [module(y) for module, y in zip((ours, theirs), inputs, strict=True)]
    for out in outs:
        (out * weight).sum().backward()
    close = torch.testing.assert_close
    close(outs[0], outs[1])
    close(inputs[0].grad, inputs[1].grad)
    close(ours.keys.grad, theirs[0].weight.grad)
    close(ours.values.grad, theirs[2].weight.grad.T)


@pytest.mark.parametrize("settings", [{}, {"block": 3}, {"norm": True}, {"gated": True}])
@pytest.mark.parametrize("phi", ["relu", "-0.5*relu/L", "gelu", "relu2(x-0.3)/L"])
def test_sizes_of_weights_come_with_the_output_and_have_gradients(phi: str, settings: dict) -> None:
    module, x = Memory(6, 10, phi=phi, **settings).double(), 2 * torch.randn(3, 5, 6).double()
    out, sizes = module(x, return_l1=True)
    torch.testing.assert_close(out, module(x))
    scores = x @ (module.keys if module.gates is None else module.gates).T
    weights = formula(module, x) if phi == "gelu" else {
        "relu": scores.clamp(min=0),
        "-0.5*relu/L": -0.05 * scores.clamp(min=0),
        "relu2(x-0.3)/L": (scores - 0.3).clamp(min=0) ** 2 / 10,
    }[phi]  # fmt: skip
    if module.gates is not None:
        weights = (scores * 0.5 * torch.erfc(-scores / math.sqrt(2)) if phi == "gelu" else weights) * (
            x @ module.keys.T
        )
    torch.testing.assert_close(sizes, weights.abs().sum(-1))
    given = torch.autograd.grad(sizes.sum(), list(module._matrices()), retain_graph=True, allow_unused=True)
    wanted = torch.autograd.grad(weights.abs().sum(), list(module._matrices()), allow_unused=True)
    for mine, theirs in zip(given, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sizes_keep_the_precision_of_autocast() -> None:
    module, x = Memory(32, 4000), torch.randn(9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out, sizes = module(x, return_l1=True)
        assert torch.equal(out, module(x))
    assert (out.dtype, sizes.dtype) == (torch.bfloat16, torch.float32)
    plain = module.bfloat16()(x.bfloat16(), return_l1=True)[1]
    assert_precise(sizes, plain, (x.double() @ module.keys.double().T).relu().sum(-1))


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("phi", PHIS)
def test_every_phi_is_its_formula_with_the_slots_as_its_length(phi: str, block: int | None) -> None:
    module, x = Memory(6, 10, phi=phi, block=block), 2 * torch.randn(3, 5, 6)
    exact = doubled(module)
    plain, weights = formula(module, x), formula(exact, x.double())
    assert_precise(module.weights(x), plain, weights)
    assert_precise(module(x), plain @ module.values, weights @ exact.values)


@pytest.mark.parametrize("phi", ["softmax", "gelu", "1.5*softplus(x-0.3)/L^0.5", "cube"])
def test_the_gradients_of_blocks_are_right(phi: str) -> None:
    module = Memory(4, 7, phi=phi, block=3).double()

    def call(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"keys": keys, "values": values}, x)

    leaves = [x.detach().clone().requires_grad_() for x in (torch.randn(5, 4).double(), module.keys, module.values)]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)
    leaves[2].requires_grad_(False)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("phi", ["relu", "softmax"])
def test_the_second_derivative_through_a_residual_is_that_of_all_slots_at_once(phi: str) -> None:
    module, x = Memory(4, 11, phi=phi).double(), torch.randn(3, 4).double().requires_grad_()
    found = []
    for block in (None, 4):
        module.block = block
        (first,) = torch.autograd.grad((x + module(x)).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("phi", ["relu", "softmax"])
def test_transforms_of_torch_func_take_a_memory_in_blocks(phi: str) -> None:
    module, x = Memory(4, 11, phi=phi, block=3).double(), torch.randn(5, 4).double()
    found = torch.func.vmap(torch.func.jacrev(module))(x)
    want = torch.stack([torch.autograd.functional.jacobian(module, token) for token in x])
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("phi", ["relu", "softmax"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_memory_is_exported_for_any_number_of_tokens(phi: str, strict: bool) -> None:
    module, x = Memory(4, 11, phi=phi), torch.randn(9, 4)
    shapes = ({0: torch.export.Dim("tokens", min=2, max=512)},)
    exported = torch.export.export(module, (torch.randn(5, 4),), dynamic_shapes=shapes, strict=strict).module()
    torch.testing.assert_close(exported(x), module(x))


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("phi", ["relu", "softmax"])
def test_what_comes_out_may_be_changed_in_place(phi: str, block: int | None) -> None:
    module, x = Memory(4, 11, phi=phi, block=block), torch.randn(5, 4, requires_grad=True)
    (module(x) + x).square().sum().backward()
    want, x.grad = x.grad, None
    out = module(x)
    out += x
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_input_of_another_precision_than_the_parameters_keeps_its_own(dtype: torch.dtype, norm: bool) -> None:
    module, x = Memory(4, 11, norm=norm), torch.randn(3, 4)
    exact, x = doubled(module), x.to(dtype)
    weights = torch.relu(x @ module.keys.to(dtype).T)
    plain = weights @ module.values.to(dtype)
    plain = plain if module.norm is None else module.norm(plain.float()).to(dtype)  # the norm keeps its own precision
    assert module(x).dtype == module.weights(x).dtype == dtype
    assert_precise(module(x), plain, exact(x.double()))
    assert_precise(module.weights(x), weights, exact.weights(x.double()))


def test_softmax_blocks_stand_scores_that_would_overflow_and_maxima_that_come_late() -> None:
    module, x = Memory(4, 12, phi="softmax", block=5), 300 * torch.randn(6, 4)
    with torch.no_grad():
        module.keys[-1] = x[0]  # by far the best match of the first token, in the last block
    x.requires_grad_()
    out = module(x)
    exact = torch.softmax(x.double() @ module.keys.double().T, -1) @ module.values.double()
    assert_precise(out, torch.softmax(x @ module.keys.T, -1) @ module.values, exact)
    torch.testing.assert_close(out[0], module.values[-1])
    out.sum().backward()
    for tensor in (x, module.keys, module.values):
        assert tensor.grad.isfinite().all()


def test_a_first_block_that_nothing_is_seen_of_leaves_the_others() -> None:
    module = Memory(1, 2, phi="softmax", block=1)
    with torch.no_grad():
        module.keys.copy_(torch.tensor([[-1e20], [1.0]]))
        module.values.copy_(torch.tensor([[1.0], [2.0]]))
    assert module(torch.tensor([[1e20]])).item() == 2


def test_the_norm_is_a_layer_norm_of_what_was_found() -> None:
    module, x = Memory(8, 20, phi="softmax", norm=True), torch.randn(3, 8)
    assert {name: list(p.shape) for name, p in module.named_parameters()} == {
        "keys": [20, 8], "values": [20, 8], "norm.weight": [8], "norm.bias": [8],
    }  # fmt: skip
    with torch.no_grad():
        module.norm.weight.normal_()
        module.norm.bias.normal_()

    def expected(module: Memory, x: Tensor) -> Tensor:
        found = formula(module, x) @ module.values
        centred = found - found.mean(-1, keepdim=True)
        normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return normal * module.norm.weight + module.norm.bias

    assert_precise(module(x), expected(module, x), expected(doubled(module), x.double()))


class Sizes(TorchDispatchMode):
    """The number of elements of the largest new tensor, and how many products of matrices there were."""

    largest = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("phi", ["relu", "softmax", "2*gelu/L^0.5"])
def test_a_large_memory_never_makes_all_weights_at_once(phi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # All limits, and the memory, smaller than in use, so that the test is quick.
    monkeypatch.setattr(memory, "KEPT", 2**23 // 128)
    monkeypatch.setattr(memory, "BLOCK", 2**21 // 128)
    monkeypatch.setattr(memory, "NARROWEST", 32)
    tokens, dim, slots = 128, 8, 4096
    module, x = Memory(dim, slots, phi=phi), torch.randn(tokens, dim, requires_grad=True)
    with Sizes() as sizes:
        module(x).sum().backward()
    assert sizes.largest == dim * slots == max(p.numel() for p in module.parameters()) == tokens * slots // 16
    assert sizes.products == 7 * slots // 128


def test_the_default_limits_keep_65536_slots_below_a_seventh_of_all_weights() -> None:
    for tokens, slots in ((128, 65_536), (1024, 65_536)):
        module, x = Memory(1, slots), torch.randn(tokens, 1)
        with torch.no_grad(), Sizes() as sizes:
            module(x)
        assert sizes.largest < tokens * slots / 7


@pytest.mark.parametrize("phi", ["relu", "softmax"])
def test_a_small_memory_is_computed_at_once_and_no_product_twice(phi: str) -> None:
    module, x = Memory(8, 512, phi=phi), torch.randn(100, 8, requires_grad=True)
    with Sizes() as sizes:
        module(x).sum().backward()
    assert sizes.products == 6


def test_no_tokens_are_as_good_as_some() -> None:
    for block in (None, 3):
        module = Memory(4, 7, phi="softmax", block=block)
        x = torch.randn(2, 0, 4, requires_grad=True)
        out = module(x)
        out.sum().backward()
        assert out.shape == (2, 0, 4)
        assert not module.keys.grad.any()


@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize("phi", ["relu", "softmax"])
def test_bfloat16_by_autocast_or_by_conversion_is_the_same_to_rounding(phi: str, block: int | None) -> None:
    module, x = Memory(16, 40, phi=phi, block=block), torch.randn(9, 16)
    want = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        casted = module(x)
        casted.float().sum().backward()
    assert module.keys.grad.dtype == torch.float32
    converted = module.bfloat16()(x.bfloat16())
    assert casted.dtype == converted.dtype == torch.bfloat16
    for got in (casted, converted):
        assert (got - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.parametrize("block", [None, 512])
def test_float16_does_not_overflow_before_the_factor_of_phi(block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLOW", frozenset())  # as on a GPU, which computes in half precision what it can
    module = Memory(64, 4096, phi="relu/L", block=block).half()
    torch.nn.init.ones_(module.keys)
    torch.nn.init.ones_(module.values)
    assert (module(torch.ones(2, 64).half()) == 64).all()


def test_keys_and_values_start_xavier_uniform() -> None:
    module = Memory(64, 200)
    bound = math.sqrt(6 / 264)
    for matrix in (module.keys.detach(), module.values.detach()):
        assert 0.98 * bound < matrix.abs().max() <= bound
        assert float(matrix.std()) == pytest.approx(bound / math.sqrt(3), rel=five_errors(matrix.numel()))


def test_what_is_printed_says_the_phi() -> None:
    assert repr(Memory(8, 20, phi="relu2/L")) == "Memory(8, slots=20, phi='relu2/L')"
    assert repr(Memory(8, 20, gated=True)) == "Memory(8, slots=20, phi='relu', gated=True)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Memory(0, 4), "dim=0 must be an integer of at least 1"),
        (lambda: Memory(4, 2.5), r"slots=2\.5"),
        (lambda: Memory(4, 4, block=0), "block=0"),
        (lambda: Memory(4, 4, block=2, gated=True), "block=2 does not go with gated=True.*Leave out either"),
        (lambda: Memory(4, 4, phi="softmax", gated=True), 'phi="softmax" does not go with gated=True'),
        (lambda: Memory(4, 4, phi="rellu"), "did you mean 'relu'"),
        (lambda: Memory(4, 4, phi="entmax15"), 'phi="entmax15" needs all slots at once.*softmax'),
        (lambda: Memory(4, 4)(torch.randn(2, 5)), r"x must be \[\.\.\., 4\], got \[2, 5\]"),
        (
            lambda: Memory(4, 4)(torch.ones(2, 4, dtype=torch.long)),
            "x must be of floating point numbers, got torch.int64",
        ),
        (lambda: Memory(4, 4).weights(torch.randn(5)), r"x must be \[\.\.\., 4\], got \[5\]"),
    ],
)
def test_a_slip_is_answered_in_words(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_many_slots_in_blocks_are_as_exact_as_the_plain_formula() -> None:
    module, x, grad = Memory(64, 4096, phi="softmax", block=512), torch.randn(37, 64), torch.randn(37, 64)
    found = []
    for blocks, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
        keys, values, y = (each.detach().to(dtype).requires_grad_() for each in (module.keys, module.values, x))
        out = memory._Softmax.apply(y, keys, values, 512) if blocks else (y @ keys.T).softmax(-1) @ values
        found.append(torch.autograd.grad(out, (y, keys, values), grad.to(dtype)))
    for ours, plain, exact in zip(*found, strict=True):
        assert (ours - exact).abs().mean() < 1.4 * (plain - exact).abs().mean()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("phi", ["relu", "relu2/L", "2*relu(x-1.5)"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_a_few_tokens_are_looked_up_as_exactly_and_without_reading_values_of_zero_weight(
    tokens: int, phi: str, dtype: torch.dtype, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Memory(64, 1000, phi=phi, gated=gated).to(dtype), torch.randn(tokens, 64).to(dtype)
    exact = copy.deepcopy(module).double()
    with torch.no_grad():
        for scored in (module, exact):
            (scored.gates if gated else scored.keys).mul_(3)
        plain = module.weights(x) @ module.values
        wanted = exact.weights(x.double()) @ exact.values
        few = module(x)
        assert_precise(few, plain, wanted)
        unused = (exact.weights(x.double()) == 0).all(0)
        if tokens == 1 and "1.5" in phi:
            assert unused.double().mean() > 0.6
            for rows in (module.values, module.keys) if gated else (module.values,):
                rows[unused] = torch.nan
            assert torch.equal(module(x), few)
    seven = torch.randn(7, 64).to(dtype)
    monkeypatch.setattr(memory, "look_up", None)  # neither for more tokens, nor in training
    module(seven)
    module(x).sum().backward()


@pytest.mark.parametrize("phi", ["relu", "0.5*silu(x-0.1)/L^0.5", "relu2/L"])
def test_a_gated_memory_is_three_linear_layers_weight_for_weight(phi: str) -> None:
    ours = Memory(12, 32, phi=phi, gated=True).double()
    assert {name: tuple(p.shape) for name, p in ours.state_dict().items()} == dict.fromkeys(
        ("keys", "values", "gates"), (32, 12)
    )
    gate, up, down = (nn.Linear(*size, bias=False).double() for size in ((12, 32), (12, 32), (32, 12)))
    with torch.no_grad():
        gate.weight.copy_(ours.gates)
        up.weight.copy_(ours.keys)
        down.weight.copy_(ours.values.T)
    h = {"relu": torch.relu, "relu2/L": lambda s: s.relu() ** 2 / 32}.get(
        phi, lambda s: 0.5 * nn.functional.silu(s - 0.1) / math.sqrt(32)
    )
    x, weight = torch.randn(2, 7, 12).double(), torch.randn(2, 7, 12).double()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [ours(inputs[0]), down(h(gate(inputs[1])) * up(inputs[1]))]
    for out in outs:
        (out * weight).sum().backward()
    close = torch.testing.assert_close
    close(*outs)
    close(ours.weights(x), h(gate(x)) * up(x))
    close(inputs[0].grad, inputs[1].grad)
    close(ours.gates.grad, gate.weight.grad)
    close(ours.keys.grad, up.weight.grad)
    close(ours.values.grad, down.weight.grad.T)
    with torch.no_grad():  # many tokens, and with float32 a few
        close(ours(x), outs[1])
        close(ours.float()(x[0, :2].float()), outs[1][0, :2].float())


def test_a_gated_memory_has_second_derivatives_and_is_transformed_and_exported() -> None:
    module, x = Memory(4, 7, phi="silu", gated=True).double(), torch.randn(5, 4).double()

    def call(*tensors: Tensor) -> Tensor:
        names = ("keys", "values", "gates")
        return torch.func.functional_call(module, dict(zip(names, tensors[1:], strict=True)), tensors[0])

    leaves = [each.detach().clone().requires_grad_() for each in (x, module.keys, module.values, module.gates)]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)
    found = torch.func.vmap(torch.func.jacrev(module))(x)
    want = torch.stack([torch.autograd.functional.jacobian(module, token) for token in x])
    torch.testing.assert_close(found, want)
    shapes = ({0: torch.export.Dim("tokens", min=2, max=512)},)
    exported = torch.export.export(module, (x,), dynamic_shapes=shapes).module()
    torch.testing.assert_close(exported(x[:3]), module(x[:3]))


@pytest.mark.parametrize("gated", [False, True])
def test_a_compiled_memory_serves_few_tokens_and_many(gated: bool) -> None:
    module = Memory(64, 100, gated=gated)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.no_grad():
        for tokens in (1, 4, 9):
            x = torch.randn(tokens, 64)
            torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("tokens", [2, 9])
def test_a_gated_memory_keeps_the_precision_of_autocast_and_of_its_input(tokens: int) -> None:
    module, x = Memory(64, 100, gated=True, norm=True), torch.randn(tokens, 64)
    want = module(x)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        casted = module(x)
    with torch.no_grad():
        converted = module(x.bfloat16())
    assert casted.dtype == converted.dtype == torch.bfloat16
    for got in (casted, converted):
        assert (got - want).abs().max() < 0.03 * want.abs().max()
