"""`nomax bench memory`: nn.Memory with many slots against the three lines one would write, in time and in bytes."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import torch
from rich.console import RenderableType
from torch import Tensor, nn

from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, run_bench
from nomax.bench.results import Case, Check, Goal, PeakMemory, Results
from nomax.nn import Memory

INFERENCE: Literal["inference"] = "inference"
TRAINING: Literal["training"] = "training"
MODES = (INFERENCE, TRAINING)
PHIS: tuple[Literal["relu", "softmax"], ...] = ("relu", "softmax")
OURS, PLAIN = "Memory", "plain"
FEW, MANY = (1024, 4096), 65_536
TOKENS = (1024, 4096)
COLUMNS = ("time", "GFLOP/s", "vs plain")
TITLE = "nn.Memory: speed and memory relative to three lines of PyTorch"


def shape(phi: str, slots: int, tokens: int) -> str:
    """Return the name of a case."""
    return f"{phi}, {slots:,} slots, {tokens:,} tokens"


def _shapes(slots: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(shape(phi, count, tokens) for phi in PHIS for count in slots for tokens in TOKENS)


GOALS = (
    *(Goal("65,536 slots, time", "speedup", 0.9, mode, PLAIN, _shapes((MANY,))) for mode in MODES),
    *(Goal("few slots, time", "speedup", 0.95, mode, PLAIN, _shapes(FEW)) for mode in MODES),
    Goal("65,536 slots, peak memory", "memory share", 0.25, TRAINING, ours=PHIS),
)


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure nn.Memory, a feed-forward layer of learned slots, against plain PyTorch: φ(x @ keys.T) @ values.

    With 65,536 slots the plain version holds a weight for every token and slot, several times over in training; ours
    computes them in blocks. Few slots show that nothing is lost where there is nothing to gain. Training is forward and
    backward, with gradients of x, keys and values. Peak memory is what a training call adds to a separate process.

    Correctness comes first: a layer that is wrong by more than twice the error of the plain version is not timed, and
    the exit code is 1. Then both take turns, round after round, and the best round of each counts.

    Writes memory.json (every sample, machine, versions), memory.md (tables) and memory.svg (a figure). Ctrl-C stops it
    and keeps the measurements so far.
    """

    slots: tuple[int, ...] = (*FEW, MANY)
    """Numbers of slots, one after the other."""
    tokens: tuple[int, ...] = TOKENS
    """Numbers of tokens in a call."""
    phis: tuple[Literal["relu", "softmax"], ...] = PHIS
    """The φ to measure, which turn scores into weights."""
    modes: tuple[Literal["inference", "training"], ...] = MODES
    """The work: inference, training, or both."""
    dim: int = 256
    """Width of tokens, keys and values."""

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), slots=(64, 1024), tokens=(32,), dim=16)


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    settings, with_peak = len(options.phis) * len(options.tokens), TRAINING in options.modes
    races = 1 + len(options.threads) * len(options.modes)
    run.expect(settings * (len(options.slots) * races + (with_peak and MANY in options.slots)))
    for phi in options.phis:
        for slots in options.slots:
            for tokens in options.tokens:
                name = shape(phi, slots, tokens)
                with run.checking(name, "float32", phi) as check:
                    compare(check, slots, options.dim, 7 if options.smoke else 37)
                if not check.right:
                    continue
                layers, x = make_layers(phi, slots, options.dim), torch.randn(tokens, options.dim)
                for threads in options.threads:
                    for mode in options.modes:
                        flop = 2.0 * (6 if mode == TRAINING else 2) * tokens * slots * options.dim
                        case = Case(name, "float32", mode, threads, ours=(OURS,), flop=flop)
                        run.race(case, {who: _call(layer, x, mode) for who, layer in layers.items()})
                if with_peak and (not run.results.memory if options.smoke else slots == MANY):
                    with run.step(f"{name}: memory"):
                        run.results.memory += peak_memory(phi, slots, tokens, options.dim)
        yield _table(phi, run.results)


class Plain(nn.Module):
    """Compute the memory in three lines of plain PyTorch."""

    def __init__(self, layer: Memory) -> None:
        super().__init__()
        self.keys, self.values, self.phi = layer.keys, layer.values, str(layer.phi)

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.keys.T
        weights = scores.relu() if self.phi == "relu" else scores.softmax(-1)
        return weights @ self.values


def make_layers(phi: str, slots: int, dim: int, block: int | None = None) -> dict[str, nn.Module]:
    """Return both layers, with the same keys and values."""
    torch.manual_seed(0)
    layer = Memory(dim, slots, phi=phi, block=block)
    return {OURS: layer, PLAIN: Plain(layer)}


