"""`nomax data pack`: shards that hold what the folder held, the same every time, finished after any interruption."""

import gc
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import encoded, fill, picture

from nomax import data
from nomax.cli import exit_code
from nomax.data.commands import pack
from nomax.data.images import files, shard_index
from nomax.data.images.files import FolderSource
from nomax.data.images.shards import ShardSource


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "images" / "train", {"cat": 5, "dog": 4, "été": 2})
    picture(77).save(tmp_path / "images" / "train" / "dog" / "odd.name.PNG")
    return tmp_path / "images"


def run(folder: Path, output: Path, **changes: Any) -> int:
    options = pack.Options(folder, output, **{"shard_size": 5, **changes})
    return exit_code("nomax data pack", lambda: pack.run(options))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.tar"))}


def contents(source: FolderSource | ShardSource) -> list[tuple[bytes, str]]:
    return sorted((source.read(n), source.classes[source.labels[n]]) for n in range(len(source)))


def test_the_shards_hold_the_files_as_they_were(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path / "out") == 0
    names = [path.name for path in sorted((tmp_path / "out").iterdir())]
    tars = [f"train-{number:06d}.tar" for number in range(3)]
    assert names == sorted(["classes.json", "train-packing.json", *tars, *(f"{tar}.index.npz" for tar in tars)])
    source = data.load(tmp_path / "out")
    assert isinstance(source, ShardSource)
    assert list(source.classes) == ["cat", "dog", "été"]
    assert contents(source) == contents(FolderSource(folder))
    assert "12 images of 3 classes in 3 shards" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves files open
def test_webdataset_reads_the_shards(folder: Path, tmp_path: Path) -> None:
    import webdataset

    run(folder, tmp_path / "out")
    urls = sorted(map(str, (tmp_path / "out").glob("*.tar")))
    peer = webdataset.WebDataset(urls, shardshuffle=False).decode("pil")
    source = ShardSource(tmp_path / "out")
    samples = list(peer)
    assert len(samples) == len(source)
    for number, sample in enumerate(samples):
        assert sample["cls"] == source.labels[number]
        image = sample.get("jpg") or sample["png"]
        assert np.array_equal(np.asarray(image), np.asarray(source.image(number)))
    del peer
    gc.collect()


def test_the_same_folder_gives_the_same_bytes_wherever_and_whenever(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "one")
    for path in folder.rglob("*.*"):
        os.utime(path, (1, 1))
    folder.rename(tmp_path / "moved")
    run(tmp_path / "moved", tmp_path / "two")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    run(tmp_path / "moved", tmp_path / "three", seed=1)
    assert not digests(tmp_path / "one").items() & digests(tmp_path / "three").items()


def test_classes_are_mixed_unless_sorted_is_wanted(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "mixed")
    run(folder, tmp_path / "sorted", shuffle=False)
    assert ShardSource(tmp_path / "sorted").labels.tolist() == [0] * 5 + [1] * 5 + [2] * 2
    assert len(set(ShardSource(tmp_path / "mixed").labels[:5].tolist())) > 1


def test_shards_are_bounded_in_images_and_bytes(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out", max_bytes=8192)
    tars = sorted((tmp_path / "out").glob("*.tar"))
    assert len(tars) > 3
    assert all(len(shard_index.index_of(tar).names) >= 1 for tar in tars)
    large = [tar for tar in tars if len(shard_index.index_of(tar).names) > 1]
    # A tar file is filled up to blocks of 10,240 bytes.
    assert all(shard_index.index_of(tar).offsets[-1] + shard_index.index_of(tar).sizes[-1] <= 8192 for tar in large)


def test_it_goes_on_where_it_was_stopped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, tmp_path / "undisturbed")
    real, calls = FolderSource.read, iter(range(100))

    def interrupted(self: FolderSource, index: int) -> bytes:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(FolderSource, "read", interrupted)
    assert run(folder, tmp_path / "out") == 130
    assert [path.name for path in (tmp_path / "out").glob("*tar*")].count("train-000001.tar") == 0
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")], "half a shard is left"
    first = (tmp_path / "out" / "train-000000.tar").stat()
    assert run(folder, tmp_path / "out") == 0
    assert (tmp_path / "out" / "train-000000.tar").stat().st_mtime_ns == first.st_mtime_ns, "it was written again"
    assert digests(tmp_path / "out") == digests(tmp_path / "undisturbed")


@pytest.mark.parametrize("change", ["options", "files", "foreign", "classes"])
def test_another_packing_is_not_overwritten(
    change: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options: dict[str, Any] = {}
    if change == "foreign":
        output.mkdir()
        (output / "train-000000.tar").write_bytes(b"something else")
        message = "not made by nomax data pack"
    elif change == "classes":
        output.mkdir()
        (output / "classes.json").write_text('["other"]')
        message = "lists other classes"
    else:
        run(folder, output)
        message = "holds another packing of 'train': its"
        if change == "options":
            options = {"shard_size": 6}
        else:
            picture(5).save(folder / "train" / "cat" / "new.jpg")
    before = digests(output)
    assert run(folder, output, **options) == 2
    assert message in capsys.readouterr().err
    assert digests(output) == before


def test_checking_finds_broken_images(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = folder / "train" / "cat" / "002.jpg"
    broken.write_bytes(encoded(picture(0, 200, 200))[:999])
    assert run(folder, tmp_path / "unchecked") == 0
    capsys.readouterr()
    assert run(folder, tmp_path / "out", check=True) == 2
    assert capsys.readouterr().err.startswith(f"nomax data pack: {broken} is a broken image")
    assert run(folder, tmp_path / "skipped", check=True, on_error="skip") == 0
    out = capsys.readouterr().out
    assert str(broken) in out
    assert "1 broken images left out" in out
    source = ShardSource(tmp_path / "skipped")
    assert len(source) == 11
    for number in range(11):
        files.decode(source.read(number), "x")


def test_two_splits_share_a_folder(folder: Path, tmp_path: Path) -> None:
    fill(folder / "val", {"cat": 1, "dog": 1, "été": 1})
    run(folder, tmp_path / "out")
    assert run(folder, tmp_path / "out", split="val") == 0
    assert len(data.load(tmp_path / "out", "train")) == 12
    assert len(data.load(tmp_path / "out", "test")) == 3
    assert json.loads((tmp_path / "out" / "classes.json").read_text(encoding="utf-8")) == ["cat", "dog", "été"]


def test_what_cannot_be_packed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "nowhere", tmp_path / "out") == 2
    assert "there is no folder" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "out", shard_size=0) == 2
    assert "--shard-size" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
