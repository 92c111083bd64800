"""Calibration: gains and shifts are the best there are, and padding has no part in them."""

import pytest
import torch
from torch import nn

import nomax
from nomax.conversion.calibrate import as_softmax, calibrate, inner_attentions
from nomax.nn import InnerAttention

DIM, HEADS = 16, 2


class Layer(nn.Module):
    """A residual attention layer with scores that are far from uniform."""

    def __init__(self, phi):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.inner_attention = InnerAttention(phi, HEADS)
        with torch.no_grad():
            self.qkv.weight[: 2 * DIM] *= 4

    def forward(self, x, mask):
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        return x + self.out(self.inner_attention(query, key, value, mask).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self, phi="relu/L", depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(phi) for _ in range(depth))

    def forward(self, x, attention_mask=None):
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_the_fit_is_the_best_on_a_fine_grid():
    model, x = Encoder(depth=1), torch.randn(4, 12, DIM)
    (fit,) = calibrate(model, [x])
    query, key, value = model.layers[0].qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).double().unbind(2)
    scores = query @ key.transpose(-1, -2) / (DIM // HEADS) ** 0.5
    wanted = scores.softmax(-1) @ value
    errors = []
    for shift in torch.linspace(-6, 8, 400):
        out = (scores + shift).relu() @ value / 12
        # torch's least squares has the best gain of each head
        best = [torch.linalg.lstsq(out[:, h].reshape(-1, 1), wanted[:, h].reshape(-1, 1)) for h in range(HEADS)]
        left = torch.stack([(out[:, h] * best[h].solution.item() - wanted[:, h]).square().sum() for h in range(HEADS)])
        errors.append(left / wanted.square().sum((0, 2, 3)))
    assert (fit.error <= torch.stack(errors).amin(0) * 1.02).all()
    inner = model.layers[0].inner_attention
    out = inner(query.float(), key.float(), value.float()).double()
    left = (out - wanted).square().sum((0, 2, 3)) / wanted.square().sum((0, 2, 3))
    torch.testing.assert_close(left, fit.error.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("phi", ["relu/L", "sigmoid(x-log L)", "relu2/L^2"])
@pytest.mark.parametrize("order", ["in turn", "at once"])
def test_a_calibrated_model_is_closer_to_its_original(phi, order):
    model, x = Encoder(phi), torch.randn(8, 12, DIM)
    with as_softmax(inner_attentions(model).values()):
        original = model(x)
    before = (model(x) - original).norm()
    calibrate(model, [x[:4], x[4:]], order=order)
    assert (model(x) - original).norm() < 0.7 * before


class Alone(nn.Module):
    """An attention without projections, of queries and keys that are given."""

    def __init__(self):
        super().__init__()
        self.inner_attention = InnerAttention("relu/L", HEADS)

    def forward(self, query, key, value, mask=None):
        return self.inner_attention(query, key, value, mask)


def test_a_head_that_looks_at_one_key_of_short_and_long_texts_does_not_divide_by_l():
    def text(length, padding=0):
        query, key, value = torch.randn(3, 4, HEADS, length, 8).unbind(0)
        query[..., 0], key[..., 0] = 8, -6
        key[:, :, 1, 0] = 6  # every query looks at the second key
        shown = torch.arange(length) < length - padding
        return query, key, value, shown.expand(4, 1, 1, -1)

    batches = [text(4), text(25, padding=5)]
    plain, model = Alone(), Alone()
    (before,) = calibrate(plain, batches)
    (fit,) = calibrate(model, batches, alpha=True)
    assert (before.error > 0.1).all()
    assert (fit.error < 0.05 * before.error).all()
    assert fit.alpha.tolist() == [0.0] * HEADS

    left, whole = torch.zeros(2, HEADS).double()
    for query, key, value, shown in batches:
        count = int(shown[0].sum())
        query, key, value = (x.double() for x in (query, key[:, :, :count], value[:, :, :count]))
        scores = query @ key.mT / 8**0.5
        out = (scores + fit.shift.double().view(-1, 1, 1)).relu() @ value * fit.gain.double().view(-1, 1, 1)
        error = (out - scores.softmax(-1) @ value)[:, :, :count].square()
        left += error.sum((0, 2, 3))
        whole += (scores.softmax(-1) @ value)[:, :, :count].square().sum((0, 2, 3))
    torch.testing.assert_close(left / whole, fit.error.double(), rtol=1e-3, atol=1e-6)


def test_padding_does_not_count():
    model, x = Encoder(), torch.randn(3, 9, DIM)
    fits = calibrate(model, [x])
    padded = torch.cat([x, 50 * torch.randn(3, 4, DIM)], 1)
    mask = (torch.arange(13) < 9).expand(3, -1).long()
    other = Encoder()
    other.load_state_dict({name: value for name, value in model.state_dict().items() if "inner" not in name})
    for fit, again in zip(fits, calibrate(other, [{"x": padded, "attention_mask": mask}]), strict=True):
        # The searches begin at other samples of the scores, so they end at neighbours.
        torch.testing.assert_close(again.error, fit.error, rtol=0.02, atol=1e-3)


def test_as_softmax_is_softmax_and_gives_everything_back():
    model, x = Encoder(), torch.randn(2, 9, DIM)
    calibrate(model, [x])
    before, keys = model(x), list(model.state_dict())
    with as_softmax(inner_attentions(model).values()):
        inside = model(x)
    softmax = Encoder("softmax")
    softmax.load_state_dict({name: value for name, value in model.state_dict().items() if "inner" not in name})
    assert torch.equal(inside, softmax(x))
    assert torch.equal(model(x), before)
    assert list(model.state_dict()) == keys


def test_a_model_in_training_stays_so_and_keeps_its_weights():
    model, x = Encoder().train(), torch.randn(2, 9, DIM)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibrate(model, [x])
    assert model.training
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_grouped_heads_and_causal_calls_are_calibrated():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner_attention = InnerAttention("relu/L", 4)

        def forward(self, query, key, value):
            return self.inner_attention(3 * query, key, value, is_causal=True, enable_gqa=True)

    model = Decoder()
    call = (torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8))
    with as_softmax([model.inner_attention]):
        original = model(*call)
    before = (model(*call) - original).norm()
    calibrate(model, [call])
    assert (model(*call) - original).norm() < before


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="at least one batch"):
        calibrate(Encoder(), [])
    with pytest.raises(ValueError, match=r"convert it first, with nomax\.convert"):
        calibrate(Encoder("softmax"), [torch.randn(1, 4, DIM)])
    model = Encoder()
    model.layers[0].inner_attention.num_heads = None
    with pytest.raises(ValueError, match="does not know its number of heads"):
        calibrate(model, [torch.randn(1, 4, DIM)])
    assert nomax.calibrate is calibrate
