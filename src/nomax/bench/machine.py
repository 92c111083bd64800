"""What the numbers were measured on, and with."""

import os
import subprocess
from typing import Any

from nomax.ops import build, cpu
from nomax.train import facts

FLAGS = ("fma", "avx2", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")


def load() -> float:
    """How many processes wanted to run, on average over the last minute."""
    return os.getloadavg()[0]


def machine() -> dict[str, Any]:
    """The machine, and the instructions that we use of it."""
    has = facts.cpu_flags()
    return facts.machine() | {"flags": [flag for flag in FLAGS if flag in has], "kernels": _instruction_set()}


def versions() -> dict[str, str | None]:
    """The software, and the compiler of the kernels."""
    return facts.versions() | {"compiler": _compiler_version()}


def _instruction_set() -> str:
    try:
        return cpu.instruction_set()
    except build.BuildError as error:
        return f"none: {error}"


def _compiler_version() -> str | None:
    try:
        words = [*build._compiler(), "--version"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.partition("\n")[0]
    except (build.BuildError, OSError, subprocess.CalledProcessError):
        return None
