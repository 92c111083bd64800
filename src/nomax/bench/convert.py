"""`nomax bench convert`: a converted text encoder against the original, on whole and on ragged batches."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from rich.console import RenderableType
from torch import Tensor

from nomax import _compat
from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, run_bench
from nomax.bench.results import Case, Goal, Results
from nomax.conversion import convert, pack, unpack
from nomax.nn import InnerAttention

OURS, PACKED, PEER = "relu/L", "relu/L, packed", "softmax"
LARGEST_DIFFERENCE = 1e-4  # of outputs around 1, for softmax through nomax
WORDS = 1000
LONG = ("8×256", "8×512")  # shapes at which a converted encoder has to be the faster one
GOALS = (
    Goal("a ragged batch against the original", "speedup", 1.0, "ragged", PEER),
    Goal("a whole batch of long texts against the original", "speedup", 1.0, "whole", PEER, LONG),
)
COLUMNS = (
    *("batch", "tokens", "of them padding", "threads", OURS, PACKED, f"{PEER} (SDPA)"),
    *(f"{OURS} vs {PEER}", f"packed vs {PEER}"),
)


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure a BERT with random weights, converted to relu/L, against the original on PyTorch's fused attention.

    The converted one has a gain, a shift and a power of L for every head, as calibration can give it. whole: sequences
    of one length. ragged: sequences of lengths from an eighth of that to all of it, padded. Before anything is timed,
    a converted model has to compute what the original does, with φ = softmax. Ctrl-C stops it and keeps the
    measurements so far.

    Writes convert.json (every sample, machine, versions) and convert.md (a table).
    """

    lengths: tuple[int, ...] = (128, 256, 512)
    """Numbers of tokens of the longest sequence, one after the other."""
    batch: int = 8
    """Sequences in a batch."""
    width: int = 384
    """Dimension of the model; heads have 32."""
    layers: int = 6
    """Layers of the model."""

    def validate(self) -> None:
        if self.width % 32 or min(self.lengths) < 8:
            raise ValueError("--width must be a multiple of 32, and --lengths at least 8.")
        if importlib.util.find_spec("transformers") is None:
            raise ImportError("the model is missing: pip install transformers")

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), lengths=(16,), batch=2, width=32, layers=1)


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    run.note_versions("transformers")
    run.expect(6 * len(options.lengths) * len(options.threads))
    models = {OURS: calibrated(make_model(options)), PEER: make_model(options)}
    softmax = make_model(options)
    convert(softmax, "softmax")
    for length in options.lengths:
        for mode in ("whole", "ragged"):
            inputs = make_batch(options.batch, length, ragged=mode == "ragged")
            shape = f"{options.batch}×{length}"
            with run.checking(shape, "float32", mode) as check:
                real = inputs["attention_mask"].bool()
                original = encode(models[PEER], inputs)[real]
                off = (encode(softmax, inputs)[real] - original).abs().max()
                check.bound("output", float(off), LARGEST_DIFFERENCE)
                packed = (encode_packed(softmax, inputs)[real] - original).abs().max()
                check.bound("packed output", float(packed), LARGEST_DIFFERENCE)
            if not check.right:
                continue
            for threads in options.threads:
                case = Case(shape, "float32", mode, threads, ours=(OURS, PACKED))
                torch.set_num_threads(threads)
                case.differences[PEER] = float(off)
                contestants = {name: partial(encode, model, inputs) for name, model in models.items()}
                run.race(case, {**contestants, PACKED: partial(encode_packed, models[OURS], inputs)})
    yield render.terminal_table(COLUMNS, _rows(run.results.cases), "A converted encoder against the original", words=1)


def make_model(options: Options) -> Any:
    """Return a BERT whose scores are about as large as those of a trained one."""
    transformers = _compat.transformers()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=options.width, num_hidden_layers=options.layers, num_attention_heads=options.width // 32,
        intermediate_size=4 * options.width, vocab_size=WORDS, initializer_range=options.width**-0.5,
        max_position_embeddings=max(512, *options.lengths),
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def calibrated(model: Any) -> Any:
    """Convert a model, and give every head a gain, a shift and a power of L of sizes that calibration gives."""
    convert(model, OURS)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, InnerAttention) and module.num_heads is not None:
            gain, shift = torch.randn(2, module.num_heads, generator=generator).exp().unbind()
            module.learn(gain, shift, torch.rand(module.num_heads, generator=generator))
    return model


def make_batch(batch: int, length: int, *, ragged: bool) -> dict[str, Tensor]:
    """Return token ids and their mask; ragged lengths are spread evenly from an eighth to the whole."""
    lengths = torch.linspace(length / 8, length, batch).long() if ragged else torch.full((batch,), length)
    ids = torch.randint(5, WORDS, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths.unsqueeze(1)).long()}


@torch.no_grad()
def encode(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states."""
    hidden: Tensor = model(**inputs).last_hidden_state
    return hidden


@torch.no_grad()
def encode_packed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the same, computed without padding."""
    mask = inputs["attention_mask"]
    return unpack(model(**pack(inputs["input_ids"], mask)).last_hidden_state, mask)


def _rows(cases: list[Case]) -> list[list[str]]:
    rows = []
    for case in cases:
        batch, length = map(int, case.shape.split("×"))
        real = int(make_batch(batch, length, ragged=case.mode == "ragged")["attention_mask"].sum())
        times = [render.seconds(case.best(name)) for name in (OURS, PACKED, PEER)]
        padding = f"{1 - real / (batch * length):.0%}"
        speedups = [render.times(case.speedup(name, PEER)) for name in (OURS, PACKED)]
        rows.append([case.mode, case.shape, padding, str(case.threads), *times, *speedups])
    return rows


def report(results: Results) -> list[str]:
    """Return the table, with the conditions of the measurement."""
    options = results.options
    text = (
        f"A BERT of {options['layers']} layers and width {options['width']} with random weights, forwards, on "
        f"{render.measured_on(results, 'transformers')}. {render.best_of(results)} Ragged lengths are spread evenly, "
        "from an eighth of the longest to all of it. Heads have gains, shifts and powers of L of their own. Attention "
        "skips keys that are padding; packed: nothing is computed for padding, and packing and unpacking are counted."
    )
    return [text, render.markdown_table(COLUMNS, _rows(results.cases))]


BENCH = Bench("convert", _measure, report, GOALS)
run = partial(run_bench, BENCH)
