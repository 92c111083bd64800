"""`nomax bench attention`: one call of our operation against its peers, in speed and in memory."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from nomax.bench import harness, render
from nomax.bench.decode import READ
from nomax.bench.harness import Bench, Run, known, run_bench
from nomax.bench.peers import (
    BACKWARD,
    FORWARD,
    GPU_SHAPES,
    INFERENCE,
    OURS,
    PEERS,
    SHAPES,
    UNCAUSAL,
    Attention,
    Inputs,
    Shape,
    eager,
    make_inputs,
    ours,
    peak_flop,
    sdpa,
    step,
)
from nomax.bench.render import markdown_table, seconds, speedup_figure, terminal_table, times
from nomax.bench.results import CannotMeasureError, Case, Check, Goal, PeakMemory, Results
from nomax.phi import Phi

GRAD_MODES: dict[str, Callable[[], Any]] = {
    FORWARD: torch.no_grad,
    BACKWARD: torch.enable_grad,
    INFERENCE: torch.inference_mode,
}
# Where a CPU multiplies no bfloat16, PyTorch's products of many rows take up to a hundred times as long as in float32,
# and ours are those of float32: racing both says nothing, and takes half of the time.
SLOW_WITHOUT_PRODUCTS = ("eager", "compiled")
LEFT_OUT = (
    "This CPU has no bfloat16 products. In bfloat16, PyTorch's formulas take up to a hundred times as long as ours, "
    "and are left out (`--peers` measures them); other activations are computed, and so measured, in float32 only."
)
OTHER_PHIS_FROM = 197  # keys; below, the activation is not what takes the time
LARGEST_DIFFERENCE = 0.05  # of a peer that claims to compute relu/L; bfloat16's roundings stay well below
PEER_NAMES = {"sdpa": "SDPA", "eager": "eager", "compiled": "compiled", "flex": "Flex"}
TITLE = "Attention without softmax: speed relative to PyTorch’s softmax attention"
# Peak memory is that of one long call, as a share of the matrix of weights that it must never hold.
MEMORY_LENGTH = 16_384
MEMORY_SETTINGS = [(participant, mode) for participant in (OURS, "sdpa") for mode in (FORWARD, BACKWARD)]

Device = Literal["auto", "cpu", "cuda", "xpu"]
GPUS: tuple[Device, ...] = ("cuda", "xpu")
ALL_SHAPES = SHAPES | GPU_SHAPES
Dtypes = tuple[Literal["float32", "bfloat16", "float16"], ...]
BOTH: Dtypes = ("float32", "bfloat16")
HALF: Dtypes = ("bfloat16", "float16")
F32, BF16 = ("float32",), ("bfloat16",)
VIT, LONG = ("S/32", "S/16", "S/8", "B/16"), ("long-2049", "long-4096")
FROM_197 = ("S/16", "S/8", "B/16", *LONG, "causal-1024", "padded")
FROM_785 = ("S/8", *LONG, "causal-1024")
BELOW_785 = ("S/32", "S/16", "B/16")
DECODE, TINY = ("decode",), ("tiny",)
EVERY = tuple(name for name in SHAPES if name != "tiny")
SMOOTH = ("gelu/L", "sigmoid/L", "softplus/L", "silu/L")
COSTLY = ("gelu/L", "softplus/L")
# fmt: off
GOALS = (
    Goal("float32 against SDPA, S/32", "speedup", 1.4, FORWARD, "sdpa", ("S/32",), F32),
    Goal("float32 against SDPA, other ViT and long", "speedup", 1.3, FORWARD, "sdpa", (*VIT[1:], *LONG), F32),
    Goal("float32 against SDPA, ViT and long", "speedup", 1.25, BACKWARD, "sdpa", (*VIT, *LONG), F32),
    Goal("bfloat16 against SDPA, L ≥ 785", "speedup", 2.4, FORWARD, "sdpa", ("S/8", *LONG), BF16),
    Goal("bfloat16 against SDPA, L < 785", "speedup", 2.0, FORWARD, "sdpa", BELOW_785, BF16),
    Goal("bfloat16 against SDPA, ViT and long", "speedup", 2.0, BACKWARD, "sdpa", (*VIT, *LONG), BF16),
    Goal("bfloat16 against SDPA, long-4096", "speedup", 2.2, BACKWARD, "sdpa", ("long-4096",), BF16),
    Goal("against eager ReLU, every shape", "speedup", 1.0, FORWARD, "eager", EVERY),
    Goal("against eager ReLU, every shape", "speedup", 1.0, BACKWARD, "eager", EVERY),
    Goal("float32 against eager ReLU, L ≥ 785", "speedup", 2.5, FORWARD, "eager", FROM_785, F32),
    Goal("float32 against eager ReLU, L ≥ 785", "speedup", 2.0, BACKWARD, "eager", FROM_785, F32),
    Goal("bfloat16 against eager ReLU, L < 785", "speedup", 1.15, BACKWARD, "eager", BELOW_785, BF16),
    Goal("float32 share of the FMA peak, L ≥ 785", "peak share", 0.85, FORWARD, "peak", ("S/8", *LONG), F32),
    Goal("causal against not causal, time", "time", 0.6, FORWARD, UNCAUSAL, ("causal-1024",)),
    Goal("causal against not causal, time", "time", 0.65, BACKWARD, UNCAUSAL, ("causal-1024",)),
    Goal("smooth activations against SDPA, L ≥ 197", "speedup", 1.0, FORWARD, "sdpa", FROM_197, ours=SMOOTH),
    Goal("smooth activations against SDPA, L ≥ 197", "speedup", 1.0, BACKWARD, "sdpa", FROM_197, ours=SMOOTH),
    Goal("gelu and softplus against SDPA, L ≥ 785", "speedup", 1.1, FORWARD, "sdpa", FROM_785, ours=COSTLY),
    Goal("decode, float32, against SDPA", "speedup", 1.1, FORWARD, "sdpa", DECODE, F32),
    Goal("decode, float32, against eager ReLU", "speedup", 1.1, FORWARD, "eager", DECODE, F32),
    Goal("decode, bfloat16, against SDPA", "speedup", 1.2, FORWARD, "sdpa", DECODE, BF16),
    Goal("decode, bfloat16, against eager ReLU", "speedup", 1.2, FORWARD, "eager", DECODE, BF16),
    Goal("decode, share of the speed of reading memory", "peak share", 0.9, FORWARD, "peak", DECODE),
    Goal("memory of a call at L = 16,384, of the L×L matrix", "memory share", 0.05, FORWARD, ours=(OURS,)),
    Goal("memory of a call at L = 16,384: 24 MiB", "bytes", 24 * 2**20, BACKWARD, ours=(OURS,)),
    Goal("time of a tiny call against SDPA's", "time", 1.6, FORWARD, "sdpa", TINY),
    Goal("time of a tiny call against SDPA's", "time", 1.6, INFERENCE, "sdpa", TINY),
    Goal("time of a tiny call against SDPA's", "time", 1.5, BACKWARD, "sdpa", TINY),
)
# fmt: on


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure the speed of nomax.attention against its peers on this machine, and on a CPU its memory.

    Correctness comes first: a shape on which nomax is wrong by more than twice the error of plain PyTorch in the same
    precision is not timed, and the exit code is 1. Then all participants take turns, round after round, and the best
    round of each counts. Most of the time goes into torch.compile, which prepares the peers, and into slow peers.
    Ctrl-C stops it and keeps the measurements so far.

    Writes attention.json (every sample, machine, versions), attention.md (tables) and attention.svg (a figure). On a
    GPU they are called attention-gpu, and speeds are TFLOP/s by FlashAttention's formula, SDPA's beside ours.
    """

    device: Device = "auto"
    """auto: a GPU if there is one. AMD's GPUs are cuda, too."""
    shapes: tuple[str, ...] = ()
    """On a CPU by default ViT-S/32, S/16, S/8 and ViT-B/16, long and causal sequences, a padded batch, a decode step, a
    tiny call; on a GPU 2,048 and 16,384 positions, causal or not, of heads of 64 and 128, and a ViT-B/16."""
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ()
    """Precisions of query, key and value: by default float32 and bfloat16 on a CPU, bfloat16 and float16 on a GPU."""
    peers: tuple[str, ...] = ()
    """sdpa: softmax; eager, compiled: relu/L in PyTorch; flex: FlexAttention in log space; peak: the core's limit, or
    that of its memory. By default all on a CPU, but for eager and compiled in bfloat16 where it has no such products;
    sdpa and flex on a GPU."""
    phis: tuple[str, ...] = (*SMOOTH, "identity/L")
    """Other activations to measure besides relu/L, for shapes with at least 197 queries."""
    rounds: int = 5
    """Samples of every participant; the best counts. Each lasts at least about 20 ms."""
    memory: bool = True
    """Also measure the peak memory of a call with 16,384 keys."""

    @property
    def place(self) -> Device:
        """The type of the device to measure on."""
        if self.device != "auto":
            return self.device
        return next((each for each in GPUS if torch.get_device_module(each).is_available()), "cpu")

    @property
    def on_gpu(self) -> bool:
        """Whether it is not a CPU."""
        return self.place != "cpu"

    def settled(self) -> Self:
        """Return the options with the defaults of the device."""
        shapes, dtypes, peers = (GPU_SHAPES, HALF, ("sdpa", "flex")) if self.on_gpu else (SHAPES, BOTH, tuple(PEERS))
        return dataclasses.replace(
            self,
            device=self.place,
            shapes=self.shapes or tuple(shapes),
            dtypes=self.dtypes or dtypes,
            peers=self.peers or peers,
            threads=self.threads[:1] if self.on_gpu else self.threads,
            memory=self.memory and not self.on_gpu,
        )

    def validate(self) -> None:
        if self.on_gpu and not torch.get_device_module(self.place).is_available():
            raise ValueError(f"--device {self.place}: torch.{self.place}.is_available() is False on this machine.")
        for name in self.shapes:
            known("shape", name, ALL_SHAPES)
        for name in self.peers:
            known("peer", name, PEERS)
        for phi in self.phis:
            parsed = Phi.parse(phi)
            if str(parsed) != f"{parsed.activation}/L" or parsed.activation == "softmax":
                remedy = f"activations are compared at the same scale; write {parsed.activation}/L."
                raise ValueError(f"--phis {phi}: {remedy}")

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), dtypes=self.settled().dtypes[:1], phis=self.phis[:1])


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    no_products = not (options.peers or options.on_gpu or harness.multiplies_bfloat16())
    options = options.settled()
    if no_products and "bfloat16" in options.dtypes:
        run.results.facts["left out"] = LEFT_OUT
        yield Text(LEFT_OUT)
    shapes = [ALL_SHAPES[name].shrunk() if options.smoke else ALL_SHAPES[name] for name in options.shapes]
    run.results.facts["shapes"] = shapes
    if options.on_gpu:
        module = torch.get_device_module(options.device)
        run.finish = module.synchronize
        run.results.facts["gpu"] = module.get_device_name()
    settings = MEMORY_SETTINGS[: 1 if options.smoke else None] if options.memory else []
    entries = {}
    for shape in shapes:
        for dtype in options.dtypes:
            phis = () if no_products and dtype == "bfloat16" else options.phis
            entries[shape.name, dtype] = _entries(phis, shape)
    races = len(options.threads) * len(options.dtypes) * sum(len(shape.modes) for shape in shapes)
    run.expect(sum(map(len, entries.values())) + races + len(settings))
    for shape in shapes:
        for dtype in options.dtypes:
            slow = SLOW_WITHOUT_PRODUCTS if no_products and dtype == "bfloat16" and shape.queries > 1 else ()
            raced = [name for name in options.peers if name not in slow]
            inputs = make_inputs(shape, getattr(torch, dtype), options.device)
            right = {}
            for name, phi in entries[shape.name, dtype].items():
                own_inputs = dataclasses.replace(inputs, causal=False) if name == UNCAUSAL else inputs
                with run.checking(shape.name, dtype, name) as check:
                    everywhere = phi == OURS and not options.on_gpu
                    compare(check, own_inputs, phi, gradients=BACKWARD in shape.modes, everywhere=everywhere)
                if check.right:
                    right[name] = (own_inputs, phi)
            for threads in options.threads if right else ():
                for mode in shape.modes:
                    own = (OURS, *(name for name in right if name not in (OURS, UNCAUSAL)))
                    flop = shape.flash_flop(mode) if options.on_gpu else shape.flop(mode)
                    case = Case(shape.name, dtype, mode, threads, ours=own, flop=flop)
                    if shape.reads:
                        case.read = inputs.key.nbytes + inputs.value.nbytes
                    _race(options, run, case, inputs, right, raced)
        yield _shape_tables(run.results, shape)
    for participant, mode in settings:
        with run.step(f"memory, {participant}, {mode}"):
            run.results.memory.append(_peak_memory(participant, mode, 512 if options.smoke else MEMORY_LENGTH))


