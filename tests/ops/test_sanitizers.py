"""The C++ kernels against naive loops (csrc/driver.cpp), under the sanitizers and for every instruction set.

No torch is involved: each test compiles the kernels of one instruction set and the driver into a program, and runs it.
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from nomax.ops import build

DRIVER = Path(__file__).parent / "csrc" / "driver.cpp"
LANGUAGE = "-std=c++20"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@dataclass(frozen=True)
class Program:
    """How to compile the kernels of one instruction set, and what the CPU must have to run them."""

    name: str
    instruction_set: str
    flags: tuple[str, ...]
    sanitizers: tuple[str, ...]
    needs: tuple[str, ...] = ()
    compiler: tuple[str, ...] = ()
    """Empty: that of this machine."""
    emulator: tuple[str, ...] = ()


ARM, QEMU = ("aarch64-linux-gnu-g++", "-static"), ("qemu-aarch64-static", "-cpu", "max")
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")

PROGRAMS = [
    # -Og, because it compiles in a third of the time of -O1; the sanitizers check the same.
    Program("portable", "portable", ("-Og",), SANITIZERS),
    Program("avx2", "avx2", ("-Og", *build.AVX2), SANITIZERS, AVX2),
    # The AVX-512 kernels with their vectors of 16 floats and pairs of bfloat16 spelled out by the compiler, so that
    # their tiles and layouts are tested without such a CPU. (GCC notes that these vectors have no ABI; we pass none.)
    Program("emulated", "avx512_bf16", ("-Og", "-DNOMAX_EMULATE", "-Wno-psabi", *build.AVX2), SANITIZERS, AVX2),
    # As they are shipped, for this is the only place where the real instructions meet the naive loops.
    Program("avx512", "avx512", ("-O3", *build.AVX512), (), AVX512),
    Program("avx512_bf16", "avx512_bf16", ("-O3", *build.AVX512, "-mavx512bf16"), (), (*AVX512, "avx512_bf16")),
    # Other CPUs, in an emulator, with all the instructions that it knows.
    Program("neon", "portable", ("-O2",), (), compiler=ARM, emulator=QEMU),
    Program("neon_bf16", "neon_bf16", ("-O2", *build.INSTRUCTION_SETS["neon_bf16"]), (), compiler=ARM, emulator=QEMU),
    # The kernels are written in GCC's dialect, which clang, the compiler of macOS, mostly shares.
    Program("clang", "avx2", ("-O2", *build.AVX2), (), AVX2, compiler=("clang++",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_kernels_agree_with_naive_loops_and_touch_no_foreign_memory(program: Program, tmp_path: Path) -> None:
    compiler = list(program.compiler) or _compiler()
    for tool in (compiler[0], *program.emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here")
    if missing := set(program.needs) - _cpu_features():
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    if not _links(compiler, program, tmp_path):
        pytest.skip(f"{compiler[0]} cannot build a program with {' '.join((*program.flags, *program.sanitizers))}")

    name = f"-DNOMAX_ISA={program.instruction_set}"
    kernel, driver, executable = (str(tmp_path / file) for file in ("kernel.o", "driver.o", "program"))
    units = [
        [*program.flags, *program.sanitizers, "-g1", str(build.SOURCES / "kernel.cpp"), "-o", kernel],
        # Without sanitizers, for the naive loops would take most of the time; the memory that the driver allocates is
        # watched all the same.
        ["-O1", str(DRIVER), "-o", driver],
    ]
    with ThreadPoolExecutor(len(units)) as pool:
        list(pool.map(lambda unit: _run([*compiler, LANGUAGE, "-fno-strict-aliasing", name, "-c", *unit]), units))
    _run([*compiler, *program.sanitizers, kernel, driver, "-o", executable])

    assert _run([*program.emulator, executable]).endswith(" passed, 0 failed\n")


def _compiler() -> list[str]:
    try:
        return build._compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


def _cpu_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: only what needs nothing runs
        return set()
    return next((set(line.split()[2:]) for line in lines if line.startswith("flags")), set())


def _links(compiler: list[str], program: Program, folder: Path) -> bool:
    """Whether the compiler knows the flags and has the sanitizers' libraries, which are sometimes a package apart."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [*compiler, LANGUAGE, *program.flags, *program.sanitizers, str(source), "-o", str(folder / "empty")]
    return subprocess.run(command, capture_output=True).returncode == 0


def _run(command: list[str]) -> str:
    """Return what the command prints; show all of it if the command fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(command)}\nexit status {result.returncode}\n{result.stdout[-8000:]}", pytrace=False)
    return result.stdout
