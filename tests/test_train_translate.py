"""`nomax train translate` and `nomax train language` as their users meet them."""

import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from text_corpora import corpus

from nomax import models
from nomax.cli import main
from nomax.data.text import Tokenizer, TokenOrder
from nomax.data.text.corpus import write
from nomax.models import ReLUFormer
from nomax.nn import RELUFORMER
from nomax.train import language, load_text_run, loop_config, metrics, optimiser, text_data, translate
from nomax.train.configure_text import configure, fitted
from nomax.train.distributed import World
from nomax.train.losses import smoothed
from nomax.train.text import TextTask
from nomax.train.text_config import TextConfig
from nomax.train.text_recipes import RECIPES, iwslt

pytest.importorskip("sentencepiece")
HERE = World(torch.device("cpu"))
SMALL = {"tensorboard": False, "threads": 1, "vocabulary": 330, "batch_size": 256, "warmup": 1, "max_length": 128}
SMALL |= {"dim": 16, "heads": 2, "decoder_layers": 1, "slots": 32, "dropout": 0.1}
TRANSLATE = {**SMALL, "encoder_layers": 1}
LANGUAGE = {name: value for name, value in SMALL.items() if name != "max_length"} | {"documents": 64}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOMAX_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


def tales(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, documents) in enumerate({"train": 12, "valid": 3, "test": 2}.items()):
        text = corpus(documents, seed=seed)
        write(folder / f"{split}.jsonl", text.documents, text.languages)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tales(tmp_path_factory.mktemp("data") / "tales")


def lines(folder):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in metrics.read(folder)]


def losses(folder):
    return [line.get("evaluation", line)["loss"] for line in metrics.read(folder)]


def test_one_command_trains_two_phis_compares_them_and_says_what_to_do_next(tmp_path, data, capsys):
    options = translate.Options(
        phi=("reluformer", "softmax"), data=data, out=tmp_path / "run", smoke=True, vocabulary=330, tensorboard=False
    )
    assert translate.run(options) == 0
    told = capsys.readouterr().out
    for name, phi in (("reluformer", RELUFORMER), ("softmax", "softmax")):
        folder = tmp_path / "run" / name
        model, tokenizer, config = load_text_run(folder)
        assert config.model.phi == model.config.phi == phi
        assert config.vocabulary == tokenizer.digest == Tokenizer.load(folder / "model" / "vocabulary.model").digest
        result = json.loads((folder / "result.json").read_text())
        assert result["valid_perplexity"] == pytest.approx(math.exp(result["valid_nll"]))
        perplexity = f"{result['valid_perplexity']:.4g}"
        assert perplexity in told
        card = (folder / "model" / "README.md").read_text()
        for fact in (phi, data, "en to es", "small", perplexity, "nomax train translate --phi reluformer softmax"):
            assert fact in card
        assert {"loss", "nll", "accuracy"} <= set(lines(folder)[-1]["evaluation"])
    table = (tmp_path / "run" / "comparison.md").read_text()
    assert table.index("reluformer") < table.index("| softmax |")
    assert "nomax evaluate" in told
    assert "nomax translate" in told


def test_reluformer_has_a_learned_gain_and_penalties_and_its_peers_have_not():
    own, factor, softmax, wortsman = (
        configure(translate.Options(penalty=penalty), phi, "translate")
        for phi, penalty in ((RELUFORMER, None), (RELUFORMER, 0.0), ("softmax", None), ("relu/L", None))
    )
    assert (own.model.learned_gain, own.normalisation_penalty, own.entropy_penalty) == ("head", 0.03, 0.03)
    assert (factor.model.learned_gain, factor.penalised) == ("head", False)
    assert [(each.model.learned_gain, each.penalised) for each in (softmax, wortsman)] == [(None, False)] * 2
    assert [each.model.gamma for each in (own, factor, softmax, wortsman)] == [6.4, 6.4, 1.0, 1.0]
    given = configure(translate.Options(), "0.2*relu/L^0.5", "translate")  # its factor is where the gain starts
    assert (given.model.gamma, given.model.learned_gain, given.penalised) == (1.0, "head", True)
    assert configure(translate.Options(gamma=3.0), RELUFORMER, "translate").model.gamma == 3.0
    one = configure(translate.Options(penalty=0.2, entropy_penalty=0.0), RELUFORMER, "translate")
    assert (one.normalisation_penalty, one.entropy_penalty) == (0.2, 0.0)


