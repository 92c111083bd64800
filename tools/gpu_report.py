"""Test the Triton kernels on this machine's GPU, time them, and print one report to send in.

    python tools/gpu_report.py > report.txt               # ten minutes
    python tools/gpu_report.py --no-tests > report.txt    # the times alone

The tests are those that all backends share, with their tensors on the GPU. The times are of one call beside PyTorch's
softmax attention (F.scaled_dot_product_attention), in TFLOP/s by FlashAttention's formula: 4·L²·D·heads·batch forwards
and 2.5 times that backwards, half of it if causal. They are shown only next to the error that the same call makes.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

import nomax

ROOT = Path(__file__).parent.parent
TESTS = ("semantics", "dropout", "rows", "packed", "shapes_and_dtypes", "triton")
# batch, heads, length, dim: sixteen thousand positions, as in FlashAttention's tables, and a ViT-B/16
SHAPES = [(8, 16, 2048, 64), (8, 16, 2048, 128), (1, 16, 16384, 64), (1, 16, 16384, 128), (64, 12, 197, 64)]


def tflops(shape: tuple[int, int, int, int], causal: bool, backward: bool, seconds: float) -> float:
    batch, heads, length, dim = shape
    operations = 4 * batch * heads * length**2 * dim * (3.5 if backward else 1) / (2 if causal else 1)
    return operations / seconds / 1e12


def measured(call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], backward: bool) -> float:
    """Return the seconds of a call, with its gradients if wanted: the median of about a second of calls."""
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    grad = torch.ones_like(inputs[0])

    def step() -> None:
        out = call(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, grad)

    step()  # compiles, and chooses the tiles
    return float(Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.5).median)


def error(inputs: list[Tensor], causal: bool) -> float:
    """Return the largest error of a call in one head, relative to the largest result, against float64."""
    head = [x[:1, :1, :2048] for x in inputs]
    exact = nomax.attention(*(x.double() for x in head), is_causal=causal, backend="reference")
    got = nomax.attention(*head, is_causal=causal, backend="triton")
    return float((got.double() - exact).abs().max() / exact.abs().max())


def times(device: str, shapes: list[tuple[int, int, int, int]], dtypes: list[torch.dtype]) -> None:
    print(
        f"{'batch × heads × length × dim':<28} {'dtype':<9} {'':<7} {'pass':<8} {'nomax':>9} {'SDPA':>9} {'ratio':>7}"
    )
    for dtype in dtypes:
        for shape in shapes:
            for causal in (False, True):
                inputs = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
                name = "×".join(map(str, shape))
                try:
                    wrong = error(inputs, causal)
                except Exception as problem:
                    print(f"{name:<28} failed: {type(problem).__name__}: {problem}")
                    continue
                for backward in (False, True):
                    calls = (
                        lambda q, k, v, causal=causal: nomax.attention(q, k, v, is_causal=causal, backend="triton"),
                        lambda q, k, v, causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                    )
                    speeds = [tflops(shape, causal, backward, measured(call, inputs, backward)) for call in calls]
                    print(
                        f"{name:<28} {str(dtype)[6:]:<9} {'causal' if causal else '':<7} "
                        f"{'both' if backward else 'forward':<8} {speeds[0]:>9.3g} {speeds[1]:>9.3g} "
                        f"{speeds[0] / speeds[1]:>6.2f}×  (error {wrong:.1e})",
                        flush=True,
                    )


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
    shapes, dtypes = SHAPES, [torch.bfloat16, torch.float16]
    if options.smoke:
        shapes, dtypes = [(1, 1, 20, 16)], [torch.float32]
    times(options.device, shapes, dtypes)
    sys.exit(code)


if __name__ == "__main__":
    main()
