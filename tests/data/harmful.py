"""Harmful files, and a process with little memory and time to open them in."""

import json
import os
import subprocess
import sys

from pictures import encoded, picture

LIMITED = """
import json, resource, sys
from pathlib import Path
from nomax import data
from nomax.data.images import files
from nomax.data.prepare import packages
from nomax.data.images.shards import ShardSource
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + {megabytes} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
outcomes = {{}}
for name, arguments in json.loads(sys.stdin.read()).items():
    try:
        outcomes[name] = ["fine", str(({call})(*arguments))]
    except Exception as error:
        outcomes[name] = [type(error).__name__, str(error)]
print(json.dumps(outcomes))
"""


def limited(call: str, cases: dict[str, list[str]], megabytes: int = 400) -> dict[str, tuple[str, str]]:
    """What a call gives, or the kind and text of its error, for each case, within limits of memory and CPU time."""
    process = subprocess.run(
        [sys.executable, "-c", LIMITED.format(call=call, megabytes=megabytes)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert process.returncode == 0, f"exit code {process.returncode} (-24: it hung)\n{process.stderr[-2000:]}"
    return {name: (kind, text) for name, (kind, text) in json.loads(process.stdout).items()}


# Tar files


def header(name: str, size: bytes | int, kind: bytes = b"0", extra: dict[int, bytes] | None = None) -> bytes:
    """A tar header with a right checksum, whatever it says."""
    block = bytearray(512)
    block[: len(name)] = name.encode()
    block[100:108] = b"0000644\0"
    block[124:136] = size if isinstance(size, bytes) else f"{size:011o}\0".encode()
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    for place, content in (extra or {}).items():
        block[place : place + len(content)] = content
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def binary(number: int) -> bytes:
    """A size as GNU tar writes those that octal digits cannot: here also the negative ones."""
    return (number % (1 << 96) | 0x80 << 88).to_bytes(12, "big")


def record(key: str, value: str) -> bytes:
    length = len(key) + len(value) + 3
    length += len(str(length + len(str(length))))
    return f"{length} {key}={value}\n".encode()


def pax(*records: bytes) -> bytes:
    data = b"".join(records)
    return header("PaxHeader", len(data), b"x") + padded(data)


def good(number: int) -> bytes:
    data = encoded(picture(number), "PNG")
    return header(f"{number}.png", len(data)) + padded(data) + header(f"{number}.cls", 1) + padded(b"0")
