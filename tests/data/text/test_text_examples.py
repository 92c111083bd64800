"""The vocabulary, examples of sentences and documents, which come when, and batches."""

import itertools
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_corpora import corpus

from nomax.data import text
from nomax.data.text import Corpus, Document, Pair, Tokenizer, TokenOrder
from nomax.data.text.batches import batches, evaluation_batches
from nomax.data.text.tokenizer import SizeError

pytest.importorskip("sentencepiece")
TALES = corpus()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TALES, 330)


def test_special_pieces_have_the_agreed_numbers(tokenizer) -> None:
    assert (tokenizer.padding, tokenizer.begin, tokenizer.end, tokenizer.unknown, tokenizer.separator) == tuple(
        range(5)
    )
    assert len(tokenizer) == 330
    used = set(itertools.chain.from_iterable(tokenizer.encode(words) for pair in TALES.pairs() for words in pair))
    assert min(used) > 4


@settings(max_examples=40)
@given(words=st.text(max_size=40).filter(lambda words: "\0" not in words and "▁" not in words))
def test_any_text_comes_back_with_single_spaces(tokenizer, words: str) -> None:
    ids = tokenizer.encode(words)
    assert all(3 < number < len(tokenizer) for number in ids)
    assert " ".join(tokenizer.decode(ids).split()) == " ".join(words.split())


