"""Runs of studies of text, from the configuration to their outcome, and a whole study by its command."""

import csv
import json
import math
import signal

import pytest
import torch
import tyro
from text_corpora import corpus

from nomax.console import Console
from nomax.data.text.corpus import write_jsonl
from nomax.evaluate import load_text
from nomax.report import page as report
from nomax.study import command as run_command
from nomax.study.engine import measures
from nomax.study.engine.store import Store
from nomax.study.engine.worker import run_to_outcome
from nomax.study.text.setup import SETUPS
from nomax.train import metrics
from nomax.train.console import Stop
from nomax.train.text import data as text_data

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")


@pytest.fixture(scope="module")
def tales(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tales")
    for seed, (split, documents) in enumerate({"train": 20, "valid": 2, "test": 3}.items()):
        write_jsonl(folder / f"{split}.jsonl", corpus(documents, 10, seed).documents, ("en", "es"))
    return folder


@pytest.fixture(scope="module")
def setup(tales):
    return SETUPS["smoke"].adapted(data=str(tales))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path_factory.getbasetemp() / "cache"))


def do(run, store, stop=None):
    return run_to_outcome(run, store, "nomax study memory", stop or Stop(), Console(quiet=True))


class StopAfter(Stop):
    """Somebody presses Ctrl-C once a run has come to a step."""

    def __init__(self, folder, step):
        super().__init__()
        self.folder, self.step = folder, step

    @property
    def exit_code(self):
        return 128 + signal.SIGINT if metrics.last(self.folder).get("step", 0) >= self.step else 0


@pytest.fixture(scope="module")
def finished(setup, tmp_path_factory):
    """A run with every measurement, its store and its result."""
    store = Store(tmp_path_factory.mktemp("store"))
    run = setup.reluformer(documents=128, measures=tuple(measures.TEXT_MEASURES))
    assert do(run, store) == 0
    return run, store, store.outcome(run.key)


def test_a_run_ends_with_an_outcome_that_says_what_the_saved_model_can_do(finished):
    run, store, result = finished
    assert result.status == "done", result.error
    assert (result.task, result.attention, result.memory, result.tokens) == ("translate", "ReLUFormer", "relu", 128)
    trained = load_text(store.folder(run.key))
    examples = text_data.examples(run.config, text_data.of_run(run.config, "test"), trained.tokenizer)

    def loss(sources):
        total, count = 0.0, 0
        for read, example in zip(sources, examples, strict=True):
            source, target = torch.tensor([[*read.source, 2]]), torch.tensor([[1, *example.target, 2]])
            with torch.no_grad():
                logits = trained.model(source, target[:, :-1])
            total += torch.nn.functional.cross_entropy(logits[0], target[0, 1:], reduction="sum").item()
            count += target.shape[1] - 1
        return total / count

    assert result.loss == pytest.approx(loss(examples), rel=1e-4)
    half = len(examples) // 2
    others = [*examples[-half:], *examples[:-half]]
    assert all(read.source != example.source for read, example in zip(others, examples, strict=True))
    assert result.measured["source_use"] == pytest.approx(loss(others) - loss(examples), abs=1e-4)
    assert not (store.folder(run.key) / "checkpoints").exists()


def test_every_measurement_is_a_number_in_its_range(finished):
    measured = finished[2].measured
    names = {"bleu", "chrf", "entropy", "row_sum", "zeros", "empty_rows", "variance_ratio", "top_share", "anisotropy"}
    assert set(measured) == names | {"frequent", "frequent_keys", "source_use"}  # 128 tokens are too few to be distant
    assert all(math.isfinite(value) for value in measured.values())
    for name in ("zeros", "empty_rows", "top_share", "frequent", "frequent_keys"):
        assert 0 <= measured[name] <= 1
    assert 0.2 < measured["zeros"] < 0.8  # half of all scores are negative before training
    assert 0 < measured["entropy"] < math.log(128)


