"""`nomax translate` and `nomax evaluate` on runs of text."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from text_corpora import corpus

from nomax import cli, models
from nomax.data.text import Corpus, Document, Pair, Tokenizer
from nomax.data.text.corpus import write
from nomax.evaluate import runs, stream, translation
from nomax.evaluate.commands import evaluate, probe, translate
from nomax.models.search import search
from nomax.train import language, text_data
from nomax.train import translate as train

pytest.importorskip("sentencepiece")
sacrebleu = pytest.importorskip("sacrebleu")
SMALL = {"vocabulary": 330, "dim": 32, "heads": 2, "decoder_layers": 1, "slots": 64, "tensorboard": False, "threads": 1}
TRANSLATE = {**SMALL, "encoder_layers": 1, "batch_size": 1024, "dropout": 0.0, "checkpoint_every": 1000}
TALES = [pair.source for pair in corpus(2, seed=2).pairs()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of sentences that has learned something, one of documents and one of language that have not."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "data").mkdir()
    for seed, (split, documents) in enumerate({"train": 12, "valid": 2, "test": 2}.items()):
        text = corpus(documents, seed=seed)
        write(folder / "data" / f"{split}.jsonl", text.documents, text.languages)
    data = {"data": str(folder / "data")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOMAX_DATA", str(folder / "cache"))
        usual = {"lr": 1e-2, "warmup": 10, **data, **TRANSLATE}
        options = train.Options(out=folder / "sentences", steps=100, max_length=64, **usual)
        assert train.run(options) == 0
        options = train.Options(out=folder / "documents", steps=25, documents=80, **usual)
        assert train.run(options) == 0
        assert language.run(language.Options(out=folder / "language", steps=3, warmup=1, **data, **SMALL)) == 0
    return folder


def translated(monkeypatch, capfdbinary, text, **options):
    """What the command writes for some bytes: its exit code, lines and errors."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    code = translate.run(translate.Options(**{"beams": 2, **options}))
    sys.stdout.flush()
    out, err = capfdbinary.readouterr()
    assert not out or out.endswith(b"\n")
    return code, out.decode().split("\n")[:-1], err.decode()


def test_lines_come_out_in_their_order_and_number_and_empty_ones_stay_empty(folder, monkeypatch, capfdbinary):
    text = "\n".join([TALES[0], "", *TALES[1:], "  ", "\t", TALES[3] + "\r"])
    code, lines, _ = translated(monkeypatch, capfdbinary, text.encode(), run=str(folder / "sentences"))
    assert code == 0
    assert len(lines) == len(text.split("\n"))
    assert [line for line, given in zip(lines, text.split("\n"), strict=True) if not given.strip()] == [""] * 3
    run = runs.load_text(folder / "sentences")
    for given, line in zip(text.split("\n"), lines, strict=True):
        if given.strip():
            source = torch.tensor([[*run.tokenizer.encode(given.strip()), 2]])
            assert line == run.tokenizer.decode(search(run.model, source, beams=2)[0][0].tokens)
    assert lines[4] == lines[-1] != lines[0]


@pytest.mark.slow
def test_a_line_is_translated_as_soon_as_it_is_there_until_nobody_reads_on(folder):
    code = f"import sys; from nomax import cli; {COMMAND}; sys.exit(cli.main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "translate", str(folder / "sentences"), "--beams", "1"]
    with subprocess.Popen(words, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)) as running:
        for line in TALES[:2]:
            running.stdin.write(f"{line}\n".encode())
            running.stdin.flush()
            assert running.stdout.readline().strip()
        running.stdout.close()
        running.stdin.write("\n".join(TALES).encode())
        running.stdin.close()
        assert running.wait(60) == 141
        assert running.stderr.read() == b""


COMMAND = "cli.COMMANDS['translate'] = ('nomax.evaluate.commands.translate', '')"


def test_ctrl_c_ends_it_after_whole_lines(folder, monkeypatch, capfdbinary):
    class Input(io.BytesIO):
        def read1(self, size=-1):
            line = self.readline()
            if not line:
                raise KeyboardInterrupt
            return line

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Input(f"{TALES[0]}\n{TALES[1]}\n".encode())))
    monkeypatch.setitem(cli.COMMANDS, "translate", ("nomax.evaluate.commands.translate", ""))
    assert cli.main(["translate", str(folder / "sentences"), "--beams", "1"]) == 130
    out, err = capfdbinary.readouterr()
    assert out.count(b"\n") == 2
    assert out.endswith(b"\n")
    assert err == b"nomax translate: stopped.\n"


