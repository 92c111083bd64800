"""What a run folder says about where it came from: the command, the software, the machine."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import nomax


def facts(command: str) -> dict[str, Any]:
    """The command, versions, machine and time, for run.json."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": started, "command": command, "versions": versions(), "machine": machine()}


def versions() -> dict[str, str | None]:
    """The software, with the git revision if this is a checkout ("+" = with changes that are not committed)."""
    return {
        "nomax": nomax.__version__,
        "revision": _revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """The processor and the system."""
    return {
        "cpu": _processor().get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
    }


def cpu_flags() -> list[str]:
    """The extensions of its instruction set that the processor names."""
    processor = _processor()
    return (processor.get("flags") or processor.get("Features") or "").split()


def _processor() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _revision() -> str | None:
    git = ["git", "-C", str(Path(nomax.__file__).parent)]
    try:
        # A revision of a repository around an installed copy would say nothing about nomax.
        _output([*git, "ls-files", "--error-unmatch", "__init__.py"])
        changes = _output([*git, "status", "--porcelain", "."])
        return _output([*git, "rev-parse", "HEAD"]).strip() + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _output(words: list[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
