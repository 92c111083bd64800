"""Test the Triton kernels on this machine's GPU, time them, and print one report to send in.

    python tools/gpu_report.py > report.txt               # ten minutes
    python tools/gpu_report.py --no-tests > report.txt    # the times alone

The tests are those that all backends share, with their tensors on the GPU. The times are those of
`nomax bench attention`: calls beside PyTorch's softmax attention, in TFLOP/s by FlashAttention's formula.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import nomax
from nomax.bench import attention

ROOT = Path(__file__).parent.parent
TESTS = ("semantics", "dropout", "problem", "rows", "packed", "shapes_and_dtypes", "triton")


def tests(device: str) -> int:
    """Run the tests of the operation on the device; return pytest's exit code."""
    environment = {**os.environ, "NOMAX_TEST_DEVICE": device}
    files = [str(ROOT / "tests" / "ops" / f"test_{name}.py") for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "triton", "-p", "no:cacheprovider", "--tb=short", *files]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-20_000:], done.stderr[-2_000:], sep="\n")
    return done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="xpu" if torch.xpu.is_available() else "cuda", help="cuda or xpu")
    parser.add_argument("--no-tests", action="store_true", help="only the times")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to check that the script works; any device")
    options = parser.parse_args()
    module = torch.get_device_module(options.device)
    if not options.smoke and not module.is_available():
        sys.exit(f"There is no GPU here: torch.{options.device}.is_available() is False.")
    import triton

    print("nomax on a GPU: please send this to https://github.com/nomax/nomax/issues")
    versions = f"nomax {nomax.__version__}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{versions}, Python {sys.version.split()[0]}")
    print(f"{options.device}: {'interpreted' if options.smoke else module.get_device_properties(0)}\n")
    code = 0
    if not options.no_tests:
        code = tests(options.device)
    with tempfile.TemporaryDirectory() as folder:
        # Other activations would each be compiled, and their tiles tried, which takes longer than ten minutes.
        common = {"device": options.device, "load_limit": 1e9, "phis": (), "output": Path(folder)}
        toy = {"smoke": True, "peers": ("sdpa",), "memory": False, "shapes": ("S/16", "causal-1024")}
        wrong = attention.run(attention.Options(**common, **toy if options.smoke else {}))
        for written in sorted(Path(folder).glob("*.md")):
            print(written.read_text())
    sys.exit(code or wrong)


if __name__ == "__main__":
    main()
