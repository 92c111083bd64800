"""What the numbers were measured on, and with."""

import os
import platform
import subprocess
from pathlib import Path

import torch

import nomax
from nomax.ops import build, cpu

FLAGS = ("fma", "avx2", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")


def load() -> float:
    """How many processes wanted to run, on average over the last minute."""
    return os.getloadavg()[0]


def machine() -> dict[str, object]:
    """The processor, and the instructions that we and torch use of it."""
    facts = _cpu_facts()
    return {
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in (facts.get("flags") or facts.get("Features") or "").split()],
        "nomax_instructions": _instruction_set(),
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str | None]:
    """The software, with the git revision if this is a checkout ("+" = with changes that are not committed)."""
    return {
        "nomax": nomax.__version__,
        "revision": _revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _compiler_version(),
    }


def _cpu_facts() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _instruction_set() -> str:
    try:
        return cpu.instruction_set()
    except build.BuildError as error:
        return f"none: {error}"


def _compiler_version() -> str | None:
    try:
        return _output([*build._compiler(), "--version"]).partition("\n")[0]
    except (build.BuildError, OSError, subprocess.CalledProcessError):
        return None


def _revision() -> str | None:
    git = ["git", "-C", str(Path(nomax.__file__).parent)]
    try:
        # A revision of a repository around an installed copy would say nothing about nomax.
        _output([*git, "ls-files", "--error-unmatch", "__init__.py"])
        changes = _output([*git, "status", "--porcelain", "."])
        return _output([*git, "rev-parse", "HEAD"]).strip() + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
