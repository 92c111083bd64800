"""Runs of text from the inside: recipes, the loss and its penalties, documents that grow, shares of ranks."""

import json

import pytest
import torch
import torch.nn.functional as F
from precision import REORDERED
from toy_text import TRANSLATE

from nomax.models import ReLUFormer
from nomax.nn import RELUFORMER
from nomax.train import config as configs
from nomax.train import optimiser
from nomax.train.distributed import World
from nomax.train.text import data as text_data
from nomax.train.text.command import Translate, configure
from nomax.train.text.config import RECIPES, TextConfig, fit, iwslt
from nomax.train.text.data import Corpora
from nomax.train.text.task import TextTask

pytest.importorskip("sentencepiece")
HERE = World(torch.device("cpu"))


def test_reluformer_has_a_learned_gain_and_penalties_and_its_peers_have_not():
    own, factor, softmax, wortsman = (
        configure(Translate(penalty=penalty), phi, "translate")
        for phi, penalty in ((RELUFORMER, None), (RELUFORMER, 0.0), ("softmax", None), ("relu/L", None))
    )
    assert (own.model.learned_gain, own.normalisation_penalty, own.entropy_penalty) == ("head", 0.03, 0.03)
    assert (factor.model.learned_gain, factor.penalised) == ("head", False)
    assert [(each.model.learned_gain, each.penalised) for each in (softmax, wortsman)] == [(None, False)] * 2
    assert [each.model.gamma for each in (own, factor, softmax, wortsman)] == [6.4, 6.4, 1.0, 1.0]
    given = configure(Translate(), "0.2*relu/L^0.5", "translate")  # its factor is where the gain starts
    assert (given.model.gamma, given.model.learned_gain, given.penalised) == (1.0, "head", True)
    assert configure(Translate(gamma=3.0), RELUFORMER, "translate").model.gamma == 3.0
    one = configure(Translate(penalty=0.2, entropy_penalty=0.0), RELUFORMER, "translate")
    assert (one.normalisation_penalty, one.entropy_penalty) == (0.2, 0.0)


def task_of(data, options, phi, kind="translate"):
    corpora = Corpora(*(text_data.load_corpus(data, split, kind) for split in ("train", "valid")))
    config = fit(configure(options, phi, kind), corpora)
    tokenizer = corpora.learn(config.model.vocabulary)
    train = text_data.stages(config, corpora.train, tokenizer)
    return TextTask(config, train, text_data.examples(config, corpora.valid, tokenizer))


@torch.no_grad()
def test_the_loss_is_that_of_each_sequence_by_itself_without_padding(data):
    task = task_of(data, Translate(**TRANSLATE, penalty=0.0), "relu/L")
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
    assert float(measured["loss"]) == pytest.approx(total, rel=REORDERED)
    assert int(measured["accuracy"]) == right
    assert task.size(batch) == batch.tokens == count


@torch.no_grad()
def test_penalties_are_added_with_their_weights(data):
    task = task_of(data, Translate(**TRANSLATE, penalty=0.5, entropy_penalty=2.0, margin=0.6), RELUFORMER)
    task.model.eval()
    batch = next(task.batches(0, HERE))
    measured = {name: float(value) / task.size(batch) for name, value in task.measure(task.model, batch).items()}
    plain = task_of(data, Translate(**TRANSLATE, penalty=0.0), RELUFORMER)
    plain.model.eval()
    without = float(plain.measure(plain.model, batch)["loss"]) / task.size(batch)
    expected = [0.0, 0.0]
    for number in batch.numbers:
        example = task.stages[0][0][number]
        source, target = torch.tensor([[*example.source, 2]]), torch.tensor([[1, *example.target]])
        _, penalties = task.model(source, target, penalties=True, margin=0.6)
        expected = [sum_ + float(value) * target.shape[1] for sum_, value in zip(expected, penalties[:2], strict=True)]
    assert [measured["normalisation"], measured["entropy"]] == pytest.approx([x / task.size(batch) for x in expected])
    total = without + 0.5 * measured["normalisation"] + 2.0 * measured["entropy"]
    assert measured["loss"] == pytest.approx(total, rel=REORDERED)


def test_epochs_are_counted_in_batches(data):
    train = text_data.load_corpus(data, "train")
    task = task_of(data, Translate(**TRANSLATE, epochs=2.0), "relu/L")
    shown = [number for step in range(task.config.steps) for number in task.stages[0][1].batch(step)]
    assert sorted(shown) == sorted([*range(len(train))] * 2)


GROWING = {**TRANSLATE, "max_length": None, "documents": 512, "batch_size": 512, "growth": 0.5, "steps": 20}


def test_documents_grow_from_128_tokens_by_doubling(data):
    task = task_of(data, Translate(**GROWING), "relu/L")
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
    assert configure(Translate(**{**GROWING, **changed}), "relu/L", "translate").stages == stages


def test_ranks_share_the_validation_split_between_them(data):
    task = task_of(data, Translate(**TRANSLATE), RELUFORMER)
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
    (tmp_path / "config.json").write_text(configs.to_json(config))
    assert configs.read(tmp_path / "config.json", TextConfig) == config
    assert "nomax train translate" in recipe.__doc__
    content = json.loads((tmp_path / "config.json").read_text())
    content["model"]["colour"] = "blue"
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="colour"):
        configs.read(tmp_path / "config.json", TextConfig)