def _call(layer: nn.Module, x: Tensor, mode: str) -> Callable[[], None]:
    """Return the call that is timed."""
    x = x.detach().requires_grad_(mode == TRAINING)
    grad = torch.randn_like(x)

    def inference() -> None:
        with torch.inference_mode():
            layer(x)

    def training() -> None:
        torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)

    return inference if mode == INFERENCE else training


def compare(check: Check, slots: int, dim: int, tokens: int) -> None:
    """Compare output and gradients of a few tokens with float64, in blocks even where so few would need none."""
    layers = make_layers(check.name, slots, dim, block=max(slots // 8, 1))
    x, grad = (torch.randn(tokens, dim) for _ in range(2))
    mine, plain = (_outputs(layers[who], x, grad) for who in (OURS, PLAIN))
    check.compare(mine, plain, _outputs(layers[PLAIN].double(), x.double(), grad.double()))


def _outputs(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x)
    gradients = torch.autograd.grad(out, [x, *layer.parameters()], grad)
    names = ("output", "gradient of x", "gradient of keys", "gradient of values")
    return dict(zip(names, (out.detach(), *gradients), strict=True))


def peak_memory(phi: str, slots: int, tokens: int, dim: int) -> list[PeakMemory]:
    """Measure the peak memory of a training call, ours as a share of the plain one."""
    entry = partial(PeakMemory, mode=TRAINING, length=tokens, unit="tokens")
    sizes = {
        who: harness.bytes_in_a_fresh_process(training_bytes, who, phi, slots, tokens, dim) for who in (OURS, PLAIN)
    }
    mine, plain = sizes[OURS], sizes[PLAIN]
    if isinstance(mine, str) or isinstance(plain, str):
        return [entry(phi, failure=next(size for size in (mine, plain) if isinstance(size, str)))]
    return [entry(phi, bytes=mine, share=mine / max(plain, 1)), entry(f"{phi}, plain", bytes=plain)]


def training_bytes(who: str, phi: str, slots: int, tokens: int, dim: int) -> int:
    """Return how much memory a training call adds to this process at its peak."""
    torch.set_num_threads(1)
    _call(make_layers(phi, 8, dim)[who], torch.randn(8, dim), TRAINING)()  # what comes with the first does not count
    layer = make_layers(phi, slots, dim)[who]
    return harness.peak_bytes(_call(layer, torch.randn(tokens, dim), TRAINING))


def _row(case: Case) -> list[str]:
    """Return our time, our speed, and the plain version's time as a multiple of ours."""
    speed, speedup = render.number(case.gflops(), ".0f"), render.times(case.speedup(OURS, PLAIN))
    return [render.seconds(case.best(OURS)), speed, speedup]


def _memory_rows(results: Results, phi: str | None = None) -> list[list[str]]:
    rows = []
    for entry in results.memory:
        if phi is None or entry.participant.partition(",")[0] == phi:
            size = f"{entry.bytes / 2**20:,.0f} MiB" if entry.bytes is not None else entry.failure or "–"
            share = f"{entry.share:.1%}" if entry.share is not None else ""
            rows.append([entry.participant, f"{entry.length:,}", size, share])
    return rows


def _table(phi: str, results: Results) -> RenderableType:
    cases = [case for case in results.cases if case.shape.startswith(f"{phi}, ")]
    rows = [[case.shape.removeprefix(f"{phi}, "), case.mode, str(case.threads), *_row(case)] for case in cases]
    for participant, tokens, size, share in _memory_rows(results, phi):
        rows.append([f"peak memory, {participant}, {tokens} tokens", "training", "1", size, "", share])
    return render.terminal_table(["slots and tokens", "mode", "thr.", *COLUMNS], rows, phi)


def report(results: Results) -> list[str]:
    """Return the tables for the README, with the conditions of the measurement."""
    text = (
        f"nn.Memory, dim {results.options['dim']}, float32, against `φ(x @ keys.T) @ values` in PyTorch, on "
        f"{render.measured_on(results)}. {render.best_of(results)} Training is forward and backward; GFLOP/s counts "
        "the six products that the plain version needs, also where ours computes a seventh instead of keeping the "
        "weights."
    )
    rows = [[case.shape, case.mode, str(case.threads), *_row(case)] for case in results.cases]
    parts = [text, render.markdown_table(["", "mode", "threads", *COLUMNS], rows)]
    if memory := _memory_rows(results):
        title = "**Peak extra memory** of a training call, results and gradients included\n\n"
        parts.append(title + render.markdown_table(["", "tokens", "memory", "of plain"], memory))
    return parts


BENCH = Bench("memory", _measure, report, GOALS, partial(render.goal_figure, TITLE, GOALS))
run = partial(run_bench, BENCH)
