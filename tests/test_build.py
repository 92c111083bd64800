"""Compiling the CPU kernels: once, safely under races and kills, and with errors that say what to do.

Most tests use a stand-in compiler, a script that notes how it was called and writes what it was asked for.
"""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nomax.ops import build

STAND_IN = """#!/bin/sh
echo "$*" >> "$STAND_IN_LOG"
case "$*" in
    *--version*) echo "stand-in 1.0"; exit 0 ;;
    *-mfuture*) exit 1 ;;
    *-fsyntax-only*) exit 0 ;;
esac
while [ -e "$STAND_IN_HOLD" ]; do sleep 0.02; done
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then echo made > "$2"; fi
    shift
done
"""

# Waits for a line on standard input, so that several processes can be let loose at the same moment.
PROCESS = """
import sys
from pathlib import Path
from nomax.ops import build
build.SOURCES, build.BINARY = map(Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
print(build.library())
"""


class Workshop:
    """A folder with sources, an empty cache and the stand-in compiler's log."""

    def __init__(self, folder: Path) -> None:
        self.sources = folder / "csrc"
        self.binary = folder / "package" / "nomax_cpu.so"
        self.cache = folder / "cache"
        self.log = folder / "log"
        self.hold = folder / "hold"  # while there is such a file, the compiler goes on compiling
        self.compiler = folder / "compiler"
        self.sources.mkdir()
        for name in ("binding.cpp", "kernel.cpp", "kernel.h"):
            (self.sources / name).write_text(f"// {name}\n")
        self.compiler.write_text(STAND_IN)
        self.compiler.chmod(0o755)

    def calls(self, containing: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if containing in line]

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(self.sources), str(self.binary)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    workshop = Workshop(tmp_path)
    monkeypatch.setattr(build, "SOURCES", workshop.sources)
    monkeypatch.setattr(build, "BINARY", workshop.binary)
    monkeypatch.setenv("NOMAX_CACHE", str(workshop.cache))
    monkeypatch.setenv("CXX", str(workshop.compiler))
    monkeypatch.setenv("STAND_IN_LOG", str(workshop.log))
    monkeypatch.setenv("STAND_IN_HOLD", str(workshop.hold))
    return workshop


def test_the_second_call_compiles_nothing(workshop: Workshop) -> None:
    first = build.library()
    compiled = workshop.calls("-o")
    assert build.library() == first
    assert workshop.calls("-o") == compiled
    assert first.read_text() == "made\n"
    assert first.is_relative_to(workshop.cache)


def test_every_instruction_set_has_its_kernel_and_the_weakest_is_linked_first(workshop: Workshop) -> None:
    build.library()
    assert len(workshop.calls("kernel.cpp")) == len(build.INSTRUCTION_SETS)
    (binding,) = workshop.calls("binding.cpp")
    (link,) = workshop.calls("-shared")
    positions = [link.index(f"kernel_{name}.o") for name in build.INSTRUCTION_SETS]
    assert positions == sorted(positions)
    for name in build.INSTRUCTION_SETS:
        assert f"-DNOMAX_HAVE_{name.upper()}" in binding.split()
        assert any(f"-DNOMAX_ISA={name}" in line.split() for line in workshop.calls("kernel.cpp"))


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {"portable": (), "future": ("-mfuture",)})
    build.library()
    assert len(workshop.calls("kernel.cpp")) == 1
    assert not workshop.calls("NOMAX_HAVE_FUTURE")


@pytest.mark.parametrize("change", ["source", "header", "compiler", "argument"])
def test_a_change_compiles_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    first = build.library()
    if change == "compiler":
        workshop.compiler.write_text(STAND_IN.replace("1.0", "2.0"))
    elif change == "argument":
        monkeypatch.setenv("CXX", f"{workshop.compiler} -ffast-math")
    else:
        (workshop.sources / {"source": "kernel.cpp", "header": "kernel.h"}[change]).write_text("// changed\n")
    assert build.library() != first
    assert len(workshop.calls("-shared")) == 2


def test_the_compiler_may_come_with_arguments(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"'{workshop.compiler}' --first")
    build.library()
    assert workshop.calls("-shared")[0].startswith("--first ")


