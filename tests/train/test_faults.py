"""Each file of a run folder, damaged in many ways: a run goes on exactly, or says what is wrong and loses nothing."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from text_corpora import corpus

from nomax import models
from nomax.cli import exit_code
from nomax.data.text import Tokenizer
from nomax.data.text.corpus import write_jsonl
from nomax.evaluate import runs
from nomax.train import metrics, run_folder
from nomax.train.text.command import Language
from nomax.train.vision import command as vit

NEWEST = "checkpoints/step-00000004.pt"


def replaced(value: Any) -> Any:
    """The same JSON with other types: numbers for strings, strings for numbers, and so on."""
    if isinstance(value, dict):
        return {name: replaced(item) for name, item in value.items()}
    return {str: 7, list: {}, bool: [], int: "three", float: "three"}.get(type(value), "something")


def enlarged(text: str) -> str:
    """The same JSON with numbers that no machine number holds."""
    return json.dumps(json.loads(text, parse_int=lambda _: 10**400, parse_float=lambda _: 10**400))


def by_line(change: Callable[[str], str], content: bytes) -> bytes:
    try:
        return b"".join(change(line).encode() + b"\n" for line in content.decode().splitlines())
    except ValueError:
        return b"7e99999"  # not JSON: then it is one huge number


def saved(content: Any) -> Callable[[Path], None]:
    """A file that torch can load, and of a checkpoint the hash that goes with it."""

    def damage(path: Path) -> None:
        with path.open("wb") as file:
            torch.save(content, file)
        hashes = path.with_name(path.name + ".sha256")
        if hashes.exists():
            hashes.write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")

    return damage


def instead(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "binary": lambda path: path.write_bytes(bytes(range(128, 256)) * 20),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "{}": lambda path: path.write_text("{}\n"),
    "[]": lambda path: path.write_text("[]\n"),
    "null": lambda path: path.write_text("null\n"),
    "NaN": lambda path: path.write_text("NaN\n"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "other types": lambda path: path.write_bytes(
        by_line(lambda line: json.dumps(replaced(json.loads(line))), _flat(path))
    ),
    "huge": lambda path: path.write_bytes(by_line(enlarged, _flat(path))),
    "saved {}": saved({}),
    "saved []": saved([1, 2]),
    "a folder": instead(Path.mkdir),
    "a loop": instead(lambda path: path.symlink_to(path)),
}


def _flat(path: Path) -> bytes:
    """A JSON file on one line; the lines of metrics as they are."""
    content = path.read_bytes()
    return content if path.suffix != ".json" else json.dumps(json.loads(content)).encode()


def options(data: str, folder: Path) -> vit.Options:
    numbers: dict[str, Any] = {"steps": 6, "checkpoint_every": 2, "evaluate_every": 3, "keep": 9, "batch_size": 8}
    return vit.Options(data=data, out=folder, model="mu/8", threads=1, tensorboard=False, **numbers)


@pytest.fixture(scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "_revision", lambda: None)  # which asks git three times
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory, quick):
    return tiny_images.write(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert vit.run(options(data, folder)) == 0
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, finished):
    """The same run as if it had been killed while the model was written: all that a kill can leave is there."""
    folder = tmp_path_factory.mktemp("runs") / "interrupted"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()
    for path in (folder / "checkpoints").glob("step-00000006*"):
        path.unlink()
    leftovers(folder)
    return folder


def leftovers(folder: Path) -> list[Path]:
    half = [folder / ".result.json.1a2b3c4d.aside", folder / "checkpoints" / ".step-00000006.pt.1a2b3c4d.aside"]
    half += [folder / ".vocabulary.model.4711", folder / "model" / ".saving-x1y2" / "model.safetensors"]
    for path in half:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    return half


def contents(folder: Path) -> dict[str, bytes]:
    """What must not be lost: all but the lock, the leftovers of writing, and the times at which a run went on."""
    kept = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    inside = {str(path.relative_to(folder)): path.read_bytes() for path in kept if ".saving" not in str(path)}
    return {name: content for name, content in inside.items() if name != "run.json"}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in metrics.read(folder)]


def assert_same(folder: Path, whole: Path) -> None:
    mine, expected = (models.load(each / "model").state_dict() for each in (folder, whole))
    torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    results = [json.loads((each / "result.json").read_text()) for each in (folder, whole)]
    assert results[0].keys() == results[1].keys()
    assert results[0]["test_accuracy"] == results[1]["test_accuracy"]


def attack(folder: Path, name: str, damage: str, data: str, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage a file, train on, and mend the file if that is refused."""
    path = folder / name
    original = path.read_bytes()
    DAMAGES[damage](path)
    before = contents(folder)
    capsys.readouterr()
    code = exit_code(
        "nomax train vit", lambda: vit.run(options(data, folder))
    )  # an exception here would be a traceback to a user
    told = capsys.readouterr()
    if code:
        assert code in (1, 2)
        assert str(path) in told.err, told.err
        assert "Traceback" not in told.err
        after = contents(folder)
        assert all(after.get(name) == content for name, content in before.items())
        if path.is_dir():
            path.rmdir()
        elif os.path.lexists(path):
            path.unlink()
        path.write_bytes(original)
        if path.name.endswith(".pt"):
            digest = hashlib.sha256(original).hexdigest()
            path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")
        assert vit.run(options(data, folder)) == 0
        assert lines(folder) == lines(whole)
    elif name.startswith("checkpoints"):
        assert "Continuing from step 2." in told.out
        assert f"{NEWEST} is damaged" in told.err or (name == NEWEST and damage == "missing")
        aside = {path.name for path in path.parent.glob("*.damaged")}
        assert name.endswith("sha256") or damage == "missing" or f"{path.name}.damaged" in aside
        assert lines(folder) == lines(whole)
    elif name != "metrics.jsonl":
        assert lines(folder) == lines(whole)
    else:  # an empty one, of which nothing was left: what comes later is there
        assert damage in ("missing", "empty")
        assert str(path) in told.err
        assert lines(folder) == lines(whole)[-len(lines(folder)) :]
    assert_same(folder, whole)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "run.json", "metrics.jsonl", NEWEST, f"{NEWEST}.sha256", ".lock"])
