"""nn.InnerAttention against the formula in float64: gain, shift, qk-norm, and how a gain is folded away."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from precision import assert_precise
from torch import Tensor, nn

import nomax
from nomax.nn import Attention, InnerAttention

B, H, L, D = 2, 3, 7, 5


def inputs(requires_grad: bool = False) -> list[Tensor]:
    return [x.clone().requires_grad_(requires_grad) for x in torch.randn(3, B, H, L, D)]


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, gain: Tensor, shift: Tensor, scale: float) -> Tensor:
    """Σ_j relu(score + shift)·v_j · gain / L, head by head and with whole matrices."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale + shift.to(q.dtype).view(1, H, 1, 1)
    weights = scores.clamp(min=0) * seen / seen.sum(-1, keepdim=True)
    return torch.einsum("bhij,bhjd->bhid", weights, v) * gain.to(q.dtype).view(1, H, 1, 1)


PADDING = torch.tensor([L, 4]).view(B, 1, 1, 1) > torch.arange(L)


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, torch.ones(L, L)),
        ({"is_causal": True}, torch.ones(L, L).tril()),
        ({"attn_mask": PADDING}, PADDING.expand(B, 1, L, L).float()),
        ({"attn_mask": torch.ones(L, L).tril().bool(), "scale": 0.7}, torch.ones(L, L).tril()),
    ],
)
def test_gain_and_shift_are_per_head_under_every_mask_and_have_gradients(settings, seen):
    inner = InnerAttention("relu/L", H, gain=True, shift=True)
    nn.init.normal_(inner.gain, 1.0)
    nn.init.normal_(inner.shift)
    q, k, v = inputs(requires_grad=True)
    scale = settings.get("scale", 1 / math.sqrt(D))
    out = inner(q, k, v, **settings)
    expected = [
        formula(*(x.detach().to(dtype) for x in (q, k, v)), seen.to(dtype), inner.gain, inner.shift, scale).detach()
        for dtype in (torch.float32, torch.float64)
    ]
    assert_precise(out.detach(), *expected)
    with torch.no_grad():  # the kernel's own gain and shift
        assert_precise(inner(q, k, v, **settings), *expected)

    weight = torch.randn(out.shape)
    (out * weight).sum().backward()
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    gain, shift = (x.detach().double().requires_grad_() for x in (inner.gain, inner.shift))
    (formula(*leaves, seen.double(), gain, shift, scale) * weight).sum().backward()
    for ours, theirs in ((inner.gain, gain), (inner.shift, shift), (q, leaves[0]), (k, leaves[1]), (v, leaves[2])):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("phi", ["relu/L", "identity/L", "sigmoid(x-log L)", "relu2/L^2", "softmax"])
def test_with_and_without_gradients_it_is_the_same_function_also_of_packed_sequences(phi):
    row_map = phi == "softmax"
    inner = InnerAttention(phi, H, gain=True, shift=not row_map)
    for parameter in inner.parameters():
        nn.init.normal_(parameter, 1.0)
    q, k, v = (x[:1] for x in inputs())
    bounds = torch.tensor([0, 3, L])
    for settings in ({}, {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}):
        with_gradients = inner(q, k, v, **settings)
        assert with_gradients.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(inner(q, k, v, **settings), with_gradients.detach(), rtol=1e-5, atol=1e-6)


def test_without_learned_parts_it_is_attention_and_has_no_state():
    inner = InnerAttention("gelu/L", H)
    q, k, v = inputs()
    assert inner.state_dict() == {}
    assert torch.equal(inner(q, k, v, PADDING), nomax.attention(q, k, v, PADDING, phi="gelu/L"))
    assert repr(inner) == "InnerAttention(phi='gelu/L', num_heads=3)"


