"""`nomax translate`: lines and documents in, their translations out, and what it says to mistakes."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from evaluate_helpers import nomax
from text_corpora import corpus

from nomax import cli, models
from nomax.data.text import Tokenizer
from nomax.evaluate import runs, translate, translation
from nomax.evaluate.translation import Translator
from nomax.models.decoding import beam_search

pytest.importorskip("sentencepiece")
TALES = [pair.source for pair in corpus(2, seed=2).pairs()]


def translated(monkeypatch, capfdbinary, text, **options):
    """What the command writes for some bytes: its exit code, lines and errors."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    given = translate.Options(**{"beams": 2, **options})
    code = cli.exit_code("nomax translate", lambda: translate.run(given))
    sys.stdout.flush()
    out, err = capfdbinary.readouterr()
    assert not out or out.endswith(b"\n")
    return code, out.decode().split("\n")[:-1], err.decode()


def test_lines_come_out_in_their_order_and_number_and_empty_ones_stay_empty(text_runs, monkeypatch, capfdbinary):
    text = "\n".join([TALES[0], "", *TALES[1:], "  ", "\t", TALES[3] + "\r"])
    code, lines, _ = translated(monkeypatch, capfdbinary, text.encode(), run=str(text_runs / "sentences"))
    assert code == 0
    assert len(lines) == len(text.split("\n"))
    assert [line for line, given in zip(lines, text.split("\n"), strict=True) if not given.strip()] == [""] * 3
    run = runs.load_text(text_runs / "sentences")
    for given, line in zip(text.split("\n"), lines, strict=True):
        if given.strip():
            source = torch.tensor([[*run.tokenizer.encode(given.strip()), 2]])
            assert line == run.tokenizer.decode(beam_search(run.model, source, beams=2)[0][0].tokens)
    assert lines[4] == lines[-1] != lines[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("the cat",), "not arguments: echo 'the cat' | nomax translate 'my run'"),
        (("the", "cat"), "not arguments: echo 'the cat' | nomax translate 'my run'"),
        (("in 1.txt",), "it reads standard input: nomax translate 'my run' < 'in 1.txt'"),
    ],
)
def test_text_as_an_argument_is_told_to_come_from_standard_input(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in 1.txt").write_text("the cat\n")
    assert cli.main(["translate", "my run", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_line_is_translated_as_soon_as_it_is_there_until_nobody_reads_on(text_runs):
    words = [sys.executable, "-m", "nomax.cli", "translate", str(text_runs / "sentences"), "--beams", "1"]
    with subprocess.Popen(words, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)) as running:
        for line in TALES[:2]:
            running.stdin.write(f"{line}\n".encode())
            running.stdin.flush()
            assert running.stdout.readline().strip()
        running.stdout.close()
        running.stdin.write("\n".join(TALES).encode())
        running.stdin.close()
        assert running.wait() == 141
        assert running.stderr.read() == b""


def test_ctrl_c_ends_it_after_whole_lines(text_runs, monkeypatch, capfdbinary):
    class Input(io.BytesIO):
        def read1(self, size=-1):
            line = self.readline()
            if not line:
                raise KeyboardInterrupt
            return line

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Input(f"{TALES[0]}\n{TALES[1]}\n".encode())))
    assert cli.main(["translate", str(text_runs / "sentences"), "--beams", "1"]) == 130
    out, err = capfdbinary.readouterr()
    assert out.count(b"\n") == 2
    assert out.endswith(b"\n")
    assert err == b"nomax translate: stopped.\n"


def test_bytes_that_are_not_utf8_are_named_and_what_came_before_is_out(text_runs, monkeypatch, capfdbinary):
    text = b"\n".join([TALES[0].encode(), TALES[1].encode(), b"\xc3\xa1 \xff", TALES[2].encode()])
    code, lines, told = translated(monkeypatch, capfdbinary, text, run=str(text_runs / "sentences"))
    assert code == 1
    assert len(lines) == 2
    assert all(lines)
    assert "line 3, byte 4 (0xff) is not UTF-8" in told


def test_a_line_that_is_too_long_is_named_or_split(text_runs, monkeypatch, capfdbinary):
    words = "the king sees. " * 30 + "x" * 200
    text = "\n".join([TALES[0], words, TALES[1]]).encode()
    code, lines, told = translated(monkeypatch, capfdbinary, text, run=str(text_runs / "sentences"))
    assert (code, len(lines)) == (1, 1)
    assert "line 2 has " in told
    assert "more than the 63 of this model" in told
    assert "--split" in told
    code, split, _ = translated(monkeypatch, capfdbinary, text, run=str(text_runs / "sentences"), split=True)
    assert (code, len(split)) == (0, 3)
    assert split[0] == lines[0]
    assert len(split[1]) > len(split[0])


