"""nn.Attention against its formula in float64, its learned scales against φ."""

import math

import pytest
import torch
import torch.nn.functional as F
from precision import assert_precise, doubled, five_errors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nomax
from nomax.nn import Attention, GatedRMSNorm, KeyValueCache

PHIS = (
    "relu/L", "softmax", "gelu/L", "sigmoid(x-log L)", "relu(x-0.5*sqrt(2 log L))", "1.5*softplus(x-0.3)/L^0.5",
    "relu2/L^2, L=keys",
)  # fmt: skip


def plain_weights(phi: str, scores: Tensor, seen: Tensor) -> Tensor:
    """φ of the scores, from the formula, one whole matrix at a time."""
    seen = seen.expand(scores.shape)
    n = seen.sum(-1, keepdim=True).clamp(min=1)
    if phi == "softmax":
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = {
        "relu/L": lambda: scores.relu() / n,
        "gelu/L": lambda: F.gelu(scores) / n,
        "sigmoid(x-log L)": lambda: torch.sigmoid(scores - n.log()),
        "1.5*softplus(x-0.3)/L^0.5": lambda: 1.5 * torch.log1p((scores - 0.3).exp()) / n.sqrt(),
        "relu2/L^2, L=keys": lambda: scores.relu() ** 2 / scores.shape[-1] ** 2,
        "relu(x-0.5*sqrt(2 log L))": lambda: (scores - 0.5 * (2 * n.log()).sqrt()).relu(),
    }[phi]()
    return weights * seen


