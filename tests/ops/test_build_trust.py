"""Compiled kernels that are damaged, or that somebody else may have put there, are never loaded."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from workshop import Workshop

from nomax.ops import build


def another_content(library: Path) -> None:
    library.write_text("MADE\n")


def no_content(library: Path) -> None:
    library.write_text("")


def no_record(library: Path) -> None:
    library.with_suffix(".json").unlink()


def broken_record(library: Path) -> None:
    library.with_suffix(".json").write_text('{"sha256": ')


def record_of_another_kind(library: Path) -> None:
    library.with_suffix(".json").write_text("[1]")


def writable_library(library: Path) -> None:
    library.chmod(0o666)


def writable_record(library: Path) -> None:
    library.with_suffix(".json").chmod(0o646)


def link_to_a_library(library: Path) -> None:
    elsewhere = library.with_name("elsewhere")
    library.rename(elsewhere)
    library.symlink_to(elsewhere)


def library_of_another_user(library: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(library, 12345, -1)


@pytest.mark.parametrize(
    "damage",
    [
        another_content,
        no_content,
        no_record,
        broken_record,
        record_of_another_kind,
        writable_library,
        writable_record,
        link_to_a_library,
        library_of_another_user,
    ],
)
def test_a_library_that_is_not_as_it_was_compiled_is_compiled_again(
    workshop: Workshop, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    library = build.library()
    damage(library)
    assert build.library() == library
    assert library.read_text() == "made\n"
    assert not library.is_symlink()
    assert len(workshop.calls("-shared")) == 2
    assert f"nomax: {library} is not as it was compiled" in capfd.readouterr().err
    build.library()
    assert len(workshop.calls("-shared")) == 2


def test_whatever_the_umask_nobody_else_can_write_to_the_cache(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOMAX_CACHE", str(workshop.cache / "deep" / "down"))
    before = os.umask(0)
    try:
        library = build.library()
    finally:
        os.umask(before)
    for folder in (library.parent, *library.parents[1:4]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert library.parents[3] == workshop.cache
    for file in library.parent.iterdir():
        assert not file.stat().st_mode & 0o022
    assert build.library() == library
    assert len(workshop.calls("-shared")) == 1


@pytest.mark.parametrize("exposed", ["the folder of the library", "the cache", "a folder above it"])
@pytest.mark.parametrize("mode", [0o777, 0o707])
def test_a_cache_that_others_can_write_is_refused(workshop: Workshop, exposed: str, mode: int) -> None:
    library = build.library()
    folder = {
        "the folder of the library": library.parent,
        "the cache": workshop.cache,
        "a folder above it": workshop.cache.parent,
    }[exposed]
    before = stat.S_IMODE(folder.stat().st_mode)
    folder.chmod(mode)
    with pytest.raises(build.BuildError, match=rf"{folder} can be written by others.*chmod go-w {folder}.*NOMAX_CACHE"):
        build.library()
    library.parent.chmod(mode)
    both = re.escape(" ".join(map(str, dict.fromkeys((library.parent, folder)))))
    with pytest.raises(build.BuildError, match=f"chmod go-w {both}`"):
        build.library()
    folder.chmod(before)
    library.parent.chmod(0o700)
    assert build.library() == library


def test_a_group_that_only_the_user_is_in_may_write(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.library()
    workshop.cache.chmod(0o770)
    monkeypatch.setattr(build, "_is_own_group", lambda group: group == workshop.cache.stat().st_gid)
    assert build.library() == library
    monkeypatch.setattr(build, "_is_own_group", lambda group: False)
    with pytest.raises(build.BuildError, match="can be written by others"):
        build.library()


def test_a_cache_below_a_sticky_folder_is_safe(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.cache.mkdir()
    workshop.cache.chmod(0o1777)  # as /tmp is
    library = build.library()
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert build.library() == library
    # What somebody else has put there before us is another matter.
    library.parent.chmod(0o1777)
    with pytest.raises(build.BuildError, match="can be written by others"):
        build.library()


@pytest.mark.parametrize("foreign", ["the folder of the library", "the cache"])
def test_a_cache_of_another_user_is_refused(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, foreign: str) -> None:
    folder = build.library().parent
    if foreign == "the cache":
        folder = folder.parent
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:  # nobody but root can give a folder away, but one can look at one's own as somebody else
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(build.BuildError, match=r"belongs to another user \(user id \d+\).*NOMAX_CACHE"):
        build.library()


@pytest.mark.parametrize("damage", [another_content, no_content, no_record, broken_record, record_of_another_kind])
def test_a_damaged_library_of_the_package_is_an_error(workshop: Workshop, damage: Callable[[Path], None]) -> None:
    build.compile_library(workshop.binary)
    damage(workshop.binary)
    with pytest.raises(build.BuildError, match=rf"{workshop.binary}, are damaged\. Install nomax again, or delete"):
        build.library()


# The real library, in a process of its own, because a damaged one can end the process that loads it.
ATTEND = """
import warnings
import torch
import nomax
query, key, value = torch.randn(3, 2, 4, 17, 32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    output = nomax.attention(query, key, value, phi="relu/L")
torch.testing.assert_close(output, torch.relu(query @ key.mT / 32**0.5) @ value / 17)
print(*[warning.message for warning in caught], *torch.ops.loaded_libraries)
"""
# Knows its version, which is all that it takes to find a compiled library.
NO_COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "stand-in 1.0"; exit 0 ;; esac
echo "no compiler today"
exit 1
"""


def zeroed_header(content: bytearray) -> None:
    content[:64] = bytes(64)


def emptied(content: bytearray) -> None:
    content.clear()


def of_another_architecture(content: bytearray) -> None:
    content[18:20] = (0xF3).to_bytes(2, "little")  # RISC-V, in the header of an ELF file


def truncated(content: bytearray) -> None:
    del content[300_000:]


def with_flipped_bytes(content: bytearray) -> None:
    for place in range(5_000, 5_000 + 200 * 97, 97):
        content[place] ^= 0xFF


@pytest.fixture(scope="module")
def compiled() -> bytes:
    try:
        return build.library().read_bytes()
    except build.BuildError as error:
        pytest.skip(str(error))


def place(content: bytes, of: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a library into a cache of its own, with the record `of` the content it should have."""
    compiler = folder / "compiler"
    compiler.write_text(NO_COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("NOMAX_CACHE", str(folder))
    library = folder / build._key([str(compiler)]) / build.BINARY.name
    library.parent.mkdir(mode=0o700)
    library.write_bytes(of)
    record = {"sources": build.source_hash(), "sha256": build._sha256(library)}
    library.with_suffix(".json").write_text(json.dumps(record))
    library.write_bytes(content)
    return library


@pytest.mark.parametrize("damage", [zeroed_header, emptied, of_another_architecture, truncated, with_flipped_bytes])
def test_with_a_damaged_library_and_no_compiler_attention_runs_on_the_reference_and_says_why(
    compiled: bytes, damage: Callable[[bytearray], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(compiled)
    damage(content)
    library = place(bytes(content), compiled, tmp_path, monkeypatch)
    done = subprocess.run([sys.executable, "-c", ATTEND], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{library} is not as it was compiled, and is not loaded" in done.stderr
    assert "no compiler today" in done.stdout
    assert "runs on its reference backend" in done.stdout


def test_a_library_that_the_system_cannot_load_is_named_and_attention_runs_on_the_reference(
    compiled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(compiled)
    of_another_architecture(content)
    library = place(bytes(content), bytes(content), tmp_path, monkeypatch)
    done = subprocess.run([sys.executable, "-c", ATTEND], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"cannot load its compiled CPU kernels, {library}: " in done.stdout
    assert f"Delete {library.parent} to have them compiled again" in done.stdout


def test_an_intact_library_is_loaded_without_a_word(
    compiled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = place(compiled, compiled, tmp_path, monkeypatch)
    done = subprocess.run([sys.executable, "-c", ATTEND], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{library}\n", "")
