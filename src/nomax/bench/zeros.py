"""`nomax bench zeros`: what exact zeros among the weights save where a few queries or tokens read a lot of memory."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from torch import Tensor

import nomax
from nomax.bench import decode, harness, render
from nomax.bench.decode import PEAK
from nomax.bench.harness import Bench, Run, run_bench
from nomax.bench.render import times
from nomax.bench.results import Case, Check, Goal, Results, counted
from nomax.evaluate.runs import load_text
from nomax.nn import Memory

ATTENTION, MEMORY, GATED = "attention", "memory", "gated memory"
OURS, DENSE, SDPA = "nomax", "dense", "SDPA"
BANDWIDTH = "bandwidth"
PHI = "relu/L"
SHARES = (0.0, 0.5, 0.7, 0.9, 0.95)
TOKENS = (1, 4)
GROUPS = (1, 4)  # heads that share keys and values
BATCH, HEADS, KEYS, HEAD_DIM = 8, 8, 2048, 64
COLD = 2**27  # bytes, more than a cache of a CPU holds, that calls take turns to read
SIZES = ((512, 2048), (1024, 4096), (256, 65_536))  # dim and slots of memories
STEEP = 6.0  # scores of one sign, beside which what is random in them is small
TITLE = "Exact zeros: speed relative to reading everything"
COLUMNS = ("time", f"vs {DENSE}", f"vs {SDPA}", "of bandwidth", "zeros")


def attention_shape(group: int, share: float) -> str:
    """Return the name of a case of attention."""
    heads = "one query per key head" if group == 1 else f"{group} queries per key head"
    return f"{heads}, {share:.0%} zeros"


def memory_shape(size: tuple[int, int], tokens: int, share: float) -> str:
    """Return the name of a case of a memory."""
    return f"dim {size[0]:,}, {size[1]:,} slots, tokens = {tokens}, {share:.0%} zeros"


def _attentions(*shares: float, groups: tuple[int, ...] = GROUPS) -> tuple[str, ...]:
    return tuple(attention_shape(group, share) for group in groups for share in shares)


def _memories(*shares: float, tokens: tuple[int, ...] = TOKENS) -> tuple[str, ...]:
    return tuple(memory_shape(size, count, share) for size in SIZES for count in tokens for share in shares)


def _goal(text: str, bound: float, mode: str, shapes: tuple[str, ...]) -> Goal:
    return Goal(f"{mode}: {text}", "speedup", bound, mode, DENSE, shapes)


GOALS = (
    _goal("one query, 90% zeros", 1.5, ATTENTION, _attentions(0.9, groups=(1,))),
    _goal("one query, 95% zeros", 1.6, ATTENTION, _attentions(0.95, groups=(1,))),
    _goal("never slower", 1.0, ATTENTION, _attentions(*SHARES[1:])),
    _goal("one token, 90% zeros", 1.5, MEMORY, _memories(0.9, tokens=(1,))),
    _goal("one token, 95% zeros", 1.7, MEMORY, _memories(0.95, tokens=(1,))),
    _goal("never slower", 1.0, MEMORY, _memories(*SHARES)),
    _goal("one token, 90% zeros", 1.8, GATED, _memories(0.9, tokens=(1,))),
    _goal("one token, 95% zeros", 2.3, GATED, _memories(0.95, tokens=(1,))),
    _goal("never slower", 1.0, GATED, _memories(*SHARES)),
)


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure what exact zeros save in decoding, where reading keys, values and weights is most of the work.

    Attention with one query per key head, and with four, against our own kernels where no weight is zero, and against
    PyTorch's softmax (SDPA). Memories and gated memories with one token and with four against PyTorch's dense layers,
    F.linear–ReLU–F.linear, and with a gate three of them. Which weights are zero is random, and for each token apart.

    Correctness comes first: whatever is wrong by more than twice the error of plain PyTorch is not timed, and the exit
    code is 1. Then all take turns, round after round, and the best round of each counts. Each call reads another copy,
    as in a model of many layers: nothing stays in the cache.

    Writes zeros.json (every sample, machine, versions), zeros.md (tables) and zeros.svg (a figure). Ctrl-C stops it and
    keeps the measurements so far.
    """

    shares: tuple[float, ...] = SHARES
    """Shares of zeros, from 0 to 1."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Precisions."""
    tokens: tuple[int, ...] = TOKENS
    """Tokens of a call of a memory, up to six."""
    model: Path | None = None
    """Folder of a trained language model, as `nomax train language` writes it, to count its zeros as it writes."""

    def validate(self) -> None:
        if not all(0 <= share <= 1 for share in self.shares) or not self.shares:
            raise ValueError(f"--shares {' '.join(map(str, self.shares))} must be from 0 to 1, such as 0.9.")
        if max(self.tokens) > 6:
            raise ValueError(
                f"--tokens {max(self.tokens)} must be at most 6: zeros save reading only for a few tokens."
            )
        if self.model is not None and load_text(self.model, "cpu").model.config.encoder_layers:
            raise ValueError("--model translates; give a language model.")

    def shrunk(self) -> Self:
        shares = (self.shares[0], self.shares[-1])
        return dataclasses.replace(super().shrunk(), shares=shares, dtypes=self.dtypes[:1], tokens=self.tokens[-1:])


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    sizes = (1, 64) if options.smoke else (BATCH, KEYS)
    dims = ((64, 128),) if options.smoke else SIZES
    memories = [(size, tokens, gated) for size in dims for gated in (False, True) for tokens in options.tokens]
    groups = GROUPS[-1:] if options.smoke else GROUPS
    kinds = len(options.dtypes) * len(options.shares) * (len(memories) + len(groups))
    run.expect(kinds * (1 + len(options.threads)) + len(options.threads) + (options.model is not None))
    run.results.facts |= {"zeros": {}, "model": None}
    if options.model is not None:
        with run.step("counting the zeros of the model"):
            model = load_text(options.model, "cpu").model.float().eval().requires_grad_(False)
            run.results.facts["model"] = decode.zeros(model, decode.filled(model, 64, 1, writes=True))
    reads = {threads: _bandwidth(options, run, threads) for threads in options.threads}
    for dtype in options.dtypes:
        precision: torch.dtype = getattr(torch, dtype)
        for group in groups:
            dense: Tensor | None = None
            for share in options.shares:
                query, key, value = attention_inputs(*sizes, group, share, precision)
                dense = attention_inputs(*sizes, group, 0.0, precision)[1] if dense is None else dense
                name = attention_shape(group, share)
                with run.checking(name, dtype, OURS) as check:
                    run.results.facts["zeros"][f"{ATTENTION}, {name}"] = compare_attention(check, query, key, value)
                size_read = key.nbytes + value.nbytes
                sdpa = partial(F.scaled_dot_product_attention, enable_gqa=True)
                copies = _copies(options, size_read, (key, dense, value))
                calls = {
                    OURS: in_turn([partial(_attend, query, each, values) for each, _, values in copies]),
                    DENSE: in_turn([partial(_attend, query, each, values) for _, each, values in copies]),
                    SDPA: in_turn([partial(sdpa, query, each, values) for each, _, values in copies]),
                }
                _race(options, run, check, ATTENTION, calls, size_read, reads)
        for size, tokens, gated in memories:
            layer, down, mode = make_memory(size, gated, precision), None, GATED if gated else MEMORY
            down = layer.values.T.contiguous()
            for share in options.shares:
                x, name = set_zeros(layer, tokens, share), memory_shape(size, tokens, share)
                with run.checking(name, dtype, mode) as check:
                    run.results.facts["zeros"][f"{mode}, {name}"] = compare_memory(check, layer, x)
                size_read = sum(matrix.nbytes for matrix in layer.parameters())
                layers = _copies(options, size_read, (layer, down))
                calls = {
                    OURS: in_turn([partial(each, x) for each, _ in layers]),
                    DENSE: in_turn([partial(dense_layers, each, weight, x) for each, weight in layers]),
                }
                _race(options, run, check, mode, calls, size_read, reads)
        yield _table(dtype, run.results)


