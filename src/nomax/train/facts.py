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
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": {
            "nomax": nomax.__version__,
            "revision": _revision(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": f"{platform.system()} {platform.release()}",
        },
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _revision() -> str | None:
    """The git revision if this is a checkout of nomax, with a "+" if files in it are changed."""
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
