"""Beam search against a search written plainly, against all translations there are, and against itself elsewhere."""

import itertools
import math

import pytest
import torch
from precision import assert_rounded
from torch import Tensor

from nomax.models import ReLUFormer, decoding
from nomax.models.decoding import CopyingCache, Hypothesis, TreeCache, beam_search

PADDING, BEGIN, END = 0, 1, 2
KINDS = {
    "ReLUFormer": {},
    "softmax": {"phi": "softmax", "learned_gain": None},
    "rotary": {"positions": "rotary"},
    "post-norm, relu/L": {"norm": "post", "phi": "relu/L", "learned_gain": None},
}


def made(vocabulary: int = 9, **changes: object) -> ReLUFormer:
    settings = {
        "dim": 16,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "slots": 12,
        "max_length": 64,
        **changes,
    }
    model = ReLUFormer(vocabulary, **settings).double().eval()
    with torch.no_grad():
        model.embedding.weight *= 1.5  # more decided than a new model, so that beams differ
    return model.requires_grad_(False)


def padded(*texts: list[int]) -> Tensor:
    longest = max(map(len, texts))
    return torch.tensor([text + [PADDING] * (longest - len(text)) for text in texts])


SOURCES = [[5, 4, 8, 7, 3, 2], [3, 2], [8, 8, 6, 2], [4, 6, 7, 2]]


def log_probabilities(model: ReLUFormer, source: list[int], *texts: list[int]) -> Tensor:
    """Those of each text's next token, for texts of one length, computed from the whole texts, without a cache."""
    logits = model(torch.tensor([source] * len(texts)), torch.tensor([[BEGIN, *text] for text in texts]))[:, -1]
    logits[:, [PADDING, BEGIN]] = -math.inf
    return logits.log_softmax(1)


def normalised(total: float, tokens: int, penalty: float) -> float:
    return total / ((5 + tokens) / 6) ** penalty


def plain_search(model: ReLUFormer, source: list[int], beams: int, penalty: float, limit: int) -> list[Hypothesis]:
    """Beam search for one sentence as one would write it down."""
    alive, ended = [(0.0, [])], []
    for length in range(1, limit + 1):
        extensions = []
        rows = log_probabilities(model, source, *(text for _, text in alive)).tolist()
        for (total, text), row in zip(alive, rows, strict=True):
            for token, log_p in enumerate(row):
                if token == END or (length < limit and log_p > -math.inf):
                    extensions.append((total + log_p, [*text, token]))
        extensions.sort(key=lambda extension: -extension[0])
        ended += [(normalised(t, length, penalty), text[:-1]) for t, text in extensions[:beams] if text[-1] == END]
        ended = sorted(ended, key=lambda hypothesis: -hypothesis[0])[:beams]
        alive = [extension for extension in extensions if extension[1][-1] != END][:beams]
        hope = normalised(alive[0][0], limit, penalty) if alive else -math.inf
        if len(ended) == beams or (ended and ended[0][0] >= hope):
            break
    return [Hypothesis(text, score) for score, text in ended]


def assert_same(hypotheses: list[Hypothesis], want: list[Hypothesis]) -> None:
    assert [hypothesis.tokens for hypothesis in hypotheses] == [hypothesis.tokens for hypothesis in want]
    assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([hypothesis.score for hypothesis in want])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beams", [1, 2, 5])
def test_a_batch_gives_what_a_plain_search_without_caches_gives_for_each_sentence(kind: str, beams: int) -> None:
    model = made(**KINDS[kind])
    translations = beam_search(model, padded(*SOURCES), beams=beams)
    for source, hypotheses in zip(SOURCES, translations, strict=True):
        assert_same(hypotheses, plain_search(model, source, beams, 0.6, limit=10 + 2 * len(source)))


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_length_penalty_and_max_length_are_as_in_the_plain_search(penalty: float) -> None:
    model = made()
    translations = beam_search(model, padded(*SOURCES), beams=3, length_penalty=penalty, max_length=7)
    for source, hypotheses in zip(SOURCES, translations, strict=True):
        assert_same(hypotheses, plain_search(model, source, 3, penalty, limit=7))


@pytest.mark.parametrize("kind", ["ReLUFormer", "rotary"])
def test_one_beam_takes_the_likeliest_token_until_the_end(kind: str) -> None:
    model = made(**KINDS[kind])
    for source, hypotheses in zip(SOURCES, beam_search(model, padded(*SOURCES), beams=1, max_length=15), strict=True):
        text: list[int] = []
        while len(text) < 14 and (token := int(log_probabilities(model, source, text)[0].argmax())) != END:
            text.append(token)
        assert [hypothesis.tokens for hypothesis in hypotheses] == [text]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("kind", ["ReLUFormer", "rotary"])