def _entries(phis: tuple[str, ...], shape: Shape) -> dict[str, str]:
    """Return our participants for a shape: names, and the φ that they stand for."""
    entries = {OURS: OURS}
    if ALL_SHAPES[shape.name].queries >= OTHER_PHIS_FROM:
        entries |= {phi: phi for phi in phis}
    return entries | ({UNCAUSAL: OURS} if shape.causal else {})


def compare(check: Check, inputs: Inputs, phi: str, *, gradients: bool, everywhere: bool) -> None:
    """Compare our output and gradients with float64.

    Unless `everywhere`, only the first and the last heads are compared: activations differ only inside a tile, and one
    of them is checked in full.
    """
    mine = outputs(ours(inputs, phi), inputs, gradients)
    parts = list(inputs.parts())
    for entry, heads, part in parts if everywhere else (parts[0], parts[-1]):
        wide = part.to(torch.float64)
        plain, exact = (outputs(eager(some, phi), some, gradients) for some in (part, wide))
        check.compare({name: tensor[entry : entry + 1, heads] for name, tensor in mine.items()}, plain, exact)


def outputs(attention: Attention, inputs: Inputs, gradients: bool) -> dict[str, Tensor]:
    """Return the output and, if asked for, the gradients of query, key and value."""
    leaves = [x.detach().requires_grad_(gradients) for x in (inputs.query, inputs.key, inputs.value)]
    out = attention(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.grad) if gradients else ()
    names = ("output", "query gradient", "key gradient", "value gradient")
    return dict(zip(names, (out.detach(), *grads), strict=False))


