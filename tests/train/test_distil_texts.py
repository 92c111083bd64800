"""The texts that sentence encoders learn from: pieces of documents, and the sides of data sets."""

import json
import random

import pytest

from nomax.train.distil import texts
from nomax.train.distil.texts import Piece


class Tokenizer:
    """One token for each word."""

    def __call__(self, texts, add_special_tokens=False):
        return {"input_ids": [text.split() for text in texts]}


def document(count: int) -> list[Piece]:
    """Return segments of 30 words, each word a different one."""
    return [Piece(" ".join(f"{segment}.{word}" for word in range(30)), 30) for segment in range(count)]


def test_without_short_texts_segments_are_whole():
    pieces = texts.cut([document(200)], 256, random.Random(0))
    assert {piece.tokens % 30 for piece in pieces} == {0}
    assert " ".join(piece.text for piece in pieces) == " ".join(piece.text for piece in document(200))


def test_short_texts_are_a_few_words_in_a_row_of_one_segment():
    segments = document(400)
    pieces = texts.cut([segments], 256, random.Random(0), short=1.0)
    assert len(pieces) == len(segments)
    for piece, segment in zip(pieces, segments, strict=True):
        words = piece.text.split()
        assert len(words) == piece.tokens
        assert f" {piece.text} " in f" {segment.text} "
    counts = {piece.tokens for piece in pieces}
    assert (min(counts), max(counts)) == texts.FEW


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_the_share_of_short_texts_is_that_of_pieces(share):
    pieces = texts.cut([document(4000)], 256, random.Random(0), short=share)
    assert sum(piece.tokens < 30 for piece in pieces) / len(pieces) == pytest.approx(share, abs=0.05)


def test_a_segment_of_one_word_stays_as_it_is():
    assert texts.cut([[Piece("Hallelujah", 4)]], 256, random.Random(0), short=1.0) == [Piece("Hallelujah", 4)]


@pytest.fixture
def paired(tmp_path):
    for split in ("train", "valid", "test"):
        sides = {side: [f"{word} {i}" for i in range(3)] for side, word in (("kjv", "hath"), ("en", "has"))}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"name": "a", **sides}) + "\n")
    return tmp_path


@pytest.mark.parametrize(("suffix", "first"), [("", "has"), (":en", "has"), (":kjv", "hath")])
def test_a_name_can_ask_for_one_side_of_its_pairs(paired, suffix, first):
    (segments,) = texts.documents([f"{paired}{suffix}"], "train", None, Tokenizer())
    assert [piece.text.split()[0] for piece in segments] == [first] * 3


def test_a_side_that_is_not_there_is_named(paired):
    with pytest.raises(ValueError, match=r"--data .*:de: .* has kjv and en\."):
        texts.documents([f"{paired}:de"], "train", None, Tokenizer())
