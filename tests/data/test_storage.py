"""Shards behind URLs: read without conversion, by ranks that share them, with patience and then a clear error."""

import io
import logging
import os
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, picture

from nomax import data
from nomax.data import storage
from nomax.data.images.batches import batches
from nomax.data.images.shards import ShardSource
from nomax.data.images.transforms import Augment
from nomax.data.order import Order
from nomax.data.source import DataError
from nomax.data.storage import OpenFiles, Patience

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")

HASTY = Patience(retries=2, pause=0.001)


def shard(start: int, count: int) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for number in range(start, start + count):
            members = ((f"{number}.png", encoded(picture(number), "PNG")), (f"{number}.cls", str(number % 3).encode()))
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "indexes"


@pytest.fixture
def url():
    """Three shards of four images in memory, behind a URL, with a list of classes."""
    files = fsspec.filesystem("memory")
    for number in range(3):
        files.pipe_file(f"/set/train-{number:03d}.tar", shard(4 * number, 4))
    files.pipe_file("/set/classes.json", b'["ant", "bee", "cat"]')
    yield "memory://set"
    files.rm("/set", recursive=True)


@pytest.mark.parametrize("pattern", ["", "/train-{000..002}.tar"])
def test_shards_behind_a_url_are_those_on_the_disk(tmp_path, url, pattern):
    for number in range(3):
        (tmp_path / f"train-{number:03d}.tar").write_bytes(shard(4 * number, 4))
    there, here = data.load(url + pattern), data.load(tmp_path)
    assert list(there.classes) == ["ant", "bee", "cat"]
    assert there.labels.tolist() == here.labels.tolist() == [number % 3 for number in range(12)]
    assert [there.read(number) for number in (11, 0, 5)] == [here.read(number) for number in (11, 0, 5)]
    assert there.name(5) == "memory://set/train-001.tar: 5.png"


def test_the_root_of_a_url_is_its_own_parent():
    place = storage.place("s3://bucket/a/b.tar")
    assert [str(place), str(place.parent), str(place.parent.parent)] == [
        "s3://bucket/a/b.tar",
        "s3://bucket/a",
        "s3://bucket",
    ]
    assert place.parent.parent.parent == place.parent.parent


def test_a_lost_connection_is_not_a_missing_list_of_classes(url, monkeypatch):
    def lost(self, path, **_):
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(memory.MemoryFileSystem, "info", lost)
    with pytest.raises(DataError, match=r"classes\.json cannot be read: reset by peer \(3 attempts"):
        ShardSource(f"{url}/train-{{000..002}}.tar", patience=HASTY)


def test_a_file_url_is_a_path(tmp_path):
    (tmp_path / "train-000.tar").write_bytes(shard(0, 2))
    source = data.load(f"file://{tmp_path}")
    assert source.tars == [tmp_path / "train-000.tar"]
    assert storage.place("file:///a/b.tar") == Path("/a/b.tar")


def test_the_index_of_a_remote_shard_is_kept_here_or_read_from_beside_it(tmp_path, url, cache, monkeypatch):
    ShardSource(url)
    assert len(list(cache.glob("*.npz"))) == 3
    with monkeypatch.context() as patch:
        patch.setattr(storage.RemotePath, "open", lambda *_, **__: pytest.fail("read again"))
        assert len(ShardSource(url)) == 12
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path / "another"))
    # An upload of the folder that `nomax data pack` wrote has the index too, with another modification time.
    local = tmp_path / "train-000.tar"
    local.write_bytes(shard(0, 4))
    data.load(tmp_path)
    files = fsspec.filesystem("memory")
    files.pipe_file("/set/train-000.tar.index.npz", (tmp_path / "train-000.tar.index.npz").read_bytes())
    opened = []
    monkeypatch.setattr(storage.RemotePath, "open", _noting(opened, storage.RemotePath.open))
    assert len(ShardSource(url)) == 12
    assert sorted(place.name for place in opened) == ["train-001.tar", "train-002.tar"]


def _noting(opened, function):
    def noted(self, **settings):
        opened.append(self)
        return function(self, **settings)

    return noted


def test_another_content_behind_the_same_url_is_indexed_again(url):
    assert len(ShardSource(url)) == 12
    fsspec.filesystem("memory").pipe_file("/set/train-001.tar", shard(4, 2))
    assert ShardSource(url).labels.tolist() == [number % 3 for number in (0, 1, 2, 3, 4, 5, 8, 9, 10, 11)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_read_disjoint_samples_and_together_all_of_them(url, world, monkeypatch):
    source = ShardSource(url)
    order, steps = Order(len(source), 4, seed=3, block=2), len(source) // 4
    read = {rank: [] for rank in range(world)}
    for rank in range(world):
        noted, original = read[rank], ShardSource.read

        def reading(self, index, noted=noted, original=original):
            noted.append(index)
            return original(self, index)

        monkeypatch.setattr(ShardSource, "read", reading)
        with batches(source, order, Augment(8, "resize"), rank=rank, world=world) as made:
            for _ in range(steps):
                next(made)
        monkeypatch.setattr(ShardSource, "read", original)
    everything = [index for noted in read.values() for index in noted]
    assert sorted(everything) == list(range(len(source)))  # each once, by exactly one rank


class Flaky(memory.MemoryFileSystem):
    """Memory behind a bad connection: `failures` says how many of the next opens or reads fail, and how."""

    protocol = "flaky"
    cachable = False
    failures: list = []  # noqa: RUF012

    def _open(self, path, *args, **kwargs):
        if Flaky.failures:
            failure = Flaky.failures.pop(0)
            if isinstance(failure, threading.Event):
                failure.wait()
            else:
                raise failure
        return super()._open(path.replace("flaky://", "/"), *args, **kwargs)


@pytest.fixture
def flaky(url, monkeypatch):
    monkeypatch.setattr(Flaky, "failures", [])
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    return storage.place("flaky://set/train-001.tar", HASTY)


def test_a_failing_read_is_tried_again(flaky, caplog):
    Flaky.failures += [ConnectionResetError("reset by peer"), OSError(5, "Input/output error")]
    with caplog.at_level(logging.WARNING, "nomax.data"):
        got = OpenFiles(HASTY).read(flaky, 512, 100)
    assert got == shard(4, 4)[512:612]
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "flaky://set/train-001.tar: 100 bytes at offset 512: reset by peer",
        "flaky://set/train-001.tar: 100 bytes at offset 512: Input/output error",
    ]