def _race(
    options: Options, run: Run, case: Case, inputs: Inputs, entries: dict[str, tuple[Inputs, str]], peers: list[str]
) -> None:
    torch.set_num_threads(case.threads)
    if not {"compiled", "flex"}.isdisjoint(peers):
        torch.compiler.reset()  # torch limits recompilation: without this, later shapes would run uncompiled
    calls = {name: step(ours(own_inputs, phi), own_inputs, case.mode) for name, (own_inputs, phi) in entries.items()}
    with GRAD_MODES[case.mode]():
        for name in peers:
            peer = PEERS[name]
            of_core = (case.dtype, case.threads, inputs.query.is_cpu) == ("float32", 1, True)
            if case.mode not in peer.modes or (name == "peak" and not (of_core or case.read)):
                continue
            with case.attempting(name):
                if name == "peak" and case.read:
                    numbers = torch.ones(2**16 if options.smoke else READ)
                    calls[name], case.peak_flop = numbers.sum, float(numbers.nbytes)
                    continue
                call = peer.prepare(inputs, case.mode, "eager" if options.smoke else "inductor")
                result = call()
                if peer.computes_relu and OURS in calls:
                    case.differences[name] = _difference(result, calls[OURS]())
                    if not case.differences[name] <= LARGEST_DIFFERENCE:
                        raise CannotMeasureError(f"its result differs from ours by {case.differences[name]:.1%}")
                calls[name] = call
        if "peak" in calls and not case.read:
            case.peak_flop = peak_flop()
        run.race(case, calls)


