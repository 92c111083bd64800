"""`nomax bench vit`: whole vision transformers, ours with relu/L against timm's with softmax, at the same weights."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from torch import Tensor, nn

from nomax import _compat
from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, known, run_bench
from nomax.bench.render import times
from nomax.bench.results import Case, Check, Goal, Results
from nomax.models import from_timm
from nomax.nn.layers import SLOW

INFERENCE: Literal["inference"] = "inference"
TRAINING: Literal["training"] = "training"

# Who takes part: ours, timm's ViT, ours with softmax, and ours with no attention at all; in inference also ours as
# ViT.prepared returns it, and timm's compiled.
OURS, TIMM, SOFTMAX, FREE = "relu/L", "timm", "our softmax", "free attention"
PREPARED, COMPILED = "relu/L, prepared", "timm, compiled"

# The name of a model in timm, and how many images a call gets: about a second's work.
MODELS = {
    "S/32": ("vit_small_patch32_224", 32),
    "S/16": ("vit_small_patch16_224", 8),
    "S/8": ("vit_small_patch8_224", 2),
}
GOALS = tuple(
    Goal(f"{model} {dtype} against timm's softmax", "speedup", bound, mode, TIMM, (model,), (dtype,), (ours,))
    for model, dtype, inference, training in (
        ("S/16", "float32", 1.1, 1.1),
        ("S/8", "float32", 1.25, 1.5),
        ("S/16", "bfloat16", 1.3, 1.3),
        ("S/8", "bfloat16", 1.6, 1.6),
    )
    for mode, bound, ours in ((INFERENCE, inference, PREPARED), (TRAINING, training, OURS))
)
COLUMNS = ("relu/L", "timm", "vs timm", "vs our softmax", "limit vs timm", "prepared", "vs timm", "vs timm compiled")


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure the images per second of our ViT with relu/L, against timm's softmax ViT with the same weights.

    Correctness comes first: with softmax, our model must give timm's logits and gradients, and with relu/L those of
    plain PyTorch, to within twice their own error; otherwise nothing is timed, and the exit code is 1. Then all take
    turns, round after round, and the best round of each counts. A training step is forward, backward and AdamW.
    bfloat16 is torch.autocast for all. "free attention" is our model without any attention: the upper limit of the
    ordinary one. In inference our model also runs as ViT.prepared returns it, and timm's as torch.compile makes it with
    frozen weights, which takes about half a minute for each model and precision; smoke runs leave that out.

    Writes vit.json (every sample, machine, versions) and vit.md (tables). Ctrl-C stops it and keeps the measurements so
    far.
    """

    models: tuple[str, ...] = ("S/16", "S/8")
    """Size / patch, for images of 224 pixels; S/32 is also available."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Precisions, one after the other."""
    modes: tuple[Literal["inference", "training"], ...] = (INFERENCE, TRAINING)
    """The work: inference, training, or both."""
    threads: tuple[int, ...] = (2,)
    """Numbers of threads to measure with, one after the other."""

    def validate(self) -> None:
        for name in self.models:
            known("model", name, MODELS)
        _compat.timm()

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), dtypes=self.dtypes[:1])


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    run.note_versions("timm")
    run.results.facts["slow_bfloat16"] = torch.bfloat16 in SLOW
    inference = INFERENCE in options.modes
    checks_each = 3 if inference else 2
    run.expect(len(options.models) * len(options.dtypes) * (checks_each + len(options.modes) * len(options.threads)))
    for name in options.models:
        participants, images, labels = _prepare(name, options.smoke)
        macs = participants[OURS].macs() * len(images)
        for dtype in options.dtypes:
            checks = []
            for who, model, peer in _comparisons(participants):
                with run.checking(name, dtype, who) as check:
                    _compare(check, model, peer, images[:2], labels[:2])
                checks.append(check)
            ready: Any = participants[OURS].prepared(getattr(torch, dtype)) if inference else None
            if inference:
                with run.checking(name, dtype, PREPARED) as check:
                    _compare_logits(check, ready, _plain(participants[OURS]), images[:3])
                checks.append(check)
            for threads in options.threads if all(check.right for check in checks) else ():
                for mode in options.modes:
                    flop = 2.0 * macs * (3 if mode == TRAINING else 1)
                    case = Case(name, dtype, mode, threads, ours=(OURS,), flop=flop, items=len(images))
                    calls = {who: _call(model, images, labels, case) for who, model in participants.items()}
                    if mode == INFERENCE:
                        calls[PREPARED] = _call(ready, images, labels, case)
                        if not options.smoke:
                            calls[COMPILED] = _compiled(participants[TIMM], images, case)
                    run.race(case, calls)
        cases = [case for case in run.results.cases if case.shape == name]
        rows = [[case.dtype, case.mode, str(case.threads), *_row(case)] for case in cases]
        yield render.terminal_table(["dtype", "mode", "thr.", *COLUMNS], rows, f"ViT-{name}, {len(images)} images")


