"""`nomax generate`: texts of a language model, the same for the same seed, and what it says to mistakes."""

import io
import os
import sys

import pytest
import torch
from evaluate_helpers import write_splits

from nomax import cli, models
from nomax.evaluate import runs
from nomax.models.decoding import sample
from nomax.train.text.command import Language, Translate

pytest.importorskip("sentencepiece")
SMALL = {
    "vocabulary": 330,
    "dim": 32,
    "heads": 2,
    "decoder_layers": 1,
    "slots": 64,
    "tensorboard": False,
    "threads": 1,
    "lr": 1e-2,
    "warmup": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Language models of segments and of documents, with markup in their names, and a translation."""
    folder = tmp_path_factory.mktemp("runs")
    usual = {"data": write_splits(folder / "data"), **SMALL}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOMAX_DATA", str(folder / "cache"))
        segments = {"steps": 40, "documents": 0, "max_length": 48}
        assert Language(out=folder / "[b]segments", **segments, **usual).run() == 0
        assert Language(out=folder / "documents", steps=5, documents=128, **usual).run() == 0
        usual |= {"encoder_layers": 1, "batch_size": 1024}
        assert Translate(out=folder / "translation", steps=3, max_length=64, **usual).run() == 0
    return folder


class Input(io.StringIO):
    """Standard input: a terminal, or a pipe with these bytes."""

    def __init__(self, content=None):
        super().__init__()
        self.terminal = content is None
        self.buffer = io.BytesIO(content or b"")

    def isatty(self):
        return self.terminal


@pytest.fixture
def generated(monkeypatch, capfdbinary):
    """Call the command, and get its exit code, output and errors."""

    def call(*words, stdin=None):
        monkeypatch.setattr(sys, "stdin", Input(stdin))
        code = cli.main(["generate", *map(str, words)])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return call


def continued(run, prompt, most, **settings):
    """The text, from sample alone."""
    tokens = run.tokenizer.encode(prompt)
    (added,) = sample(run.model, torch.tensor([tokens], dtype=torch.int64), most, **settings)
    return run.tokenizer.decode([*tokens, *added]) + "\n"


def test_a_text_is_the_prompt_and_what_the_model_adds(folder, generated):
    run = runs.load_text(folder / "[b]segments")
    code, out, err = generated(folder / "[b]segments", "7: the  king", "--tokens", 12, "--seed", 3)
    assert (code, err) == (0, "")
    assert out == continued(run, "7: the king", 12, seed=3)
    assert out.startswith("7: the king")
    # Words without quotes, standard input and a saved model do the same.
    assert generated(folder / "[b]segments", "7:", "the", "king", "--tokens", 12, "--seed", 3)[1] == out
    piped = b"\xef\xbb\xbf7: the\nking\n"
    assert generated(folder / "[b]segments", "--tokens", 12, "--seed", 3, stdin=piped)[1] == out
    assert generated(folder / "[b]segments" / "model", "7: the king", "--tokens", 12, "--seed", 3)[1] == out


def test_options_reach_the_sampling(folder, generated):
    run = runs.load_text(folder / "[b]segments")
    usual = (folder / "[b]segments", "the", "--tokens", 20)
    for words, settings in (
        (("--temperature", "0"), {"temperature": 0}),
        (("--temperature", "1.7"), {"temperature": 1.7}),
        (("--top-k", "2"), {"top_k": 2}),
        (("--top-p", "0.3"), {"top_p": 0.3}),
    ):
        assert generated(*usual, *words)[1] == continued(run, "the", 20, **settings)
    every = [continued(run, "the", 20, seed=seed) for seed in (5, 6, 7)]
    assert generated(*usual, "--seed", 5, "--count", 3)[1] == "".join(every)
    assert len(set(every)) > 1
    assert generated(*usual, "--seed", 6)[1] == every[1]


def test_without_a_prompt_texts_begin_with_nothing(folder, generated):
    run = runs.load_text(folder / "[b]segments")
    on_a_terminal = generated(folder / "[b]segments", "--tokens", 10)
    assert on_a_terminal == generated(folder / "[b]segments", "--tokens", 10, stdin=b"")
    assert on_a_terminal[1] == continued(run, "", 10)
    # By default as much as fits, with 48 at most.
    assert generated(folder / "[b]segments", "the king")[1] == continued(
        run, "the king", 48 - len(run.tokenizer.encode("the king"))
    )


def test_lines_are_segments_of_a_document(folder, generated):
    run = runs.load_text(folder / "documents")
    first, second = "1: the king sees.", "2: the river"
    tokens = [*run.tokenizer.encode(first), 4, *run.tokenizer.encode(second)]
    code, out, _ = generated(folder / "documents", "--count", 2, "--tokens", 60, stdin=f"{first}\n\n{second}".encode())
    assert code == 0
    texts = []
    for seed in (0, 1):
        (added,) = sample(run.model, torch.tensor([tokens]), 60, seed=seed)
        texts.append("\n".join(run.tokenizer.segments([*tokens, *added])))
    assert out == f"{texts[0]}\n\n{texts[1]}\n"
    assert out.startswith(f"{first}\n{second}")
    words = ("--count", 2, "--tokens", 60)
    assert generated(folder / "documents" / "model", *words, stdin=f"{first}\n{second}".encode())[1] == out


def test_a_terminal_sees_the_text_as_it_comes(folder, monkeypatch):
    class Terminal(io.StringIO):
        buffer = io.BytesIO()

        def isatty(self):
            return True

    pieces = []
    monkeypatch.setattr(sys, "stdin", Input())
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr("nomax.evaluate.generate._write", pieces.append)
    words = ["generate", str(folder / "[b]segments"), "año ☃ ", "--tokens", "30", "--seed", "2"]
    assert cli.main(words) == 0
    assert len([piece for piece in pieces if piece]) > 5
    run = runs.load_text(folder / "[b]segments")
    assert "".join(pieces) == continued(run, "año ☃", 30, seed=2)
    # Characters of several tokens, each of which is a byte, come whole.
    tokens = run.tokenizer.encode("☃☂")
    steps = (torch.tensor([token]) for token in tokens)
    monkeypatch.setattr("nomax.evaluate.generate.stream", lambda *given, **settings: steps)
    pieces.clear()
    assert cli.main(words[:2]) == 0
    assert [piece for piece in pieces if piece] == ["☃", "☂", "\n"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "0"), "--tokens 0 must be at least 1"),
        (("--count", "0"), "--count 0 must be at least 1"),
        (("--top-k", "0"), "--top-k 0 must be at least 1"),
        (("--top-p", "1.5"), "--top-p 1.5 must be more than 0 and at most 1"),
        (("--top-p", "nan"), "--top-p nan must be"),
        (("--temperature", "-1"), "--temperature -1 must be 0, or from 1e-06"),
        (("--temperature", "inf"), "--temperature inf must be"),
        (("--seed", "-1"), "--seed -1 must be from 0"),
        (("the king", "--tokens", "48"), "--tokens 48 must be at most 4"),
        (("king " * 60,), "and {run} reads at most 48: there is no room to go on. Shorten it."),
    ],
)
def test_slips_are_answered_in_words(words, message, folder, generated):
    run = folder / "[b]segments"
    code, out, err = generated(run, *words)
    assert (code, out) == (2, "")
    assert message.format(run=run) in err


def test_only_language_models_and_text_are_taken(folder, tmp_path, generated):
    code, _, err = generated(folder / "translation", "the king")
    assert code == 2
    assert f"To translate: nomax translate {folder}/translation < in.txt" in err
    models.save(models.ViT("mu/7", num_classes=10, image_size=28, channels=1), tmp_path / "vit")
    code, _, err = generated(tmp_path / "vit", "the king")
    assert code == 2
    assert "is an image model, not a text model" in err
    code, _, err = generated(folder / "[b]segments", stdin=b"caf\xe9")
    assert code == 2
    assert "not UTF-8: byte 4 is 0xe9" in err
    code, _, err = generated(folder / "[b]segments", stdin=b"a " * (1 << 20))
    assert code == 2
    assert "more than 1,048,576 bytes" in err


def test_a_broken_model_is_told(folder, tmp_path, generated):
    run = runs.load_text(folder / "[b]segments")
    with torch.no_grad():
        run.model.embedding.weight.fill_(torch.nan)
    models.save(run.model, tmp_path / "broken")
    run.tokenizer.save(tmp_path / "broken" / models.hub.VOCABULARY)
    code, _, err = generated(tmp_path / "broken", "the")
    assert code == 2
    assert "logits are not finite" in err


def test_nobody_reading_on_is_no_error(folder, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdin", Input())
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["generate", str(folder / "[b]segments"), "the", "--tokens", "3"]) == 141


def test_the_card_and_the_advice_say_how(folder, capsys, monkeypatch):
    card = (folder / "[b]segments" / "model" / "README.md").read_text()
    assert "text-generation" in card
    assert '$ nomax generate FOLDER "How the text begins"' in card
    assert "$ nomax translate FOLDER < in.txt" in (folder / "translation" / "model" / "README.md").read_text()
    monkeypatch.setenv("NOMAX_DATA", str(folder / "cache"))
    segments = {"steps": 40, "documents": 0, "max_length": 48, "data": str(folder / "data")}
    options = Language(out=folder / "[b]segments", **segments, **SMALL)
    assert options.run() == 0
    told = capsys.readouterr().out
    assert f"{folder}/[b]segments is finished" in told
    assert f"nomax generate '{folder}/[b]segments' (texts)" in told
