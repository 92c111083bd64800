"""The leaf that every layer writes its files with."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from nomax import _files


def test_a_file_that_cannot_be_finished_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("before")

    def fail_halfway() -> None:
        with _files.atomic(path) as file:
            file.write(b"half of")
            raise OSError("full disk")

    with pytest.raises(OSError, match="full disk"):
        fail_halfway()
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_folders_above_a_file_are_made(tmp_path: Path) -> None:
    _files.write(tmp_path / "deep" / "down" / "name", "\udcff é")
    assert (tmp_path / "deep" / "down" / "name").read_bytes() == rb"\udcff " + "é".encode()


@dataclass
class Point:
    x: float
    more: tuple[object, ...] = ()


def test_json_has_no_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    _files.write_json(tmp_path / "a.json", {1: Point(math.nan, (Point(math.inf), 2.5, "é"))})
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "1": {"x": None, "more": [{"x": None, "more": []}, 2.5, "é"]}
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{", "damaged"), (b"\xff", "damaged"), (b"[" * 100_000, "nested too deeply"), (b"", "damaged")],
)
def test_json_that_cannot_be_read_is_named_with_advice(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.json .*{said}.* Remove it\.$"):
        _files.read_json(path, "Remove it.")


def test_a_folder_in_the_place_of_a_file_is_named_and_no_file_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory\. Move it\."):
        _files.read_json(tmp_path, "Move it.")
    with pytest.raises(FileNotFoundError):
        _files.read_json(tmp_path / "none.json", "Move it.")


def test_only_leftovers_are_removed(tmp_path: Path) -> None:
    for name in (".a.json.0123abcd.aside", "a.json", ".lock", ".vocabulary.model.17"):
        (tmp_path / name).touch()
    (tmp_path / ".saving-x").mkdir()
    _files.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a.json"]


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    assert _files.did_you_mean("RELU/l", ["relu/L", "softmax"]) == "; did you mean relu/L?"
    assert _files.did_you_mean("zebra", ["relu/L", "softmax"]) == "."
