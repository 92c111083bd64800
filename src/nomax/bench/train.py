"""`nomax bench train`: training steps of the studies' small models, and where their time goes."""

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import RenderableType
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nomax import _compat
from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, known, run_bench
from nomax.bench.render import times
from nomax.bench.results import Case, Check, Goal, Results
from nomax.data.text import Example
from nomax.ops import cpu, row_maps
from nomax.train.console import Stop
from nomax.train.distributed import World
from nomax.train.loop import Loop, keep_freed_memory
from nomax.train.text import config as text_configs
from nomax.train.text.task import TextTask
from nomax.train.vision import config as vision_configs
from nomax.train.vision.task import VisionTask, load_images

TRAINING = "training"
# Who takes part: our model with relu/L (text: ReLUFormer's φ), with softmax on PyTorch's attention, and with softmax as
# a formula, whose matrices of scores and weights are written out; softmax without any kernel of ours; timm's ViT; and a
# product of two matrices of SIDE rows.
OURS, SOFTMAX, FORMULA, PLAIN, TIMM = "ours", "our softmax", "softmax as a formula", "plain PyTorch", "timm"
PEAK = "peak"
SIDE = 1024
DATA = "fashion-mnist-small"
IMAGES = ("pico/4", "pico/2", "micro/4")
TEXT = "text"
MODELS = (*IMAGES, TEXT)
BATCH, TOKENS, WIDTH, LAYERS, VOCABULARY = 64, 2048, 128, 3, 4000
PRECISIONS: dict[str, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16"}
GOALS = (
    Goal("micro/4, share of the peak", "peak share", 0.6, TRAINING, PEAK, ("micro/4",)),
    Goal("pico/4, share of the peak", "peak share", 0.5, TRAINING, PEAK, ("pico/4",)),
    *(Goal(f"{name} against plain PyTorch", "speedup", 1.0, TRAINING, PLAIN, (name,)) for name in MODELS),
)
# Where the time goes: the beginnings of the operators' names. The rest is Python, the autograd engine and small things.
PARTS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "mkldnn"),
    "attention": ("nomax::attend",),
    "LayerNorm": ("nomax::layer_norm", "aten::native_layer_norm"),
    "GELU, ReLU": ("nomax::gelu", "aten::gelu", "aten::clamp_min", "aten::threshold", "aten::relu"),
    "loss": ("nomax::cross_entropy", "aten::binary_cross", "aten::argmax", "aten::log"),
    "dropout": ("nomax::dropout", "aten::bernoulli", "aten::native_dropout"),
    "optimiser": ("Optimizer", "aten::_fused", "aten::_foreach", "aten::linalg_vector_norm"),
    "copies and sums": ("aten::copy_", "aten::sum", "aten::add", "aten::mul", "aten::cat", "aten::div", "aten::fill_"),
}
REST, LOADING = "the rest", "data"
COLUMNS = ("per second", "step", "GFLOP/s", "of peak", "vs softmax", "as a formula", "vs plain PyTorch", "vs timm")


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure training steps of the studies' models, as `nomax train` takes them, and the parts of a step.

    Images per second of ViTs on batches of 64 Fashion-MNIST images, and tokens per second of a translation model
    (3 + 3 layers, 128 wide) on 2,048 random tokens, ours with relu/L (text: ReLUFormer's φ and penalties) against the
    same model with softmax on PyTorch's attention and as a plain formula, against softmax without any of our kernels,
    and against timm's ViT of the same shape. All go through the same loop: forward, backward, clipping, AdamW. The
    share of the peak is relative to a product of two 1,024 × 1,024 matrices in the same precision and run. bfloat16 is
    autocast for all.

    Correctness comes first: loss and gradients must match plain PyTorch to within twice its own error, otherwise
    nothing is timed, and the exit code is 1. Then all take turns, round after round, and the best round of each counts.

    Writes train.json (every sample, machine, versions), train.md (tables) and train.svg (a figure). Ctrl-C stops it and
    keeps the measurements so far.
    """

    models: tuple[str, ...] = MODELS
    """pico/4, pico/2, micro/4 or text."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Precisions, one after the other."""
    threads: tuple[int, ...] = (1,)
    """Numbers of threads to measure with, one after the other."""

    def validate(self) -> None:
        for name in self.models:
            known("model", name, MODELS)
        _compat.timm()

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), dtypes=self.dtypes[:1])


