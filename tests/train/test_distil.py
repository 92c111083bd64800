"""Distillation: the student comes closer to its teacher, and a killed one goes on to the same weights."""

import copy
import itertools

import pytest
import torch
from torch import nn

import nomax
from nomax import _compat
from nomax.nn import InnerAttention
from nomax.train.distil import distillation, texts
from nomax.train.distil.distillation import (
    DistilConfig,
    blocks,
    distil,
    output_error,
    relative_error,
    sentence_error,
)

DIM, HEADS = 16, 2
CONFIG = DistilConfig(steps=12, lr=3e-3, warmup=2, checkpoint_every=5, precision="float32")


class Layer(nn.Module):
    def __init__(self, phi):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.inner_attention = InnerAttention(phi, HEADS)

    def forward(self, x, mask):
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        return x + self.out(self.inner_attention(query, key, value, mask).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self, phi):
        super().__init__()
        self.embedding = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(Layer(phi) for _ in range(2))

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask.bool()[:, None, None])
        return x


def pair():
    teacher = Encoder("softmax")
    student = Encoder("relu/L")
    student.load_state_dict(teacher.state_dict())
    for layer in student.layers:
        layer.inner_attention.learn(torch.ones(HEADS), torch.zeros(HEADS))
    student.embedding.requires_grad_(False)
    return student, teacher


def batches(count=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        mask = (torch.arange(10) < torch.tensor([[10], [7], [4]])).long()
        yield {"input_ids": torch.randint(50, (3, 10), generator=generator), "attention_mask": mask}


def error(student, teacher):
    with torch.no_grad():
        return sum(relative_error(student(**x), teacher(**x), x["attention_mask"]) for x in batches(3)).item()


@pytest.mark.parametrize("layers", ["together", "in turn"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_student_comes_closer(layers, precision):
    student, teacher = pair()
    before, kept = error(student, teacher), copy.deepcopy(teacher.state_dict())
    table = student.embedding.weight.clone()
    config = DistilConfig(steps=30, lr=3e-3, layers=layers, precision=precision)
    history = distil(student, teacher, batches(30), config)
    assert error(student, teacher) < 0.5 * before
    assert torch.equal(student.embedding.weight, table)
    assert all(torch.equal(teacher.state_dict()[name], value) for name, value in kept.items())
    assert [step.step for step in history] == list(range(1, 31))
    assert history[-1].positions == 30 * 21  # padding is not learned from


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path):
    whole, teacher = pair()
    killed = copy.deepcopy(whole)
    again = copy.deepcopy(whole)
    history = distil(whole, teacher, batches(), CONFIG)

    def kill(step):
        if step.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distil(killed, teacher, batches(), CONFIG, folder=tmp_path, report=kill)
    resumed = distil(again, teacher, batches(), CONFIG, folder=tmp_path)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in whole.state_dict().items())
    assert [step.loss for step in resumed] == [step.loss for step in history]
    with pytest.raises(ValueError, match="other settings"):
        distil(again, teacher, batches(), DistilConfig(steps=13), folder=tmp_path)


def test_padding_does_not_change_the_loss():
    losses = []
    for padding in (0, 49):
        torch.manual_seed(0)
        student, teacher = pair()
        batch = next(batches(1))
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, padding)
        losses.append(distil(student, teacher, [batch], DistilConfig(steps=1, precision="float32"))[0].loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_end_may_count_the_output_only():
    student, teacher = pair()
    first, last = distil(student, teacher, batches(2), DistilConfig(steps=2, last_share=0.5))
    assert first.loss > first.output
    assert last.loss == last.output


@pytest.mark.parametrize("slow", [True, False])
def test_bfloat16_only_where_the_cpu_is_fast_at_it(slow, monkeypatch):
    monkeypatch.setattr(distillation, "SLOW", {torch.bfloat16} if slow else set())
    losses = []
    for precision in ("auto", "float32" if slow else "bfloat16"):
        torch.manual_seed(0)
        losses.append(distil(*pair(), batches(1), DistilConfig(steps=1, precision=precision))[0].loss)
    assert losses[0] == losses[1]


def test_a_loss_that_is_not_finite_stops():
    student, teacher = pair()
    with pytest.raises(ArithmeticError, match="at step 0"):
        distil(student, teacher, batches(), CONFIG, output_loss=lambda *_: torch.tensor(torch.nan))


def test_errors_say_what_to_do():
    student, teacher = pair()
    with pytest.raises(ValueError, match=r"convert it first, with nomax\.convert"):
        distil(teacher, teacher, batches(), CONFIG)
    with pytest.raises(ValueError, match="has 3 batches, fewer than the 12 steps"):
        distil(student, teacher, batches(3), CONFIG)
    teacher.layers = nn.ModuleList(teacher.layers[:1])
    with pytest.raises(ValueError, match=r"no module 'layers\.1'"):
        distil(student, teacher, batches(), CONFIG)
    with pytest.raises(ValueError, match="last_share=2"):
        DistilConfig(last_share=2)
    assert nomax.distil is distil


def test_blocks_are_what_stands_in_lists():
    assert blocks(Encoder("relu/L")) == ["layers.0", "layers.1"]
    assert blocks(nn.ModuleDict({"one": Layer("relu/L")})) == ["one"]


def test_losses_against_their_formulas():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    student, teacher = torch.randn(2, 3, 5, 7).unbind(0)
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 3)
    seen = mask.bool()
    p, q = teacher.softmax(-1)[seen], student.softmax(-1)[seen]
    divergence = (p * (p.log() - q.log())).sum(-1).mean()
    torch.testing.assert_close(output_error(Output(student), Output(teacher), {"attention_mask": mask}), divergence)
    mean = [nn.functional.normalize(x[:, :3].mean(1), dim=-1) for x in (student, teacher)]
    cosine = (mean[0] * mean[1]).sum(-1).mean()
    torch.testing.assert_close(sentence_error(student, teacher, {"attention_mask": mask}), 1 - cosine)
    torch.testing.assert_close(relative_error(2 * teacher, teacher), torch.tensor(1.0))


