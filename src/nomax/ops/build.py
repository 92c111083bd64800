"""The compiled CPU kernels: shipped with the package, or compiled once into the user's cache.

Loading a library runs it, so a library is not loaded if it may be damaged or put there by somebody else: a record
beside it holds its SHA-256, and only the user and root may be able to write to the cache.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import torch
from filelock import FileLock, Timeout

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
# so a function shared with the portable kernel can never contain instructions that an older CPU lacks. Compiled are
# those of the machine whose flags the compiler knows. On aarch64 the portable kernel is NEON, which all of them have.
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "neon_bf16": ("-march=armv8.2-a+bf16",),
}
BEGINNINGS = {"x86_64": ("portable", "avx"), "aarch64": ("portable", "neon")}  # of their names, by machine

WRITABLE = "can be written by others"


class BuildError(RuntimeError):
    """The CPU kernels could not be compiled, or must not be loaded; the message says why and what to do."""


def library() -> Path:
    """Return the compiled library, checked, compiling it first if neither the package nor the cache has it."""
    if _in_package():
        return BINARY
    compiler = _compiler()
    folder = cache_folder() / _key(compiler)
    target = folder / BINARY.name
    try:
        _make_private(folder)
        _refuse_shared(folder)
        if not _is_intact(target):
            _compile_once(target)
    except OSError as error:
        raise BuildError(
            f"nomax cannot keep its compiled CPU kernels in {folder}: {error}. "
            "Set the environment variable NOMAX_CACHE to a directory that you can write to."
        ) from error
    return target


def _compile_once(target: Path) -> None:
    # The operating system drops the lock of a killed process; what that process left behind is ours to remove.
    lock = FileLock(target.parent / "lock", mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say("waiting for another process, which is compiling the CPU kernels …")
        lock.acquire()
    try:
        if not _is_intact(target):
            for leftover in target.parent.glob("building-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if target.exists():
                _say(f"{target} is not as it was compiled, and is not loaded")
            _say("compiling the CPU kernels (once, about 20 s) …")
            compile_library(target)
    finally:
        lock.release()


def compile_library(destination: Path) -> None:
    """Compile the C++ sources into the shared library `destination`, and write its record beside it.

    Each of the two files appears complete or not at all; a library that is not the recorded one counts as damaged.
    """
    compiler = _compiler()
    sources = source_hash()
    torch_folder = Path(torch.__file__).parent
    target = _target(compiler)
    instruction_sets = {
        name: flags for name, flags in sets_for(target).items() if not flags or _accepts(compiler, flags)
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
        _run([*compiler, *link_flags(target, torch_folder / "lib", aside), *objects, "-o", str(linked)])
        record = Path(aside, "record")
        record.write_text(json.dumps({"sources": sources, "sha256": _sha256(linked)}))
        for file, place in ((linked, destination), (record, _record(destination))):
            file.chmod(0o644)  # whatever the umask
            _flush(file)
            os.replace(file, place)
    _flush(destination.parent)


def sets_for(target: str) -> dict[str, tuple[str, ...]]:
    """Return the instruction sets of a target such as x86_64-linux-gnu, and their flags."""
    beginnings = BEGINNINGS.get(_machine(target), ("portable",))
    return {name: flags for name, flags in INSTRUCTION_SETS.items() if name.startswith(beginnings)}


def link_flags(target: str, libraries: Path, aside: str) -> list[str]:
    """Return the linker's flags for a target such as x86_64-linux-gnu.

    Of another kind of CPU there is no libtorch_cpu to link with; an empty library of that name takes its place.
    """
    if "apple" in target or "darwin" in target:  # whose linker asks where each symbol is, unless told not to
        return ["-shared", "-undefined", "dynamic_lookup"]
    if _machine(target) != _machine(platform.machine()):
        stub = Path(aside, "libtorch_cpu.so")
        _run(
            [*_compiler(), "-shared", "-fPIC", "-x", "c++", os.devnull, "-Wl,-soname,libtorch_cpu.so", "-o", str(stub)]
        )
        return ["-shared", f"-L{aside}", "-Wl,--no-as-needed", "-ltorch_cpu"]
    return ["-shared", f"-L{libraries}", "-Wl,--no-as-needed", "-ltorch_cpu"]


def _target(compiler: list[str]) -> str:
    """Return what the compiler compiles for; if it does not say, this machine."""
    try:
        return _run([*compiler, "-dumpmachine"]).strip() or platform.machine()
    except BuildError:
        return platform.machine()


def _machine(target: str) -> str:
    name = target.partition("-")[0].lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def source_hash() -> str:
    """Return a digest of all that the library is made from: the C++ files and the flags they are compiled with."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, INSTRUCTION_SETS)).encode())
    for file in sorted(SOURCES.rglob("*")):
        if file.suffix in (".cpp", ".h"):
            content = file.read_bytes()
            digest.update(f"\n{file.relative_to(SOURCES).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _record(library: Path) -> Path:
    return library.with_suffix(".json")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    # Not nomax._files.sync_folder: the build of a wheel loads this file alone, without the package.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_package() -> bool:
    """Return whether the package holds the library of its sources: trusted as the package is, but maybe damaged."""
    if not BINARY.exists() and not _record(BINARY).exists():
        return False
    try:
        record = json.loads(_record(BINARY).read_text())
        if record["sha256"] == _sha256(BINARY):
            return bool(record["sources"] == source_hash())
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BuildError(
        f"The compiled CPU kernels that were installed with nomax, {BINARY}, are damaged. "
        f"Install nomax again, or delete {BINARY.parent} to have them compiled on this machine."
    )


def _is_intact(library: Path) -> bool:
    """Return whether a library of the cache is the one that was compiled, and nobody else can have written to it."""
    try:
        files = [file.lstat() for file in (library, _record(library))]
        if not all(stat.S_ISREG(file.st_mode) and not _fault(file) for file in files):
            return False
        return bool(json.loads(_record(library).read_text())["sha256"] == _sha256(library))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make_private(folder: Path) -> None:
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)  # parents=True would leave the parents to the umask