def test_the_smoothed_loss_is_pytorchs():
    logits = 4 * torch.randn(3, 7, 11)
    labels = torch.randint(11, (3, 7))
    weights = torch.rand(3, 7)
    for smoothing in (0.0, 0.1):
        found = {}
        for name, dtype in (("exact", torch.float64), ("torch", torch.float32), ("ours", torch.float32)):
            x = logits.to(dtype, copy=True).requires_grad_()
            if name == "ours":
                loss, nll = smoothed(x, labels, smoothing)
                torch.testing.assert_close(nll, F.cross_entropy(x.mT, labels, reduction="none"))
                assert not nll.requires_grad
            else:
                loss = F.cross_entropy(x.mT, labels, reduction="none", label_smoothing=smoothing)
            (loss * weights.to(dtype)).sum().backward()
            found[name] = (loss.detach().double(), x.grad.double())
        for exact, torchs, ours in zip(*found.values(), strict=True):
            assert (ours - exact).abs().max() <= 2 * (torchs - exact).abs().max() + 1e-7


def task_of(data, options, phi, kind="translate"):
    train, valid = (text_data.load(data, split, kind) for split in ("train", "valid"))
    config = fitted(configure(options, phi, kind), train)
    tokenizer = text_data.learned(train, config.model.vocabulary)
    return TextTask(config, text_data.stages(config, train, tokenizer), text_data.examples(config, valid, tokenizer))


@torch.no_grad()
def test_the_loss_is_that_of_each_sequence_by_itself_without_padding(data):
    task = task_of(data, translate.Options(**TRANSLATE, penalty=0.0), "relu/L")
    task.model.eval()
    batch = next(task.batches(3, HERE))
    measured = task.measure(task.model, batch)
    total, right, count = 0.0, 0, 0
    for number in batch.numbers:
        example = task.stages[0][0][number]
        source, target = torch.tensor([[*example.source, 2]]), torch.tensor([[1, *example.target, 2]])
        logits = task.model(source, target[:, :-1])[0]
        total += float(F.cross_entropy(logits, target[0, 1:], label_smoothing=0.1, reduction="sum"))
        right += int((logits.argmax(-1) == target[0, 1:]).sum())
        count += target.shape[1] - 1
    assert len(set(map(len, (task.stages[0][0][number].target for number in batch.numbers)))) > 1
    assert float(measured["loss"]) == pytest.approx(total, rel=1e-5)
    assert int(measured["accuracy"]) == right
    assert task.size(batch) == batch.tokens == count


@torch.no_grad()
def test_penalties_are_added_with_their_weights(data):
    task = task_of(data, translate.Options(**TRANSLATE, penalty=0.5, entropy_penalty=2.0, margin=0.6), RELUFORMER)
    task.model.eval()
    batch = next(task.batches(0, HERE))
    measured = {name: float(value) / task.size(batch) for name, value in task.measure(task.model, batch).items()}
    plain = task_of(data, translate.Options(**TRANSLATE, penalty=0.0), RELUFORMER)
    plain.model.eval()
    without = float(plain.measure(plain.model, batch)["loss"]) / task.size(batch)
    expected = [0.0, 0.0]
    for number in batch.numbers:
        example = task.stages[0][0][number]
        source, target = torch.tensor([[*example.source, 2]]), torch.tensor([[1, *example.target]])
        _, found = task.model(source, target, penalties=True, margin=0.6)
        expected = [sum_ + float(value) * target.shape[1] for sum_, value in zip(expected, found, strict=True)]
    assert [measured["normalisation"], measured["entropy"]] == pytest.approx([x / task.size(batch) for x in expected])
    total = without + 0.5 * measured["normalisation"] + 2.0 * measured["entropy"]
    assert measured["loss"] == pytest.approx(total, rel=1e-5)