def test_bytes_that_are_not_utf8_are_named_and_what_came_before_is_out(folder, monkeypatch, capfdbinary):
    text = b"\n".join([TALES[0].encode(), TALES[1].encode(), b"\xc3\xa1 \xff", TALES[2].encode()])
    code, lines, told = translated(monkeypatch, capfdbinary, text, run=str(folder / "sentences"))
    assert code == 1
    assert len(lines) == 2
    assert all(lines)
    assert "line 3, byte 4 (0xff) is not UTF-8" in told


def test_a_line_that_is_too_long_is_named_or_split(folder, monkeypatch, capfdbinary):
    words = "the king sees. " * 30 + "x" * 200
    text = "\n".join([TALES[0], words, TALES[1]]).encode()
    code, lines, told = translated(monkeypatch, capfdbinary, text, run=str(folder / "sentences"))
    assert (code, len(lines)) == (1, 1)
    assert "line 2 has " in told
    assert "more than the 63 of this model" in told
    assert "--split" in told
    code, split, _ = translated(monkeypatch, capfdbinary, text, run=str(folder / "sentences"), split=True)
    assert (code, len(split)) == (0, 3)
    assert split[0] == lines[0]
    assert len(split[1]) > len(split[0])


def test_split_parts_fit_and_lose_nothing(folder):
    run = runs.load_text(folder / "sentences")
    translator = stream.Translator(run.model, run.tokenizer, split=True)
    text = "the king sees. " * 30 + "x" * 200
    parts = translator._parts(text, "line 1")
    assert all(len(part) <= 63 for part in parts)
    assert "".join("".join(map(run.tokenizer.decode, parts)).split()) == "".join(text.split())


def test_a_line_break_among_the_tokens_does_not_break_a_line(folder, monkeypatch):
    run = runs.load_text(folder / "sentences")
    letters = [run.tokenizer._pieces.PieceToId(piece) for piece in ("a", "<0x0A>", "<0xE2>", "<0x80>", "<0xA8>", "a")]
    monkeypatch.setattr(stream, "translate", lambda model, sources, how: [letters for _ in sources])
    assert stream.Translator(run.model, run.tokenizer).take([b"one", b"two"]) == ["a a", "a a"]


@pytest.mark.parametrize("form", ["lines", "jsonl"])
def test_documents_keep_their_segments(folder, monkeypatch, capfdbinary, form):
    documents = [TALES[:3], TALES[3:8], ["", TALES[8]] if form == "jsonl" else [TALES[8]]]
    if form == "lines":
        text = "\n\n".join("\n".join(document) for document in documents)
    else:
        text = "\n".join(json.dumps({"name": i, "en": document}) for i, document in enumerate(documents))
    options = {"run": str(folder / "documents"), "documents": form}
    code, lines, _ = translated(monkeypatch, capfdbinary, text.encode(), **options)
    assert code == 0
    given = text.split("\n")
    assert len(lines) == len(given)
    if form == "lines":
        assert [bool(line) for line in lines] == [bool(line) for line in given]
    for number, line in enumerate(lines if form == "jsonl" else []):
        found = json.loads(line)
        assert found["name"] == number
        assert [bool(text) for text in found["es"]] == [bool(text) for text in documents[number]]


def test_documents_do_not_depend_on_how_the_lines_come_in(folder):
    run = runs.load_text(folder / "documents")
    lines = [line.encode() for line in [*TALES[:3], "", *TALES[3:8]]]
    whole, pieces = (stream.Translator(run.model, run.tokenizer, documents="lines") for _ in range(2))
    found = [*whole.take(lines), *whole.end()]
    assert found == [*(text for line in lines for text in pieces.take([line])), *pieces.end()]
    assert len(found) == 9
    assert whole.stretches == pieces.stretches > 2  # of 80 tokens at most


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1", "line 1 is not JSON"),
        (b'"text"', "line 1 must be an object"),
        (b'{"en": [1]}', "with a list of texts"),
        (b'{"de": ["a"], "fr": ["b"]}', "none for 'en'"),
    ],
)
def test_documents_that_are_none_are_told(folder, monkeypatch, capfdbinary, line, words):
    options = {"run": str(folder / "documents"), "documents": "jsonl"}
    code, lines, told = translated(monkeypatch, capfdbinary, line, **options)
    assert (code, lines) == (1, [])
    assert words in told