def _difference(theirs: Any, mine: Any) -> float:
    """Return the largest difference relative to our largest value, over the output or the gradients."""
    pairs = [(theirs, mine)] if isinstance(mine, Tensor) else list(zip(theirs, mine, strict=True))
    tiny = 1e-30  # both may be all zeros
    differences = [(t.double() - m.double()).abs().max() / m.double().abs().max().clamp(tiny) for t, m in pairs]
    return float(torch.stack(differences).max())  # unlike Python's max, this keeps a NaN


def _peak_memory(participant: str, mode: str, length: int) -> PeakMemory:
    size = harness.bytes_in_a_fresh_process(long_call_bytes, participant, mode, length)
    if isinstance(size, str):
        return PeakMemory(participant, mode, length, failure=size)
    return PeakMemory(participant, mode, length, size, size / (4 * length * length))


def long_call_bytes(participant: str, mode: str, length: int) -> int:
    """Return how much memory one call adds to this process at its peak."""

    def attend(inputs: Inputs) -> None:
        attention = sdpa(inputs) if participant == "sdpa" else ours(inputs, participant)
        outputs(attention, inputs, gradients=mode == BACKWARD)

    attend(make_inputs(Shape("warm-up", "", 1, 1, 256, 256), torch.float32))
    inputs = make_inputs(Shape("long", "", 1, 1, length, length), torch.float32)
    return harness.peak_bytes(lambda: attend(inputs))


