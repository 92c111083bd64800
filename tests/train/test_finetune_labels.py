"""`nomax finetune` on a text classifier: calibrate, distil, then learn labels from CSV files."""

import csv
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import nomax
from nomax import _compat
from nomax.cli import main

WORDS = [f"w{number}" for number in range(40)]
LABELS = {0: "low", 1: "high"}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder with a tiny BERT that classifies texts, converted, and its tokenizer."""
    transformers = _compat.transformers()
    folder = tmp_path_factory.mktemp("models") / "classifier"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=42, initializer_range=0.4, id2label=LABELS, label2id={name: i for i, name in LABELS.items()}, **sizes
    )
    model = transformers.BertForSequenceClassification(config).eval()
    nomax.convert(model, "relu/L")
    model.save_pretrained(folder)
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]")
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Texts whose words are from one half of the vocabulary or from the other, which the label says."""
    folder = tmp_path_factory.mktemp("labelled")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 120), ("test", 60)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["id", "text", "label"])
            for number in range(count):
                label, length = number % 2, 3 + number % 9
                words = torch.randint(20, (length,), generator=generator) + 20 * label
                rows.writerow([number, " ".join(WORDS[i] for i in words.tolist()), LABELS[label]])
    return folder


def finetune(folder, data, out, *more):
    words = ["finetune", folder, "--data", data, "--out", out, "--length", "16", "--batch-size", "12"]
    status = main([*map(str, words), *more])
    return status, json.loads((out / "finetune.json").read_text()) if status == 0 else None


def test_labels_come_after_distillation(classifier, labelled, tmp_path):
    out = tmp_path / "out"
    more = ["--distil.steps", "30", "--distil.lr", "0.003", "--labels.steps", "60", "--labels.lr", "0.01"]
    status, result = finetune(classifier, labelled, out, *more)
    assert status == 0
    stages = result["stages"]
    assert list(stages) == ["original", "converted", "calibrated", "distilled", "fine-tuned"]
    assert stages["original"]["agreement"] == 1
    assert stages["original"]["accuracy"] < 0.8
    assert stages["fine-tuned"]["accuracy"] >= 0.95
    assert result["labels"]["steps"][-1]["step"] == 60
    assert "| fine-tuned |" in (out / "finetune.md").read_text()

    model = nomax.from_pretrained(out)
    assert model.config.id2label == LABELS
    tokenizer = _compat.transformers().AutoTokenizer.from_pretrained(out)
    logits = model(**tokenizer(["w1 w2 w3", "w30 w31 w32 w33"], padding=True, return_tensors="pt")).logits
    assert logits.argmax(-1).tolist() == [0, 1]


def test_a_recovered_encoder_with_a_new_head_learns_labels_without_its_original(classifier, labelled, tmp_path):
    encoder = nomax.from_pretrained(classifier, class_name="BertModel")
    for module in encoder.modules():
        if isinstance(module, nomax.nn.InnerAttention):
            module.learn(torch.full((2,), 1.5), torch.full((2,), 0.5))  # as if calibrated
    encoder.save_pretrained(tmp_path / "encoder")
    headed = nomax.from_pretrained(
        tmp_path / "encoder", class_name="BertForSequenceClassification", num_labels=2, id2label=LABELS
    )
    headed.save_pretrained(tmp_path / "headed")
    for path in classifier.glob("tokenizer*"):
        (tmp_path / "headed" / path.name).write_bytes(path.read_bytes())
    more = ["--distil.steps", "0", "--labels.steps", "120", "--labels.lr", "0.01"]
    status, result = finetune(tmp_path / "headed", labelled, tmp_path / "out", *more)
    assert status == 0
    assert {name: list(measured) for name, measured in result["stages"].items()} == {
        "converted": ["accuracy"],
        "fine-tuned": ["accuracy"],
    }
    assert result["stages"]["fine-tuned"]["accuracy"] >= 0.95


def test_wrong_labels_and_files_say_what_to_do(classifier, labelled, tmp_path, capsys):
    def complaint(data, *more):
        assert finetune(classifier, data, tmp_path / "out", *more)[0] == 2
        return " ".join(capsys.readouterr().err.split())

    assert "there is no train.csv" in complaint(tmp_path)
    assert "--pairs is not for text classifiers" in complaint(labelled, "--pairs", "x")
    (tmp_path / "train.csv").write_text("text,label\nw1,middle\n")
    assert "line 2: the label 'middle' is none of the model's" in complaint(tmp_path)
    (tmp_path / "train.csv").write_text("words,label\nw1,low\n")
    assert "must name the columns text and label" in complaint(tmp_path)
    (tmp_path / "train.csv").write_text("text,label\n")
    assert "has no rows" in complaint(tmp_path)