def test_the_reported_perplexity_of_a_language_model_is_that_of_the_saved_one(tmp_path, data):
    assert language.run(language.Options(data=data, out=tmp_path / "run", steps=3, language="es", **LANGUAGE)) == 0
    model, tokenizer, config = load_text_run(tmp_path / "run")
    assert (config.languages, config.documents, config.model.encoder_layers) == (("es",), True, 0)
    text = text_data.load(data, "valid", "language", ("es",))
    assert {pair.source for pair in text.pairs()} == {pair.target for pair in text_data.load(data, "valid").pairs()}
    total, count = 0.0, 0
    for example in text_data.examples(config, text, tokenizer):
        tokens = torch.tensor([[1, *example.target, 2]])
        with torch.no_grad():
            total += float(F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="sum"))
        count += tokens.shape[1] - 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["valid_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_a_language_model_reads_plain_text(tmp_path):
    for name in ("train.txt", "other"):
        (tmp_path / name).write_text("\n".join(pair.source for pair in corpus().pairs()))
    options = language.Options(data=str(tmp_path / "train.txt"), valid=str(tmp_path / "other"), steps=2, **LANGUAGE)
    assert language.run(language.Options(**{**vars(options), "out": tmp_path / "run"})) == 0
    assert load_text_run(tmp_path / "run")[2].languages == ("txt",)


def test_the_vocabulary_comes_from_the_training_split_alone_and_is_learned_once(tmp_path, data, monkeypatch):
    options = translate.Options(data=data, out=tmp_path / "run", steps=2, **TRANSLATE)
    assert translate.run(options) == 0
    direct = Tokenizer.train(text_data.load(data, "train"), 330)
    assert load_text_run(tmp_path / "run")[1].digest == direct.digest
    monkeypatch.setattr(Tokenizer, "train", None)  # it would be called if it were learned again
    assert translate.run(translate.Options(**{**vars(options), "out": tmp_path / "again"})) == 0


def test_a_vocabulary_that_is_not_the_runs_is_refused(tmp_path, data, capsys):
    options = translate.Options(data=data, out=tmp_path / "run", steps=2, **TRANSLATE)
    assert translate.run(options) == 0
    Tokenizer.train(corpus(seed=9), 330, tmp_path / "run" / "vocabulary.model")
    with pytest.raises(ValueError, match="its pieces have other numbers"):
        load_text_run(tmp_path / "run")
    assert translate.run(options) == 2
    assert "vocabulary: " in capsys.readouterr().err
    shutil.copy(tmp_path / "run" / "model" / "vocabulary.model", tmp_path / "run")
    other = {**vars(load_text_run(tmp_path / "run")[0].config), "vocabulary": 340}
    models.save(ReLUFormer(**other), tmp_path / "run" / "model")
    with pytest.raises(ValueError, match="model has a vocabulary of 340 pieces, but this one has"):
        load_text_run(tmp_path / "run")
    (tmp_path / "run" / "vocabulary.model").unlink()
    with pytest.raises(FileNotFoundError, match=r"no vocabulary\.model"):
        load_text_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"phi": ("relux/L",)}, "did you mean 'relu/L'"),
        ({"phi": ("reluformer", RELUFORMER)}, "the same φ is there twice"),
        ({"phi": ("softmax",), "learned_gain": "head"}, "there is no gain to learn"),
        ({"data": "bible-en-fr"}, "Did you mean bible-en-es"),
        ({"languages": ("en", "fr")}, "unknown language mark 'fr'"),
        ({"steps": 5, "epochs": 2.0}, "--steps and --epochs"),
        ({"steps": 1}, "warmup=1 must be less than steps=1"),
        ({"vocabulary": 100_000}, "vocabulary is 100,000, which sentencepiece cannot learn"),
        ({"batch_size": 100}, "batch_size=100 tokens cannot hold an example of 128"),
        ({"documents": 64}, "leave out --max-length"),
        ({"steps": 3, "growth": 0.5}, "growth=0.5: only documents grow"),
        ({"steps": 3, "growth": 1.0, "documents": 128, "max_length": None}, "growth=1.0 must be at least 0 and below"),
        ({"penalty": 0.1, "phi": ("gelu",)}, "phi='gelu' has weights below zero"),
        ({"penalty": -1.0}, "normalisation_penalty=-1.0 must be a number of at least 0"),
        ({"margin": math.nan}, "margin=nan must be a number of at least 0"),
        ({"steps": 3, "lr": math.inf}, "lr=inf must be a number of at least 0"),
        ({"steps": 3, "seed": -1}, "seed=-1 must be from 0 to 2^63 - 1"),
        ({"epochs": 0.0}, "--epochs 0 must be a number above 0"),
        ({"epochs": math.inf}, "--epochs inf must be a number above 0"),
        ({"device": "foo"}, "--device foo cannot be used here"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
    ],
)
def test_wrong_options_are_told_before_anything_is_written(tmp_path, data, capsys, wrong, words):
    assert translate.run(translate.Options(**{**TRANSLATE, "data": data, "out": tmp_path / "run", **wrong})) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_corpus_without_splits_needs_other_data_to_evaluate_on(tmp_path, data, capsys):
    whole = str(Path(data, "train.jsonl"))
    assert translate.run(translate.Options(data=whole, out=tmp_path / "run", steps=2, **TRANSLATE)) == 2
    assert "--valid" in capsys.readouterr().err
    valid = str(Path(data, "valid.jsonl"))
    assert translate.run(translate.Options(data=whole, valid=valid, out=tmp_path / "run", steps=2, **TRANSLATE)) == 0