def _shape_tables(results: Results, shape: Shape) -> Group:
    """Show all measurements of one shape. A ratio is the peer's time divided by ours."""
    cases = [case for case in results.cases if case.shape == shape.name]
    sizes = f"{shape.batch}×{shape.num_heads} heads, {shape.queries} queries, {shape.keys} keys, D {shape.head_dim}"
    parts: list[RenderableType] = [Text.assemble((f"\n{shape.name}", "bold"), f"  {shape.note}: {sizes}")]
    main = [
        [
            seconds(case.best(OURS)),
            *(_speed(results, case, name) for name in (OURS, "sdpa")),
            render.number(case.peak_share(), ".0%"),
            *(times(case.speedup(OURS, peer)) for peer in PEER_NAMES),
        ]
        for case in cases
    ]
    peers, unit = [f"vs {name}" for name in PEER_NAMES.values()], _unit(results)
    parts.append(_table(cases, ["time", unit, f"SDPA\n{unit}", "of\npeak", *peers], main))
    phis = dict.fromkeys(name for case in cases for name in case.samples if name in case.ours[1:])
    more = {f"{phi}\nvs SDPA": (phi, "sdpa") for phi in phis}
    more |= {"vs not\ncausal": (OURS, UNCAUSAL)} if shape.causal else {}
    if more:
        rows = [[times(case.speedup(*pair)) for pair in more.values()] for case in cases]
        parts += ["", _table(cases, list(more), rows)]
    return Group(*parts, *render.missing(results, shape.name))


def _table(cases: list[Case], columns: list[str], rows: list[list[str]]) -> RenderableType:
    short = {BACKWARD: "fwd + bwd", INFERENCE: "inference"}
    settings = [[case.dtype, short.get(case.mode, case.mode), str(case.threads)] for case in cases]
    joined = [[*setting, *row] for setting, row in zip(settings, rows, strict=True)]
    return terminal_table(["dtype", "mode", "thr.", *columns], joined)


def _speed(results: Results, case: Case, name: str) -> str:
    speed = case.gflops(name)
    return render.number(speed / 1000 if speed and "gpu" in results.facts else speed, ".1f")


def _unit(results: Results) -> str:
    return "TFLOP/s" if "gpu" in results.facts else "GFLOP/s"


