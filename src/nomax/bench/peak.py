"""The most that one core can do: fused multiply-adds in float32, and nothing else."""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from nomax.ops import build

ROUNDS = 1_000_000
SUMS = 12  # more than the latency × throughput of any core's multiply-adds, and they still fit into the registers

SOURCE = """
#if defined(__AVX512F__)
typedef float vector __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float vector __attribute__((vector_size(32)));
#else
typedef float vector __attribute__((vector_size(16)));
#endif
extern "C" int width() { return sizeof(vector) / sizeof(float); }
extern "C" float spin(long rounds, float factor, float summand) {
    vector sums[SUMS], factors = vector{} + factor, summands = vector{} + summand;
    // Different starts, or the compiler would see that all sums are the same one.
    for (int i = 0; i < SUMS; ++i) sums[i] = vector{} + i * summand;
    while (rounds--)
        for (vector& sum : sums) sum = sum * factors + summands;
    for (vector& sum : sums) sums[0] += sum;
    return sums[0][0];
}
"""


def call() -> Callable[[], float]:
    """One call is `flop()` operations. Without a C++ compiler this raises an error that says so."""
    return partial(_library().spin, ROUNDS, 0.999, 0.001)


def flop() -> float:
    """The floating point operations of one call."""
    return 2.0 * SUMS * ROUNDS * int(_library().width())


@cache
def _library() -> ctypes.CDLL:
    flags = ["-O3", "-march=native", "-ffp-contract=fast", f"-DSUMS={SUMS}", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "peak.cpp"), Path(folder, "peak.so")
        source.write_text(SOURCE)
        subprocess.run([*build._compiler(), *flags, str(source), "-o", str(target)], check=True, capture_output=True)
        library = ctypes.CDLL(str(target))
    library.spin.argtypes = [ctypes.c_long, ctypes.c_float, ctypes.c_float]
    library.spin.restype = ctypes.c_float
    return library