DOCUMENTS = [[texts.Piece(" ".join(["word"] * n), n) for n in (3, 8, 5, 30, 2, 12, 9)] for _ in range(20)]


def test_batches_are_the_same_again_and_within_their_size(monkeypatch):
    monkeypatch.setattr(texts, "encoded", lambda texts, tokenizer, longest: texts)
    made = [
        list(itertools.islice(texts.batches(DOCUMENTS, None, tokens=120, longest=40, seed=seed), 60))
        for seed in (0, 0, 1)
    ]
    assert made[0] == made[1] != made[2]
    for batch in made[0]:
        assert len(batch) == 1 or len(batch) * (max(len(text.split()) for text in batch) + 2) <= 120


def test_packed_batches_have_texts_of_all_lengths(monkeypatch):
    monkeypatch.setattr(texts, "encoded", lambda texts, tokenizer, longest: texts)
    made = texts.batches(DOCUMENTS, None, tokens=120, longest=40, seed=0, packing=lambda batch: batch)
    spreads = []
    for batch in itertools.islice(made, 30):
        lengths = [len(text.split()) for text in batch]
        spreads.append(max(lengths) - min(lengths))
    assert sorted(spreads)[15] > 20  # of 40 at most; without packing they share batches by length
    padded = texts.batches(DOCUMENTS, None, tokens=120, longest=40, seed=0)
    widths = [[len(text.split()) for text in batch] for batch in itertools.islice(padded, 30)]
    assert sorted(max(width) - min(width) for width in widths)[15] < 10


def test_a_packed_batch_has_the_loss_of_a_padded_one():
    transformers = _compat.transformers()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    mask = (torch.arange(9) < torch.tensor([[9], [4], [6]])).long()
    batch = {"input_ids": torch.randint(2, 50, (3, 9)).masked_fill(mask == 0, 1), "attention_mask": mask}
    for name in ("Bert", "Roberta"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(vocab_size=50, pad_token_id=1, initializer_range=0.4, **sizes)
        model, other = (getattr(transformers, f"{name}Model")(config).eval() for _ in range(2))
        for each in (model, other):
            nomax.convert(each, "relu/L")
        packed = texts.packing_of(model, batch)(batch)
        with torch.no_grad():
            losses = [sentence_error(model(**each), other(**each), each) for each in (batch, packed)]
        torch.testing.assert_close(*losses)
    assert texts.packing_of(Encoder("relu/L"), batch) is None  # which knows no positions and bounds


def test_queries_are_words_of_the_texts_that_they_have_to_find():
    words = [f"w{number}" for number in range(40)]
    documents = [[texts.Piece(" ".join(words), 40), texts.Piece("too short", 2)] for _ in range(5)]

    def tokenizer(texts, add_special_tokens):
        return {"input_ids": [text.split() for text in texts]}

    asked, wanted = texts.queries(documents, 3, tokenizer)
    assert [piece.tokens for piece in asked] == [4] * 3
    assert [piece.tokens for piece in wanted] == [40] * 3
    assert all(query.text in text.text for query, text in zip(asked, wanted, strict=True))
    assert texts.queries([[texts.Piece("too short", 2)]], 3, tokenizer) is None


def test_measured_texts_have_about_the_length_asked_for():
    for length, pieces in texts.measured(DOCUMENTS, 50).items():
        assert all(abs(piece.tokens + 2 - length) <= 0.15 * length for piece in pieces)
        assert len(pieces) <= 50
    with pytest.raises(ValueError, match="no texts of about 15, 55, 135 tokens"):
        texts.measured([], 50)


def test_retrieval_counts_both_directions():
    points = nn.functional.normalize(torch.randn(6, 4), dim=-1)
    assert texts.retrieval(points, points, both_ways=True) == 1
    turned = points.clone()
    turned[0], turned[1] = points[1], points[0]
    assert texts.retrieval(points, turned, both_ways=True) == pytest.approx(4 / 6)
    same = points.clone()
    same[1:] = points[0]  # the first of equals is the nearest: to all targets one source, to each source another target
    assert texts.retrieval(points, same, both_ways=False) == pytest.approx(1 / 6)
