"""Text on one rank or two: the same run, to rounding. The ranks are processes under torchrun, running this file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from precision import REORDERED
from text_corpora import corpus

from nomax.data.text.corpus import write_jsonl
from nomax.train import load_text_run, metrics
from nomax.train.distributed import world
from nomax.train.text.command import Language, Translate

pytestmark = pytest.mark.slow
pytest.importorskip("sentencepiece")
COMMANDS = {"translate": Translate, "language": Language}
# Dropout has other random numbers on each rank.
SMALL = {"vocabulary": 330, "batch_size": 512, "dim": 16, "heads": 2, "decoder_layers": 1, "slots": 32, "dropout": 0.0}
SMALL |= {"steps": 5, "warmup": 1, "threads": 1, "tensorboard": False, "evaluate_every": 3, "accumulate": 2}
TRANSLATE = {**SMALL, "encoder_layers": 1, "max_length": 128}
CASES = {
    "translate": {**TRANSLATE, "phi": ["reluformer"], "penalty": 0.0, "ema": 0.9},
    "language": {**SMALL, "phi": ["reluformer"], "documents": 64},
    "penalties": {**TRANSLATE, "phi": ["reluformer"], "label_smoothing": 0.2},
}
RUNS = [("translate", "ddp"), ("language", "fsdp"), ("penalties", "fsdp")]


def run(case, folder, **more):
    """Train a case; on ranks that share a model, with activations that are computed again."""
    command = COMMANDS["language" if case == "language" else "translate"]
    options = {**CASES[case], **more, "data": str(folder / "data"), "out": folder / " ".join([case, *more.values()])}
    options |= {"phi": tuple(options["phi"]), "activation_checkpointing": more.get("distribute") == "fsdp"}
    assert command(**options).run() == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs of two ranks, made by one torchrun, and the same runs of one."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "data").mkdir()
    for seed, (split, documents) in enumerate({"train": 12, "valid": 3}.items()):
        text = corpus(documents, seed=seed)
        write_jsonl(folder / "data" / f"{split}.jsonl", text.documents, text.languages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOMAX_DATA", str(folder / "cache"))
        for case in CASES:
            run(case, folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])  # text_corpora
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        subprocess.run([*command, json.dumps([str(folder), RUNS])], check=True, env=environment)
    return folder


def losses(folder):
    return [line.get("evaluation", line)["loss"] for line in metrics.read(folder)]


@pytest.mark.parametrize(("case", "kind"), RUNS)
def test_two_ranks_train_as_one_does(folder, case, kind):
    one, two = losses(folder / case), losses(folder / f"{case} {kind}")
    assert two == pytest.approx(one, rel=REORDERED)
    assert len(one) == 7


def test_ranks_write_one_vocabulary_and_one_model(folder):
    one, two = (load_text_run(folder / name) for name in ("penalties", "penalties fsdp"))
    assert one[1].digest == two[1].digest
    assert set(one[0].state_dict()) == set(two[0].state_dict())


if __name__ == "__main__":
    place, wanted = json.loads(sys.argv[1])
    with world():  # joined once: torchrun does not let ranks meet again and again
        for case, kind in wanted:
            run(case, Path(place), distribute=kind)