def test_split_parts_fit_and_lose_nothing(text_runs):
    run = runs.load_text(text_runs / "sentences")
    text = "the king sees. " * 30 + "x" * 200
    parts = Translator(run.model, run.tokenizer).segment(text)
    assert all(len(part) <= 63 for part in parts)
    assert len(parts[0]) < 48  # of whole sentences, with room for a longer translation
    assert "".join("".join(map(run.tokenizer.decode, parts)).split()) == "".join(text.split())


def test_a_line_break_among_the_tokens_does_not_break_a_line(text_runs, monkeypatch):
    run = runs.load_text(text_runs / "sentences")
    letters = [run.tokenizer._pieces.PieceToId(piece) for piece in ("a", "<0x0A>", "<0xE2>", "<0x80>", "<0xA8>", "a")]
    monkeypatch.setattr(
        translation, "translate", lambda model, sources, how: [(n, letters) for n in range(len(sources))]
    )
    assert translate.Stream(Translator(run.model, run.tokenizer)).take([b"one", b"two"]) == ["a a", "a a"]


@pytest.mark.parametrize("form", ["lines", "jsonl"])
def test_documents_keep_their_segments(text_runs, monkeypatch, capfdbinary, form):
    documents = [TALES[:3], TALES[3:8], ["", TALES[8]] if form == "jsonl" else [TALES[8]]]
    if form == "lines":
        text = "\n\n".join("\n".join(document) for document in documents)
    else:
        text = "\n".join(json.dumps({"name": i, "en": document}) for i, document in enumerate(documents))
    options = {"run": str(text_runs / "documents"), "documents": form}
    code, lines, _ = translated(monkeypatch, capfdbinary, text.encode(), **options)
    assert code == 0
    given = text.split("\n")
    assert len(lines) == len(given)
    if form == "lines":
        assert [bool(line) for line in lines] == [bool(line) for line in given]
    for number, line in enumerate(lines if form == "jsonl" else []):
        document = json.loads(line)
        assert document["name"] == number
        assert [bool(text) for text in document["es"]] == [bool(text) for text in documents[number]]


def test_documents_do_not_depend_on_how_the_lines_come_in(text_runs):
    run = runs.load_text(text_runs / "documents")
    lines = [line.encode() for line in [*TALES[:3], "", *TALES[3:8]]]
    whole, pieces = (translate.Stream(Translator(run.model, run.tokenizer, whole=True), "lines") for _ in range(2))
    output = [*whole.take(lines), *whole.end()]
    assert output == [*(text for line in lines for text in pieces.take([line])), *pieces.end()]
    assert len(output) == 9
    assert whole.translator.stretches == pieces.translator.stretches > 2  # of 60 tokens at most


def echo(tokenizer, shown, most):
    """Instead of a search: each source is its own translation, but without separators if it has too many segments."""

    def translated(model, sources, search):
        for number, source in enumerate(sources):
            shown.append(len(tokenizer.segments(source)))
            yield number, source if shown[-1] <= most else [token for token in source if token != 4]

    return translated


def test_stretches_leave_room_for_a_longer_translation_and_uneven_ones_are_halved(text_runs, monkeypatch):
    run = runs.load_text(text_runs / "documents")
    whole = Translator(run.model, run.tokenizer, whole=True)
    texts = [*TALES, "the king " * 35, "the king"]  # one that needs more than the room by itself
    document = [whole.segment(text) for text in texts]
    lengths = [len(part) for (part,) in document]
    assert 60 < lengths[-2] < 80
    for stretch in whole._packed([document]):
        assert sum(lengths[place] + 1 for place in stretch) <= 60 or stretch == [len(texts) - 2]

    shown = []
    monkeypatch.setattr(translation, "translate", echo(run.tokenizer, shown, most=2))
    short = [f"{number} a" for number in range(8)]
    assert whole.translate([[whole.segment(text) for text in short]]) == [short]
    assert shown == [8, 4, 4, 2, 2, 2, 2]
    assert (whole.stretches, whole.uneven) == (1, 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1", "line 1 cannot be read as JSON"),
        (b'{"en": ["a"], "n": %s}' % (b"9" * 5000), "line 1 cannot be read as JSON"),
        (b'{"en": ["\\ud800"]}', "line 1 has \\ud800 alone"),
        (b'{"name": "\\udfff", "en": ["a"]}', "line 1 has \\udfff alone"),
        (b"{}", "with a list of texts"),
        (b'"text"', "line 1 must be an object"),
        (b'{"en": [1]}', "with a list of texts"),
        (b'{"de": ["a"], "fr": ["b"]}', "line 1: unknown language mark 'en'; it has de, fr."),
        (b'{"name": "d1", "es": ["a"]}', "line 1: unknown language mark 'en'; it has es."),
    ],
)
def test_documents_that_are_none_are_told(text_runs, monkeypatch, capfdbinary, line, words):
    options = {"run": str(text_runs / "documents"), "documents": "jsonl"}
    code, lines, told = translated(monkeypatch, capfdbinary, line, **options)
    assert (code, lines) == (1, [])
    assert words in told
    assert told.count("\n") == 1