def _refuse_shared(folder: Path) -> None:
    """Refuse a folder into which others could put a library, or in whose place they could put another folder."""
    folder, faults = folder.resolve(), {}
    for path in (folder, *folder.parents):
        status = path.stat()
        fault = _fault(status)
        # In a sticky folder such as /tmp others can add entries, but neither rename nor remove ours.
        if fault and not (fault == WRITABLE and path != folder and status.st_mode & stat.S_ISVTX):
            faults[path] = fault
    if faults:
        mend = (
            f"Run `chmod go-w {shlex.join(map(str, faults))}`, or set" if set(faults.values()) == {WRITABLE} else "Set"
        )
        raise BuildError(
            f"nomax does not load compiled CPU kernels from {folder}: "
            + " and ".join(f"{path} {fault}" for path, fault in faults.items())
            + f", so this process could be made to run somebody else's library. {mend} the environment variable "
            "NOMAX_CACHE to a directory of your own."
        )


def _fault(status: os.stat_result) -> str:
    """Say why a file or folder cannot be trusted: an owner other than the user or root, or others who can write."""
    if not hasattr(os, "geteuid"):  # Windows, where permissions are kept elsewhere
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (user id {status.st_uid})"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)):
        return WRITABLE
    return ""


def _is_own_group(group: int) -> bool:
    """Return whether a group has no member but the user or root: there a umask of 002 is usual, and harmless."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return group == 0
    return group == 0 or (entry.gr_name == user and set(entry.gr_mem) <= {user})


def _key(compiler: list[str]) -> str:
    identity = _run([*compiler, "--version"]).partition("\n")[0]
    parts = (source_hash(), torch.__version__, shlex.join(compiler), identity, platform.machine())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    chosen, desktop = os.environ.get("NOMAX_CACHE"), Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if chosen:
            folder = Path(chosen).expanduser()
        else:  # the desktop convention has relative paths ignored
            folder = (desktop if desktop.is_absolute() else Path.home() / ".cache") / "nomax"
    except RuntimeError as error:
        raise BuildError(
            "nomax found no home directory to keep its compiled CPU kernels in. "
            "Set the environment variable NOMAX_CACHE to a directory that you can write to."
        ) from error
    if not folder.is_absolute():
        raise BuildError(
            f"nomax does not load compiled CPU kernels from {str(folder)!r}: the path is relative, so the current "
            "directory would decide which library is run. "
            "Set the environment variable NOMAX_CACHE to an absolute path."
        )
    return folder


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
        "Install g++ or clang++, or set CXX to your compiler, or install a wheel with compiled kernels: "
        "`make wheel` in a checkout builds one, on a machine with a compiler."
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


def _say(line: str) -> None:
    print(f"nomax: {line}", file=sys.stderr, flush=True)