def _bandwidth(options: Options, run: Run, threads: int) -> Case:
    numbers = decode.numbers_to_read(options.smoke)
    case = Case("a sum over a gibibyte", "float32", BANDWIDTH, threads, ours=(PEAK,), peak_flop=float(numbers.nbytes))
    run.race(case, {PEAK: numbers.sum})
    return case


def _race(
    options: Options,
    run: Run,
    check: Check,
    mode: str,
    calls: dict[str, Callable[[], Any]],
    size: int,
    reads: dict[int, Case],
) -> None:
    """Time what is right, beside the bandwidth that was measured: bytes take the place of operations."""
    for threads in options.threads if check.right else ():
        read = reads[threads]
        case = Case(check.shape, check.dtype, mode, threads, ours=(OURS,), flop=float(size), peak_flop=read.peak_flop)
        with torch.inference_mode():
            run.race(case, calls)
        case.samples[PEAK] = read.samples[PEAK]


def _copies(options: Options, size: int, of: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return several copies of what a call reads, so many that they do not stay in the cache."""
    return [copy.deepcopy(of) for _ in range(1 if options.smoke else -(-COLD // size))]


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a call of the next one each time: as in a model of many layers, none finds its weights in the cache."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def signs(share: float, *shape: int) -> Tensor:
    """Return random signs, of which a share is negative."""
    return torch.where(torch.rand(shape) < share, -1.0, 1.0)


def attention_inputs(
    batch: int, keys: int, group: int, share: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query per head, keys and values; a share of the scores of every head is negative."""
    torch.manual_seed(0)
    query = torch.randn(batch, HEADS, 1, HEAD_DIM)
    key, value = torch.randn(2, batch, HEADS // group, keys, HEAD_DIM)
    # The first dimensions belong to one query of a group each, and decide about the sign of its scores.
    query[..., :group] = HEAD_DIM**0.5 * STEEP * torch.eye(group).repeat(HEADS // group, 1)[:, None]
    key[..., :group] = signs(share, *key.shape[:3], group)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nomax.attention(query, key, value, phi=PHI, enable_gqa=True)


def compare_attention(check: Check, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Compare attention with plain PyTorch and float64, and return the share of zeros."""
    plain = partial(nomax.attention, phi=PHI, enable_gqa=True, backend="reference")
    exact = tuple(x.double() for x in (query, key, value))
    mine = {"output": _attend(query, key, value).double()}
    check.compare(mine, {"output": plain(query, key, value).double()}, {"output": plain(*exact)})
    group = query.shape[1] // key.shape[1]
    scores = exact[0] @ exact[1].repeat_interleave(group, 1).mT
    return float((scores <= 0).double().mean())


def make_memory(size: tuple[int, int], gated: bool, dtype: torch.dtype) -> Memory:
    """Return a memory whose scores are about 1."""
    torch.manual_seed(0)
    layer = Memory(*size, gated=gated)
    for matrix in layer.parameters():
        torch.nn.init.normal_(matrix, std=size[0] ** -0.5)
    return layer.to(dtype).eval().requires_grad_(False)


def set_zeros(layer: Memory, tokens: int, share: float) -> Tensor:
    """Return tokens for each of which a share of the slots is exactly zero, another one for each."""
    torch.manual_seed(0)
    x, scored = torch.randn(tokens, layer.dim), layer.keys if layer.gates is None else layer.gates
    x[:, :tokens] = STEEP * torch.eye(tokens)
    scored[:, :tokens] = signs(share, layer.slots, tokens).to(scored.dtype)
    return x.to(scored.dtype)


def dense_layers(layer: Memory, down: Tensor, x: Tensor) -> Tensor:
    """Compute a memory by PyTorch's linear layers; `down` is its values as the weight of the last one."""
    if layer.gates is None:
        return F.linear(F.linear(x, layer.keys).relu_(), down)
    return F.linear(F.linear(x, layer.gates).relu_().mul_(F.linear(x, layer.keys)), down)


def compare_memory(check: Check, layer: Memory, x: Tensor) -> float:
    """Compare a memory with plain PyTorch and float64, and return the share of slots that are zero, over all tokens."""
    tokens, keys = x.double(), layer.keys.double()
    h = F.relu(tokens @ (keys if layer.gates is None else layer.gates.double()).T)
    exact = (h if layer.gates is None else h * (tokens @ keys.T)) @ layer.values.double()
    plain = dense_layers(layer, layer.values.T.contiguous(), x)
    check.compare({"output": layer(x).double()}, {"output": plain.double()}, {"output": exact})
    return float((h == 0).double().mean())


def _row(case: Case, results: Results) -> list[str]:
    share, zeros = case.peak_share(), results.facts["zeros"].get(f"{case.mode}, {case.shape}")
    return [
        render.seconds(case.best(OURS)),
        *(times(case.speedup(OURS, peer)) for peer in (DENSE, SDPA)),
        *("–" if value is None else f"{value:.0%}" for value in (share, zeros)),
    ]


def _rows(results: Results, dtype: str) -> list[list[str]]:
    cases = [case for case in results.cases if case.dtype == dtype and case.mode != BANDWIDTH]
    return [[f"{case.mode}, {case.shape}", str(case.threads), *_row(case, results)] for case in cases]


def _table(dtype: str, results: Results) -> RenderableType:
    return render.terminal_table(["", "thr.", *COLUMNS], _rows(results, dtype), f"Zeros, {dtype}", words=1)


def report(results: Results) -> list[str]:
    """Return the tables, with the conditions of the measurement."""
    text = (
        f"A few queries or tokens, with exact zeros among the weights, on {render.measured_on(results)}. "
        f"{render.best_of(results)} Each call reads another copy, so that nothing stays in the cache, as in a model of "
        f"many layers. Attention has {BATCH} × {HEADS} heads of {HEAD_DIM}, {KEYS:,} keys and φ = {PHI}; “{DENSE}” is "
        "ours where no weight is zero. Of memories it is PyTorch's linear layers without biases, two or, with "
        "a gate, three. Which weights are zero is random; with several tokens other ones for each, so that fewer rows "
        "are zero for all."
    )
    reads = {
        case.threads: case.peak_flop / seconds / 1e9
        for case in results.cases
        if case.mode == BANDWIDTH and case.peak_flop and (seconds := case.best(PEAK))
    }
    speeds = ", ".join(f"{speed:.1f} GB/s with {counted(threads, 'thread')}" for threads, speed in reads.items())
    shares = (
        "“of bandwidth” is all the bytes, also those not read, by our time, as a share of how fast a sum reads "
        f"a gibibyte of float32 ({speeds}): caches and zeros may take it over 100%."
    )
    parts = [text, shares]
    if model := results.facts["model"]:
        parts.append(
            f"The model of `--model` has {model['attention']:.1%} zeros among the weights of attention for one token, "
            f"and {model['memories']:.1%} in its memories."
        )
    for dtype in results.options["dtypes"]:
        table = render.markdown_table(["", "threads", *COLUMNS], _rows(results, dtype))
        parts.append(f"**{dtype}**\n\n{table}")
    return parts


BENCH = Bench("zeros", _measure, report, GOALS, partial(render.goal_figure, TITLE, GOALS))
run = partial(run_bench, BENCH)
