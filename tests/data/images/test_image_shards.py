"""Tar shards: any image is one read away, whatever wrote them; what is wrong with a shard is told by name."""

import io
import itertools
import json
import os
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, picture
from PIL import Image

from nomax import data
from nomax.data import storage
from nomax.data.images import shard_index
from nomax.data.images.shards import ShardSource
from nomax.data.source import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "indexes"


def write(path: Path, members: Iterable[tuple[str, bytes]], **settings: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **settings) as archive:  # type: ignore[call-overload]
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def samples(start: int, count: int) -> list[tuple[str, bytes]]:
    """Images with the labels 0, 1, 2, 0, …"""
    pairs = [
        [(f"{number:05d}.png", encoded(picture(number), "PNG")), (f"{number:05d}.cls", str(number % 3).encode())]
        for number in range(start, start + count)
    ]
    return list(itertools.chain(*pairs))


def same(image: Image.Image, number: int) -> bool:
    return np.array_equal(np.asarray(image), np.asarray(picture(number)))


def test_it_reads_what_webdataset_writes_in_any_order(tmp_path: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(tmp_path / "train-%06d.tar"), maxcount=4, verbose=0) as writer:
        for number in range(10):
            writer.write({"__key__": f"some/{number:04d}", "png": picture(number), "cls": number % 3})
    source = ShardSource(tmp_path)
    assert len(source) == 10
    assert len(source.tars) == 3
    assert list(source.classes) == ["0", "1", "2"]
    assert source.labels.tolist() == [number % 3 for number in range(10)]
    for number in (7, 0, 9, 3, 4, 8, 1):
        assert same(source.image(number), number)
        assert source.name(number) == f"{tmp_path}/train-{number // 4:06d}.tar: some/{number:04d}.png"


def test_labels_may_be_in_json_and_may_be_names(tmp_path: Path) -> None:
    image = encoded(picture(0), "PNG")
    write(
        tmp_path / "a.tar",
        [
            ("1.json", json.dumps({"label": 1, "caption": "…"}).encode()),
            ("1.png", image),
            ("2.jpeg", encoded(picture(1))),
            ("2.json", b'{"label": "cat"}'),
            ("3.png", image),
            ("3.cls", b"dog\n"),
            ("3.json", b'{"caption": "no label here"}'),
        ],
    )
    for file, content in (("classes.txt", "cat\ndog\n"), ("classes.json", '["cat", "dog"]')):
        (tmp_path / file).write_text(content)
        source = ShardSource(tmp_path)
        assert list(source.classes) == ["cat", "dog"]
        assert source.labels.tolist() == [1, 0, 1]


def test_splits_are_subfolders_or_beginnings_of_names(tmp_path: Path) -> None:
    write(tmp_path / "one" / "train" / "x.tar", samples(0, 2))
    write(tmp_path / "one" / "val" / "x.tar", samples(0, 3))
    write(tmp_path / "two" / "train-000.tar", samples(0, 2))
    write(tmp_path / "two" / "val-000.tar", samples(0, 3))
    for place in (tmp_path / "one", tmp_path / "two"):
        assert len(ShardSource(place, "train")) == 2
        assert len(ShardSource(place, "val")) == 3
        assert len(ShardSource(place, "test")) == 3
        assert len(data.load(place, "train")) == 2
        with pytest.raises(FileNotFoundError, match="it has train, val"):
            ShardSource(place, "extra")
    write(tmp_path / "three" / "000.tar", samples(0, 2))
    assert len(ShardSource(tmp_path / "three")) == 2
    with pytest.raises(FileNotFoundError, match="its shards name no split"):
        ShardSource(tmp_path / "three", "test")
    (tmp_path / "four").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there are no \*\.tar"):
        ShardSource(tmp_path / "four")


def test_a_pattern_names_shards_and_missing_ones_are_named(tmp_path: Path) -> None:
    for number in range(8, 12):
        write(tmp_path / f"train-{number:03d}.tar", samples(number, 1))
    source = data.load(f"{tmp_path}/train-{{008..010}}.tar")
    assert [name.split(": ")[1] for name in map(source.name, range(3))] == ["00008.png", "00009.png", "00010.png"]
    with pytest.raises(FileNotFoundError, match=r"no shard .*train-012\.tar \(2 of 6 are missing\)"):
        ShardSource(f"{tmp_path}/train-{{008..013}}.tar")
    with pytest.raises(FileNotFoundError, match="of the split 'train', not of 'test'"):
        ShardSource(f"{tmp_path}/train-{{008..010}}.tar", "test")
    with pytest.raises(ValueError, match="must count up"):
        ShardSource(f"{tmp_path}/train-{{3..1}}.tar")