def test_the_names_of_special_pieces_in_a_text_are_only_text(tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a </s> <pad> <sep> b")) == "a </s> <pad> <sep> b"
    assert not set(tokenizer.encode("</s><sep>")) & set(range(5))


def test_the_vocabulary_is_a_function_of_the_corpus(tokenizer, tmp_path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from text_corpora import corpus; "
        "from nomax.data.text import Tokenizer; print(Tokenizer.train(corpus(), 330, sys.argv[2]).digest)"
    )
    folder = str(Path(__file__).parents[2])  # of text_corpora
    command = [sys.executable, "-c", code, folder, str(tmp_path / "run" / "vocabulary.model")]
    digest = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert digest == tokenizer.digest
    assert Tokenizer.load(tmp_path / "run" / "vocabulary.model").digest == digest
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["vocabulary.model"]
    assert pickle.loads(pickle.dumps(tokenizer)).digest == digest


def test_it_learns_from_a_bounded_part_of_a_large_corpus(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("nomax.data.text.tokenizer.MOST_SEGMENTS", 60)
    halved = Corpus((Document("a", tuple(TALES.pairs())[::4]),), ("en", "es"))
    assert Tokenizer.train(TALES, 300).digest == Tokenizer.train(halved, 300).digest


def test_it_learns_from_segments_of_any_length() -> None:
    letters = ["αβγδ εζη θικ λμν", "один два три"]
    pairs = [Pair(f"{letters[0]} {n} " * 600, f"{letters[1]} {n} " * 900) for n in range(4)]
    assert min(len(text.encode()) for pair in pairs for text in pair) > 1 << 14
    tokenizer = Tokenizer.train(Corpus((Document("a", tuple(pairs)),), ("el", "ru"), "long"), 330)
    for words in letters:
        assert len(tokenizer.encode(words)) < len(words)  # spelled in bytes, it would have about twice as many pieces


def test_the_sign_that_stands_for_a_space_among_pieces_is_none_in_a_text(tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a▁b ▁▁")) == "a_b __"
    assert tokenizer.decode([*range(4), *tokenizer.encode("the king"), 2]) == "the king"


def test_a_vocabulary_that_does_not_fit_a_checkpoint_is_noticed(tokenizer) -> None:
    other = Tokenizer.train(corpus(seed=1), 330)
    tokenizer.check(330, tokenizer.digest)
    with pytest.raises(ValueError, match="run 7 has a vocabulary of 400 pieces, but this one has 330"):
        tokenizer.check(400, title="run 7")
    with pytest.raises(ValueError, match="its pieces have other numbers"):
        other.check(330, tokenizer.digest)


def test_an_impossible_vocabulary_or_file_says_why(tmp_path) -> None:
    with pytest.raises(ValueError, match="vocabulary is 100; it must be more than 261"):
        Tokenizer.train(TALES, 100)
    for size, advice in (
        (9000, r"pieces at most\. Pass --vocabulary \d+ or less"),
        (270, r"need.*--vocabulary \d+ or more"),
    ):
        with pytest.raises(SizeError, match=rf"vocabulary is {size:,}, .* cannot learn from tales: .*{advice}") as told:
            Tokenizer.train(TALES, size)
        assert len(Tokenizer.train(TALES, told.value.nearest)) == told.value.nearest
    (tmp_path / "x.model").write_bytes(b"no vocabulary")
    with pytest.raises(ValueError, match=r"x\.model is not a vocabulary"):
        Tokenizer.load(tmp_path / "x.model")
    with pytest.raises(FileNotFoundError, match="there is no such vocabulary"):
        Tokenizer.load(tmp_path / "y.model")


def test_numbers_outside_the_vocabulary_are_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match="330 is no piece of this vocabulary"):
        tokenizer.decode([5, 330])


# Examples


def test_every_pair_is_one_sentence_example(tokenizer) -> None:
    examples = text.sentences(TALES, tokenizer)
    assert [tokenizer.decode(example.source) for example in examples] == [pair.source for pair in TALES.pairs()]
    assert [tokenizer.decode(example.target) for example in examples] == [pair.target for pair in TALES.pairs()]
    assert examples[13].name == "tale 1:4"


@pytest.mark.parametrize("tokens", [64, 128, 500, 4096])
@pytest.mark.parametrize("join", [True, False])
def test_documents_are_cut_and_joined_to_a_length_with_every_pair_once(tokens, join, tokenizer) -> None:
    examples = text.documents(TALES, tokenizer, tokens, join=join, too_long="split")
    assert max(example.length for example in examples) <= tokens
    places = [place for example in examples for place in example.places]
    assert sorted(set(places)) == places or tokens < 128
    assert set(places) == {(d, p) for d, document in enumerate(TALES.documents) for p in range(len(document.pairs))}
    for example in examples:
        ours, theirs = tokenizer.segments(example.source), tokenizer.segments(example.target)
        assert len(ours) == len(theirs) == len(example.places)
        if not join:
            assert len({document for document, _ in example.places}) == 1
        if tokens > 128:  # nothing was split
            assert theirs == [TALES.documents[d].pairs[p].target for d, p in example.places]
    if join and tokens > 128:
        assert all(example.length > tokens / 2 for example in examples[:-1])


def test_an_example_could_not_hold_one_pair_more(tokenizer) -> None:
    examples = text.documents(TALES, tokenizer, 300)
    single = {example.places[0]: example for example in text.sentences(TALES, tokenizer)}
    for example, following in itertools.pairwise(examples):
        first = single[following.places[0]]
        assert max(len(example.source) + len(first.source), len(example.target) + len(first.target)) + 2 > 300


def test_a_pair_that_is_too_long_is_an_error_or_split_or_left_out(tokenizer) -> None:
    long = Corpus((Document("epic", (Pair("a b", "c"), Pair("river " * 50, "río " * 30))),), ("en", "es"), "epics")
    with pytest.raises(ValueError, match=r"epic:2 of epics has .* more than 20: “river river"):
        text.sentences(long, tokenizer, longest=20)
    assert len(text.sentences(long, tokenizer, longest=20, too_long="skip")) == 1
    parts = text.sentences(long, tokenizer, longest=20, too_long="split")[1:]
    assert max(part.length for part in parts) <= 20
    assert [*itertools.chain(*(part.source for part in parts))] == tokenizer.encode("river " * 50)
    assert [*itertools.chain(*(part.target for part in parts))] == tokenizer.encode("río " * 30)
    assert {part.places for part in parts} == {((0, 1),)}
    with pytest.raises(ValueError, match="too_long must be"):
        text.sentences(long, tokenizer, too_long="drop")


def test_a_language_model_gets_one_side_alone(tokenizer) -> None:
    for side, index in (("source", 0), ("target", 1)):
        examples = text.documents(TALES, tokenizer, 200, side=side)
        assert all(example.source == [] for example in examples)
        said = [words for example in examples for words in tokenizer.segments(example.target)]
        assert said == [pair[index] for pair in TALES.pairs()]
    batch = next(batches(examples, TokenOrder([example.length for example in examples], 1000)))
    assert batch.source is None


# Order

LENGTHS = np.random.default_rng(0).integers(3, 200, 500)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=120),
    budget=st.integers(90, 400),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_shows_every_example_once_within_the_budget(lengths, budget, seed, epoch) -> None:
    order = TokenOrder(lengths, budget, seed)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    shown = [order.batch(step) for step in steps]
    assert sorted(np.concatenate(shown)) == list(range(len(lengths)))
    for batch in shown:
        assert 0 < len(batch) * max(lengths[number] for number in batch) <= budget
        assert len(batch) >= order.fewest


def test_any_step_can_be_asked_for_alone() -> None:
    forward = [TokenOrder(LENGTHS, 1000, seed=3).batch(step) for step in range(200)]
    for step in (199, 0, 77, 150):
        np.testing.assert_array_equal(TokenOrder(LENGTHS, 1000, seed=3).batch(step), forward[step])


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_ranks_together_show_the_same_for_any_number_of_them(world) -> None:
    order = TokenOrder(LENGTHS, 1000, seed=1)
    for step in range(order.steps_per_epoch + 2):
        shares = [order.batch(step, rank, world) for rank in range(world)]
        assert sorted(np.concatenate(shares)) == sorted(order.batch(step))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert min(map(len, shares)) > 0


def test_epochs_and_seeds_differ_and_padding_is_little() -> None:
    order = TokenOrder(LENGTHS, 1000, seed=1)
    epochs = [
        [tuple(order.batch(step + epoch * order.steps_per_epoch)) for step in range(order.steps_per_epoch)]
        for epoch in (0, 1)
    ]
    assert epochs[0] != epochs[1]
    assert Counter(map(len, epochs[0])) == Counter(map(len, epochs[1]))
    assert not set(map(frozenset, epochs[0])) & set(map(frozenset, epochs[1]))
    assert tuple(TokenOrder(LENGTHS, 1000, seed=2).batch(0)) != epochs[0][0]
    padded = sum(len(batch) * LENGTHS[list(batch)].max() for batch in epochs[0])
    assert LENGTHS.sum() / padded > 0.9
    assert [LENGTHS[list(batch)].mean() for batch in epochs[0]] != sorted(
        LENGTHS[list(batch)].mean() for batch in epochs[0]
    )


def test_documents_cut_to_a_length_fill_whole_batches() -> None:
    order = TokenOrder(np.random.default_rng(0).integers(2000, 2049, 400), 8192)
    assert order.steps_per_epoch == 100


def test_what_cannot_be_batched_says_why() -> None:
    with pytest.raises(ValueError, match=r"example 1 has 600 tokens, more than tokens_per_batch = 512"):
        TokenOrder([3, 600], 512)
    with pytest.raises(
        ValueError, match=r"4 ranks cannot share a batch of 2 examples\. Take larger batches, of about 800"
    ):
        TokenOrder([200] * 8, 512).batch(0, 0, 4)
    with pytest.raises(ValueError, match="lengths has the shape"):
        TokenOrder([], 512)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        TokenOrder([5], 512).batch(0, 2, 2)


# Batches


def test_a_batch_is_padded_and_framed(tokenizer) -> None:
    examples = text.sentences(TALES, tokenizer)
    order = TokenOrder([example.length for example in examples], 700)
    batch = next(batches(examples, order, start=4))
    assert batch.step == 4
    assert list(batch.numbers) == list(order.batch(4))
    assert batch.source.dtype == batch.target.dtype == torch.int64
    assert max(batch.source.numel(), batch.target[:, 1:].numel()) <= 700
    for row, number in enumerate(batch.numbers):
        example = examples[number]
        assert [token for token in batch.source[row].tolist() if token] == [*example.source, 2]
        assert [token for token in batch.target[row].tolist() if token] == [1, *example.target, 2]
    assert batch.tokens == int((batch.target[:, 1:] != 0).sum())


def test_batches_resume_and_are_shared_exactly(tokenizer) -> None:
    examples = text.documents(TALES, tokenizer, 150)
    order = TokenOrder([example.length for example in examples], 600, seed=5)
    whole = list(itertools.islice(batches(examples, order), 12))
    late = next(batches(examples, order, start=11))
    assert torch.equal(late.target, whole[11].target)
    for rank in range(2):
        for full, share in zip(whole, batches(examples, order, 0, rank, 2), strict=False):
            assert share.numbers == full.numbers[rank::2]
            assert share.tokens == full.tokens
    with pytest.raises(ValueError, match="the order is for"):
        batches(examples[1:], order)


def test_evaluation_shows_everything_once(tokenizer) -> None:
    examples = text.sentences(TALES, tokenizer)
    shown = [number for batch in evaluation_batches(examples, 500) for number in batch.numbers]
    assert sorted(shown) == list(range(len(examples)))
    assert examples[shown[0]].length > 2 * examples[shown[-1]].length
