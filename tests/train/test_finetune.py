"""`nomax finetune`: from a converted folder to a better one, with what came of it; killed, and on again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import nomax
from nomax import _compat
from nomax.cli import main
from nomax.train.distil import command as module
from nomax.train.distil.result import figure, markdown

WORDS = [f"w{number}" for number in range(60)]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A folder with a tiny BERT, converted, and its tokenizer."""
    transformers = _compat.transformers()
    folder = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=64, initializer_range=0.4, **sizes)).eval()
    nomax.convert(model, "relu/L")
    model.save_pretrained(folder)
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]")
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    generator = torch.Generator().manual_seed(0)
    for split, documents in (("train", 12), ("valid", 1), ("test", 4)):
        lines = []
        for number in range(documents):
            texts = [
                " ".join(WORDS[i] for i in torch.randint(60, (7,), generator=generator).tolist()) for _ in range(24)
            ]
            lines.append(json.dumps({"name": str(number), "en": texts, "es": texts[::-1]}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def arguments(converted, corpus, out, *more):
    words = ["finetune", converted, "--data", corpus, "--out", out, "--length", "64", "--batch-tokens", "256"]
    words += ["--test-texts", "8", "--calibration-texts", "8", "--distil.steps", "40", "--distil.checkpoint-every", "4"]
    words += ["--distil.lr", "0.003"]
    return [*map(str, words), *more]


def command(*settings):
    return main(arguments(*settings))


def result_of(folder):
    return json.loads((folder / "finetune.json").read_text())


def test_the_table_and_the_model(converted, corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert command(converted, corpus, out, "--pairs", str(corpus)) == 0
    printed = capsys.readouterr().out
    result = result_of(out)
    assert list(result["stages"]) == ["original", "converted", "calibrated", "distilled"]
    for name, measured in result["stages"].items():
        assert name in printed
        assert set(measured) == {"cosine at 15", "cosine at 55", "cosine at 135", "retrieval"}
    before, after, end = (result["stages"][name]["cosine at 55"] for name in ("converted", "distilled", "original"))
    assert before < after < end
    assert end == pytest.approx(1, abs=1e-5)
    assert result["distillation"]["steps"][-1]["step"] == 40
    assert result["command"].startswith(f"nomax finetune {converted} --data {corpus} --out {out} --pairs {corpus}")
    assert "--length 64" in result["command"]
    assert not (out / "checkpoints").exists()
    drawing = (out / "finetune.svg").read_text()
    assert f"distilled: {result['stages']['distilled']['cosine at 15']:.3f}" in drawing
    assert f"| {after:.4f} |" in (out / "finetune.md").read_text()

    monkeypatch.setattr(module, "distil", None)  # a finished one has nothing left to do
    capsys.readouterr()
    assert command(converted, corpus, out, "--pairs", str(corpus)) == 0
    assert f"{after:.4f}" in capsys.readouterr().out


def test_killed_with_signal_9_it_goes_on_to_the_very_same_weights(converted, corpus, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ["--threads", str(torch.get_num_threads()), "--distil.steps", "120"]
    assert command(converted, corpus, whole, *more) == 0

    words = arguments(converted, corpus, killed, *more)
    process = subprocess.Popen([sys.executable, "-m", "nomax.cli", *words], stdout=subprocess.DEVNULL)
    while not list(killed.glob("checkpoints/step-*.pt")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    left = result_of(killed)
    assert "distilled" not in left["stages"]

    assert command(converted, corpus, killed, *more) == 0
    assert result_of(killed)["stages"] == result_of(whole)["stages"]
    first, second = (nomax.from_pretrained(folder).state_dict() for folder in (whole, killed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_calibration(converted, corpus, tmp_path):
    out = tmp_path / "out"
    assert command(converted, corpus, out, "--distil.steps", "0", "--calibration", "at once") == 0
    result = result_of(out)
    assert list(result["stages"]) == ["original", "converted", "calibrated"]
    assert "--calibration 'at once'" in result["command"]
    model = nomax.from_pretrained(out)
    gains = result["calibration"]["layers"]["encoder.layer.0.attention.self.inner_attention"]["gain"]
    torch.testing.assert_close(model.encoder.layer[0].attention.self.inner_attention.gain, torch.tensor(gains))


def test_a_power_of_l_per_head_is_fitted_learned_and_saved(converted, corpus, tmp_path):
    out = tmp_path / "out"
    assert command(converted, corpus, out, "--learn-alpha", "--distil.steps", "5") == 0
    fitted = result_of(out)["calibration"]["layers"]["encoder.layer.0.attention.self.inner_attention"]["alpha"]
    learned = nomax.from_pretrained(out).encoder.layer[0].attention.self.inner_attention.alpha
    assert learned.shape == (len(fitted),)
    assert (learned != torch.tensor(fitted)).any()


def test_smoke_takes_few_steps(converted, corpus, tmp_path):
    assert main(["finetune", str(converted), "--data", str(corpus), "--out", str(tmp_path / "out"), "--smoke"]) == 0
    result = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert result["distillation"]["steps"][-1]["step"] == 3


def test_wrong_options_say_what_to_do(converted, corpus, tmp_path, capsys):
    def complaint(*arguments):
        assert command(*arguments) == 2
        return capsys.readouterr().err

    assert "name another folder" in complaint(converted, corpus, converted)
    assert "is neither a file or folder" in complaint(converted, tmp_path / "nowhere", tmp_path / "a")
    assert "has en and es" in complaint(converted, corpus, tmp_path / "b", "--language", "fr")
    assert "--short-texts 1.5 must be a share" in complaint(converted, corpus, tmp_path / "b", "--short-texts", "1.5")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine.txt").write_text("precious")
    assert "holds something else already" in complaint(converted, corpus, tmp_path / "c")
    out = tmp_path / "d"
    assert command(converted, corpus, out, "--distil.steps", "0") == 0
    assert "another command" in complaint(converted, corpus, out, "--distil.steps", "3")
    assert "name the original with --teacher" in complaint(out, corpus, tmp_path / "e")


def test_a_trained_model_learns_on_from_the_original(converted, corpus, tmp_path):
    model = nomax.from_pretrained(converted)
    nomax.revert(model)
    original = tmp_path / "original"
    model.save_pretrained(original)
    first, second = tmp_path / "first", tmp_path / "second"
    assert command(converted, corpus, first, "--distil.steps", "5") == 0  # which leaves much to learn
    assert command(first, corpus, second, "--teacher", str(original)) == 0
    before, after = (result_of(folder)["stages"] for folder in (first, second))
    assert list(after) == ["original", "converted", "distilled"]
    assert after["converted"] == pytest.approx(before["distilled"], abs=1e-5)
    assert after["distilled"]["cosine at 55"] > before["distilled"]["cosine at 55"]


def test_the_tables_on_the_page_are_those_of_the_results():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "recover.md").read_text()
    results = sorted((root / "results" / "convert").glob("minilm*/finetune.json"))
    assert results
    for file in results:
        table = markdown(json.loads(file.read_text()))
        assert table.partition("-->\n\n")[2] in page
        assert table == file.with_suffix(".md").read_text()
    result = result_of(root / "results" / "convert" / "minilm")
    for drawn in ("results/convert/minilm/finetune.svg", "docs/images/recover.svg"):
        assert (root / drawn).read_bytes() == figure(result)
