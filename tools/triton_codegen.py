"""Compile the Triton kernels for GPUs that are not here, and check what comes out.

    python tools/triton_codegen.py            # all cases, and the table in benchmarks/results/triton.md; 15 minutes
    python tools/triton_codegen.py --quick    # one case for every GPU, without the table; a minute

It makes the calls that `nomax.attention` would make, catches what they would launch, and compiles that ahead of time.
It fails if a kernel does not use the tensor instructions of its GPU, rounds float32 to TF32, needs more shared memory
than a program can have, or spills more registers to memory than LARGEST_SPILL. A run that was interrupted goes on
where it stopped.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nomax._files import write, write_json
from nomax.ops.registration import CODES
from nomax.ops.triton import launch
from nomax.ops.triton.tuning import SOURCES, Config, candidates

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
KERNELS = tuple(launch.KERNELS)
FUNCTIONS = dict(launch.KERNELS)
LARGEST_SPILL = 256  # bytes of a thread


class Gpu(NamedTuple):
    name: str
    target: GPUTarget
    instruction: str  # of its tensor units, in half precision
    shared: int  # bytes that one program can have
    exact: str = "fma.rn.f32"  # what multiplies float32 without rounding it first

    def multiplies(self, dtype: torch.dtype) -> str:
        return self.exact if dtype == torch.float32 else self.instruction


GPUS = [
    Gpu("A100 (sm80)", GPUTarget("cuda", 80, 32), "mma.sync", 166_912),
    Gpu("H100 (sm90)", GPUTarget("cuda", 90, 32), "wgmma.mma_async", 232_448),
    Gpu("B200 (sm100)", GPUTarget("cuda", 100, 32), "tcgen05.mma", 232_448),
    Gpu("RTX 5090 (sm120)", GPUTarget("cuda", 120, 32), "mma.sync", 101_376),
    Gpu("MI300X (gfx942)", GPUTarget("hip", "gfx942", 64), "v_mfma", 65_536, "v_mfma_f32_"),
]


class Case(NamedTuple):
    dtype: torch.dtype
    dim: int
    kind: str  # plain, causal, or bias: with its gradient, dropout, factors of each row, grouped heads
    activation: str


CASES = [
    Case(torch.bfloat16, 64, "causal", "relu"),
    Case(torch.bfloat16, 80, "causal", "relu"),  # in tiles of 128, whose last columns are masked
    Case(torch.bfloat16, 128, "causal", "relu"),
    Case(torch.float16, 64, "bias", "relu"),
    Case(torch.bfloat16, 256, "plain", "gelu"),
    Case(torch.float32, 64, "causal", "relu"),
    Case(torch.float32, 128, "plain", "relu"),
]


class Launch(NamedTuple):
    """A kernel and the arguments that it would be launched with."""

    kernel: str
    arguments: dict[str, Any]
    options: dict[str, Any]


def launches(case: Case, config: Config) -> list[Launch]:
    """Return what a forward and a backward pass would launch."""
    query, key = torch.empty(2, 8, 512, case.dim, dtype=case.dtype), torch.empty(2, 8, 512, case.dim, dtype=case.dtype)
    mask = seed = factor = None
    if case.kind == "bias":
        key = key[:, :2]
        mask, seed = torch.zeros(1, 8, 512, 512), torch.tensor(1)
        factor = torch.ones(2, 1, 512)
    activation, diagonal = CODES[case.activation], 0 if case.kind == "causal" else None
    dropout = 0.0 if seed is None else 0.1
    settings = (activation, case.dim**-0.5, 1 / 512, 0.5, diagonal, dropout)
    inputs = (query, key, key, mask, factor, factor, seed, None, None, *settings)
    caught: list[Launch] = []

    class Catch:
        def __init__(self, name: str) -> None:
            self.function = FUNCTIONS[name]
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            def catch(*arguments: Any, **options: Any) -> None:
                names = self.function.arg_names
                given = dict(zip(names, arguments, strict=False)) | {k: v for k, v in options.items() if k in names}
                caught.append(Launch(self.name, given, {k: v for k, v in options.items() if k not in names}))

            return catch

    catching = {name: Catch(name) for name in KERNELS}
    with (
        mock.patch.object(launch, "tuned", lambda kernel, call, variant, each: each(config)),
        mock.patch.dict(launch.KERNELS, catching),
    ):
        launch.forward(*inputs, False)
        launch.backward(torch.empty_like(query), None, *inputs, mask is not None)
    return caught


TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.uint8: "u8",
}  # fmt: skip


def source(caught: Launch) -> ASTSource:
    """Specialise a kernel for its arguments, as triton does when it launches one."""
    function = FUNCTIONS[caught.kernel]
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def type_of(value: Any, path: tuple[int, ...], specialised: bool = True) -> Any:
        if isinstance(value, tuple):
            types = [type_of(each, (*path, place)) for place, each in enumerate(value)]
            return type(value)(*types)
        if value is None or (isinstance(value, int) and value == 1 and specialised):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if specialised and (isinstance(value, torch.Tensor) or value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        return f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"

    signature = {}
    for place, (name, parameter) in enumerate(zip(function.arg_names, function.params, strict=True)):
        value = caught.arguments[name]
        if parameter.is_constexpr:
            signature[name], constants[(place,)] = "constexpr", value
        else:
            signature[name] = type_of(value, (place,), specialised=name != "coin")
    return ASTSource(function, signature, constants, attributes)


class Result(NamedTuple):
    gpu: str  # these five are its place in the table
    kernel: str
    dtype: str
    dim: int
    kind: str
    tile: str
    instruction: str
    instructions: int
    rounded: int  # instructions that round float32 to TF32 before they multiply: none is wanted
    shared: int
    careful_shared: int  # of the second launch, for blocks whose results are not finite
    registers: int
    spill: int


def compiled(gpu: Gpu, case: Case, kernel: str, config: Config, careful: bool = True) -> Result:
    """Compile a kernel, and its careful twin, with one way to cut the work."""
    chosen = [each for each in launches(case, config) if each.kernel == kernel]
    plain = [each for each in chosen if not each.arguments.get("CAREFUL")]
    twins = [each for each in chosen if each.arguments.get("CAREFUL")] if careful else []
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    first, *others = [triton.compile(source(each), target=gpu.target, options=options) for each in plain + twins]
    text = first.asm["ptx"] if gpu.target.backend == "cuda" else first.asm["amdgcn"]
    registers, spill = usage(first, gpu)
    return Result(
        gpu=gpu.name,
        kernel=kernel,
        dtype=str(case.dtype)[6:],
        dim=case.dim,
        kind=case.kind,
        tile=f"{config.rows}×{config.keys}, {config.warps} warps, {config.stages} stages",
        instruction=gpu.multiplies(case.dtype),
        instructions=text.count(gpu.multiplies(case.dtype)),
        rounded=len(re.findall(r"\.tf32|_xf32", text)),
        shared=first.metadata.shared,
        careful_shared=max((each.metadata.shared for each in others), default=0),
        registers=registers,
        spill=spill,
    )


def usage(kernel: Any, gpu: Gpu) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it keeps in memory because they are too few."""
    if gpu.target.backend == "hip":
        text = kernel.asm["amdgcn"]
        numbers = {name: int(re.search(rf"\.{name}: +(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]
        return numbers["vgpr_count"], 4 * numbers["vgpr_spill_count"]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    numbers = {name: int(re.search(rf"{name}:(\d+)", done.stdout)[1]) for name in ("REG", "STACK")}  # type: ignore[index]
    return numbers["REG"], numbers["STACK"]


def best(gpu: Gpu, case: Case, kernel: str, careful: bool = True) -> Result:
    """Compile the first candidate that is as it should be; without one, the first of all."""
    results = []
    for config in candidates(kernel, case.dtype, case.dim):
        results.append(compiled(gpu, case, kernel, config, careful))
        if not complaints(results[-1], gpu):
            return results[-1]
    return results[0]


def complaints(result: Result, gpu: Gpu) -> list[str]:
    """Return what is wrong with a kernel."""
    wrong = []
    if max(result.shared, result.careful_shared) > gpu.shared:
        wrong.append(f"needs {max(result.shared, result.careful_shared):,} bytes of shared memory, of {gpu.shared:,}")
    if result.instructions == 0:
        wrong.append(f"has no {result.instruction}")
    if result.rounded:
        wrong.append(f"rounds float32 to TF32 in {result.rounded} instructions")
    if result.spill > LARGEST_SPILL:
        wrong.append(f"spills {result.spill} bytes of a thread, more than {LARGEST_SPILL}")
    return wrong


def table(results: list[Result]) -> str:
    lines = [
        "<!-- Written by `python tools/triton_codegen.py`; the same numbers are in triton.json. -->",
        "",
        f"The Triton kernels, compiled ahead of time by triton {triton.__version__} for GPUs that were not at hand. "
        "**Nothing here ran on a GPU, and nothing is a measurement of speed.** Checked: half precision uses the tensor "
        "instructions of its GPU, float32 is multiplied as it is and never rounded to TF32, everything fits into a "
        "program's shared memory, and a thread spills at most "
        f"{LARGEST_SPILL} bytes. bias: a float mask with its "
        "gradient, dropout, a factor and a shift for each row, grouped heads. For each GPU it is the first candidate "
        "of which all this holds; on a GPU the fastest is chosen. Shared memory is that of the kernel and "
        "that of the second launch, for blocks whose results are not finite.",
        "",
        "| GPU | kernel | dtype | dim | kind | tile | multiplies by | count | shared memory | registers | spill |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.gpu} | {each.kernel} | {each.dtype} | {each.dim} | {each.kind} | {each.tile} | "
        f"{each.instruction} | {each.instructions} | {each.shared:,} / {each.careful_shared:,} | "
        f"{each.registers} | {each.spill} |"
        for each in results
    ]
    return "\n".join(lines) + "\n"


def digest() -> str:
    """Return a hash of the kernels' source."""
    folder, names = Path(launch.__file__).parent, [name for name in SOURCES if name != "tuning.py"]
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()[:16]


def earlier(versions: dict[str, str]) -> dict[tuple[Any, ...], Result]:
    """Return what an interrupted run of the same kernels and the same triton has compiled, by place in the table."""
    written = json.loads((RESULTS / "triton.json").read_text())
    if any(written.get(name) != version for name, version in versions.items()):
        return {}
    gpus = {gpu.name: gpu for gpu in GPUS}
    rows = [Result(**each) for each in written["kernels"]]
    return {row[:5]: row for row in rows if not complaints(row, gpus[row.gpu])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case for every GPU, and no table")
    quick = parser.parse_args().quick
    versions = {"triton": triton.__version__, "torch": torch.__version__, "source": digest()}
    done = {} if quick else earlier(versions)
    results, failed = [], False
    for case in CASES[:1] if quick else CASES:
        for kernel in KERNELS if case.kind == "bias" else KERNELS[:3]:
            for gpu in GPUS:
                place = (gpu.name, kernel, str(case.dtype)[6:], case.dim, case.kind)
                result = done.get(place) or best(gpu, case, kernel, careful=not quick)
                wrong = complaints(result, gpu)
                failed = failed or bool(wrong)
                results.append(result)
                print(
                    f"{gpu.name:<17} {kernel:<15} {result.dtype:<9} {case.dim:>3} {case.kind:<10} {result.tile:<27} "
                    f"{result.instructions:>4} {result.instruction:<16} "
                    f"{result.shared:>7,} / {result.careful_shared:>7,} bytes, "
                    f"{result.registers:>3} registers, spill {result.spill}"
                    + "".join(f"\n    WRONG: {each}" for each in wrong),
                    flush=True,
                )
                if not quick:  # after each: all of them take a while
                    known = {**done, **{each[:5]: each for each in results}}
                    write_json(
                        RESULTS / "triton.json", versions | {"kernels": [each._asdict() for each in known.values()]}
                    )
    if not quick:
        write_json(RESULTS / "triton.json", versions | {"kernels": [each._asdict() for each in results]})
        write(RESULTS / "triton.md", table(results))
    if failed:
        sys.exit("A kernel is not as it should be: see WRONG above.")


if __name__ == "__main__":
    main()