def two_files(folder, name, seed):
    folder.mkdir(exist_ok=True)
    for side, mark in enumerate(("en", "es")):
        (folder / f"{name}.{mark}").write_text("".join(f"{pair[side]}\n" for pair in corpus(2, seed=seed).pairs()))
    return ",".join(str(folder / f"{name}.{mark}") for mark in ("en", "es"))


def test_ones_own_small_text_gives_a_smoke_run_and_then_a_command_that_works(tmp_path, capsys):
    whole = two_files(tmp_path, "train", 0)
    options = translate.Options(data=whole, valid=whole, out=tmp_path / "run", smoke=True, tensorboard=False)
    assert translate.run(options) == 0
    config = load_text_run(tmp_path / "run")[2]
    assert 300 < config.model.vocabulary < 512
    assert text_data.of_run(config, "valid") == text_data.of_run(config, "train")
    advice = re.search("Next: nomax (.*) \\(BLEU\\)", capsys.readouterr().out)[1]
    assert main([*advice.split(), "--smoke"]) == 0
    (tmp_path / "train.es").write_text((tmp_path / "train.es").read_text().replace("rey", "reina"))
    assert translate.run(options) == 2
    assert "the text of train: SHA-256" in capsys.readouterr().err


def test_languages_turn_two_files_round_and_those_of_the_validation_follow(tmp_path):
    train, valid = (two_files(tmp_path, name, seed) for seed, name in enumerate(("train", "valid")))
    turned = {"languages": ("es", "en"), "valid": ",".join(reversed(valid.split(",")))}
    for name, given in (("there", {"valid": valid}), ("back", turned)):
        assert translate.run(translate.Options(data=train, out=tmp_path / name, steps=2, **given, **TRANSLATE)) == 0
    there, back = (load_text_run(tmp_path / name)[2] for name in ("there", "back"))
    assert (there.languages, back.languages) == (("en", "es"), ("es", "en"))
    for split in ("train", "valid"):
        assert text_data.of_run(back, split).documents == text_data.of_run(there, split).turned().documents