def test_an_interrupted_run_goes_on_exactly_or_says_what_is_damaged(
    tmp_path, data, finished, interrupted, capsys, name, damage
):
    shutil.copytree(interrupted, tmp_path / "run")
    (tmp_path / "run" / ".lock").touch()
    attack(tmp_path / "run", name, damage, data, finished, capsys)


def load(folder: Path, name: str) -> None:
    """What `nomax evaluate` and its kin do first: a model, or an error that names what is damaged."""
    said = ""
    try:
        assert not runs.load_any(folder).model.training
    except (ValueError, OSError) as error:
        said = str(error)
    path = folder / name
    none_left = name.startswith("checkpoints") and f"no checkpoint in {path.parent} is whole" in said
    assert not said or none_left or (str(path.parent) in said and path.name in said), said


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", NEWEST, f"{NEWEST}.sha256"])
def test_of_an_interrupted_run_a_model_is_loaded_or_an_error_says_what_is_damaged(
    tmp_path, interrupted, capsys, name, damage
):
    shutil.copytree(interrupted, tmp_path / "run")
    DAMAGES[damage](tmp_path / "run" / name)
    load(tmp_path / "run", name)


FINISHED = ["config.json", "run.json", "metrics.jsonl", "result.json", "model/config.json", "model/model.safetensors"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*FINISHED, "model/README.md", "checkpoints/step-00000006.pt"])
def test_a_finished_run_is_left_as_it_is_or_its_damage_is_told(tmp_path, data, finished, capsys, name, damage):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    path = folder / name
    DAMAGES[damage](path)
    before = contents(folder)
    load(folder, name)
    capsys.readouterr()
    code = exit_code("nomax train vit", lambda: vit.run(options(data, folder)))
    told = capsys.readouterr()
    if code:
        assert code in (1, 2)
        assert str(path) in told.err
    else:
        assert "is finished" in told.out
    if name == "result.json":
        assert code == (0 if damage == "missing" else 1)
        if code:  # the way out that it tells
            assert "Remove it and give the same command again" in told.err
            path.rmdir() if path.is_dir() else path.unlink()
            assert vit.run(options(data, folder)) == 0
        assert_same(folder, finished)
        del before["model/README.md"]  # it has the command, and so the folder, in it
    after = contents(folder)
    assert all(after[each] == content for each, content in before.items() if each != name)