def test_a_truncated_tar_is_named_with_the_place(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.tar", samples(0, 4)).read_bytes()
    (tmp_path / "whole.tar").unlink()
    tar = tmp_path / "train-0.tar"
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        boundaries = [member.offset for member in archive]
    for cut in (*boundaries[1:], boundaries[4] + 100, boundaries[4] + 700, boundaries[6] + 512 + 9, 100):
        tar.write_bytes(whole[:cut])
        before = max(place for place in boundaries if place <= cut)
        with pytest.raises(DataError, match=f"{tar} is truncated or damaged at offset {before:,} of {cut:,} bytes"):
            ShardSource(tmp_path)
        complete = sum(cut >= end for end in boundaries[2::2])
        if complete:
            source = ShardSource(tmp_path, on_error="skip")
            assert len(source) == complete
            assert all(same(source.image(number), number) for number in range(complete))
            assert any("truncated" in text for text in source.problems.left_out.values())


@pytest.mark.parametrize("content", [b"", b"hello" * 1000, b"\x1f\x8b" + b"x" * 2000])
def test_what_is_not_a_tar_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"train-0\.tar is truncated or damaged at offset 0"):
        ShardSource(tmp_path)


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(tmp_path: Path) -> None:
    tar = write(tmp_path / "0.tar", samples(0, 4))
    content = bytearray(tar.read_bytes())
    with tarfile.open(tar) as archive:
        place = archive.getmembers()[4].offset
    content[place : place + 100] = b"\xff" * 100
    tar.write_bytes(content)
    with pytest.raises(DataError, match=f"damaged at offset {place:,}"):
        ShardSource(tmp_path)