@pytest.mark.parametrize("changed", ["train", "valid"])
def test_a_run_does_not_go_on_with_other_text(tmp_path, capsys, changed):
    data = tmp_path / "data"
    options = translate.Options(data=tales(data), out=tmp_path / "run", steps=4, checkpoint_every=2, **TRANSLATE)
    assert translate.run(options) == 0
    for path in ("result.json", "checkpoints/step-00000004.pt"):
        (tmp_path / "run" / path).unlink()
    file, story = data / f"{changed}.jsonl", tmp_path / "run" / "run.json"
    text = file.read_text()
    file.write_text(text.replace("king", "queen"))
    assert translate.run(options) == 2
    assert f"the text of {changed}: SHA-256" in capsys.readouterr().err
    assert json.loads(story.read_text())["continued"] == []
    file.write_text(text)
    story.write_text(json.dumps({"continued": []}))  # as runs had it before the text was noted
    assert translate.run(options) == 0
    assert set(json.loads(story.read_text())["text"]) == {"train", "valid"}


def test_languages_turn_the_corpus_around(tmp_path, data):
    options = translate.Options(data=data, out=tmp_path / "run", steps=2, languages=("es", "en"), **TRANSLATE)
    assert translate.run(options) == 0
    config = load_text_run(tmp_path / "run")[2]
    assert config.languages == ("es", "en")
    assert text_data.of_run(config, "test").documents == text_data.load(data, "test").turned().documents


def test_epochs_are_counted_in_batches(data):
    train = text_data.load(data, "train")
    config = fitted(configure(translate.Options(**TRANSLATE, epochs=2.0), "relu/L", "translate"), train)
    task = task_of(data, translate.Options(**TRANSLATE, epochs=2.0), "relu/L")
    shown = [number for step in range(config.steps) for number in task.stages[0][1].batch(step)]
    assert sorted(shown) == sorted([*range(len(train))] * 2)


@pytest.mark.parametrize("command", [translate, language])
@pytest.mark.parametrize("chosen", [{"steps": 6}, {"epochs": 0.6}])
def test_a_short_run_needs_no_warm_up_to_be_given(tmp_path, data, command, chosen):
    small = {**(TRANSLATE if command is translate else LANGUAGE), "warmup": None}
    assert command.run(command.Options(data=data, out=tmp_path / "run", **chosen, **small)) == 0
    config = load_text_run(tmp_path / "run")[2]
    assert config.warmup == config.steps // 5
    if "steps" not in chosen:
        train = text_data.load(data, "train", config.task, config.languages)
        lengths = [each.length for each in text_data.examples(config, train, text_data.learned(train, 330))]
        assert config.steps == round(0.6 * TokenOrder(lengths, config.batch_size).steps_per_epoch)


GROWING = {**TRANSLATE, "max_length": None, "documents": 512, "batch_size": 512, "growth": 0.5, "steps": 20}


def test_documents_grow_from_128_tokens_by_doubling(data):
    task = task_of(data, translate.Options(**GROWING), "relu/L")
    assert task.config.stages == {0: 128, 5: 256, 10: 512}
    everything = [batch for batch, _ in zip(task.batches(0, HERE), range(20), strict=False)]
    for begin, longest in task.config.stages.items():
        stage = [batch for batch in everything if begin <= batch.step < (begin + 5 if longest < 512 else 20)]
        assert longest / 2 < max(batch.target.shape[1] for batch in stage) <= longest + 1
        for batch in stage:
            names = [task.stages[begin][0][number].name for number in batch.numbers]
            assert task.describe(batch.step) == {"indices": list(batch.numbers), "names": names}
    for start in (3, 5, 12):  # a run goes on where it was stopped
        later = next(task.batches(start, HERE))
        assert later.step == start
        torch.testing.assert_close(later.target, everything[start].target, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "stages"),
    [
        ({"documents": 128}, {0: 128}),  # nothing to grow
        ({"growth": 0.0}, {0: 512}),
        ({"steps": 2, "growth": 0.1}, {0: 512}),  # too few steps for more
        ({"documents": 300, "growth": 0.9}, {0: 128, 9: 256, 18: 300}),
    ],
)
def test_stages_of_growth(changed, stages):
    assert configure(translate.Options(**{**GROWING, **changed}), "relu/L", "translate").stages == stages