class Step(NamedTuple):
    """A participant: its loop, and the batch for each of its steps."""

    loop: Loop[Any]
    batch: Any

    def __call__(self) -> None:
        self.loop.update(self.batch, Stop())


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    keep_freed_memory()
    run.note_versions("timm")
    run.results.facts["parts"] = {}
    run.expect(len(options.models) * len(options.dtypes) * (2 + len(options.threads)))
    for name in options.models:
        for dtype in options.dtypes:
            task = _task(name, dtype, options.smoke)
            with run.checking(name, dtype, OURS) as check:
                _compare(check, task)
            if not check.right:
                continue
            steps = _participants(name, dtype, task, options.smoke)
            for threads in options.threads:
                case = Case(name, dtype, TRAINING, threads, ours=(OURS, SOFTMAX), flop=_flop(steps[OURS]))
                case.items, case.peak_flop = task.size(steps[OURS].batch), 2.0 * SIDE**3
                calls: dict[str, Callable[[], Any]] = {who: _call(who, step) for who, step in steps.items()}
                run.race(case, calls | {PEAK: _product(dtype)})
            with run.step(f"{name}, {dtype}: where the time goes"):
                torch.set_num_threads(options.threads[0])
                run.results.facts["parts"][f"{name}, {dtype}"] = _parts(steps[OURS], task, 2 if options.smoke else 10)
        cases = [case for case in run.results.cases if case.shape == name]
        rows = [[case.dtype, str(case.threads), *_row(case)] for case in cases]
        yield render.terminal_table(["dtype", "thr.", *COLUMNS], rows, name)


def _task(name: str, dtype: str, smoke: bool, phi: str | None = None) -> Any:
    """Return the training of a model, with φ or the model's usual one."""
    settings: dict[str, Any] = {"precision": PRECISIONS[dtype], "steps": 10**9, "warmup": 10**8, "device": "cpu"}
    if name == TEXT:
        size: dict[str, Any] = (
            {"dim": 32, "heads": 1, "slots": 64} if smoke else {"dim": WIDTH, "heads": 2, "slots": 4 * WIDTH}
        )
        layers: dict[str, Any] = {"encoder_layers": 1 if smoke else LAYERS, "decoder_layers": 1 if smoke else LAYERS}
        chosen: dict[str, Any] = {} if phi is None else {"phi": phi}
        words = 50 if smoke else VOCABULARY
        config = text_configs.small("translate", words, **chosen, **size, **layers)
        config = dataclasses.replace(config, batch_size=256 if smoke else TOKENS, **settings)
        examples = _examples(words)
        return TextTask(config, {0: examples}, examples[:1])
    images = load_images(DATA)
    vision = vision_configs.for_images("small", images[0], data=DATA, variant=name, phi=phi or "relu/L")
    return VisionTask(dataclasses.replace(vision, batch_size=4 if smoke else BATCH, **settings), *images)


def _examples(vocabulary: int) -> Sequence[Example]:
    """Return pairs of 8 to 64 random tokens."""
    random = np.random.default_rng(0)

    def tokens() -> list[int]:
        return [int(token) for token in random.integers(5, vocabulary, random.integers(8, 65))]

    return [Example(tokens(), tokens(), str(number), ()) for number in range(500)]


def _participants(name: str, dtype: str, task: Any, smoke: bool) -> dict[str, Step]:
    softmax = _task(name, dtype, smoke, "softmax")
    tasks = {OURS: task, SOFTMAX: softmax, FORMULA: copy.copy(softmax), PLAIN: copy.copy(softmax)}
    for who in (FORMULA, PLAIN):
        tasks[who].model = copy.deepcopy(softmax.model)
    if name != TEXT:
        tasks[TIMM] = copy.copy(softmax)
        tasks[TIMM].model = _timms(task)
    return {who: _step(each) for who, each in tasks.items()}


def _timms(task: VisionTask) -> nn.Module:
    """Return timm's ViT of the same shape: patches, width, depth, heads, qk-norm and the mean of the patches."""
    model = task.config.model
    width, depth, mlp, heads = model.size
    kind = _compat.timm().models.VisionTransformer
    theirs: nn.Module = kind(
        img_size=model.image, patch_size=model.patch, in_chans=model.channels, num_classes=model.num_classes,
        embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=mlp / width, qk_norm=True, class_token=False,
        global_pool="avg", fc_norm=False,
    )  # fmt: skip
    return theirs


def _step(task: Any) -> Step:
    world = World(torch.device("cpu"))
    loop = Loop(task, task.config, Path(tempfile.gettempdir()), world)  # it writes nothing without being asked to
    return Step(loop, next(task.batches(0, world)))


def _call(who: str, step: Step) -> Callable[[], None]:
    conditions = {PLAIN: _without_kernels, FORMULA: _softmax_as_a_formula}.get(who, contextlib.nullcontext)

    def call() -> None:
        with conditions():
            step()

    return call


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """Replace our kernels by PyTorch's own; attention is SDPA if φ is softmax."""
    serves, cpu.serves = cpu.serves, lambda x: False
    try:
        yield
    finally:
        cpu.serves = serves


@contextlib.contextmanager
def _softmax_as_a_formula() -> Iterator[None]:
    """Replace PyTorch's attention by three operations in the precision of its inputs. Scores are rounded to it."""
    functions: Any = F
    fused, widened = F.scaled_dot_product_attention, row_maps.trains_in_float32
    functions.scaled_dot_product_attention, row_maps.trains_in_float32 = softmax_formula, lambda problem: False
    try:
        yield
    finally:
        functions.scaled_dot_product_attention, row_maps.trains_in_float32 = fused, widened