def test_options_that_cannot_be_served_are_told(folder, monkeypatch, capfdbinary, tmp_path):
    wrong = {
        "language": ({}, "does not translate"),
        "sentences": ({"documents": "lines"}, "was trained on single segments"),
        "documents": ({"beams": 0}, "--beams 0"),
        "nowhere": ({}, "there is no such folder"),
        "data": ({}, "no config.json"),
    }
    for name, (options, words) in wrong.items():
        code, lines, told = translated(monkeypatch, capfdbinary, b"", run=str(folder / name), **options)
        assert (code, lines) == (2, [])
        assert words in told
    models.save(runs.load_text(folder / "sentences").model, tmp_path / "bare")
    code, _, told = translated(monkeypatch, capfdbinary, b"", run=str(tmp_path / "bare"))
    assert code == 2
    assert "no vocabulary.model" in told
    Tokenizer.train(corpus(), 340, tmp_path / "bare" / "vocabulary.model")
    code, _, told = translated(monkeypatch, capfdbinary, b"", run=str(tmp_path / "bare"))
    assert code == 2
    assert "has a vocabulary of 330 pieces, but this one has 340" in told


def test_bleu_and_chrf_are_sacrebleus(folder, capsys, tmp_path):
    output = tmp_path / "found.json"
    assert evaluate.run(evaluate.Options(runs=(str(folder / "sentences"),), beams=3, output=output)) == 0
    told = capsys.readouterr().out
    run = runs.load_text(folder / "sentences")
    pairs = list(text_data.of_run(run.config, "test").pairs())
    hypotheses = []
    for pair in pairs:
        source = torch.tensor([[*run.tokenizer.encode(pair.source), 2]])
        hypotheses.append(run.tokenizer.decode(search(run.model, source, beams=3)[0][0].tokens))
    references = [[pair.target for pair in pairs]]
    (found,) = json.loads(output.read_text())["results"]
    assert found["segments"]["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, references).score)
    assert found["segments"]["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, references).score)
    assert found["segments"]["bleu"] > 10  # it has learned something
    assert f"{found['segments']['bleu']:.2f}" in told
    assert "tok:13a|smooth:exp|version:" in told
    assert "documents" not in found


def test_a_run_of_documents_has_bleu_of_documents_too(folder, tmp_path, capsys):
    output = tmp_path / "found.json"
    assert evaluate.run(evaluate.Options(runs=(str(folder / "documents"),), beams=1, output=output)) == 0
    (found,) = json.loads(output.read_text())["results"]
    assert (found["segments"]["texts"], found["documents"]["texts"]) == (20, 2)
    run = runs.load_text(folder / "documents")
    text = text_data.of_run(run.config, "test")
    whole = translation.translate_corpus(run.model, run.tokenizer, run.config, text, translation.Search(beams=1))
    references = [" ".join(pair.target for pair in document.pairs) for document in text.documents]
    assert found["documents"]["bleu"] == pytest.approx(sacrebleu.corpus_bleu(whole.documents, [references]).score)
    assert len(whole.segments) == 20
    assert "doc. BLEU" in " ".join(capsys.readouterr().out.split())


def test_pairs_that_were_cut_are_put_together_again(folder):
    run = runs.load_text(folder / "sentences")
    pairs = (Pair(TALES[0], "…"), Pair("the king. " * 40, "rey. " * 40))
    text = Corpus((Document("one", pairs),), ("en", "es"))
    found = translation.translate_corpus(run.model, run.tokenizer, run.config, text)
    assert found.examples > len(found.segments) == 2
    assert found.documents == [" ".join(found.segments)]


def test_a_smoke_run_says_so_and_text_and_images_keep_apart(folder, capsys, tmp_path):
    both = tuple(str(folder / name) for name in ("sentences", "language"))
    assert evaluate.run(evaluate.Options(runs=both, smoke=True)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("these numbers mean nothing") == 2
    assert "bits/character" in told
    assert probe.run(probe.Options(runs=both[:1])) == 2
    assert "is a model of text, not of images" in capsys.readouterr().err
    saved = str(Path(both[0], "model"))
    assert evaluate.run(evaluate.Options(runs=(saved,), smoke=True)) == 2
    assert "give one with --data" in capsys.readouterr().err
    assert evaluate.run(evaluate.Options(runs=(saved,), data=str(folder / "data"), smoke=True)) == 0