def _prepare(name: str, smoke: bool) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return the models, ours with relu/L first, and the images and labels for all of them."""
    torch.manual_seed(0)
    timm_name, batch = MODELS[name]
    size, toy = 224, {}
    if smoke:
        patch = int(name.split("/")[1])
        size, batch = 2 * patch, 2
        toy = {"img_size": size, "embed_dim": 32, "depth": 1, "num_heads": 2}
    theirs = _compat.timm().create_model(timm_name, num_classes=1000, **toy)
    theirs.eval()  # neither model has anything that differs in training
    participants: dict[str, Any] = {OURS: from_timm(theirs, phi=OURS), TIMM: theirs, SOFTMAX: from_timm(theirs)}
    participants[FREE] = copy.deepcopy(participants[OURS])
    for block in participants[FREE].blocks:
        block.attention._attend = lambda query, key, value, *rest, **settings: (value, None)
    return participants, torch.rand(batch, 3, size, size) * 2 - 1, torch.randint(1000, (batch,))


def _comparisons(participants: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield our model with softmax beside timm's, and with relu/L beside plain PyTorch."""
    yield SOFTMAX, participants[SOFTMAX], participants[TIMM]
    yield OURS, participants[OURS], _plain(participants[OURS])


def _plain(model: Any) -> Any:
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.attention.backend = "reference"
    return plain


def _compare(check: Check, model: nn.Module, peer: nn.Module, images: Tensor, labels: Tensor) -> None:
    mine, plain = (_outputs(each, images, labels, check.dtype) for each in (model, peer))
    exact = _outputs(copy.deepcopy(peer).double(), images.double(), labels, "float64")
    check.compare(mine, plain, exact, largest=False)


def _compare_logits(check: Check, model: nn.Module, peer: nn.Module, images: Tensor) -> None:
    """Check a model without gradients."""
    exact = copy.deepcopy(peer).double()
    with torch.inference_mode():
        with _precision(check.dtype):
            plain = {"logits": peer(images).double()}
        check.compare({"logits": model(images).double()}, plain, {"logits": exact(images.double())})


def _outputs(model: nn.Module, images: Tensor, labels: Tensor, dtype: str) -> dict[str, Tensor]:
    images = images.clone().requires_grad_()
    with _precision(dtype):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(loss, images)
    return {"logits": logits.detach().double(), "gradient of the images": gradient.double()}


def _precision(dtype: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")


def _call(model: nn.Module, images: Tensor, labels: Tensor, case: Case) -> Callable[[], None]:
    """Return the call that is timed."""

    def inference() -> None:
        with torch.inference_mode(), _precision(case.dtype):
            model(images)

    def step() -> None:
        with _precision(case.dtype):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    if case.mode == INFERENCE:
        return inference
    # A rate of zero: many steps on random labels would only make the numbers strange.
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1, fused=True)
    return step


def _compiled(model: nn.Module, images: Tensor, case: Case) -> Callable[[], None]:
    """Return the call of a compiled copy, whose weights are constants, packed by the compiler."""
    torch.compiler.reset()  # or a second precision or number of threads would meet the limit of recompilations
    torch.set_num_threads(case.threads)
    compiled = torch.compile(copy.deepcopy(model), options={"freezing": True})

    def inference() -> None:
        with torch.no_grad(), _precision(case.dtype):  # under inference_mode nothing is frozen
            compiled(images)

    inference()
    return inference


def _row(case: Case) -> list[str]:
    """Return images per second and ratios, as in COLUMNS."""
    ours, timm, ready = (render.number(case.per_second(name), ".3g") for name in (OURS, TIMM, PREPARED))
    ratios = [times(case.speedup(OURS, peer)) for peer in (TIMM, SOFTMAX)]
    limit = times(case.speedup(FREE, TIMM))
    return [ours, timm, *ratios, limit, ready, *(times(case.speedup(PREPARED, peer)) for peer in (TIMM, COMPILED))]


def report(results: Results) -> list[str]:
    """Return the table for the README, with the conditions of the measurement."""
    parts = [
        f"ViT with `relu/L` against timm's with softmax, same weights, 224 pixels, on "
        f"{render.measured_on(results, 'timm')}. Images per second; {render.best_of(results)} “limit” is how many "
        "times as fast as timm our model would be if attention took no time. “prepared” is our model as `ViT.prepared` "
        "returns it; timm is compiled by torch.compile with frozen weights. A training step is forward, backward and "
        "AdamW; bfloat16 is autocast for all, and for “prepared” its own."
    ]
    if results.facts.get("slow_bfloat16"):
        parts.append(
            "This CPU has no products of bfloat16. PyTorch's linear layers then go element by element; ours compute in "
            "float32 and round the result, which is most of the difference in bfloat16."
        )
    rows = [
        [f"{case.shape} ({case.items} images)", case.dtype, case.mode, str(case.threads), *_row(case)]
        for case in results.cases
    ]
    return [*parts, render.markdown_table(["model", "dtype", "mode", "threads", *COLUMNS], rows)]


BENCH = Bench("vit", _measure, report, GOALS)
run = partial(run_bench, BENCH)