def report(results: Results) -> list[str]:
    """Return the tables for the README, with the conditions of the measurement."""
    if "gpu" in results.facts:
        return gpu_report(results)
    threads = sorted({case.threads for case in results.cases}) or [1]
    counts = f"{' / '.join(map(str, threads))} thread{'s' * (threads[-1] > 1)}"
    parts = [
        f"`relu/L` on {render.measured_on(results)}, with {counts}. {render.best_of(results)} "
        "Shapes: batch × heads × queries (× keys) × D, contiguous tensors."
    ]
    if "left out" in results.facts:
        parts.append(results.facts["left out"])
    for mode in (FORWARD, BACKWARD):
        for dtype in dict.fromkeys(case.dtype for case in results.cases):
            cases = [case for case in results.cases if (case.dtype, case.mode) == (dtype, mode)]
            if names := dict.fromkeys(case.shape for case in cases if case.shape != "tiny"):
                columns = ["shape", "GFLOP/s", *(f"vs {name}" for name in PEER_NAMES.values())]
                rows = [_row(results, name, dtype, mode, threads) for name in names]
                parts.append(f"**{dtype}, {mode}**\n\n" + markdown_table(columns, rows))
    reading = [
        [case.dtype, str(case.threads), f"{case.read / best / 1e9:.1f}", render.number(case.peak_share(), ".0%")]
        for case in results.cases
        if case.read and (best := case.best(OURS))
    ]
    if reading:
        title = (
            "**Decoding** reads keys and values, all of them, as no weight is zero here; beside a sum that reads\n\n"
        )
        parts.append(title + markdown_table(["dtype", "threads", "GB/s", "of a sum"], reading))
    tiny = [
        [case.mode, case.dtype, str(case.threads), seconds(case.best(OURS)), seconds(case.best("sdpa"))]
        for mode in (FORWARD, INFERENCE, BACKWARD)
        for case in results.cases
        if (case.shape, case.mode) == ("tiny", mode)
    ]
    if tiny:
        title = "**The cost of a call**: one query, one key, one head\n\n"
        parts.append(title + markdown_table(["mode", "dtype", "threads", "nomax", "SDPA"], tiny))
    memory = [
        [peak.mode, peak.participant, f"{peak.bytes / 2**20:.0f} MiB", f"{peak.share:.1%}"]
        for peak in results.memory
        if peak.bytes is not None and peak.share is not None
    ]
    if memory:
        title = f"**Peak extra memory**, one head, L = {results.memory[0].length:,}, float32, results included\n\n"
        parts.append(title + markdown_table(["mode", "", "memory", "of the L×L matrix"], memory))
    return parts


def gpu_report(results: Results) -> list[str]:
    """Return the tables of a GPU: TFLOP/s by FlashAttention's formula, ours beside those of softmax."""
    parts = [
        f"`relu/L` on a GPU, {results.facts['gpu']}. TFLOP/s by FlashAttention's formula: 4·L²·D·heads·batch forwards, "
        f"half of it if causal, and 3.5 times that with the backward pass. {render.best_of(results)} "
        "Shapes: batch × heads × queries × D."
    ]
    shapes = {shape.name: shape for shape in results.facts["shapes"]}
    peers = {name: title for name, title in PEER_NAMES.items() if any(name in case.samples for case in results.cases)}
    for mode in (FORWARD, BACKWARD):
        for dtype in dict.fromkeys(case.dtype for case in results.cases):
            rows = [
                [
                    f"{case.shape} ({shapes[case.shape].sizes()})",
                    *(_speed(results, case, name) for name in (OURS, *peers)),
                    times(case.speedup(OURS, "sdpa")),
                ]
                for case in results.cases
                if (case.dtype, case.mode) == (dtype, mode)
            ]
            if rows:
                table = markdown_table(["shape", "nomax", *peers.values(), "vs SDPA"], rows)
                parts.append(f"**{dtype}, {mode}, TFLOP/s**\n\n{table}")
    return parts


def _row(results: Results, name: str, dtype: str, mode: str, threads: list[int]) -> list[str]:
    (shape,) = (shape for shape in results.facts["shapes"] if shape.name == name)
    cases = [results.case(name, dtype, mode, count) for count in threads]
    speeds = [render.number(case.gflops(), ".0f") if case else "–" for case in cases]
    row = [f"{name} ({shape.sizes()})", " / ".join(speeds)]
    for peer in PEER_NAMES:
        speedups = [case.speedup(OURS, peer) if case else None for case in cases]
        row.append(" / ".join(map(times, speedups)) if any(speedups) else "–")
    return row


def draw(results: Results) -> str:
    """Draw our speed-up over softmax attention, shape by shape."""
    shapes = list(dict.fromkeys(case.shape for case in results.cases if case.shape != "tiny"))
    return speedup_figure(TITLE, results, GOALS, peer=("sdpa", "SDPA"), shapes=shapes, modes=(FORWARD, BACKWARD))


BENCH = Bench("attention", _measure, report, GOALS, draw)
GPU_BENCH = Bench("attention-gpu", _measure, report, ())


def run(options: Options) -> int:
    """Measure; see Options for what is written. Returns run_bench's exit code."""
    return run_bench(GPU_BENCH if options.on_gpu else BENCH, options)
