"""A ViT prepared for inference: the function of its model, whatever its settings, and nothing that it cannot do."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from precision import assert_precise, doubled
from torch import Tensor, nn

from nomax.models import ViT, prepared, vit
from nomax.nn import layers
from nomax.ops import rowwise

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "class token": {"pool": "tok"},
    "class token, not pooled": {"class_token": True},
    "first patch": {"pool": "0"},
    "first patch after a class token": {"pool": "0", "class_token": True},
    "qk_norm and gate": {"qk_norm": True, "gate": "silu", "pool": "tok"},
    "learned": {"learned_gain": "head", "learned_alpha": "layer", "learned_shift": "head"},
    "learned, class token": {"learned_gain": "layer", "learned_alpha": "head", "learned_shift": "layer", "pool": "tok"},
    "norm after pooling": {"norm": "pooled", "gelu": "exact", "posemb": "sincos2d"},
    "class token, norm after pooling": {"norm": "pooled", "pool": "tok", "rep_size": True},
    "features": {"num_classes": 0, "rep_size": 24},
    "softmax": {"phi": "softmax", "pool": "tok"},
    "L of all keys": {"phi": "sigmoid(x-log L)", "dropout": 0.5},
}


def made(variant: str = "pico/4", **settings: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(variant, image_size=20, **{"num_classes": 10, **settings}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.02, std=0.2)
    return model


def images(batch: int = 3) -> Tensor:
    return torch.rand(batch, 3, 20, 20) * 2 - 1


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_prepared_model_gives_the_models_logits(settings: dict[str, Any], batch: int) -> None:
    model, x = made(**settings), images(batch)
    with torch.inference_mode():
        logits = model.prepared()(x)
        assert_precise(logits, model(x), doubled(model)(x.double()))


@pytest.mark.parametrize("fast", [True, False], ids=["CPU with bfloat16", "CPU without"])
@pytest.mark.parametrize("name", ["plain", "class token", "qk_norm and gate", "learned, class token"])
def test_bfloat16_is_as_exact_as_autocast(name: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = frozenset() if fast else frozenset({torch.bfloat16})
    monkeypatch.setattr(prepared, "SLOW", slow)
    monkeypatch.setattr(layers, "SLOW", slow)
    model, x = made(**SETTINGS[name]), images(5)
    ready = model.prepared(torch.bfloat16)
    assert ready.dtype == (torch.bfloat16 if fast else torch.float32)
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            plain = model(x)
        logits = ready(x)
        assert logits.dtype == torch.float32
        assert_precise(logits, plain.float(), doubled(model)(x.double()))


def test_the_tokens_that_nobody_reads_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    gelu = rowwise.gelu
    monkeypatch.setattr(prepared, "gelu", lambda x, *rest, **also: (rows.append(x.shape[1]), gelu(x, *rest, **also))[1])
    made(pool="tok").prepared()(images())
    assert rows == [26, 26, 26, 1]


def test_autocast_around_a_prepared_model_changes_nothing() -> None:
    ready, x = made().prepared(), images()
    with torch.autocast("cpu", torch.bfloat16):
        inside = ready(x)
    assert torch.equal(inside, ready(x))


def test_preparing_leaves_the_model_alone_and_later_changes_are_not_seen() -> None:
    model, x = made(pool="tok", learned_gain="head").train(), images()
    before = copy.deepcopy(model.state_dict())
    ready = model.prepared()
    logits = ready(x)
    assert model.training
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(ready(x), logits)


def test_features_are_the_input_of_the_head() -> None:
    model, x = made(rep_size=True, pool="tok"), images()
    with torch.inference_mode():
        assert_precise(model.prepared().features(x), model.features(x), doubled(model).features(x.double()))


@pytest.mark.parametrize(
    ("use", "answer"),
    [
        (lambda ready: ready.train(), "cannot be trained"),
        (lambda ready: ready.requires_grad_(), "cannot be trained"),
        (lambda ready: ready(images().requires_grad_()), "has no gradients"),
        (lambda ready: ready.state_dict(), "no state to save"),
        (lambda ready: ready.load_state_dict({}), "takes no other weights"),
        (lambda ready: ready.to("meta"), "stays on the CPU"),
        (lambda ready: ready.bfloat16(), "stays on the CPU"),
        (copy.deepcopy, "neither copied nor pickled"),
        (pickle.dumps, "neither copied nor pickled"),
    ],
)
def test_what_a_prepared_model_cannot_do_it_says(use: Callable[[Any], Any], answer: str) -> None:
    ready = made().prepared()
    with pytest.raises(RuntimeError, match=f"{answer}.*prepare that one again"):
        use(ready)
    assert ready.eval() is ready
    assert not ready.training


def test_what_cannot_be_prepared_or_computed_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch.float16 must be torch.float32 or torch.bfloat16"):
        made().prepared(torch.float16)
    with torch.device("meta"):
        elsewhere = vit.ViT("pico/4", image_size=20)
    with pytest.raises(ValueError, match=r"the model is on meta: call model.cpu\(\) first"):
        elsewhere.prepared()
    with pytest.raises(ValueError, match=r"images must be \[batch, 3, 20, 20\] on the CPU .* got \[1, 3, 24, 24\]"):
        made().prepared()(torch.zeros(1, 3, 24, 24))


def test_a_prepared_model_shows_what_it_is() -> None:
    assert "pico/4, phi=relu/L, products in float32" in repr(made().prepared())