def softmax_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention with softmax. The arguments are PyTorch's, as nomax gives them."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def _product(dtype: str) -> Callable[[], object]:
    left, right = (torch.randn(SIDE, SIDE).to(getattr(torch, dtype)) for _ in range(2))
    return lambda: left @ right


def _flop(step: Step) -> float:
    """Count the operations of the products in a step, and of attention."""
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


def _compare(check: Check, task: Any) -> None:
    """Compare loss and gradients of a step without dropout with those of plain PyTorch."""
    world = World(torch.device("cpu"))
    batch = next(task.batches(0, world))
    task, exact = copy.copy(task), copy.copy(task)
    task.model = copy.deepcopy(task.model)
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):  # our coins are not PyTorch's
            module.p = 0.0
    exact.model = copy.deepcopy(task.model).double()
    mine = _outputs(task, batch, check.dtype)
    with _without_kernels():
        for module in (*task.model.modules(), *exact.model.modules()):
            if hasattr(module, "backend"):
                module.backend = "reference"
        plain, wanted = _outputs(task, batch, check.dtype), _outputs(exact, batch, "float64")
    check.compare(mine, plain, wanted, roundings=4)


def _outputs(task: Any, batch: Any, dtype: str) -> dict[str, torch.Tensor]:
    task.model.train()
    if dtype == "float64" and hasattr(batch, "images"):
        batch = dataclasses.replace(batch, images=batch.images.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = task.measure(task.model, batch)["loss"] / task.size(batch)
    parameters = dict(task.model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    grads = [x.double().flatten() for x in gradients if x is not None]
    return {"loss": loss.detach().double(), "gradient": torch.cat(grads)}


def _parts(step: Step, task: Any, count: int) -> dict[str, float]:
    """Return the seconds of a step by part, according to a profiler, and the seconds to make a batch."""
    batches = task.batches(0, step.loop.world)
    next(batches)
    start = perf_counter()
    for _ in range(count):
        next(batches)
    loading = (perf_counter() - start) / count
    step()
    start = perf_counter()
    for _ in range(count):
        step()
    whole = (perf_counter() - start) / count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(count):
            step()
    parts = dict.fromkeys(PARTS, 0.0)
    for event in profiler.key_averages():
        part = next((name for name, starts in PARTS.items() if event.key.startswith(starts)), None)
        if part is not None:
            parts[part] += event.self_cpu_time_total * 1e-6 / count
    # What the profiler itself takes lies between the operators: the rest is what the step takes without it.
    return {**parts, REST: max(whole - sum(parts.values()), 0.0), LOADING: loading}


def _row(case: Case) -> list[str]:
    return [
        render.number(case.per_second(OURS)),
        render.seconds(case.best(OURS)),
        render.number(case.gflops()),
        render.number(case.peak_share(), ".0%"),
        *(times(case.speedup(OURS, peer)) for peer in (SOFTMAX, FORMULA, PLAIN, TIMM)),
    ]


def report(results: Results) -> list[str]:
    """Return the tables, with the conditions of the measurement."""
    intro = (
        f"Training steps of the studies' models, on {render.measured_on(results, 'timm')}. Images per second of ViTs "
        f"(batches of {BATCH}, 28 pixels, qk-norm), tokens per second of a translation model ({LAYERS} + {LAYERS} "
        f"layers, {WIDTH} wide, {TOKENS:,} tokens a step, with ReLUFormer's penalties); {render.best_of(results)} “of "
        f"peak” is relative to a product of two {SIDE:,} × {SIDE:,} matrices in the same precision. A step is forward, "
        "backward, clipping and AdamW, by the loop of `nomax train`; bfloat16 is autocast for all. “vs softmax” is the "
        "same model with PyTorch's fused attention, “as a formula” with softmax in three operations, which round "
        "scores and weights to the precision of the inputs."
    )
    rows = [[case.shape, case.dtype, str(case.threads), *_row(case)] for case in results.cases]
    speeds = render.markdown_table(["model", "dtype", "threads", *COLUMNS], rows)
    columns = (*PARTS, REST, LOADING)
    shares = [
        [name, *(f"{parts[part] / sum(parts.values()):.0%}" for part in columns)]
        for name, parts in results.facts["parts"].items()
    ]
    goes = "Where the time of our step goes, by a profiler on one thread; “the rest” is Python and the autograd engine."
    return [intro, speeds, goes, render.markdown_table(["model", *columns], shares)]


def draw(results: Results) -> str:
    """Draw the milliseconds of our step for each model, by part."""
    return render.parts_figure("Where the time of a training step goes", results.facts["parts"], results)


BENCH = Bench("train", _measure, report, GOALS, draw)
run = partial(run_bench, BENCH)