HARMFUL = {
    "/etc/x.png": "leads out of its folder",
    "a/../../x.png": "leads out of its folder",
    "../x.txt": "leads out of its folder",
    "x" * 1200 + ".png": "name of more than 1024 bytes",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_name_is_refused_and_told(name: str, tmp_path: Path) -> None:
    write(tmp_path / "0.tar", [*samples(0, 2), (name, encoded(picture(0), "PNG"))], format=tarfile.GNU_FORMAT)
    with pytest.raises(DataError, match=HARMFUL[name]) as caught:
        ShardSource(tmp_path)
    assert name[:20] in str(caught.value)
    assert len(str(caught.value)) < 400
    assert len(ShardSource(tmp_path, on_error="skip")) == 2


def test_a_link_in_a_tar_is_refused(tmp_path: Path) -> None:
    tar = write(tmp_path / "0.tar", samples(0, 1))
    with tarfile.open(tar, "a") as archive:
        link = tarfile.TarInfo("9.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"'9\.png' .* is not a regular file"):
        ShardSource(tmp_path)


WRONG = {
    "no label": ([("7.png", b"x")], r"7\.png has no label; 7\.cls or 7\.json"),
    "empty label": ([("7.png", b"x"), ("7.cls", b" \n")], r"7\.cls holds no label"),
    "broken json": ([("7.png", b"x"), ("7.json", b'{"label": ')], r"7\.json holds no label"),
    "deep json": ([("7.png", b"x"), ("7.json", b"[" * 200_000)], r"7\.json holds no label"),
    "label of a wrong kind": ([("7.png", b"x"), ("7.json", b'{"label": [1]}')], "neither a whole number nor a class"),
    "two images": ([("7.png", b"x"), ("7.jpg", b"x"), ("7.cls", b"1")], r"the key 7 has two images, 7\.png and 7\.jpg"),
    "key twice": ([("7.png", b"x"), ("7.cls", b"1")] * 2, "the key 7 has two images"),
    "two labels": ([("7.png", b"x"), ("7.cls", b"1"), ("7.cls", b"2")], r"the key 7 has two labels in \.cls"),
    "no image": ([("7.cls", b"1")], r"7\.cls is a label without an image"),
    "unknown class": ([("7.png", b"x"), ("7.cls", b"9")], r"7\.png has the label '9', which is none of the 3 classes"),
    "unknown name": ([("7.png", b"x"), ("7.cls", b"bird")], r"7\.png has the label 'bird'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_sample_is_named_or_left_out_where_the_user_said_so(kind: str, tmp_path: Path) -> None:
    members, message = WRONG[kind]
    tar = write(tmp_path / "0.tar", [*samples(0, 2), *members, *samples(100, 1)])
    (tmp_path / "classes.json").write_text('["a", "b", "c"]')
    with pytest.raises(DataError, match=message) as caught:
        ShardSource(tmp_path)
    assert str(tar) in str(caught.value)
    source = ShardSource(tmp_path, on_error="skip")
    assert source.problems.left_out
    assert len(source) == 3 + (kind in ("two images", "key twice", "two labels"))  # the first one stays
    assert same(source.image(0), 0)
    assert same(source.image(len(source) - 1), 100)


def test_names_without_a_list_of_classes_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", [("7.png", b"x"), ("7.cls", b"bird")])
    with pytest.raises(DataError, match=r"the label 'bird' is not a number of a class, and there is no classes\.json"):
        ShardSource(tmp_path)


@pytest.mark.parametrize("content", ["{}", '["a", "a"]', "[]", '["a", 3]', "[", '[""]'])
def test_a_wrong_list_of_classes_is_named(content: str, tmp_path: Path) -> None:
    write(tmp_path / "0.tar", samples(0, 2))
    (tmp_path / "classes.json").write_text(content)
    with pytest.raises(DataError, match=r"classes\.json"):
        ShardSource(tmp_path)


def test_a_tar_without_images_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", [("x.txt", b"x")])
    with pytest.raises(DataError, match="no labelled images in 1 shards"):
        ShardSource(tmp_path)


def test_the_index_is_made_once_and_again_when_the_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    build = shard_index._build
    monkeypatch.setattr(shard_index, "_build", lambda tar, *rest: made.append(tar.name) or build(tar, *rest))
    tar = write(tmp_path / "0.tar", samples(0, 3))
    assert len(ShardSource(tmp_path)) == 3
    assert len(ShardSource(tmp_path)) == 3
    assert made == ["0.tar"]
    write(tar, samples(5, 2))
    assert len(ShardSource(tmp_path)) == 2
    assert made == ["0.tar"] * 2
    os.utime(tar, ns=(1, 1))
    assert len(ShardSource(tmp_path)) == 2
    assert made == ["0.tar"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.tar", "0.tar.index.npz"]


def test_the_index_goes_to_the_cache_if_the_folder_cannot_be_written_to(tmp_path: Path, cache: Path) -> None:
    tar = write(tmp_path / "data" / "0.tar", samples(0, 3))
    tar.with_name("0.tar.index.npz").mkdir()  # so that no file can be put there
    assert len(ShardSource(tmp_path / "data")) == 3
    (saved,) = cache.iterdir()
    before = saved.stat().st_mtime_ns
    source = ShardSource(tmp_path / "data")
    assert saved.stat().st_mtime_ns == before
    assert same(source.image(2), 2)
    cache.rename(cache.with_name("gone"))
    cache.write_text("in the way")
    source = ShardSource(tmp_path / "data")  # no place at all: it is made each time, and names are less telling
    assert same(source.image(1), 1)
    assert "the image at offset" in source.name(1)


@pytest.mark.parametrize("damage", ["cut", "noise", "outside", "pickle", "labels"])
def test_a_damaged_or_lying_index_is_made_anew(damage: str, tmp_path: Path) -> None:
    write(tmp_path / "0.tar", samples(0, 3))
    ShardSource(tmp_path)
    path = tmp_path / "0.tar.index.npz"
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "noise":
        path.write_bytes(b"hello")
    else:
        with np.load(path) as saved:
            arrays = dict(saved)
        changes = {
            "outside": {"offsets": arrays["offsets"] + 10**9},
            "pickle": {"names": np.array([object()] * 3)},
            "labels": {"labels": arrays["labels"] + 5},
        }
        np.savez(path, **{**arrays, **changes[damage]})
    source = ShardSource(tmp_path)
    assert source.labels.tolist() == [0, 1, 2]
    assert all(same(source.image(number), number) for number in range(3))


def test_many_shards_are_indexed_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for number in range(20):
        write(tmp_path / f"{number:03d}.tar", samples(2 * number, 2))
    source = ShardSource(tmp_path)
    assert source.labels.tolist() == [number % 3 for number in range(40)]
    assert all(same(source.image(number), number) for number in (39, 0, 20, 21))


def test_an_error_in_another_process_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for number in range(20):
        write(tmp_path / f"{number:03d}.tar", samples(2 * number, 2))
    (tmp_path / "007.tar").unlink()
    (tmp_path / "007.tar").mkdir()
    with pytest.raises(DataError, match=r"007\.tar cannot be read: Is a directory"):
        ShardSource(tmp_path)


def test_only_a_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "OPEN_FILES", 3)
    for number in range(6):
        write(tmp_path / f"{number}.tar", samples(number, 1))
    source = ShardSource(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for number in [0, 1, 2, 3, 4, 5, 0, 3, 1, 5, 5]:
        assert same(source.image(number), number)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    del source
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_copy_in_another_process_opens_its_own_files(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", samples(0, 2))
    source = ShardSource(tmp_path)
    assert same(source.image(0), 0)
    copy = pickle.loads(pickle.dumps(source))
    del source
    assert same(copy.image(1), 1)


def test_a_shard_that_became_shorter_is_named(tmp_path: Path) -> None:
    tar = write(tmp_path / "0.tar", samples(0, 3))
    source = ShardSource(tmp_path)
    os.truncate(tar, 2000)
    with pytest.raises(DataError, match=r"0\.tar: .* is cut off"):
        source.image(2)


def test_a_shard_that_disappeared_is_named(tmp_path: Path) -> None:
    tar = write(tmp_path / "0.tar", samples(0, 3))
    source = ShardSource(tmp_path)
    tar.unlink()
    with pytest.raises(DataError, match=r"0\.tar: the image at offset .* cannot be read: No such file"):
        source.image(2)
