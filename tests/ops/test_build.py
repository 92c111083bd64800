"""Compiling the CPU kernels: once, safely under races and kills, and with errors that say what to do.

Most tests use a stand-in compiler, a script that notes how it was called and writes what it was asked for.
"""

import os
import platform
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from workshop import STAND_IN, Workshop

from nomax.ops import build


def test_the_second_call_compiles_nothing(workshop: Workshop) -> None:
    first = build.library()
    compiled = workshop.calls("-o")
    assert build.library() == first
    assert workshop.calls("-o") == compiled
    assert first.read_text() == "made\n"
    assert first.is_relative_to(workshop.cache)


def test_every_instruction_set_has_its_kernel_and_the_weakest_is_linked_first(workshop: Workshop) -> None:
    build.library()
    names = build.sets_for(platform.machine())
    assert len(workshop.calls("kernel.cpp")) == len(names)
    (binding,) = workshop.calls("binding.cpp")
    (link,) = workshop.calls("-shared")
    positions = [link.index(f"kernel_{name}.o") for name in names]
    assert positions == sorted(positions)
    for name in names:
        assert f"-DNOMAX_HAVE_{name.upper()}" in binding.split()
        assert any(f"-DNOMAX_ISA={name}" in line.split() for line in workshop.calls("kernel.cpp"))


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {"portable": (), "avx-future": ("-mfuture",)})
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    build.library()
    assert len(workshop.calls("kernel.cpp")) == 1
    assert not workshop.calls("NOMAX_HAVE_FUTURE")


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("x86_64-linux-gnu", ["portable", "avx2", "avx512", "avx512_bf16"]),
        ("x86_64-apple-darwin22.6.0", ["portable", "avx2", "avx512", "avx512_bf16"]),
        ("aarch64-linux-gnu", ["portable", "neon_bf16"]),
        ("arm64-apple-darwin23.1.0", ["portable", "neon_bf16"]),
        ("riscv64-linux-gnu", ["portable"]),
    ],
)
def test_a_compiler_gets_the_instruction_sets_of_what_it_compiles_for(
    workshop: Workshop, target: str, names: list[str]
) -> None:
    workshop.compiler.write_text(STAND_IN.replace("-dumpmachine*) exit 1", f"-dumpmachine*) echo {target}; exit 0"))
    build.library()
    assert sorted(re.findall(r"-DNOMAX_ISA=(\S+)", "\n".join(workshop.calls("kernel.cpp")))) == sorted(names)
    *stub, link = workshop.calls("-shared")
    if "darwin" in target:
        assert "-undefined dynamic_lookup" in link
        assert "-ltorch_cpu" not in link
    else:
        assert "-ltorch_cpu" in link
    foreign = "linux" in target and not target.startswith(platform.machine())
    assert ("libtorch_cpu.so" in "".join(stub)) == foreign
    assert not workshop.calls("openmp")


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