def test_a_batch_in_slices_is_the_batch(tmp_path, data):
    for name, parts in (("whole", 1), ("sliced", 3)):
        options = translate.Options(
            data=data, out=tmp_path / name, phi=("relu/L",), steps=3, accumulate=parts, **{**TRANSLATE, "dropout": 0.0}
        )
        assert translate.run(options) == 0
    assert losses(tmp_path / "sliced") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_ranks_share_the_validation_split_between_them(data):
    task = task_of(data, translate.Options(**TRANSLATE), RELUFORMER)
    for size in (1, 3, 40):
        parts = [list(task.evaluation(World(torch.device("cpu"), rank, size))) for rank in range(size)]
        assert len({len(part) for part in parts}) == 1
        targets = [
            [token for token in row.tolist() if token]
            for part in parts
            for batch in part
            for row in batch.target[:, 1:]
        ]
        assert sorted(targets) == sorted([*example.target, 2] for example in task.valid)
    empty = parts[-1][-1]
    assert task.size(empty) == 0
    assert all(value == 0 for value in task.measure(task.model, empty).values())


def test_a_loss_that_is_not_finite_names_the_examples(tmp_path, data, capsys):
    options = translate.Options(data=data, out=tmp_path / "run", steps=9, lr=1e38, clip=0.0, **TRANSLATE)
    assert translate.run(options) == 1
    report = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    assert "nomax train translate: step" in capsys.readouterr().err
    assert len(report["batch"]["indices"]) == len(report["batch"]["names"])
    assert report["batch"]["names"][0].startswith("tale ")


def test_the_inverse_square_root_rises_and_falls_as_it_says():
    rates = [optimiser.schedule(step, 10**6, 400, "inverse-sqrt") for step in (0, 100, 400, 1600, 40_000)]
    assert rates == pytest.approx([0, 0.25, 1, 0.5, 0.1])
    assert optimiser.schedule(0, 10, 0, "inverse-sqrt") == optimiser.schedule(1, 10, 0, "inverse-sqrt") == 1


def test_weight_decay_touches_the_keys_and_values_of_memories_but_no_embeddings():
    model = ReLUFormer(20, dim=8, heads=2, encoder_layers=1, decoder_layers=1, slots=4)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying = {names[id(parameter)] for parameter in optimiser.kernels(model)}
    assert {"encoder.0.memory.keys", "decoder.0.memory.values", "decoder.0.attention.qkv.weight"} <= decaying
    assert "embedding.weight" not in decaying


def test_iwslt_is_the_usual_recipe():
    config = iwslt()
    model = config.model
    assert (model.encoder_layers, model.decoder_layers, model.dim, model.slots, model.heads) == (6, 6, 512, 1024, 4)
    assert (model.dropout, config.lr, config.warmup, config.batch_size) == (0.3, 5e-4, 4000, 4096)
    assert (config.beta1, config.beta2, config.label_smoothing, config.schedule) == (0.9, 0.98, 0.1, "inverse-sqrt")


@pytest.mark.parametrize("recipe", RECIPES.values())
@pytest.mark.parametrize("kind", ["translate", "language"])
def test_a_configuration_comes_back_from_its_file_unchanged(tmp_path, recipe, kind):
    config = recipe(kind)
    config.check()
    (tmp_path / "config.json").write_text(loop_config.to_json(config))
    assert loop_config.read(tmp_path / "config.json", TextConfig) == config
    assert "nomax train translate" in recipe.__doc__
    content = json.loads((tmp_path / "config.json").read_text())
    content["model"]["colour"] = "blue"
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="colour"):
        loop_config.read(tmp_path / "config.json", TextConfig)


