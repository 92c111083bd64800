"""A training command, from its first word to the finished model, imports nothing that only other commands need."""

import subprocess
import sys

import pytest
import tiny_images
from toy_text import tales

PROGRAM = """
import sys
from nomax.cli import main

code = main(sys.argv[1:])
print(*sys.modules, sep="\\n", file=sys.stderr)
sys.exit(code)
"""


def imported(*words: object) -> set[str]:
    """Run a command in a process of its own, and return the modules that it imported."""
    arguments = [*map(str, words), "--smoke", "--no-tensorboard", "--threads", "1"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split("\n"))


@pytest.mark.slow
def test_training_on_images_imports_nothing_of_text(tmp_path):
    modules = imported("train", "vit", "--data", tiny_images.write(tmp_path / "data"), "--out", tmp_path / "run")
    assert "nomax.data.images.batches" in modules
    others = ("nomax.data.text", "nomax.train.text", "nomax.evaluate", "nomax.study", "sentencepiece", "sacrebleu")
    assert not [module for module in modules if module.startswith(others)]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["translate", "language"])
def test_training_on_text_imports_nothing_of_images(task, tmp_path, monkeypatch):
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path / "cache"))
    modules = imported("train", task, "--data", tales(tmp_path / "data"), "--out", tmp_path / "run")
    assert "nomax.data.text.batches" in modules
    others = ("nomax.data.images", "nomax.train.vision", "nomax.evaluate", "nomax.study", "PIL", "torchvision")
    assert not [module for module in modules if module.startswith(others)]
