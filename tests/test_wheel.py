"""The wheel of `make wheel` works where there is no compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USE_THE_WHEEL = """
import sys
import torch
import nomax
from nomax.ops import build

assert nomax.__file__.startswith(sys.prefix), nomax.__file__
query, key, value = torch.randn(3, 2, 4, 17, 32)
output = nomax.attention(query, key, value, phi="relu/L", backend="cpu")
expected = torch.relu(query @ key.mT / 32**0.5) @ value / 17
torch.testing.assert_close(output, expected)
assert str(build.BINARY) in torch.ops.loaded_libraries, torch.ops.loaded_libraries
"""


def build_wheel(folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, env={**os.environ, **environment}, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_a_wheel_with_the_binary_needs_no_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "dist", NOMAX_BUILD_BINARY="1")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")

    clean = tmp_path / "clean"
    venv.create(clean, symlinks=True)
    python = clean / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    # torch is too large to install again: borrow this environment's. Path files inside the borrowed folder are not
    # read, so an editable nomax does not come along.
    (site_packages,) = clean.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))

    cache = tmp_path / "cache"
    cache.mkdir()
    environment = {"PATH": str(cache), "NOMAX_CACHE": str(cache), "HOME": str(tmp_path)}
    subprocess.run([python, "-c", USE_THE_WHEEL], env=environment, cwd=tmp_path, check=True)
    assert not list(cache.iterdir())


@pytest.mark.slow
def test_a_wheel_for_aarch64_is_built_on_any_machine_with_its_compiler(tmp_path: Path) -> None:
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("there is no compiler for aarch64 here")
    target = {"CXX": "aarch64-linux-gnu-g++", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    wheel = build_wheel(tmp_path / "dist", NOMAX_BUILD_BINARY="1", **target)
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("nomax/ops/_binary/nomax_cpu.so")
    assert library[:4] == b"\x7fELF"
    assert int.from_bytes(library[18:20], "little") == 183  # ELF's number of aarch64
    assert b"\0libtorch_cpu.so\0" in library  # which it asks for when it is loaded


def test_a_plain_wheel_is_pure_python_and_holds_the_sources(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, NOMAX_BUILD_BINARY="0")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {path.name for path in (ROOT / "src" / "nomax" / "ops" / "csrc").iterdir()}
    assert {"binding.cpp", "kernel.cpp"} <= sources
    assert {f"nomax/ops/csrc/{name}" for name in sources} <= set(names)
    assert "nomax/py.typed" in names
    assert not [name for name in names if name.endswith(".so")]
