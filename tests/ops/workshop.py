"""A workshop for tests of the build: sources, an empty cache, and a compiler that only notes how it was called."""

import subprocess
import sys
from pathlib import Path

STAND_IN = """#!/bin/sh
echo "$*" >> "$STAND_IN_LOG"
case "$*" in
    *--version*) echo "stand-in 1.0"; exit 0 ;;
    *-dumpmachine*) exit 1 ;;
    *-mfuture*) exit 1 ;;
    *-fsyntax-only*) exit 0 ;;
esac
while [ -e "$STAND_IN_HOLD" ]; do sleep 0.02; done
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then echo made > "$2"; fi
    shift
done
"""

# Waits for a line on standard input, so that several processes can be let loose at the same moment.
PROCESS = """
import sys
from pathlib import Path
from nomax.ops import build
build.SOURCES, build.BINARY = map(Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
print(build.library())
"""


class Workshop:
    """A folder with sources, an empty cache and the stand-in compiler's log."""

    def __init__(self, folder: Path) -> None:
        self.sources = folder / "csrc"
        self.binary = folder / "package" / "nomax_cpu.so"
        self.cache = folder / "cache"
        self.log = folder / "log"
        self.hold = folder / "hold"  # while there is such a file, the compiler goes on compiling
        self.compiler = folder / "compiler"
        self.sources.mkdir()
        for name in ("binding.cpp", "kernel.cpp", "kernel.h"):
            (self.sources / name).write_text(f"// {name}\n")
        self.compiler.write_text(STAND_IN)
        self.compiler.chmod(0o755)

    def calls(self, containing: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if containing in line]

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(self.sources), str(self.binary)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process
