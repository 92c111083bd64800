"""The compiled CPU kernels: found ready-made in the package, or compiled once into the user's cache."""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import torch
from filelock import FileLock

SOURCES = Path(__file__).parent / "csrc"
BINARY = Path(__file__).parent / "_binary" / "nomax_cpu.so"

COMMON_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    # An element is read as a float, as a pair of bfloat16 and as a vector of either.
    "-fno-strict-aliasing",
    # The stable interface as it was in torch 2.10, so that one binary serves every later torch.
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

# Weakest first, and linked in this order: of an inline function that several objects hold, the linker keeps the first,
# so a function shared with the portable kernel can never contain instructions that an older CPU lacks.
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {"portable": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": (*AVX512, "-mavx512bf16")}


class BuildError(RuntimeError):
    """The CPU kernels could not be compiled; the message says why and what to do."""


def library() -> Path:
    """Return the compiled library, compiling it first if neither the package nor the cache has it."""
    if _is_current(BINARY):
        return BINARY
    compiler = _compiler()
    folder = _cache() / _key(compiler)
    target = folder / BINARY.name
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The operating system drops the lock of a killed process; what that process left behind is ours to remove.
        with FileLock(folder / "lock"):
            if not target.exists():
                for leftover in folder.glob("building-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                with _notice():
                    compile_library(target)
    except OSError as error:
        raise BuildError(
            f"nomax cannot write its compiled CPU kernels into {folder}: {error}. "
            "Set the environment variable NOMAX_CACHE to a directory that you can write to."
        ) from error
    return target


def compile_library(destination: Path) -> None:
    """Compile the C++ sources into the shared library `destination`, which appears complete or not at all."""
    compiler = _compiler()
    torch_folder = Path(torch.__file__).parent
    instruction_sets = {
        name: flags for name, flags in INSTRUCTION_SETS.items() if not flags or _accepts(compiler, flags)
    }

    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=destination.parent) as aside:
        have = [f"-DNOMAX_HAVE_{name.upper()}" for name in instruction_sets]
        units = {"binding": [*have, "-isystem", str(torch_folder / "include"), str(SOURCES / "binding.cpp")]}
        for name, flags in instruction_sets.items():
            units[f"kernel_{name}"] = [*flags, f"-DNOMAX_ISA={name}", str(SOURCES / "kernel.cpp")]
        objects = [str(Path(aside, f"{unit}.o")) for unit in units]
        commands = [
            [*compiler, *COMMON_FLAGS, *arguments, "-c", "-o", output]
            for arguments, output in zip(units.values(), objects, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run, commands))

        linked = Path(aside, destination.name)
        # No search path for torch's libraries goes into the binary: torch has loaded them before us.
        link = ["-shared", *objects, f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-o", str(linked)]
        _run([*compiler, *link])
        os.replace(linked, destination)


def source_hash() -> str:
    """Return a digest of all that the library is made from: the C++ files and the flags they are compiled with."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, INSTRUCTION_SETS)).encode())
    for file in sorted(SOURCES.rglob("*")):
        if file.suffix in (".cpp", ".h"):
            content = file.read_bytes()
            digest.update(f"\n{file.relative_to(SOURCES).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _is_current(binary: Path) -> bool:
    record = binary.with_suffix(".json")
    return binary.exists() and record.exists() and json.loads(record.read_text())["sources"] == source_hash()


def _key(compiler: list[str]) -> str:
    identity = _run([*compiler, "--version"]).partition("\n")[0]
    parts = (source_hash(), torch.__version__, identity, platform.machine())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _cache() -> Path:
    if chosen := os.environ.get("NOMAX_CACHE"):
        return Path(chosen).expanduser().absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nomax"
    except RuntimeError as error:
        raise BuildError(
            "nomax found no home directory to keep its compiled CPU kernels in. "
            "Set the environment variable NOMAX_CACHE to a directory that you can write to."
        ) from error


def _compiler() -> list[str]:
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    candidates = ("c++", "g++", "clang++")
    for name in candidates:
        if path := shutil.which(name):
            return [path]
    raise BuildError(
        f"nomax found no C++ compiler for its CPU kernels: looked for {', '.join(candidates)} on PATH, "
        "and the environment variable CXX is not set. "
        "Install g++ or clang++, or set CXX to your compiler, or install a nomax wheel that holds the compiled kernels."
    )


def _accepts(compiler: list[str], flags: tuple[str, ...]) -> bool:
    try:
        _run([*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace")
    except OSError as error:
        raise BuildError(
            f"nomax cannot run the C++ compiler {command[0]!r}: {error}. "
            "Set the environment variable CXX to a working compiler, or unset it to let nomax look for one."
        ) from error
    if result.returncode != 0:
        output = "\n".join(result.stdout.splitlines()[-30:])
        raise BuildError(f"nomax could not compile its CPU kernels.\nCommand: {shlex.join(command)}\nOutput:\n{output}")
    return result.stdout


@contextmanager
def _notice() -> Iterator[None]:
    """Say what takes so long, if it takes longer than a moment."""
    line = "nomax: compiling its CPU kernels (once, about 20 s) …"
    timer = threading.Timer(1.0, lambda: print(line, file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
