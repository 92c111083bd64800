"""`nomax bench vit`: whole vision transformers, ours with relu/L against timm's with softmax, at the same weights."""

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor, nn

from nomax import _compat
from nomax.bench import goals, tables
from nomax.bench.frame import check_load, known, now, progress_bar, results_folder, threads_restored
from nomax.bench.gate import Gate
from nomax.bench.goals import BFLOAT16, FLOAT32, Goal
from nomax.bench.machine import load, machine, versions
from nomax.bench.race import race
from nomax.bench.results import OURS, Case, Results, write
from nomax.bench.vit_tables import FREE, INFERENCE, SOFTMAX, TIMM, TRAINING, markdown, model_table
from nomax.console import Console, Progress
from nomax.models import from_timm

# What timm calls it, and how many images a call gets: about a second's work.
MODELS = {
    "S/32": ("vit_small_patch32_224", 32),
    "S/16": ("vit_small_patch16_224", 8),
    "S/8": ("vit_small_patch8_224", 2),
}

GOALS = tuple(
    Goal(f"{model} {dtypes[0]} against timm's softmax", "speedup", bound, mode, (model,), dtypes, peer=TIMM)
    for model, dtypes, inference, training in (
        ("S/16", FLOAT32, 1.1, 1.1),
        ("S/8", FLOAT32, 1.6, 1.5),
        ("S/16", BFLOAT16, 1.4, 1.3),
        ("S/8", BFLOAT16, 1.8, 1.6),
    )
    for mode, bound in ((INFERENCE, inference), (TRAINING, training))
)


@dataclass(frozen=True)
class Options:
    """Measure how many images per second our ViT with relu/L takes, against timm's softmax ViT with the same weights.

    Correctness comes first: with softmax, our model must give timm's logits and gradients, and with relu/L those of
    plain PyTorch, to twice the error that these have themselves; otherwise nothing is timed, and the exit code is 1.
    Then all take turns, round after round, and the best round of each counts. A training step is forward, backward and
    AdamW. bfloat16 is torch.autocast for all. "free attention" is our model without any: what cannot be surpassed.

    Writes vit.json (every sample, machine, versions) and vit.md (tables). Ctrl-C stops it and keeps what was measured.
    """

    models: tuple[str, ...] = ("S/16", "S/8")
    """Size / patch, for images of 224 pixels; S/32 is there, too."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Precisions, one after the other."""
    modes: tuple[Literal["inference", "training"], ...] = (INFERENCE, TRAINING)
    """What is done with the images."""
    threads: tuple[int, ...] = (2,)
    """Numbers of threads to measure with, one after the other."""
    rounds: int = 5
    """Samples of every participant; the best counts. Calls of over 2 seconds get three, of over 8 one."""
    output: Path | None = None
    """Folder for the results; if not given, benchmarks/results where that exists, else the current folder."""
    load_limit: float = 0.5
    """Refuse to start while the machine is busier than this (its load average over the last minute)."""
    smoke: bool = False
    """Try it on toy models, with the first dtype and number of threads, in seconds: shows only that it works."""


def run(options: Options) -> int:
    """Return 0 if all is right, 1 if a result was wrong, 2 if the options cannot be served, 130 if it was stopped."""
    try:
        for name in options.models:
            known("model", name, MODELS)
        if options.rounds < 1 or not options.threads or min(options.threads) < 1:
            raise ValueError("--rounds and --threads must be at least 1.")
        if not options.smoke:
            check_load(options.load_limit)
        timm = _compat.timm()
    except (ImportError, ValueError) as error:
        print(f"nomax bench vit: {error}", file=sys.stderr)
        return 2
    if options.smoke:
        options = dataclasses.replace(options, dtypes=options.dtypes[:1], threads=options.threads[:1], rounds=2)
    console, output = Console(), results_folder(options.output)
    results = Results(
        options=dataclasses.asdict(options)
        | {"output": None, "batch": {name: MODELS[name][1] for name in options.models}},
        machine=machine(),
        versions=versions() | {"timm": timm.__version__},
        shapes=[],
        started=now(),
        smoke=options.smoke,
        load_before=load(),
    )
    stopped = False
    with progress_bar(console) as progress, threads_restored():
        try:
            for table in _measure(options, results, progress):
                console.print(table)
                write(output / "vit.json", results.json())
            results.finished = now()
        except KeyboardInterrupt:
            stopped = True

    results.load_after = load()
    results.goals = [goals.judge(goal, results) for goal in GOALS]
    console.print(tables.goal_table(results))
    for name, text in {"vit.json": results.json(), "vit.md": markdown(results)}.items():
        write(output / name, text)
    console.print(f"Written: {output / 'vit.json'}, {output / 'vit.md'}")
    for gate in results.red():
        console.print(
            Text.assemble(("WRONG", "bold red"), f" {gate.shape}, {gate.dtype}, {gate.name}: {gate.reason()}")
        )
    if stopped:
        console.print("Stopped: what was measured until then is kept.")
        return 130
    return 1 if results.red() else 0