def test_a_read_that_keeps_failing_is_named_with_shard_offset_and_attempts(flaky):
    Flaky.failures += [ConnectionResetError("reset by peer")] * 3
    with pytest.raises(
        DataError, match=r"train-001\.tar: 100 bytes at offset 512 cannot be read: reset by peer \(3 attempts"
    ):
        OpenFiles(HASTY).read(flaky, 512, 100)
    assert Flaky.failures == []


def test_pauses_double_and_have_a_bound(monkeypatch):
    pauses = []
    monkeypatch.setattr(storage.time, "sleep", pauses.append)

    def failing():
        raise OSError(5, "Input/output error")

    with pytest.raises(DataError, match="9 attempts"):
        Patience(retries=8).attempt(failing, "it")
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_read_that_never_ends_counts_as_failed(flaky):
    never = threading.Event()
    Flaky.failures += [never]
    try:
        patience = Patience(1, 0.05, 0.001)
        Flaky.failures += [never]
        with pytest.raises(DataError, match=r"no answer within 0\.05 seconds \(2 attempts"):
            OpenFiles(patience).read(flaky, 0, 10)
    finally:
        never.set()


def test_what_is_not_there_is_not_tried_again(url, monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda _: pytest.fail("tried again"))
    with pytest.raises(FileNotFoundError, match=r"there is no shard memory://set/train-003\.tar"):
        data.load(f"{url}/train-{{000..003}}.tar")
    with pytest.raises(FileNotFoundError, match="no shards of the split 'test'"):
        data.load(url, "test")
    with pytest.raises(FileNotFoundError):
        data.load("memory://nowhere")


def test_a_local_read_that_fails_once_is_tried_again_with_a_new_file(tmp_path, monkeypatch):
    path = tmp_path / "train-000.tar"
    path.write_bytes(shard(0, 2))
    files, real, failures = OpenFiles(HASTY), os.pread, [OSError(116, "Stale file handle")] * 2

    def pread(*arguments):
        if failures:
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(storage.os, "pread", pread)
    assert files.read(path, 512, 20) == shard(0, 2)[512:532]
    failures += [OSError(116, "Stale file handle")] * 4
    with pytest.raises(DataError, match=r"20 bytes at offset 512 cannot be read: Stale file handle \(3 attempts"):
        files.read(path, 512, 20)


@pytest.mark.parametrize(
    ("url", "said"),
    [("nothing://a/b.tar", "Protocol not known"), ("zip://a.tar::s3://b", "a chain of protocols")],
)
def test_a_url_that_cannot_be_read_is_explained(url, said):
    with pytest.raises((ValueError, ImportError), match=said):
        data.load(url)


def test_workers_read_shards_behind_a_url(url):
    source = ShardSource(url)
    order = Order(len(source), 6, seed=1)
    made = []
    for workers in (0, 2):
        with batches(source, order, Augment(8, "resize"), workers=workers) as stream:
            made.append(np.concatenate([next(stream).images.numpy() for _ in range(2)]))
    assert np.array_equal(*made)


def test_many_shards_open_through_one_table(tmp_path, monkeypatch):
    for number in range(20):
        (tmp_path / f"train-{number:03d}.tar").write_bytes(shard(2 * number, 2))
    first = ShardSource(tmp_path)
    (table,) = tmp_path.glob("*-more.index.npz")
    assert table.name == "train-000.tar-and-19-more.index.npz"
    with monkeypatch.context() as patch:
        patch.setattr("nomax.data.images.shards._indexes", lambda _: pytest.fail("read one by one"))
        again = ShardSource(tmp_path)
    assert again.labels.tolist() == first.labels.tolist()
    assert [again.read(number) for number in (39, 0, 17)] == [first.read(number) for number in (39, 0, 17)]
    # Another shard, another list of classes, a damaged table: it is made anew.
    (tmp_path / "train-007.tar").write_bytes(shard(14, 1))
    assert len(ShardSource(tmp_path)) == 39
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert list(ShardSource(tmp_path).classes) == ["ant", "bee", "cat"]
    table.write_bytes(table.read_bytes()[:-30])
    assert len(ShardSource(tmp_path)) == 39


@pytest.mark.parametrize("harm", ["offsets", "sizes", "labels", "counts"])
def test_a_table_that_leads_out_of_its_shards_is_not_used(tmp_path, harm):
    for number in range(16):
        (tmp_path / f"train-{number:03d}.tar").write_bytes(shard(number, 1))
    labels = ShardSource(tmp_path).labels.tolist()
    (table,) = tmp_path.glob("*-more.index.npz")
    arrays = dict(np.load(table))
    arrays[harm] = arrays[harm] + (1 << 40)
    np.savez(table, **arrays)
    assert ShardSource(tmp_path).labels.tolist() == labels
