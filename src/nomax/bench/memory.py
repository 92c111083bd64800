"""Peak memory of one long call, as a share of the matrix of weights that it must never hold.

Each call runs in a process of its own, so that nothing measured before has left memory behind.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
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
    share: float | None = None  # of length × length float32 numbers, or of what a peer takes
    failure: str | None = None
    unit: str = "L"  # what length counts


def measure(participant: str, mode: str, length: int) -> Memory:
    """Measure in a fresh process."""
    size = in_a_fresh_process("nomax.bench.memory", participant, mode, str(length))
    if isinstance(size, str):
        return Memory(participant, mode, length, failure=size)
    return Memory(participant, mode, length, size, size / (4 * length * length))


def in_a_fresh_process(module: str, *arguments: str) -> int | str:
    """The number that a module prints when it is run with these arguments, or why there is none."""
    process = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {process.returncode}"
    return int(json.loads(process.stdout))


def extra_bytes(participant: str, mode: str, length: int) -> int:
    """What one call adds to this process at its peak."""
    _attend(participant, mode, make_inputs(Shape("warm-up", "", 1, 1, 256, 256), torch.float32))
    inputs = make_inputs(Shape("long", "", 1, 1, length, length), torch.float32)
    return rise(lambda: _attend(participant, mode, inputs))


def rise(call: Callable[[], object]) -> int:
    """How far the peak of this process rises above its present memory during a call (Linux with glibc only)."""
    # Memory that was freed but not given back would be used again, and what uses it would look free.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present
    call()
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