def test_groups_of_heads_share_keys_and_have_shifts_of_their_own():
    inner = InnerAttention("relu/L", 6, shift=True)
    nn.init.normal_(inner.shift)
    q, (k, v) = torch.randn(2, 6, L, D), torch.randn(2, 2, 3, L, D)
    whole = inner(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    assert torch.equal(inner(q, k, v, enable_gqa=True), whole)


def test_qk_norm_normalises_each_head():
    inner = InnerAttention("relu/L", H, head_dim=D, qk_norm=True)
    q, k, v = inputs()
    normal = [F.layer_norm(x, (D,), eps=1e-6) for x in (q, k)]
    torch.testing.assert_close(inner(q, k, v), nomax.attention(*normal, v, phi="relu/L"))
    assert set(inner.state_dict()) == {"query_norm.weight", "key_norm.weight"}
    with pytest.raises(ValueError, match="needs head_dim"):
        InnerAttention("relu/L", H, qk_norm=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_folded_gain_computes_the_same(dim):
    inner = InnerAttention("relu/L", H, gain=True, shift=True)
    nn.init.normal_(inner.gain)
    projection = nn.Linear(H * D, 11)
    if dim == 0:
        projection.weight = nn.Parameter(projection.weight.detach().T.contiguous())
    q, k, v = inputs()

    def output() -> Tensor:
        joined = inner(q, k, v).transpose(1, 2).flatten(2)
        weight = projection.weight if dim == 1 else projection.weight.T
        return F.linear(joined, weight, projection.bias).detach()

    before = output()
    inner.fold_gain(projection, dim)
    assert inner.gain is None
    assert set(inner.state_dict()) == {"shift"}
    torch.testing.assert_close(output(), before)
    inner.learn(torch.ones(H), None)
    with pytest.raises(ValueError, match="does not follow the joined heads"):
        inner.fold_gain(nn.Linear(H * D + 1, 11))


@pytest.mark.parametrize("phi", ["relu/L", "relu/L^0.5, L=keys", "softplus"])
@pytest.mark.parametrize("case", ["whole", "causal", "padded", "packed", "grouped"])
def test_a_learned_power_of_l_is_that_of_a_phi_per_head_in_training_and_inference(phi, case):
    inner = InnerAttention(phi, H)
    alpha = torch.tensor([0.0, 0.4, 1.3])
    inner.learn(torch.tensor([1.5, -1.0, 0.5]), torch.tensor([0.1, 0.5, -0.2]), alpha)
    q, k, v = inputs()
    settings = {
        "causal": {"is_causal": True}, "padded": {"attn_mask": PADDING}, "grouped": {"enable_gqa": True}
    }.get(case, {})  # fmt: skip
    if case == "grouped":
        k, v = k[:, :1], v[:, :1]
    if case == "packed":
        q, k, v = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (q, k, v))  # two sequences after each other
        bounds = torch.tensor([0, 4, 2 * L], dtype=torch.int32)
        settings = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "is_causal": True}
    given = nomax.Phi.parse(phi)

    def by_head(dtype: torch.dtype) -> Tensor:
        """Every head with the φ that it amounts to."""
        heads = []
        for head, (gain, shift, power) in enumerate(zip(inner.gain, inner.shift, alpha, strict=True)):
            own = replace(given, alpha=float(power), gain=float(gain), shift=float(shift))
            single = InnerAttention(own, 1)
            group = slice(0, 1) if case == "grouped" else slice(head, head + 1)
            heads.append(single(*(x.to(dtype) for x in (q[:, head : head + 1], k[:, group], v[:, group])), **settings))
        return torch.cat(heads, 1)

    with torch.no_grad():
        expected = by_head(torch.float32), by_head(torch.float64)
        assert_precise(inner(q, k, v, **settings), *expected)  # by the kernel
    out = inner(q, k, v, **settings)
    assert_precise(out.detach(), *expected)
    out.square().sum().backward()
    assert (inner.alpha.grad != 0).all()


def test_what_does_not_fit_is_refused():
    inner = InnerAttention("relu/L", H)
    with pytest.raises(ValueError, match=r"gain must be \[num_heads\] = \[3\], got \[4\]"):
        inner.learn(torch.ones(4), None)
    with pytest.raises(ValueError, match='phi="softmax" normalises each row, so it takes no shift'):
        InnerAttention("softmax", H, shift=True)
    with pytest.raises(ValueError, match="num_heads=0"):
        InnerAttention("relu/L", 0)


@pytest.mark.parametrize("per", ["layer", "head"])
@pytest.mark.parametrize("context_dim", [None, 9])
def test_attention_learns_a_shift_and_folds_its_gain(per, context_dim):
    phi = "2*relu(x+0.5)/L"
    layer = Attention(12, 3, phi=phi, learned_gain=per, learned_shift=per, context_dim=context_dim)
    x, context = torch.randn(2, 6, 12), None if context_dim is None else torch.randn(2, 4, context_dim)
    plain = Attention(12, 3, phi=phi, context_dim=context_dim)
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x, context), plain(x, context))  # both start where φ is

    nn.init.normal_(layer.gain)
    nn.init.constant_(layer.shift, 0.25)
    moved = Attention(12, 3, phi="2*relu(x+0.75)/L", learned_gain=per, context_dim=context_dim)
    moved.load_state_dict({name: x for name, x in layer.state_dict().items() if name != "shift"})
    out = layer(x, context)
    torch.testing.assert_close(out, moved(x, context))
    out.sum().backward()
    assert layer.shift.grad.abs().sum() > 0
    layer.fold_gain()
    assert "gain" not in layer.state_dict()
    torch.testing.assert_close(layer(x, context), out)