def test_rows_of_softmax_sum_to_one_and_spread_as_their_entropy_says(setup, tmp_path):
    store = Store(tmp_path)
    run = setup.run("softmax", documents=512, measures=("rows", "distance"))
    assert do(run, store) == 0
    measured = store.outcome(run.key).measured
    assert measured["row_sum"] == pytest.approx(1, abs=1e-5)
    assert (measured["zeros"], measured["empty_rows"]) == (0, 0)
    # Hardly trained, so attention looks nearly everywhere alike: on distant keys as often as there are such.
    assert measured["frequent"] == pytest.approx(measured["frequent_keys"], abs=0.1)
    assert 0.1 < measured["distant"] < 0.95


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([[1.0, 0.0], [3.0, 0.0]], 1.0), ([[1.0, 0.0], [0.0, 2.0]], 0.0), ([[1.0, 0.0], [-1.0, 0.0]], -1.0)],
)
def test_anisotropy_is_the_mean_cosine_of_two_different_values(values, wanted):
    assert measures.anisotropy(torch.tensor(values)) == pytest.approx(wanted)


def test_whole_documents_are_looked_at_until_there_are_enough_pairs():
    tales = corpus(4, 10)
    assert len(measures.first(tales, 11)) == 20
    assert len(measures.first(tales, 0)) == 40


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(setup, tmp_path):
    run = setup.adapted(steps=12).run("relu/L", measures=())
    broken, whole = Store(tmp_path / "broken"), Store(tmp_path / "whole")
    assert do(run, broken, StopAfter(broken.folder(run.key), 5)) == 130
    assert broken.outcome(run.key) is None
    assert do(run, broken) == do(run, whole) == 0
    assert broken.outcome(run.key).loss == whole.outcome(run.key).loss


def test_a_run_that_diverges_is_a_result(setup, tmp_path):
    store = Store(tmp_path)
    run = setup.adapted(lr=1e38).run("relu", measures=())
    assert do(run, store) == 0
    result = store.outcome(run.key)
    assert (result.status, result.loss) == ("diverged", None)


def study(*words):
    return run_command.run(tyro.cli(run_command.Options, args=list(words)))


def test_a_study_of_text_runs_by_its_command_and_finds_all_done_the_next_time(tales, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["text-phi", "--smoke", "--data", str(tales), "--seeds", "1", "--alphas", "0", "1", "--jobs", "1"]
    words += ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    assert study(*words) == 0
    assert study(*words) == 0
    assert "3 of the 3 runs have been done before" in capsys.readouterr().out
    told = json.loads((tmp_path / "out" / "study.json").read_text())
    assert told["runs"] == {"done": 3, "diverged": 0, "failed": 0, "missing": 0}
    assert [figure["file"] for figure in told["figures"]] == ["text-phi.svg"]
    records = list(csv.DictReader((tmp_path / "out" / "runs.csv").read_text().splitlines()))
    assert [record["phi"] for record in records] == ["softmax", "relu", "relu/L"]
    assert all(float(record["loss"]) > 0 for record in records)
    assert json.loads((tmp_path / "out" / "verdicts.json").read_text())[0]["claim"] == "Q-text"
    assert report.run(report.Options((tmp_path / "out",), tmp_path / "page.html")) == 0
    page = (tmp_path / "page.html").read_text()
    assert "The vision paper&#39;s L^-1 carries over to text" in page
    assert "documents of 64 tokens" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory", "--patches", "4"], "--patches is not for memory, which is a study of text"),
        (["memory", "--model", "pico"], "--model is not for memory"),
        (["alpha", "--slots", "32"], "--slots is not for alpha, which is a study of images: memory takes it."),
        (["alpha", "--lengths", "128"], "--lengths is not for alpha, which is a study of images: documents takes it."),
        (["sequence-parallel", "--lengths", "128"], "--lengths is not for sequence-parallel"),
        (["memory", "--lengths", "128"], "--lengths is not for memory, which is a study of text: documents takes it."),
        (["text-phi", "--data", "nowhere"], "nowhere"),
        (["memory", "--smoke"], "nomax data get bible-en-es"),
        (["memory", "--setup", "hourly"], "did you mean hour"),
    ],
)
def test_wrong_options_are_explained_before_anything_runs(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert study(*words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("**/runs/*"))
