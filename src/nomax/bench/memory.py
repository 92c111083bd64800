"""Peak memory of one long call, as a share of the matrix of weights that it must never hold.

Each call runs in a process of its own, so that nothing measured before has left memory behind.
"""

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nomax.bench.gate import results
from nomax.bench.peers import ours, sdpa
from nomax.bench.shapes import BACKWARD, FORWARD, Inputs, Shape, make_inputs

LENGTH = 16_384
PARTICIPANTS = ("relu/L", "sdpa")
MODES = (FORWARD, BACKWARD)


@dataclass
class Memory:
    """What one call added to the process at its peak, results included, or why that is not known."""

    participant: str
    mode: str
    length: int
    bytes: int | None = None
    share: float | None = None  # of length × length float32 numbers
    failure: str | None = None


def measure(participant: str, mode: str, length: int) -> Memory:
    """Measure in a fresh process."""
    command = [sys.executable, "-m", "nomax.bench.memory", participant, mode, str(length)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines()
        return Memory(participant, mode, length, failure=lines[-1] if lines else f"exit code {process.returncode}")
    size = int(json.loads(process.stdout))
    return Memory(participant, mode, length, size, size / (4 * length * length))


def extra_bytes(participant: str, mode: str, length: int) -> int:
    """How far the peak of this process rises above its present memory during one call (Linux with glibc only)."""
    _attend(participant, mode, make_inputs(Shape("warm-up", "", 1, 1, 256, 256), torch.float32))
    inputs = make_inputs(Shape("long", "", 1, 1, length, length), torch.float32)
    # Memory that was freed but not given back would be used again, and what uses it would look free.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present
    _attend(participant, mode, inputs)
    return _resident("VmHWM") - before


def _attend(participant: str, mode: str, inputs: Inputs) -> None:
    attention = sdpa(inputs) if participant == "sdpa" else ours(inputs, participant)
    results(attention, inputs, gradients=mode == BACKWARD)


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    print(json.dumps(extra_bytes(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