def test_a_run_finds_its_texts_from_every_working_directory(tmp_path, monkeypatch, capsys):
    """Pairs of files, given by relative paths in a folder with a comma, and moved together with the run."""
    folder = tmp_path / "tales,old"
    folder.mkdir()
    for split, seed in (("train", 0), ("valid", 1)):
        pairs = [pair for document in corpus(12, seed=seed).documents for pair in document.pairs]
        (folder / f"{split}.en").write_text("".join(f"{pair.source}\n" for pair in pairs))
        (folder / f"{split}.es").write_text("".join(f"{pair.target}\n" for pair in pairs))
    monkeypatch.chdir(folder)
    how = {"data": "train.en,train.es", "valid": "valid.en,valid.es", "out": Path("run"), "steps": 4, **TRANSLATE}
    assert translate.run(translate.Options(checkpoint_every=2, **how)) == 0
    (folder / "run" / "result.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert load_text_run("tales,old/run")[2].data == f"{folder}/train.en,{folder}/train.es"
    assert main(["evaluate", "tales,old/run", "--split", "valid", "--smoke"]) == 0
    same = {"data": f"{folder}/train.en,tales,old/train.es", "valid": "tales,old/valid.en,tales,old/valid.es"}
    assert translate.run(translate.Options(**{**how, **same, "out": Path("tales,old/run")})) == 0
    (folder / "run" / "result.json").unlink()
    folder.rename(tmp_path / "moved")
    assert main(["evaluate", "moved/run", "--split", "valid", "--smoke"]) == 0
    monkeypatch.chdir(tmp_path / "moved")
    assert translate.run(translate.Options(**how)) == 0
    (tmp_path / "moved" / "valid.en").unlink()
    capsys.readouterr()
    assert main(["evaluate", "run", "--split", "valid"]) == 2
    told = capsys.readouterr().err
    assert "run was trained on" in told
    assert "Or give --data." in told


# The first losses of a tiny version of the recipe, one thread, as tests/test_train_recipes.py has them for images.
# To write them again, after a change that is meant: .venv/bin/python tests/test_train_translate.py
GOLDEN = Path(__file__).with_name("golden") / "translate.json"
CASES = {"reluformer": (translate, "translate"), "softmax": (translate, "translate"), "relu/L": (language, "language")}


def curve(phi, folder):
    command, kind = CASES[phi]
    torch.set_num_threads(1)
    small = {**(TRANSLATE if kind == "translate" else LANGUAGE), "dropout": 0.1, "warmup": 5}
    options = command.Options(phi=(phi,), data=tales(folder / "data"), out=folder / "run", steps=20, **small)
    assert command.run(options) == 0
    return [line["loss"] for line in metrics.read(folder / "run") if "loss" in line]


@pytest.mark.parametrize("phi", CASES)
def test_the_loss_curve_of_the_recipe_is_the_golden_one(tmp_path, phi):
    golden = json.loads(GOLDEN.read_text())[phi]
    assert curve(phi, tmp_path) == pytest.approx(golden, rel=1e-4)
    assert golden[-1] < golden[0]


PROGRAM = "import sys, tyro; from nomax.train import translate as t; sys.exit(t.run(tyro.cli(t.Options)))"
ARGUMENTS = "--phi reluformer --vocabulary 330 --batch-size 256 --max-length 128 --dim 16 --heads 2 --encoder-layers 1"
ARGUMENTS += " --decoder-layers 1 --slots 32 --steps 40 --warmup 5 --checkpoint-every 7 --evaluate-every 20 --threads 1"


def start(data, folder):
    words = [sys.executable, "-c", PROGRAM, "--data", data, "--out", str(folder), *ARGUMENTS.split()]
    return subprocess.Popen([*words, "--no-tensorboard"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_killed_at_any_step_the_result_is_the_same_to_the_bit(tmp_path, data):
    undisturbed = start(data, tmp_path / "whole")
    step = random.Random().randint(3, 35)  # really at random: any step must do
    process = start(data, tmp_path / "pieces")
    while process.poll() is None and metrics.last(tmp_path / "pieces").get("step", 0) < step:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start(data, tmp_path / "pieces")
    told, _ = process.communicate()
    assert process.returncode == 0, told
    told, _ = undisturbed.communicate()
    assert undisturbed.returncode == 0, told
    assert lines(tmp_path / "pieces") == lines(tmp_path / "whole"), f"killed at {step}"
    pieces, whole = (models.load(tmp_path / name / "model").state_dict() for name in ("pieces", "whole"))
    torch.testing.assert_close(pieces, whole, rtol=0, atol=0)


if __name__ == "__main__":
    curves = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            curves[case] = curve(case, Path(folder))
        print(f"{case}: {curves[case][0]:.4f} … {curves[case][-1]:.4f}", file=sys.stderr)
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
