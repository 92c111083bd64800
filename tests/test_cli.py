"""The command line: what it says when asked, and when something is misspelt."""

import os
import re
import subprocess
import sys

import pytest

from nomax import __version__
from nomax.cli import COMMANDS, main, parsed
from nomax.train.text.command import Translate


@pytest.mark.parametrize(("arguments", "start"), [([], ""), (["--help"], ""), (["-h"], ""), (["bench", "-h"], "bench")])
def test_help_lists_the_commands(arguments: list[str], start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert (f"nomax {name} " in out) == name.startswith(start)
        assert (text in out) == name.startswith(start)


def test_a_misspelt_command_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benhc", "attention"]) == 2
    assert "did you mean: nomax bench attention?" in capsys.readouterr().err


def test_part_of_a_command_lists_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    captured = capsys.readouterr()
    assert "nomax bench attention" in captured.err
    assert "there is no command" not in captured.err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nomax {__version__}\n"


def test_help_imports_no_command_and_not_even_torch() -> None:
    code = "import sys; from nomax.cli import main; main(['--help']); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for module in ("nomax.bench", "torch", "tyro", "rich", "matplotlib"):
        assert f"'{module}'" not in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([*command.split(), "--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: nomax {command}" in out
    # What takes long can be tried in seconds.
    assert ("--smoke" in out) == (
        not command.startswith(("data", "study ", "report", "translate", "predict", "generate", "convert", "estimate"))
    )


@pytest.mark.parametrize("arguments", ["--help", "bench attention --help"])
def test_output_that_nobody_reads_to_the_end_is_no_error(arguments: str) -> None:
    command = f"{sys.executable} -m nomax.cli {arguments} | head -c 1"
    done = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
    assert done.stderr == ""


def shown(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The default of each option, as the help of a command tells it."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    options = re.split(r"\n[│ ] (--[a-z-]+)", capsys.readouterr().out)
    texts = (re.sub(r"[\s│]+", " ", text) for text in options[2::2])
    return {
        name: text.rpartition("(default: ")[2].partition(")")[0]
        for name, text in zip(options[1::2], texts, strict=True)
    }


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("train vit", {"steps": "4700", "batch-size": "128", "lr": "0.001", "warmup": "500", "model": "nano/4"}),
        ("train vit --recipe i1k", {"epochs": "300.0", "warmup": "10000", "augmentation": "medium2", "model": "S/16"}),
        ("train vit --recipe=i21k --steps 5", {"epochs": "30.0", "batch-size": "4096", "image-size": "224"}),
        ("train translate", {"steps": "2000", "warmup": "400", "lr": "0.002", "vocabulary": "4000", "penalty": "0.03"}),
        ("train translate --recipe iwslt", {"steps": "50000", "warmup": "4000", "dim": "512", "dropout": "0.3"}),
        ("train language", {"steps": "2000", "decoder-layers": "4", "documents": "256"}),
    ],
)
def test_help_shows_the_values_of_the_recipe(
    command: str, defaults: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = shown(command, capsys)
    assert {name: options.get(f"--{name}") for name in defaults} == defaults
    assert options["--batch-size"] != "None"


@pytest.mark.parametrize("arguments", ["data list", "data list --help", "study list", "--help"])
def test_output_that_nobody_reads_ends_as_other_programs_end(arguments: str, tmp_path) -> None:
    """Of tables, which rich prints, too: it would end with 1."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "nomax.cli", *arguments.split()]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_option_that_may_be_left_out_is_a_plain_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("train translate", Translate, ["--memory-norm", "--steps", "3"]).memory_norm is True
    with pytest.raises(SystemExit):
        main(["train", "translate", "--help"])
    said = capsys.readouterr().out
    assert "--steps INT" in said
    assert "{None" not in said