def test_jsonl_keeps_what_is_no_source_and_skips_empty_lines(text_runs, monkeypatch, capfdbinary):
    given = [{"n": 1, "en": ["the king"], "tags": ["x", 2], "es": ["mine"]}, {"de": [], "en": []}]
    text = "\n\n \n".join(map(json.dumps, given)).encode()
    options = {"run": str(text_runs / "documents"), "documents": "jsonl"}
    code, lines, _ = translated(monkeypatch, capfdbinary, text, **options)
    first, second = map(json.loads, lines)
    assert code == 0
    assert (first["n"], first["tags"], second) == (1, ["x", 2], {"de": [], "es": []})
    assert first.keys() == {"n", "tags", "es"}
    assert len(first["es"]) == 1
    assert first["es"] != ["mine"]


def test_before_a_line_that_is_too_long_to_be_text_all_is_out(text_runs, monkeypatch, capfdbinary):
    monkeypatch.setattr(translate, "LONGEST_LINE", 200)
    monkeypatch.setattr(translate, "BLOCK", 64)
    text = b"the king\nthe river\n" + b"a" * 1000 + b"\nthe year"
    options = {"run": str(text_runs / "documents"), "documents": "lines"}
    code, lines, told = translated(monkeypatch, capfdbinary, text, **options)
    assert (code, len(lines)) == (1, 2)
    assert told == "nomax translate: line 3 has more than 200 bytes: is this a text?\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told(text_runs, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the king\n")))
    with monkeypatch.context() as patch, open("/dev/full", "w") as full:
        patch.setattr(sys, "stdout", full)
        assert translate.run(translate.Options(run=str(text_runs / "sentences"), beams=1)) == 1
    assert capfd.readouterr().err == "nomax translate: the translations cannot be written: No space left on device.\n"


def test_a_broken_model_is_told(text_runs, monkeypatch, capfdbinary, tmp_path):
    broken = str(shutil.copytree(text_runs / "sentences" / "model", tmp_path / "broken"))
    model = models.load(broken)
    torch.nn.init.constant_(model.embedding.weight, float("nan"))
    models.save(model, broken)
    code, lines, told = translated(monkeypatch, capfdbinary, b"the king", run=broken)
    assert (code, lines) == (2, [])
    assert told == f"nomax translate: {broken}: {NOT_FINITE}"
    assert nomax("evaluate", broken, "--data", text_runs / "data", "--smoke") == 2
    assert capfdbinary.readouterr().err.decode() == f"nomax evaluate: broken (reluformer): {NOT_FINITE}"


NOT_FINITE = "the model's logits are not finite, so no translation has a probability.\n"


def test_a_saved_model_knows_its_vocabulary(text_runs, monkeypatch, capfdbinary, tmp_path):
    copy = shutil.copytree(text_runs / "sentences" / "model", tmp_path / "copy")
    assert translated(monkeypatch, capfdbinary, b"the king", run=str(copy))[0] == 0
    Tokenizer.train(corpus(3, seed=7), 330, copy / "vocabulary.model")
    code, lines, told = translated(monkeypatch, capfdbinary, b"the king", run=str(copy))
    assert (code, lines) == (2, [])
    assert "was trained with the vocabulary" in told
    (copy / "vocabulary.model").rename(tmp_path / "other.model")
    models.save(models.load(copy), copy)  # without a vocabulary, as before there was such a check
    (tmp_path / "other.model").rename(copy / "vocabulary.model")
    assert translated(monkeypatch, capfdbinary, b"the king", run=str(copy))[0] == 0


def test_options_that_cannot_be_served_are_told(text_runs, monkeypatch, capfdbinary, tmp_path):
    wrong = {
        "language": ({}, "does not translate"),
        "sentences": ({"documents": "lines"}, "was trained on single segments"),
        "documents": ({"beams": 0}, "--beams 0"),
        "documents/../sentences": ({"length_penalty": float("inf")}, "--length-penalty inf"),
        "sentences/model": ({"length_penalty": 1e300}, "--length-penalty 1e+300"),
        "nowhere": ({}, "there is no such folder"),
        "data": ({}, "no config.json"),
    }
    for name, (options, words) in wrong.items():
        code, lines, told = translated(monkeypatch, capfdbinary, b"", run=str(text_runs / name), **options)
        assert (code, lines) == (2, [])
        assert words in told
    models.save(runs.load_text(text_runs / "sentences").model, tmp_path / "bare")
    code, _, told = translated(monkeypatch, capfdbinary, b"", run=str(tmp_path / "bare"))
    assert code == 2
    assert "no vocabulary.model" in told
    Tokenizer.train(corpus(), 340, tmp_path / "bare" / "vocabulary.model")
    code, _, told = translated(monkeypatch, capfdbinary, b"", run=str(tmp_path / "bare"))
    assert code == 2
    assert "has a vocabulary of 330 pieces, but this one has 340" in told