def test_what_a_kill_left_half_written_is_gone_after_the_next_start(tmp_path, data, finished, interrupted):
    for whole in (finished, interrupted):
        folder = tmp_path / whole.name
        shutil.copytree(whole, folder)
        half = leftovers(folder)
        (folder / ".mine").touch()
        assert vit.run(options(data, folder)) == 0
        assert not any(path.exists() for path in half)
        assert not list(folder.rglob(".saving-*"))
        assert (folder / ".mine").exists()
        assert_same(folder, finished)


def test_a_damaged_result_of_one_phi_keeps_no_other_from_being_compared(tmp_path, data, capsys):
    two = vit.Options(**{**vars(options(data, tmp_path)), "phi": ("softmax", "relu/L"), "steps": 1})
    assert vit.run(two) == 0
    (tmp_path / "softmax" / "result.json").write_text("{}")
    (tmp_path / "comparison.md").unlink()
    capsys.readouterr()
    assert vit.run(two) == 1
    assert str(tmp_path / "softmax" / "result.json") in capsys.readouterr().err
    table = (tmp_path / "comparison.md").read_text()
    assert "| relu/L |" in table
    assert "| softmax |" not in table


@pytest.fixture(scope="module")
def tales(tmp_path_factory, quick):
    folder = tmp_path_factory.mktemp("tales")
    for seed, (split, documents) in enumerate({"train": 12, "valid": 3}.items()):
        text = corpus(documents, seed=seed)
        write_jsonl(folder / f"{split}.jsonl", text.documents, text.languages)
    return str(folder)


def text_options(data: str, folder: Path) -> Language:
    size: dict[str, Any] = {"dim": 16, "heads": 2, "decoder_layers": 1, "slots": 32, "vocabulary": 330}
    numbers: dict[str, Any] = {"steps": 2, "batch_size": 256, "documents": 64, "threads": 1, "tensorboard": False}
    return Language(data=data, out=folder, **size, **numbers)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    pytest.importorskip("sentencepiece")
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vocabularies"


def test_a_damaged_vocabulary_in_the_cache_is_learned_again(tmp_path, tales, cache, capsys):
    assert text_options(tales, tmp_path / "first").run() == 0
    (file,) = cache.glob("*.model")
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"the")] ^= 1  # still a vocabulary, of as many pieces
    smaller = Tokenizer.train(corpus(3), 300).model
    for number, damaged in enumerate(
        [b"", b"{}", bytes(range(256)), whole[: len(whole) // 2], smaller, bytes(flipped)]
    ):
        file.write_bytes(damaged)
        capsys.readouterr()
        assert text_options(tales, tmp_path / str(number)).run() == 0
        told = capsys.readouterr().err
        assert str(file) in told
        assert "learned again" in told
        assert file.read_bytes() == whole
        assert (tmp_path / str(number) / "vocabulary.model").read_bytes() == whole
    capsys.readouterr()
    assert text_options(tales, tmp_path / "last").run() == 0
    assert "vocabular" not in capsys.readouterr().err


def test_a_vocabulary_without_a_hash_as_older_versions_wrote_it_is_taken(tmp_path, tales, cache, capsys, monkeypatch):
    assert text_options(tales, tmp_path / "first").run() == 0
    (hashes,) = cache.glob("*.sha256")
    hashes.unlink()
    monkeypatch.setattr(Tokenizer, "train", None)  # it would be called if it were learned again
    assert text_options(tales, tmp_path / "second").run() == 0


@pytest.mark.parametrize("name", ["vocabulary.model", "run.json", "result.json"])
def test_of_a_run_of_text_damage_is_told_and_mended_as_told(tmp_path, tales, cache, capsys, name):
    folder = tmp_path / "run"
    assert text_options(tales, folder).run() == 0
    whole = contents(folder)
    for damage in DAMAGES:
        path = folder / name
        original = path.read_bytes()
        DAMAGES[damage](path)
        load(folder, name)
        capsys.readouterr()
        code = exit_code("nomax train language", text_options(tales, folder).run)
        told = capsys.readouterr()
        if code:
            assert str(path) in told.err, (damage, told.err)
            path.rmdir() if path.is_dir() else path.unlink()
            assert text_options(tales, folder).run() == 0, damage
        assert contents(folder).keys() == whole.keys() - ({name} if name == "vocabulary.model" else set())
        if os.path.lexists(path):
            path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(original)