def _measure(options: Options, results: Results, progress: Progress) -> Iterator[RenderableType]:
    """Measure everything into `results`, and yield a table whenever a model is finished."""
    cases = len(options.dtypes) * (1 + len(options.modes) * len(options.threads))
    task = progress.add_task("", total=len(options.models) * cases)
    for name in options.models:
        participants, images, labels = _prepare(name, options.smoke)
        for dtype in options.dtypes:
            progress.update(task, description=f"{name}, {dtype}: checking")
            torch.set_num_threads(max(options.threads))
            gates = list(_gates(participants, images[:2], labels[:2], dtype))
            for gate in gates:
                gate.shape = name
            results.gates += gates
            progress.advance(task)
            for threads in options.threads:
                for mode in options.modes:
                    progress.update(task, description=f"{name}, {dtype}, {mode}, {threads} thread{'s' * (threads > 1)}")
                    if all(gate.green for gate in gates):
                        torch.set_num_threads(threads)
                        macs = participants[OURS].macs() * len(images)
                        case = Case(name, dtype, mode, threads, 2.0 * macs * (3 if mode == TRAINING else 1), {})
                        calls = {who: _call(model, images, labels, dtype, mode) for who, model in participants.items()}
                        case.samples = race(calls, options.rounds, 1e-4 if options.smoke else 0.02)
                        results.cases.append(case)
                    progress.advance(task)
        yield model_table(name, len(images), [case for case in results.cases if case.shape == name])


def _prepare(name: str, smoke: bool) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The models, ours with relu/L first, and the images and labels that all of them get."""
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
        block.attention._attend = lambda query, key, value, *rest: (value, None)
    return participants, torch.rand(batch, 3, size, size) * 2 - 1, torch.randint(1000, (batch,))


def _precision(dtype: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")


def _call(model: nn.Module, images: Tensor, labels: Tensor, dtype: str, mode: str) -> Callable[[], None]:
    """What is timed."""

    def inference() -> None:
        with torch.inference_mode(), _precision(dtype):
            model(images)

    def step() -> None:
        with _precision(dtype):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    if mode == INFERENCE:
        return inference
    # A rate of zero: many steps on random labels would only make the numbers strange.
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1, fused=True)
    return step


def _gates(participants: dict[str, Any], images: Tensor, labels: Tensor, dtype: str) -> Iterator[Gate]:
    """Our model with softmax against timm's, and with relu/L against plain PyTorch, both measured in float64."""
    plain = copy.deepcopy(participants[OURS])
    for block in plain.blocks:
        block.attention.backend = "reference"
    for name, model, peer in ((SOFTMAX, participants[SOFTMAX], participants[TIMM]), (OURS, participants[OURS], plain)):
        gate = Gate(dtype, name=name)
        try:
            exact = _results(copy.deepcopy(peer).double(), images.double(), labels, "float64")
            mine, theirs = (_results(x, images, labels, dtype) for x in (model, peer))
        except Exception as error:  # a crash is a wrong result too, and the other models are still worth measuring
            gate.failure = f"{type(error).__name__}: {error}"
            yield gate
            continue
        precision = torch.finfo(getattr(torch, dtype)).eps
        for what, want in exact.items():
            gate.error[what] = float((mine[what] - want).abs().max())
            error_of_peer = float((theirs[what] - want).abs().max())
            gate.allowed[what] = max(2 * error_of_peer, precision * float(want.abs().max()))
        gate.green = all(gate.error[what] <= gate.allowed[what] for what in gate.error)  # a NaN fails
        yield gate


def _results(model: nn.Module, images: Tensor, labels: Tensor, dtype: str) -> dict[str, Tensor]:
    images = images.clone().requires_grad_()
    with _precision(dtype):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(loss, images)
    return {"logits": logits.detach().double(), "gradient of the images": gradient.double()}
