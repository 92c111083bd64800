"""`nomax evaluate` on runs of text: BLEU, chrF and perplexity of what `nomax translate` writes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from evaluate_helpers import nomax
from text_corpora import corpus

from nomax.data.text import Corpus, Document, Pair
from nomax.evaluate import evaluate, runs, translate, translation
from nomax.evaluate.translation import Translator
from nomax.models.decoding import beam_search
from nomax.train.text import data as text_data

pytest.importorskip("sentencepiece")
sacrebleu = pytest.importorskip("sacrebleu")
TALES = [pair.source for pair in corpus(2, seed=2).pairs()]


def test_bleu_and_chrf_are_sacrebleus(text_runs, capsys, tmp_path):
    output = tmp_path / "results.json"
    assert evaluate.run(evaluate.Options(runs=(str(text_runs / "sentences"),), beams=3, output=output)) == 0
    told = capsys.readouterr().out
    run = runs.load_text(text_runs / "sentences")
    pairs = list(text_data.of_run(run.config, "test").pairs())
    hypotheses = []
    for pair in pairs:
        source = torch.tensor([[*run.tokenizer.encode(pair.source), 2]])
        hypotheses.append(run.tokenizer.decode(beam_search(run.model, source, beams=3)[0][0].tokens))
    references = [[pair.target for pair in pairs]]
    (result,) = json.loads(output.read_text())["results"]
    assert result["segments"]["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, references).score)
    assert result["segments"]["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, references).score)
    assert result["segments"]["bleu"] > 10  # it has learned something
    assert f"{result['segments']['bleu']:.2f}" in told
    assert "tok:13a|smooth:exp|version:" in told
    assert "documents" not in result


def test_a_run_of_documents_has_bleu_of_documents_too(text_runs, tmp_path, capsys):
    output = tmp_path / "results.json"
    assert evaluate.run(evaluate.Options(runs=(str(text_runs / "documents"),), beams=1, output=output)) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert (result["segments"]["texts"], result["documents"]["texts"]) == (20, 2)
    run = runs.load_text(text_runs / "documents")
    text = text_data.of_run(run.config, "test")
    whole = translation.translate_corpus(run, text, translation.Search(beams=1))
    references = [" ".join(pair.target for pair in document.pairs) for document in text.documents]
    assert result["documents"]["bleu"] == pytest.approx(sacrebleu.corpus_bleu(whole.documents, [references]).score)
    assert len(whole.segments) == 20
    assert "doc. BLEU" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["sentences", "documents"])
def test_what_is_evaluated_is_what_the_command_translates_whatever_the_references(text_runs, name):
    run = runs.load_text(text_runs / name)
    sources = [*TALES[:6], "the king. " * 40]

    def translated(targets):
        pairs = tuple(Pair(*pair) for pair in zip(sources, targets, strict=True))
        text = Corpus((Document("one", pairs),), ("en", "es"))
        return translation.translate_corpus(run, text, translation.Search(beams=1))

    usual, long = translated(TALES[:7]), translated([f"{text} " * 9 for text in TALES[:7]])
    assert usual == long
    assert usual.documents == [" ".join(usual.segments)]
    one = Translator(run.model, run.tokenizer, translation.Search(beams=1), whole=name == "documents")
    lines = translate.Stream(one, "lines" if name == "documents" else None, split=True)
    assert [*lines.take(text.encode() for text in sources), *lines.end()] == usual.segments
    assert (one.stretches, one.uneven) == (usual.stretches, usual.uneven)


@pytest.mark.parametrize("name", ["sentences", "documents"])
def test_progress_reaches_its_total(text_runs, name):
    run = runs.load_text(text_runs / name)
    text = text_data.of_run(run.config, "test")
    told = []

    def start(total):
        told.append([total])
        return told[-1].append

    translation.likelihood(run, text, 200, start)
    translation.translate_corpus(run, text, translation.Search(1, 0.6, 200), start)
    for total, *steps in told:
        assert len(steps) > 1
        assert sum(steps) == total
    assert len(told) == 2


def test_files_that_are_named_are_taken_whole_and_a_run_of_files_asks_for_them(
    text_runs, tmp_path, capsys, monkeypatch
):
    text = corpus(2, seed=2)
    for side, mark in enumerate(("en", "es")):
        (tmp_path / f"some.{mark}").write_text("\n".join(pair[side] for pair in text.pairs()))
    files, output = f"{tmp_path}/some.en,{tmp_path}/some.es", tmp_path / "results.json"
    options = {"runs": (str(text_runs / "sentences"),), "beams": 1}
    assert evaluate.run(evaluate.Options(data=files, output=output, **options)) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert (result["split"], result["segments"]["texts"]) == ("all", 20)
    moved = shutil.copytree(text_runs / "sentences", tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"data": files}))
    capsys.readouterr()
    assert nomax("evaluate", moved, "--beams", 1) == 2
    assert "which has no test split: give --data FILE,FILE." in capsys.readouterr().err


def test_a_smoke_run_says_so_and_text_and_images_keep_apart(text_runs, capsys, tmp_path):
    both = tuple(str(text_runs / name) for name in ("sentences", "language"))
    assert evaluate.run(evaluate.Options(runs=both, smoke=True)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("these numbers mean nothing") == 2
    assert "bits/character" in told
    assert nomax("probe", both[0]) == 2
    assert "is a text model, not an image model" in capsys.readouterr().err
    saved = str(Path(both[0], "model"))
    assert nomax("evaluate", saved, "--smoke") == 2
    assert "give one with --data" in capsys.readouterr().err
    assert evaluate.run(evaluate.Options(runs=(saved,), data=str(text_runs / "data"), smoke=True)) == 0
