"""Compiling the CPU kernels: once, safely under races and kills, and with errors that say what to do.

Most tests use a stand-in compiler, a script that notes how it was called and writes what it was asked for.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
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
sleep "${STAND_IN_SECONDS:-0}"
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
        self.compiler = folder / "compiler"
        self.sources.mkdir()
        for name in ("binding.cpp", "kernel.cpp", "kernel.h"):
            (self.sources / name).write_text(f"// {name}\n")
        self.compiler.write_text(STAND_IN)
        self.compiler.chmod(0o755)

    def calls(self, containing: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if containing in line]

    def start(self, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(self.sources), str(self.binary)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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


@pytest.mark.parametrize("change", ["source", "header", "compiler"])
def test_a_change_compiles_again(workshop: Workshop, change: str) -> None:
    first = build.library()
    if change == "compiler":
        workshop.compiler.write_text(STAND_IN.replace("1.0", "2.0"))
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
    workshop.binary.with_suffix(".json").write_text(json.dumps({"sources": build.source_hash()}))
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


def test_processes_that_start_together_compile_once(workshop: Workshop) -> None:
    processes = [workshop.start(STAND_IN_SECONDS="0.3") for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert answers == {f"{build.library()}\n"}
    assert len(workshop.calls("-shared")) == 1


def test_a_killed_build_leaves_no_damage(workshop: Workshop) -> None:
    process = workshop.start(STAND_IN_SECONDS="60")
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not workshop.calls("kernel.cpp"):
        assert time.monotonic() < deadline, "the build did not start"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(workshop.cache.glob("*/building-*")), "the killed build should have been under way"

    library = build.library()
    assert library.read_text() == "made\n"
    assert sorted(path.name for path in library.parent.iterdir()) == ["lock", "nomax_cpu.so"]


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
    with pytest.raises(build.BuildError, match=r"cannot write .*cache.*NOMAX_CACHE"):
        build.library()


def test_a_slow_build_says_so_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("STAND_IN_SECONDS", "0.6")  # compiling and linking: 1.2 s
    build.library()
    build.library()
    assert capfd.readouterr().err.count("nomax: compiling its CPU kernels") == 1
