"""Samples of a language model: as likely as the model says, the same for the same seed, and within their bounds."""

import math

import pytest
import torch

from nomax.models import ReLUFormer
from nomax.models.decoding import sample, stream


def made(**changes: object) -> ReLUFormer:
    settings = {
        "dim": 16,
        "heads": 2,
        "encoder_layers": 0,
        "decoder_layers": 2,
        "slots": 12,
        "max_length": 40,
        **changes,
    }
    return ReLUFormer(9, **settings).double().eval().requires_grad_(False)


PROMPT = torch.tensor([[5, 4, 8], [3, 3, 6]])


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}])
def test_without_chance_every_token_is_the_likeliest_after_the_whole_text(
    positions: str, greedy: dict[str, float]
) -> None:
    model = made(positions=positions)
    for prompt, continued in zip(PROMPT.tolist(), sample(model, PROMPT, 12, **greedy), strict=True):
        text: list[int] = []
        while len(text) < 12:
            logits = model(torch.tensor([[1, *prompt, *text]]))[0, -1]
            logits[:2] = -math.inf
            if (token := int(logits.argmax())) == 2:
                break
            text.append(token)
        assert continued == text


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 4)])
def test_tokens_come_as_often_as_the_model_says(temperature: float, top_k: int | None) -> None:
    model, count = made(), 20_000
    texts = sample(model, PROMPT[:1].expand(count, -1), 1, temperature=temperature, top_k=top_k)
    logits = model(torch.tensor([[1, *PROMPT[0].tolist()]]))[0, -1] / temperature
    logits[:2] = -math.inf
    if top_k is not None:
        logits[logits < logits.sort(descending=True)[0][top_k - 1]] = -math.inf
    for token, p in enumerate(logits.softmax(0).tolist()):
        times = sum(text == [token] for text in texts) if token != 2 else texts.count([])
        assert abs(times - count * p) <= 4.5 * math.sqrt(count * p * (1 - p))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, None, 0.5), (2.0, None, 0.9), (0.7, 5, 0.6)])
def test_top_p_leaves_the_likeliest_tokens_that_reach_it_together(
    temperature: float, top_k: int | None, top_p: float
) -> None:
    model, count = made(), 20_000
    texts = sample(model, PROMPT[:1].expand(count, -1), 1, temperature=temperature, top_k=top_k, top_p=top_p)
    logits = model(torch.tensor([[1, *PROMPT[0].tolist()]]))[0, -1].tolist()
    ranked = sorted(range(2, 9), key=lambda token: -logits[token])[:top_k]
    weights = [math.exp(logits[token] / temperature) for token in ranked]
    kept: dict[int, float] = {}
    for token, weight in zip(ranked, weights, strict=True):
        if sum(kept.values()) / sum(weights) < top_p:
            kept[token] = weight
    assert 1 < len(kept) < len(ranked)
    for token in range(9):
        p = kept.get(token, 0) / sum(kept.values())
        times = sum(text == [token] for text in texts) if token != 2 else texts.count([])
        assert abs(times - count * p) <= 4.5 * math.sqrt(count * p * (1 - p))


def test_the_stream_is_the_sample_token_by_token() -> None:
    model = made().train()
    steps = [step.tolist() for step in stream(model, PROMPT, 20, seed=4)]
    texts = [[token for token in text if token] for text in zip(*steps, strict=True)]
    assert texts == sample(model, PROMPT, 20, seed=4)
    assert model.training
    assert len(set(map(len, texts))) == 2  # one has come to its end before the other


def test_a_seed_gives_its_text_again_and_another_seed_another() -> None:
    model = made()
    one, again, other = (sample(model, PROMPT, 20, seed=seed) for seed in (1, 1, 2))
    assert one == again != other


def test_texts_stop_at_their_end_and_hold_no_special_token() -> None:
    texts = sample(made(), PROMPT[:1].expand(200, -1), 30)
    assert min(map(len, texts)) < 5
    assert len(set(map(len, texts))) > 3
    assert all(3 <= token < 9 for text in texts for token in text)


def test_a_prompt_may_be_empty_and_max_new_nothing() -> None:
    model = made()
    assert len(sample(model, torch.zeros(2, 0, dtype=torch.int64), 5)) == 2
    assert sample(model, PROMPT, 0) == [[], []]
    assert len(sample(model, PROMPT, 37)) == 2


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 1}])
def test_a_broken_model_is_told(settings: dict[str, float]) -> None:
    model = made()
    model.decoder[0].memory.keys.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        sample(model, PROMPT, 5, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new": 38}, "max_new=38 must be from 0 to 37: the model's max_length is 40, and the prompt has 3 tokens"),
        ({"max_new": 2.5}, "max_new=2.5 must be from 0 to 37"),
        ({"temperature": -1}, "temperature=-1 must be from 1e-06 to 1e\\+06, or 0"),
        ({"temperature": math.inf}, "temperature=inf must be"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0}, "top_p=0 must be more than 0 and at most 1"),
        ({"prompt": PROMPT.float()}, "prompt must be .* token ids, got torch.float32"),
        ({"model": made(encoder_layers=1)}, "this model translates: use beam_search"),
    ],
)
def test_a_slip_in_the_arguments_is_answered_in_words(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(**{"model": made(), "prompt": PROMPT, "max_new": 5, **settings})
