"""`nomax bench translate`: ReLUFormer against the same model with softmax, sparsemax and entmax, and against Marian."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import RenderableType
from torch import Tensor

from nomax.bench.conduct import conduct
from nomax.bench.frame import check_load, now
from nomax.bench.goals import Goal
from nomax.bench.machine import load, machine, versions
from nomax.bench.race import race
from nomax.bench.results import Case, Results
from nomax.bench.translate_subjects import (
    DECODING,
    ENTMAX,
    INFERENCE,
    MARIAN,
    OURS,
    PLAIN,
    SENTENCES,
    SOFTMAX,
    SPARSEMAX,
    TRAINING,
    Endless,
    decoding_gate,
    generation,
    inference,
    marian,
    marian_fault,
    model_gate,
    subjects,
    training,
    transformers,
    translation,
)
from nomax.bench.translate_tables import TOKENS, documents, markdown, sentences, table
from nomax.console import Progress
from nomax.models import ReLUFormerConfig
from nomax.ops.softmax import row_map

WITH_ENTMAX = 512  # tokens: longer, the entmax package's matrices take minutes
TITLE = "ReLUFormer: speed relative to softmax, sparsemax, entmax and Marian"


def _goal(text: str, bound: float, mode: str, shapes: tuple[str, ...], peer: str) -> Goal:
    return Goal(text, "speedup", bound, mode, shapes, phis=(OURS,), peer=peer)


GOALS = (
    _goal("against softmax (SDPA), 512 tokens", 1.1, TRAINING, (documents(512),), SOFTMAX),
    _goal("against softmax (SDPA), 2,048 tokens", 1.3, TRAINING, (documents(2048),), SOFTMAX),
    _goal("against Hugging Face's Marian, 4 beams", 3.0, DECODING, (sentences(32), sentences(128)), MARIAN),
    *(
        _goal(f"against the entmax package's {peer}", 3.0, mode, (documents(512), documents(2048)), peer)
        for peer in (SPARSEMAX, ENTMAX)
        for mode in (INFERENCE, TRAINING)
    ),
)


@dataclass(frozen=True)
class Options:
    """Measure the speed of ReLUFormer: training, reading and translating, each against a peer in the same run.

    training: tokens per second of ReLUFormer, its penalties included, against the same model with softmax on PyTorch's
    own attention, and with the entmax package's sparsemax and 1.5-entmax; as many tokens per step whatever the length
    of the documents. A step is forward, label smoothing, backward and AdamW. inference: the forward pass alone.
    decoding: beam search with 4 beams of 64 sentences, against MarianMTModel.generate of Hugging Face's transformers
    with as many layers, dimensions, heads and words, random weights in both. Neither may end before the last token:
    both compute as many steps, and what they return is checked. "free attention" is the same model without any: what
    cannot be surpassed.

    Correctness comes first: loss, gradients and scores must be those of float64 to a few roundings, otherwise nothing
    is timed, and the exit code is 1. Then all take turns, round after round, and the best round of each counts.

    Writes translate.json (every sample, machine, versions), translate.md (tables) and translate.svg (a figure). Ctrl-C
    stops it and keeps what was measured.
    """

    documents: tuple[int, ...] = (512, 2048)
    """Lengths of documents in tokens, for training and inference. Up to 512, sparsemax and entmax take part."""
    sentences: tuple[int, ...] = (32, 128)
    """Lengths of sentences in tokens, for decoding: those of the source and of the translation."""
    modes: tuple[Literal["training", "inference", "decoding"], ...] = ("training", "inference", "decoding")
    """What is done with the text."""
    layers: int = 6
    """Of the encoder, and as many of the decoder."""
    dim: int = 256
    """Width of the model; heads are 64 wide, and a feed-forward layer has four times as many slots."""
    vocabulary: int = 8000
    """Tokens there are."""
    threads: tuple[int, ...] = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    """Numbers of threads to measure with, one after the other."""
    rounds: int = 5
    """Samples of every participant; the best counts. Calls of over 2 seconds get three, of over 8 one."""
    output: Path | None = None
    """Folder for the results; if not given, benchmarks/results where that exists, else the current folder."""
    load_limit: float = 0.5
    """Refuse to start while the machine is busier than this (its load average over the last minute)."""
    smoke: bool = False
    """Try it on toy sizes, with the first number of threads, in seconds: shows only that it works."""


def run(options: Options) -> int:
    """Return 0 if all is right, 1 if a result was wrong, 2 if the options cannot be served, 130 if it was stopped."""
    try:
        config = _check(options)
        peers: dict[str, str | None] = {}
        if DECODING in options.modes:
            peers["transformers"] = str(transformers().__version__)
        if set(options.modes) - {DECODING} and min(options.documents) <= WITH_ENTMAX:
            row_map(SPARSEMAX)  # without the package, its error says how to get it
            peers["entmax"] = version("entmax")
        if not options.smoke:
            check_load(options.load_limit)
    except (ImportError, ValueError) as error:
        print(f"nomax bench translate: {error}", file=sys.stderr)
        return 2
    if options.smoke:
        options = dataclasses.replace(
            options, documents=(8, 16), sentences=options.sentences[:1], threads=options.threads[:1], rounds=2
        )
    results = Results(
        options=dataclasses.asdict(options) | {"output": None, "config": dataclasses.asdict(config), "tokens": {}},
        machine=machine(),
        versions=versions() | peers,
        shapes=[],
        started=now(),
        smoke=options.smoke,
        load_before=load(),
    )
    measure = partial(_measure, options, config, results)
    return conduct("translate", TITLE, results, GOALS, measure, markdown, options.output)


def _check(options: Options) -> ReLUFormerConfig:
    """The model to measure; an error says what is wrong with the options."""
    numbers = {"threads": options.threads, "documents": options.documents, "sentences": options.sentences}
    for name, values in (*numbers.items(), ("rounds", (options.rounds,))):
        if not values or min(values) < 1:
            raise ValueError(f"--{name} must be at least 1.")
    if unsuitable := [length for length in options.documents if TOKENS % length]:
        raise ValueError(f"--documents {unsuitable[0]}: lengths must divide {TOKENS:,}, the tokens of a step.")
    if min(options.sentences) < 2:
        raise ValueError("--sentences must be at least 2: the last token is the end.")
    longest = max(TOKENS, *options.sentences)
    if options.smoke:
        return ReLUFormerConfig(50, 32, 2, 1, 1, 64, dropout=0.0, max_length=longest)
    dim, layers = options.dim, options.layers
    return ReLUFormerConfig(
        options.vocabulary, dim, max(dim // 64, 1), layers, layers, 4 * dim, dropout=0.0, max_length=longest
    )


def _measure(
    options: Options, config: ReLUFormerConfig, results: Results, progress: Progress
) -> Iterator[RenderableType]:
    """Measure everything into `results`, and yield a table whenever a length is finished."""
    modes = [mode for mode in options.modes if mode != DECODING]
    lengths = [*(options.documents if modes else ()), *(options.sentences if DECODING in options.modes else ())]
    task = progress.add_task("", total=1 + len(lengths))
    progress.update(task, description="checking")
    models = subjects(config)
    torch.manual_seed(0)
    size = 16 if options.smoke else 96
    if modes:
        results.gates.append(model_gate(models[OURS], _text(config, 2, size), _text(config, 2, size + 1)))
    progress.advance(task)

    right = not results.red()
    for length in options.documents if modes and right else ():
        shape, tokens = documents(length), 2 * max(options.documents) if options.smoke else TOKENS
        results.options["tokens"][shape] = tokens
        source, target = _text(config, tokens // length, length), _text(config, tokens // length, length + 1)
        for threads in options.threads:
            for mode in modes:
                progress.update(task, description=f"{shape}, {mode}, {threads} thread{'s' * (threads > 1)}")
                calls: dict[str, Callable[[], Any]] = {}
                for name, model in models.items():
                    if name in (SPARSEMAX, ENTMAX) and length > WITH_ENTMAX:
                        continue
                    if mode == TRAINING:
                        calls[name] = training(name, model, source, target)
                    elif name != PLAIN:  # whose inference is the same
                        calls[name] = inference(model, source, target)
                results.cases.append(_case(options, shape, mode, threads, calls))
        yield table(shape, results)
        progress.advance(task)

    for length in options.sentences if DECODING in options.modes else ():
        yield _decoding(options, config, results, length, lambda text: progress.update(task, description=text))
        progress.advance(task)


def _decoding(
    options: Options, config: ReLUFormerConfig, results: Results, length: int, tell: Callable[[str], object]
) -> RenderableType:
    shape = sentences(length)
    tell(f"{shape}: checking")
    torch.manual_seed(0)
    model = Endless.from_config(config).eval().requires_grad_(False)
    source = _text(config, 4 if options.smoke else SENTENCES, length)
    results.options["tokens"][shape] = source.numel()
    gate = decoding_gate(model, source[:4], length)
    results.gates.append(gate)
    peer = generation(marian(config), source, length)
    for threads in options.threads if gate.green else ():
        tell(f"{shape}, {threads} thread{'s' * (threads > 1)}")
        calls: dict[str, Callable[[], Any]] = {OURS: translation(model, source, length)}
        unavailable = {}
        try:
            fault = marian_fault(peer(), length, config)
        except Exception as error:  # whatever a peer cannot do is worth a note and must not end the run
            fault = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if fault is None:
            calls[MARIAN] = peer
        else:
            unavailable[MARIAN] = fault
        case = _case(options, shape, DECODING, threads, calls)
        case.unavailable = unavailable
        results.cases.append(case)
    return table(shape, results)


def _case(options: Options, shape: str, mode: str, threads: int, calls: dict[str, Callable[[], Any]]) -> Case:
    torch.set_num_threads(threads)
    samples = race(calls, options.rounds, 1e-4 if options.smoke else 0.02)
    return Case(shape, "float32", mode, threads, 0.0, samples, ours=(OURS,))


def _text(config: ReLUFormerConfig, count: int, length: int) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, config.vocabulary, (count, length))