def test_the_ready_made_binary_is_used_while_it_matches_the_sources(workshop: Workshop) -> None:
    build.compile_library(workshop.binary)
    assert build.library() == workshop.binary
    assert not workshop.cache.exists()

    (workshop.sources / "kernel.h").write_text("// changed\n")
    assert build.library().is_relative_to(workshop.cache)


def test_the_cache_follows_the_desktop_convention(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NOMAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "desktop"))
    assert build.library().parent.parent == tmp_path / "desktop" / "nomax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.library().parent.parent == tmp_path / "home" / ".cache" / "nomax"


def test_a_relative_desktop_folder_is_ignored(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOMAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "desktop")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.library().parent.parent == tmp_path / "home" / ".cache" / "nomax"
    assert not (tmp_path / "desktop").exists()


@pytest.mark.parametrize("variable", ["NOMAX_CACHE", "HOME"])
def test_a_library_below_the_current_directory_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NOMAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "here")
    with pytest.raises(build.BuildError, match=r"'here.*relative.*NOMAX_CACHE to an absolute path"):
        build.library()
    assert not (tmp_path / "here").exists()


def test_processes_that_start_together_compile_once_and_say_what_they_wait_for(workshop: Workshop) -> None:
    workshop.hold.touch()
    processes = [workshop.start() for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    first_lines = sorted(process.stderr.readline() for process in processes if process.stderr is not None)
    assert first_lines[0].startswith("nomax: compiling the CPU kernels")
    assert all(line.startswith("nomax: waiting for another process") for line in first_lines[1:])
    workshop.hold.unlink()
    answers = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert answers == {f"{build.library()}\n"}
    assert len(workshop.calls("-shared")) == 1


def test_a_killed_build_leaves_no_damage(workshop: Workshop) -> None:
    workshop.hold.touch()
    process = workshop.start()
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    while not workshop.calls("kernel.cpp"):
        assert process.poll() is None, "the build did not start"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(workshop.cache.glob("*/building-*")), "the killed build should have been under way"

    workshop.hold.unlink()
    library = build.library()
    assert library.read_text() == "made\n"
    assert sorted(path.name for path in library.parent.iterdir()) == ["lock", "nomax_cpu.json", "nomax_cpu.so"]


def test_files_are_on_the_disk_before_they_get_their_names(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, renamed = [], []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(os.fstat(descriptor).st_ino)

    def noted_replace(source: Path, destination: Path) -> None:
        assert source.stat().st_ino in flushed
        replace(source, destination)
        renamed.append(destination.name)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    folder = build.library().parent
    assert renamed == ["nomax_cpu.so", "nomax_cpu.json"]
    assert flushed[-1] == folder.stat().st_ino


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


def test_without_a_compiler_the_error_says_what_to_install(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"looked for c\+\+, g\+\+, clang\+\+.*Install g\+\+.*CXX.*wheel"):
        build.library()


def test_a_compiler_that_cannot_run_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"'no-such-compiler'.*CXX"):
        build.library()


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_a_broken_source_shows_the_command_and_the_compilers_words(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX")
    (workshop.sources / "kernel.cpp").write_text("#error the kernel is broken on purpose\n")
    with pytest.raises(build.BuildError) as caught:
        build.library()
    assert "Command: " in str(caught.value)
    assert "-DNOMAX_ISA=portable" in str(caught.value)
    assert "the kernel is broken on purpose" in str(caught.value)
    assert not list(workshop.cache.glob("*/*.so"))
    assert not list(workshop.cache.glob("*/building-*"))


def test_a_cache_that_cannot_be_written_is_named(workshop: Workshop) -> None:
    workshop.cache.write_text("a file where the directory should be")
    with pytest.raises(build.BuildError, match=r"cannot keep .*cache.*NOMAX_CACHE"):
        build.library()


def test_a_build_says_so_once(workshop: Workshop, capfd: pytest.CaptureFixture[str]) -> None:
    build.library()
    build.library()
    assert capfd.readouterr().err == "nomax: compiling the CPU kernels (once, about 20 s) …\n"


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