def test_with_enough_beams_the_best_of_all_translations_is_found(kind: str, penalty: float) -> None:
    model, limit, source = made(vocabulary=6, **KINDS[kind]), 4, [3, 5, 4, 2]
    rows, everything = {}, {}
    for length in range(limit):
        texts = list(itertools.product(range(3, 6), repeat=length))
        rows |= dict(zip(texts, log_probabilities(model, source, *texts).tolist(), strict=True))
        for text in itertools.product(range(3, 6), repeat=length):
            whole = [*text, END]
            total = sum(rows[tuple(whole[:i])][whole[i]] for i in range(length + 1))
            everything[text] = normalised(total, length + 1, penalty)
    best = max(everything, key=lambda text: everything[text])
    settings = {"beams": len(everything), "length_penalty": penalty, "max_length": limit}
    hypotheses = beam_search(model, torch.tensor([source]), **settings)[0]
    assert hypotheses[0].tokens == list(best)
    assert hypotheses[0].score == pytest.approx(everything[best])
    assert all(hypothesis.score == pytest.approx(everything[tuple(hypothesis.tokens)]) for hypothesis in hypotheses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cached_decoding_gives_the_logits_of_the_whole_text_at_every_step(kind: str, dtype: torch.dtype) -> None:
    model = made(**KINDS[kind]).to(dtype)
    source, target = padded(*SOURCES), torch.randint(3, 9, (4, 11))
    want, caches, encoded = model(source, target), model.caches(), model.encode(source)
    steps = [1, 1, 4, 1, 2, 1, 1]
    logits = [model.decode(part, encoded, caches) for part in target.split(steps, dim=1)]
    # Of the same numbers, in float64, the order of additions differs: by a hundred roundings at most.
    assert_rounded(torch.cat(logits, 1), want, 100)


@pytest.mark.parametrize("way", [TreeCache, CopyingCache])
def test_beams_that_follow_each_other_have_the_logits_of_their_whole_texts(
    way: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "PRUNE_EVERY", 3)
    model, source, beams = made(), padded(*SOURCES), 3
    state = way(model, model.encode(source), beams)
    texts = torch.zeros(4, beams, 0, dtype=torch.int64)
    sentences = torch.arange(4)
    for step in range(24):
        token = torch.randint(3, 9, (len(sentences), beams)) if step else torch.full((4, beams), BEGIN)
        logits = state.decode(token)
        texts = torch.cat([texts, token[..., None]], 2)
        want = model(source[sentences].repeat_interleave(beams, 0), texts.flatten(0, 1))[:, -1]
        assert_rounded(logits.flatten(0, 1), want, 100)
        if step == 13:
            chosen = torch.tensor([3, 0, 1])
            state.select(chosen)
            texts, sentences = texts[chosen], sentences[chosen]
        parent = torch.randint(0, beams, (len(sentences), beams))
        state.follow(parent)
        texts = texts.gather(1, parent[..., None].expand(-1, -1, texts.shape[2]))
    if way is TreeCache:
        assert state.caches.own[0].length < beams * 24 / 2
        assert state.ancestors.shape[2] == state.caches.own[0].length


@pytest.mark.parametrize("beams", [1, 4])
def test_what_is_found_does_not_depend_on_the_batch_nor_on_padding(beams: int) -> None:
    model = made()
    sources = [torch.randint(3, 9, (length,)).tolist() for length in (3, 9, 1, 6, 2, 8)]
    together = beam_search(model, padded(*sources), beams=beams)
    backwards = beam_search(model, torch.nn.functional.pad(padded(*reversed(sources)), (0, 7)), beams=beams)
    for i, source in enumerate(sources):
        alone = beam_search(model, torch.tensor([source]), beams=beams)[0]
        assert_same(together[i], alone)
        assert_same(backwards[-1 - i], alone)


def chain(monkeypatch: pytest.MonkeyPatch, steps: dict[int, dict[int, float]]) -> ReLUFormer:
    """A model in which each token is followed by others with these probabilities, whatever the source."""
    model, table = made(vocabulary=14, positions="rotary"), torch.full((14, 14), -math.inf)
    for token in range(14):
        for following, p in steps.get(token, {END: 1.0}).items():
            table[token, following] = math.log(p)
    monkeypatch.setattr(model, "decode", lambda token, *_: table.double()[token])
    return model


def test_a_sentence_is_not_done_while_a_longer_hypothesis_can_become_better(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(monkeypatch, {BEGIN: {END: 0.6, 3: 0.4}} | {token: {token + 1: 1.0} for token in range(3, 13)})
    best, other = beam_search(model, torch.tensor([[3, 2]]), beams=2, length_penalty=2)[0]
    assert best.tokens == list(range(3, 14))
    assert best.score == pytest.approx(math.log(0.4) / (17 / 6) ** 2)
    assert other == ([], pytest.approx(math.log(0.6)))


def test_a_sentence_that_is_done_stays_as_it_is_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(monkeypatch, {BEGIN: {END: 0.5, 3: 0.5}, 3: {3: 0.8, END: 0.2}})
    sources, settings = [[4], *([[4] * 20] * 5)], {"beams": 13, "length_penalty": 1}
    alone = beam_search(model, padded(sources[0]), **settings)[0]
    assert alone[0] == ([], pytest.approx(math.log(0.5)))
    assert 3 < len(alone) < 12
    assert beam_search(model, padded(*sources), **settings)[0] == alone


def test_the_sources_keys_and_values_are_computed_once_per_sentence() -> None:
    model, seen = made(), []
    for layer in model.decoder:
        layer.source_attention.kv.register_forward_hook(lambda _, given, out: seen.append(tuple(given[0].shape)))
    beam_search(model, padded(*SOURCES), beams=4)
    assert seen == [(4, 6, 16)] * 2


def test_sentences_that_are_done_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = made(), []
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda target, *others: sizes.append(len(target)) or decode(target, *others))
    model.embedding.weight[END] = 0
    model.embedding.weight[END] -= 5 * model.embedding.weight.mean(0)
    beam_search(model, padded([3], [4] * 3, [5] * 20, [6] * 24), beams=2)
    assert sizes[0] == 4
    assert sizes[-1] < 4


def test_hypotheses_are_sorted_different_and_without_special_tokens() -> None:
    for hypotheses in beam_search(made(), padded(*SOURCES), beams=6):
        assert 1 <= len(hypotheses) <= 6
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        assert len({tuple(h.tokens) for h in hypotheses}) == len(hypotheses)
        assert all(3 <= token < 9 for h in hypotheses for token in h.tokens)


def test_a_model_in_training_is_searched_without_dropout_and_goes_on_training() -> None:
    model = made(dropout=0.5)
    want = beam_search(model, padded(*SOURCES))
    model.train()
    model.encoder.eval()  # as if it were frozen
    modes = [module.training for module in model.modules()]
    assert beam_search(model, padded(*SOURCES)) == want
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2


def test_bfloat16_models_and_empty_batches_are_searched_too() -> None:
    model = made()
    assert beam_search(model, torch.zeros(0, 5, dtype=torch.int64)) == []
    translations = beam_search(model.bfloat16(), padded(*SOURCES), beams=2)
    assert all(math.isfinite(hypotheses[0].score) for hypotheses in translations)


def test_a_translation_is_never_longer_than_the_model_allows() -> None:
    model = made(max_length=5)
    model.embedding.weight[END] *= 0
    for hypotheses in beam_search(model, padded([3, 4, 2], [5, 5, 5, 5, 2]), beams=2):
        assert all(len(hypothesis.tokens) <= 4 for hypothesis in hypotheses)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beams": 0}, "beams=0 must be an integer of at least 1"),
        ({"beams": 2.0}, r"beams=2\.0 must be an integer"),
        ({"length_penalty": -1}, "length_penalty=-1 must be a number from 0 to 10"),
        ({"length_penalty": 1e300}, "length_penalty=1e.300"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"max_length": 0}, "max_length=0 must be an integer of at least 1"),
        ({"source": torch.ones(3, dtype=torch.int64)}, r"source must be \[batch, length\]"),
        ({"model": made(encoder_layers=0)}, "use sample"),
    ],
)
def test_a_slip_in_the_arguments_is_answered_in_words(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(**{"model": made(), "source": padded(*SOURCES), **settings})


def test_a_model_whose_logits_are_not_finite_is_named_instead_of_searched_for_ever() -> None:
    model = made()
    model.embedding.weight[:] = math.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        beam_search(model, padded(*SOURCES))