def plain(
    module: Attention,
    phi: str,
    x: Tensor,
    context: Tensor | None = None,
    seen: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """What the module should compute, by its formula in this precision."""
    state = {name: tensor.to(dtype) for name, tensor in module.state_dict().items()}

    def project(y: Tensor, name: str, part: slice = slice(None)) -> Tensor:
        bias = state.get(f"{name}.bias")
        return y.to(dtype) @ state[f"{name}.weight"][part].T + (0 if bias is None else bias[part])

    dim, heads = module.dim, module.heads
    parts = [slice(i * dim, (i + 1) * dim) for i in range(3)]
    if context is None:
        q, k, v = (project(x, "qkv", part) for part in parts)
    else:
        q, k, v = project(x, "q"), project(context, "kv", parts[0]), project(context, "kv", parts[1])
    q, k, v = (y.reshape(len(y), -1, heads, dim // heads) for y in (q, k, v))
    if "query_norm.weight" in state:
        q, k = (
            (y - y.mean(-1, keepdim=True))
            / (y.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
            * state[f"{name}.weight"]
            for y, name in ((q, "query_norm"), (k, "key_norm"))
        )
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(dim // heads)
    weights = plain_weights(phi, scores, torch.tensor(True) if seen is None else seen)
    joined = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
    if module.gate is not None:
        gate = project(x, "gate")
        joined = joined * {"silu": F.silu(gate), "sigmoid": gate.sigmoid(), "identity": gate}[str(module.gate_kind)]
    return project(joined, "out")


def check(out: Tensor, module: Attention, phi: str, *inputs: Tensor | None) -> None:
    """Compare an output with the formula of its module."""
    assert_precise(out, *(plain(module, phi, *inputs, dtype=dtype) for dtype in (out.dtype, torch.float64)))


def randomised(module: Attention) -> Attention:
    """Every parameter away from where it starts, so that none of them can be left out unnoticed."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.4)
    return module


@pytest.mark.parametrize("phi", PHIS)
def test_self_attention_is_its_formula(phi: str) -> None:
    module = randomised(Attention(24, 3, phi=phi))
    x = torch.randn(2, 7, 24)
    check(module(x), module, phi, x)


@pytest.mark.parametrize("gate", [None, "silu", "sigmoid", "identity"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_qk_norm_gate_and_context_are_their_formulas(cross: bool, qk_norm: bool, gate: str | None) -> None:
    module = randomised(Attention(24, 3, context_dim=10 if cross else None, qk_norm=qk_norm, gate=gate, bias=False))
    x, context = torch.randn(2, 7, 24), torch.randn(2, 5, 10) if cross else None
    check(module(x, context), module, "relu/L", x, context)


def test_the_qk_norm_has_one_scale_for_all_heads_and_no_bias() -> None:
    module = Attention(24, 3, qk_norm=True)
    shapes = {name: list(p.shape) for name, p in module.named_parameters() if "norm" in name}
    assert shapes == {"query_norm.weight": [8], "key_norm.weight": [8]}
    assert module.query_norm.eps == module.key_norm.eps == 1e-6


@pytest.mark.parametrize("gate", [None, "silu"])
def test_relas_norm_is_its_formula_on_the_joined_heads(gate: str | None) -> None:
    module = randomised(Attention(24, 3, phi="relu", joined_norm="rela", gate=gate))
    x = torch.randn(2, 7, 24)

    def formula(module: Attention, x: Tensor) -> Tensor:
        value = module.qkv(x)[..., 48:].reshape(2, 7, 3, 8)
        y = torch.einsum("bhij,bjhd->bihd", module.weights(x), value).flatten(2)
        scale, vector = (module.joined_norm.get_parameter(name) for name in ("scale", "gate"))
        y = scale * y / (y.square().mean(-1, keepdim=True) + 1e-8).sqrt() / (1 + (-vector * y).exp())
        return module.out(y if gate is None else y * F.silu(module.gate(x)))

    assert_precise(module(x), formula(module, x), formula(doubled(module), x.double()))


def test_relas_norm_has_the_originals_eps_which_decides_for_small_vectors() -> None:
    """The authors' code (bzhangGo/zero, gated_rms_norm) adds 1e-8 to the mean of squares."""
    norm = GatedRMSNorm(6)
    torch.nn.init.normal_(norm.scale)
    torch.nn.init.normal_(norm.gate)
    scale, gate = norm.scale.tolist(), norm.gate.tolist()
    for size in (1e-5, 1e-4, 1e-3, 1.0):
        x = [size * value for value in (1.0, -2.0, 0.5, 3.0, -1.5, 0.25)]
        rms = math.sqrt(sum(value * value for value in x) / 6 + 1e-8)
        want = [s * value / rms / (1 + math.exp(-g * value)) for s, g, value in zip(scale, gate, x, strict=True)]
        single = torch.tensor(x)
        rms = (single.square().mean() + 1e-8).sqrt()
        plain = norm.scale * single / rms / (1 + (-norm.gate * single).exp())
        assert_precise(norm(single), plain, torch.tensor(want, dtype=torch.float64))


def test_relas_norm_starts_with_a_scale_of_one_and_stands_rows_of_zeros() -> None:
    module = Attention(12, 3, phi="relu", joined_norm="rela", bias=False)
    assert torch.equal(module.joined_norm.scale, torch.ones(12))
    assert 0 < module.joined_norm.gate.abs().max() <= 0.5
    x = torch.randn(2, 4, 12, requires_grad=True)
    out = module(x, attn_mask=torch.zeros(4, 4, dtype=torch.bool))
    out.sum().backward()
    assert not out.any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("phi", ["relu/L", "softmax"])
@pytest.mark.parametrize("kind", ["causal", "padding", "both"])
def test_masks_hide_keys(kind: str, phi: str) -> None:
    module = randomised(Attention(16, 2, phi=phi, qk_norm=True))
    x = torch.randn(2, 6, 16)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    padding = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()[:, None, None]
    seen = {"causal": causal, "padding": padding, "both": causal & padding}[kind]
    mask = None if kind == "causal" else seen
    out = module(x, attn_mask=mask, is_causal=kind == "causal")
    check(out, module, phi, x, None, seen)


def test_queries_keys_and_values_reach_the_operation_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watch(query: Tensor, key: Tensor, value: Tensor, *rest: object, **settings: object) -> Tensor:
        seen.extend([query, key, value])
        return nomax.attention(query, key, value, *rest, **settings)

    monkeypatch.setattr("nomax.nn.attention.attention", watch)
    Attention(24, 3)(torch.randn(2, 7, 24))
    assert [list(x.shape) for x in seen] == [[2, 3, 7, 8]] * 3
    assert len({x.untyped_storage().data_ptr() for x in seen}) == 1
    Attention(24, 3, context_dim=6)(torch.randn(2, 7, 24), torch.randn(2, 5, 6))
    assert len({x.untyped_storage().data_ptr() for x in seen[4:]}) == 1


class Largest(TorchDispatchMode):
    """The largest number of elements that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("phi", ["relu/L", "softmax"])
def test_no_matrix_of_all_pairs_is_ever_made(phi: str) -> None:
    length = 1024
    learned = {} if phi == "softmax" else {"learned_gain": "head", "learned_alpha": "head"}
    module = Attention(16, 2, phi=phi, qk_norm=True, gate="silu", **learned)
    cache = KeyValueCache()
    with Largest() as largest:
        module(torch.randn(1, length, 16), is_causal=True).sum().backward()
        module(torch.randn(1, length, 16)).sum().backward()
        if phi != "softmax":
            module(torch.randn(1, length, 16), return_rows=True)
            with torch.no_grad():
                module(torch.randn(1, length, 16), cache=cache, is_causal=True)
                module(torch.randn(1, 1, 16), cache=cache, is_causal=True)
    assert largest.numel <= 4 * 16 * length < length**2 / 8


@pytest.mark.parametrize("phi", PHIS)
def test_weights_are_those_that_the_output_was_made_with(phi: str) -> None:
    module = randomised(Attention(24, 3, phi=phi))
    x, seen = torch.randn(2, 7, 24), torch.ones(7, 7, dtype=torch.bool).tril()
    weights = module.weights(x, is_causal=True)
    assert list(weights.shape) == [2, 3, 7, 7]
    value = module.qkv(x)[..., 48:].reshape(2, 7, 3, 8)
    joined = torch.einsum("bhij,bjhd->bihd", weights, value).flatten(2)
    check(module.out(joined), module, phi, x, None, seen)
    check(module(x, is_causal=True), module, phi, x, None, seen)
    assert not weights[..., ~seen].any()
    if phi == "softmax":
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 7))


@pytest.mark.parametrize(
    "phi",
    [
        "relu/L",
        "1.5*softplus(x-0.3)/L^0.5",
        "sigmoid(x-log L)",
        "relu(x-sqrt(2 log L))",
        "relu2/L^2, L=keys",
        "relu/L, L=5",
    ],
)
def test_learned_scales_start_as_the_phi_they_replace(phi: str) -> None:
    fixed = Attention(16, 2, phi=phi)
    learned = Attention(16, 2, phi=phi, learned_gain="layer", learned_alpha="head")
    learned.load_state_dict(fixed.state_dict(), strict=False)
    x = torch.randn(2, 6, 16)
    for settings in ({}, {"is_causal": True}, {"attn_mask": torch.rand(2, 1, 6, 6) < 0.5}):
        assert_precise(learned(x, **settings), fixed(x, **settings), doubled(fixed)(x.double(), **settings))
    assert learned.gain.shape == (1,)
    assert learned.alpha.shape == (2,)


@pytest.mark.parametrize("start", ["relu/L", "2*relu/L^0.5", "relu", "sigmoid(x-log L)", "relu/L, L=keys"])
def test_learned_scales_are_a_phi_of_their_own_for_every_head(start: str) -> None:
    gains, alphas = (0.7, -1.3), (0.4, 1.2)
    module = Attention(16, 2, phi=start, learned_gain="head", learned_alpha="head")
    with torch.no_grad():
        module.gain.copy_(torch.tensor(gains))
        module.alpha.copy_(torch.tensor(alphas))
    x, mask = torch.randn(2, 6, 16), torch.rand(2, 1, 6, 6) < 0.5
    weights = module.weights(x, attn_mask=mask)
    phi = nomax.Phi.parse(start)

    def own(module: Attention, x: Tensor, head: int) -> Tensor:
        query, key, _ = module.qkv(x).reshape(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)[:, :, head : head + 1]
        unit = torch.eye(6, dtype=x.dtype).expand(2, 1, 6, 6)
        own = nomax.Phi(phi.activation, alphas[head], gains[head], phi.shift, phi.length)
        return nomax.attention(query, key, unit, mask, phi=own)

    for head in range(2):
        found = weights[:, head : head + 1]
        assert_precise(found, own(module, x, head), own(doubled(module), x.double(), head))


@pytest.mark.parametrize("per", ["layer", "head"])
def test_gradients_of_learned_scales_are_right_also_where_a_query_sees_nothing(per: str) -> None:
    module = Attention(8, 2, phi="softplus/L", learned_gain=per, learned_alpha=per, gate="silu").double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, 4, 4) < 0.6
    mask[0, :, 1] = False
    mask[1] = False

    def call(gain: Tensor, alpha: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"gain": gain, "alpha": alpha}, x, {"attn_mask": mask})

    leaves = [t.detach().clone().requires_grad_() for t in (module.gain * 1.2, module.alpha * 0.8, x)]
    assert torch.autograd.gradcheck(call, leaves)


def test_a_query_that_sees_nothing_is_exactly_zero_and_moves_nothing() -> None:
    module = Attention(8, 2, learned_gain="head", learned_alpha="head", bias=False)
    x = torch.randn(1, 4, 8, requires_grad=True)
    out, rows = module(x, attn_mask=torch.zeros(4, 4, dtype=torch.bool), return_rows=True)
    (out.sum() + rows.sum.sum() + rows.entropy.sum()).backward()
    assert not out.any()
    assert not rows.sum.any()
    assert not rows.entropy.any()
    for grad in (module.gain.grad, module.alpha.grad, x.grad):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize(
    "learned",
    [{}, {"learned_gain": "head"}, {"learned_alpha": "layer"}, {"learned_gain": "layer", "learned_alpha": "head"}],
)
@pytest.mark.parametrize(
    "phi", ["relu/L", "2*sigmoid(x-log L)/L^0.5", "relu(x-0.2*sqrt(2 log L))", "softplus/L, L=keys"]
)
def test_rows_are_those_of_the_weights(phi: str, learned: dict[str, str]) -> None:
    module = Attention(16, 2, phi=phi, **learned)
    for parameter, value in ((module.gain, 1.7), (module.alpha, 0.6)):
        if parameter is not None:
            torch.nn.init.constant_(parameter, value)
    x, mask = torch.randn(2, 30, 16), torch.rand(2, 1, 30, 30) < 0.7
    out, rows = module(x, attn_mask=mask, return_rows=True)
    torch.testing.assert_close(out, module(x, attn_mask=mask))
    weights = doubled(module).weights(x.double(), attn_mask=mask)
    module.backend = "reference"  # which also has the entropy of weights from sums over h
    _, plain = module(x, attn_mask=mask, return_rows=True)
    assert_precise(rows.sum, plain.sum, weights.sum(-1))
    assert_precise(rows.entropy, plain.entropy, torch.special.entr(weights).sum(-1))


def test_softmax_has_rows_but_nothing_to_learn() -> None:
    _, rows = Attention(16, 2, phi="softmax")(torch.randn(1, 5, 16), return_rows=True)
    torch.testing.assert_close(rows.sum, torch.ones(1, 2, 5))
    with pytest.raises(ValueError, match="softmax"):
        Attention(16, 2, phi="softmax", learned_alpha="head")


def test_projections_start_xavier_uniform_each_on_its_own_and_biases_at_zero() -> None:
    module = Attention(64, 4, gate="silu")
    cross = Attention(64, 4, context_dim=32)
    matrices = [
        *module.qkv.weight.chunk(3),
        module.out.weight,
        module.gate.weight,
        cross.q.weight,
        *cross.kv.weight.chunk(2),
    ]
    for matrix in matrices:
        bound = math.sqrt(6 / sum(matrix.shape))
        assert 0.98 * bound < matrix.abs().max() <= bound
        assert float(matrix.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=five_errors(matrix.numel()))
    for parameters in (module.named_parameters(), cross.named_parameters()):
        assert not any(p.any() for name, p in parameters if name.endswith("bias"))


def test_what_is_printed_says_the_phi() -> None:
    text = repr(Attention(16, 2, phi="1.5*relu/L^0.5", gate="sigmoid", backend="cpu", dropout=0.1))
    assert "16, heads=2, phi='1.5*relu/L^0.5', gate='sigmoid', backend='cpu', dropout=0.1" in text


def test_the_backend_is_the_one_asked_for() -> None:
    x = torch.randn(2, 7, 16)
    modules = {name: Attention(16, 2, backend=name) for name in ("cpu", "reference", "warp")}
    for module in modules.values():
        module.load_state_dict(modules["cpu"].state_dict())
    assert_precise(modules["cpu"](x), modules["reference"](x), doubled(modules["reference"])(x.double()))
    with pytest.raises(ValueError, match="backend='warp'"):
        modules["warp"](x)


def test_dropout_is_for_training_only() -> None:
    module, x = Attention(16, 2, dropout=0.5), torch.randn(1, 9, 16)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize(
    "settings", [{}, {"qk_norm": True, "gate": "silu", "learned_gain": "layer", "learned_alpha": "head"}]
)
def test_bfloat16_by_autocast_or_by_conversion_is_the_same_to_rounding(settings: dict[str, object]) -> None:
    module, x = Attention(32, 4, **settings), torch.randn(2, 20, 32)
    want = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        casted = module(x)
    converted = module.bfloat16()(x.bfloat16())
    assert casted.dtype == converted.dtype == torch.bfloat16
    for got in (casted, converted):
        assert (got - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(10, 3), "dim=10 must be a positive multiple of heads=3"),
        (lambda: Attention(0, 1), "dim=0"),
        (lambda: Attention(8, 2, gate="relu"), "gate='relu' is unknown; choose one of silu, sigmoid, identity"),
        (lambda: Attention(8, 2, learned_gain="token"), 'learned_gain=\'token\' must be "layer", "head"'),
        (lambda: Attention(8, 2, dropout=2), "dropout=2"),
        (lambda: Attention(8, 2, joined_norm="rms"), "joined_norm='rms' must be \"rela\""),
        (lambda: Attention(8, 2, phi="relu/l"), "did you mean 'relu/L'"),
        (lambda: Attention(8, 2)(torch.randn(4, 8)), r"x must be \[batch, positions, 8\], got \[4, 8\]"),
        (lambda: Attention(8, 2)(torch.randn(1, 4, 9)), r"got \[1, 4, 9\]"),
        (lambda: Attention(8, 2)(torch.randn(1, 4, 8), torch.randn(1, 4, 8)), "context_dim"),
        (lambda: Attention(8, 2, context_dim=6)(torch.randn(1, 4, 8)), r"needs context, \[batch, keys, 6\]"),
        (
            lambda: Attention(8, 2, context_dim=6)(torch.randn(1, 4, 8), torch.randn(1, 4, 8)),
            r"context must be \[batch, positions, 6\]",
        ),
        (
            lambda: Attention(8, 2)(torch.randn(1, 4, 8), attn_mask=torch.ones(4, 4).bool(), is_causal=True),
            "exclude each other",
        ),
    ],
)
def test_a_slip_is_answered_in_words(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
