"""`nomax bench decode`: a language model that adds one token at a time to a long context, against softmax and Llama."""

import copy
import dataclasses
import json
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from rich.console import RenderableType
from torch import Tensor

from nomax import _compat
from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, run_bench
from nomax.bench.render import times
from nomax.bench.results import CannotMeasureError, Case, Check, Goal, PeakMemory, Results
from nomax.evaluate.runs import load_text
from nomax.models import ReLUFormer, ReLUFormerConfig
from nomax.models.reluformer import Caches
from nomax.nn import Attention, KeyValueCache, Memory
from nomax.nn.inner_attention import with_shift
from nomax.ops import length
from nomax.phi import ACTIVATIONS, Phi

DECODING = "decoding"
SOFTMAX, GENERATE, PEAK = "softmax", "generate", "peak"
STATIC, DYNAMIC = "static", "dynamic"
BOTH = (f"{GENERATE}, {STATIC} cache", f"{GENERATE}, {DYNAMIC} cache")
PHI = "relu/L"
READ = 2**28  # float32 numbers, more than any cache of a CPU holds, whose sum measures how fast memory is read
TITLE = "Decoding: speed relative to softmax and to Hugging Face's generate"
COLUMNS = ("tokens/s", f"vs {SOFTMAX}", f"vs {GENERATE}", "bandwidth", f"of {SOFTMAX}", "zeros", "in memories")


def shape(context: int) -> str:
    """Return the name of a case."""
    return f"context of {context:,}"


LONG = (shape(8192), shape(65_536))
GOALS = (
    Goal("against softmax (SDPA), context of 1,024", "speedup", 1.0, DECODING, SOFTMAX, (shape(1024),)),
    Goal("against softmax (SDPA), contexts of 8,192 and 65,536", "speedup", 1.2, DECODING, SOFTMAX, LONG),
    Goal("against Hugging Face's generate", "speedup", 1.5, DECODING, GENERATE, (shape(1024), *LONG)),
)


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure how many tokens per second a language model adds to a context, one text at a time, on this machine's CPU.

    The peers are the same model with softmax on PyTorch's own attention, and LlamaForCausalLM.generate of Hugging
    Face's transformers with the same numbers of layers, dimensions, heads, slots and words, and random weights; of its
    static and its dynamic cache, the faster one. All start from the same cache: random keys and values, or with --model
    those of a text that the model writes. A share of exact zeros is counted in the same step, among attention weights
    and in the memories: ours does not read the values that they would multiply.

    Correctness comes first: logits must match float64 to a few roundings, otherwise nothing is timed, and the exit code
    is 1. Then all take turns, round after round, and the best round of each counts.

    Writes decode.json (every sample, machine, versions), decode.md (tables) and decode.svg (a figure). Ctrl-C stops it
    and keeps the measurements so far.
    """

    contexts: tuple[int, ...] = (1024, 8192, 65_536)
    """Numbers of tokens in the cache, one after the other."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Precisions of weights and cache."""
    tokens: int = 4
    """Tokens to decode in a call."""
    model: Path | None = None
    """Folder of a trained language model, as `nomax train language` writes it, to measure instead of random weights."""
    layers: int = 8
    """Layers of the model."""
    dim: int = 512
    """Width of the model; heads are 64 wide, and a feed-forward layer has four times as many slots."""
    vocabulary: int = 8000
    """Size of the vocabulary."""

    def validate(self) -> None:
        if self.dim % 64:
            raise ValueError(f"--dim {self.dim} must be a multiple of 64, the width of a head.")
        _compat.transformers()
        if self.model is not None:
            config, longest = self.load().config, max(self.shrunk().contexts if self.smoke else self.contexts)
            if config.encoder_layers:
                raise ValueError("--model translates: `nomax bench translate` measures its kind.")
            if Phi.parse(config.phi).activation not in ACTIVATIONS:
                raise ValueError(f"--model has φ = {config.phi}; give one with a pointwise φ, such as {PHI}.")
            if longest + self.tokens > config.max_length:
                raise ValueError(
                    f"--contexts {longest} and --tokens {self.tokens} are more than the {config.max_length:,} tokens "
                    "that --model was made for."
                )

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), contexts=(16, 48), tokens=2)

    def load(self) -> ReLUFormer:
        """Return the model to measure, in float32."""
        if self.model is not None:
            return load_text(self.model, "cpu").model.float().eval().requires_grad_(False)
        torch.manual_seed(0)
        return ReLUFormer.from_config(self.config()).eval().requires_grad_(False)

    def config(self) -> ReLUFormerConfig:
        """Return the shape of a model with random weights; its positions are rotary, as Llama's are."""
        heads, slots = self.dim // 64, 4 * self.dim
        sizes = (50, 32, 2, 0, 2, 64) if self.smoke else (self.vocabulary, self.dim, heads, 0, self.layers, slots)
        settings: dict[str, Any] = {"phi": PHI, "learned_gain": None, "positions": "rotary", "dropout": 0.0}
        return ReLUFormerConfig(*sizes, max_length=max(self.contexts) + self.tokens, **settings)


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    run.note_versions("transformers")
    ours = options.load()
    phi = ours.config.phi
    run.expect(len(options.dtypes) * len(options.contexts) * (4 + len(options.threads)))
    run.results.facts |= {"config": dataclasses.asdict(ours.config), "zeros": {}, "generate's cache": {}}
    for dtype in options.dtypes:
        models = make_models(ours, dtype)
        for context in options.contexts:
            right = _measure_speed(options, run, models, dtype, context)
            # Only now, when the caches of the races are gone: beside them, a second set might not fit.
            with run.step(f"{shape(context)}, {dtype}: memory"):
                measured = right and dtype == options.dtypes[0] and not (options.smoke and run.results.memory)
                for name in (phi, SOFTMAX, *BOTH) if measured else ():
                    run.results.memory += memory_of(name, ours.config, dtype, context, options.tokens)
        yield _table(dtype, run.results)


def _measure_speed(options: Options, run: Run, models: dict[str, ReLUFormer], dtype: str, context: int) -> bool:
    """Check, then time, and return whether all results were right."""
    phi, place = next(iter(models)), f"{shape(context)}, {dtype}"
    torch.set_num_threads(options.threads[0])
    with run.step(f"{place}: filling the caches"):
        caches = filled(models[phi], context, options.tokens, writes=options.model is not None)
        run.results.facts["zeros"][place] = zeros(models[phi], caches)
    checks = []
    for name, model in models.items():
        with run.checking(shape(context), dtype, name) as check:
            compare(check, model, caches)
        checks.append(check)
    if not all(check.right for check in checks):
        return False
    calls: dict[str, Callable[[], Any]] = {
        name: partial(decode, model, caches, options.tokens) for name, model in models.items()
    }
    failures = Case(shape(context), dtype, DECODING, 1, ours=(phi,))
    torch.set_num_threads(options.threads[0])
    with failures.attempting(GENERATE):
        kind, calls[GENERATE] = faster_generation(llama(models[phi].config, dtype), caches, options.tokens)
        run.results.facts["generate's cache"][place] = kind
    numbers = numbers_to_read(options.smoke)
    weights = sum(weight.nbytes for weight in models[phi].parameters())
    for threads in options.threads:
        case = Case(shape(context), dtype, DECODING, threads, ours=(phi,), items=options.tokens)
        case.unavailable |= failures.unavailable
        # Memory is the limit here, not arithmetic: bytes take the place of operations.
        case.flop, case.peak_flop = float(options.tokens * (weights + cache_bytes(caches))), float(numbers.nbytes)
        run.race(case, {**calls, PEAK: numbers.sum})
    return True


def numbers_to_read(smoke: bool) -> Tensor:
    """Return float32 numbers whose sum measures how fast memory is read; a few only, in a smoke run."""
    return torch.ones(2**16 if smoke else READ)


def make_models(ours: ReLUFormer, dtype: str) -> dict[str, ReLUFormer]:
    """Return our model by its φ, and the same weights with softmax, both in this precision."""
    plain = {"phi": SOFTMAX, "learned_gain": None, "learned_shift": None, "gamma": 1.0}
    softmax = ReLUFormer(**{**vars(ours.config), **plain}).eval().requires_grad_(False)
    own = softmax.state_dict()
    softmax.load_state_dict({name: weight for name, weight in ours.state_dict().items() if name in own})
    precision: torch.dtype = getattr(torch, dtype)
    return {ours.config.phi: copy.deepcopy(ours).to(precision), SOFTMAX: softmax.to(precision)}


@torch.inference_mode()
def filled(model: ReLUFormer, context: int, room: int, *, writes: bool = False) -> Caches:
    """Return caches with a context, and room for more: random keys and values, or those of a text the model writes."""
    config, dtype = model.config, model.embedding.weight.dtype
    caches, generator = model.caches(), torch.Generator().manual_seed(0)
    caches.own = [KeyValueCache(context + room) for _ in caches.own]
    if writes:
        token = torch.tensor([[config.begin]])
        for _ in range(context):
            logits = model.decode(token, caches=caches)[0, -1:].float()
            logits[:, [config.padding, config.begin, config.end]] = -torch.inf
            token = logits.softmax(1).multinomial(1, generator=generator)
        return caches
    size = (2, 1, config.heads, context, config.dim // config.heads)
    for cache in caches.own:
        cache.append(*torch.randn(size, generator=generator).to(dtype))
    caches.position = context
    return caches


def cache_bytes(caches: Caches) -> int:
    """Return the bytes of the keys and values in the caches."""
    return sum(entry.nbytes for cache in caches.own for entry in cache.entries())


@torch.inference_mode()
def decode(model: ReLUFormer, caches: Caches, tokens: int) -> Tensor:
    """Add the likeliest tokens one at a time, return the last logits [1, vocabulary], and take the tokens back."""
    context, token = caches.position, torch.tensor([[model.config.begin]])
    for _ in range(tokens):
        logits = model.decode(token, caches=caches)[:, -1]
        token = logits.argmax(1, keepdim=True)
    for cache in caches.own:
        cache.length = context
    caches.position = context
    return logits


class DoubleCache(KeyValueCache):
    """A cache in float64, converted where a layer needs it: all layers at once would take gibibytes."""

    def __init__(self, cache: KeyValueCache) -> None:
        super().__init__()
        self._cache, self.length = cache, cache.length

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.length += key.shape[2]
        keys, values = self._cache.entries()
        return torch.cat([keys.double(), key], 2), torch.cat([values.double(), value], 2)


def compare(check: Check, model: ReLUFormer, caches: Caches) -> None:
    """Compare the logits after a context with float64 and with plain PyTorch, where softmax is a formula, too."""
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, Attention) and model.config.phi == SOFTMAX:
            module._attend = _softmax_formula  # type: ignore[method-assign]
        elif isinstance(module, Attention):
            module.backend = "reference"
    exact = reference.caches()
    exact.own, exact.position = [DoubleCache(cache) for cache in caches.own], caches.position
    logits = [decode(model, caches, 1), decode(reference, caches, 1), decode(reference.double(), exact, 1)]
    check.compare(*({"logits": each.double()} for each in logits), roundings=4)


def _softmax_formula(query: Tensor, key: Tensor, value: Tensor, *_: Any, **settings: Any) -> tuple[Tensor, None]:
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value, None


@torch.inference_mode()
def zeros(model: ReLUFormer, caches: Caches) -> dict[str, float]:
    """Return the share of exact zeros among the weights of one decoded token: of attention, and of the memories."""
    attentions: list[Tensor] = []
    memories: list[Tensor] = []
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Attention):
            attend = partial(_attend_and_count, module, module._attend, attentions)
            module._attend = attend  # type: ignore[method-assign]
        elif isinstance(module, Memory):
            module.register_forward_pre_hook(lambda memory, inputs: memories.append(memory.weights(*inputs) == 0))
    decode(model, caches, 1)
    counted = {"attention": attentions, "memories": memories}
    return {name: float(torch.stack([zero.double().mean() for zero in each]).mean()) for name, each in counted.items()}


def _attend_and_count(
    module: Attention,
    attend: Callable[..., Any],
    counted: list[Tensor],
    query: Tensor,
    key: Tensor,
    *rest: Any,
    **more: Any,
) -> Any:
    result = attend(query, key, *rest, **more)
    scale: float | None = None
    if module.shift is not None:
        query, key, scale = with_shift(query, key, module.shift, scale)
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    _, shift = length.constants(module.phi, key.shape[2])
    counted.append(ACTIVATIONS[module.phi.activation].value(scores + shift) == 0)
    return result


def llama(config: ReLUFormerConfig, dtype: str) -> Any:
    """Return Hugging Face's Llama in the shape of our model, with random weights."""
    package = _compat.transformers()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.dim,
        "intermediate_size": config.slots,
        "num_hidden_layers": config.decoder_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "max_position_embeddings": config.max_length,
    }
    special = {"pad_token_id": config.padding, "bos_token_id": config.begin, "eos_token_id": config.end}
    settings = package.LlamaConfig(**sizes, **special, tie_word_embeddings=True, attn_implementation="sdpa")
    return package.LlamaForCausalLM(settings).to(getattr(torch, dtype)).eval().requires_grad_(False)


class Generation:
    """Hugging Face's `generate`, which continues a cache that is filled already; each call starts from it again."""

    def __init__(self, model: Any, caches: Caches, tokens: int, kind: str) -> None:
        package = _compat.transformers()
        self.model, self.tokens, self.context = model, tokens, caches.position
        room = {"config": model.config, "max_cache_len": self.context + tokens}
        self.cache = package.StaticCache(**room) if kind == STATIC else package.DynamicCache()
        for layer, cache in enumerate(caches.own):
            self.cache.update(*cache.entries(), layer)
        # As for a prompt whose last token is not in the cache yet: only that one is computed.
        self.text = torch.full((1, self.context + 1), model.config.bos_token_id)

    def __call__(self) -> Tensor:
        """Return the logits of the last token, [1, vocabulary]."""
        limits = {"min_new_tokens": self.tokens, "max_new_tokens": self.tokens, "do_sample": False}
        wanted = {"output_logits": True, "return_dict_in_generate": True}
        mask = torch.ones_like(self.text)
        with torch.inference_mode():
            out = self.model.generate(self.text, attention_mask=mask, past_key_values=self.cache, **limits, **wanted)
            for layer in self.cache.layers:
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length.fill_(self.context)
                else:
                    layer.crop(-self.tokens)
        if len(out.logits) != self.tokens or int(self.cache.get_seq_length()) != self.context:
            raise CannotMeasureError(f"it did not add {self.tokens} tokens to the cache")
        logits: Tensor = out.logits[-1]
        return logits


def faster_generation(model: Any, caches: Caches, tokens: int) -> tuple[str, Generation]:
    """Return the kind of Hugging Face's cache that decodes faster, and its generation."""
    best: tuple[float, str, Generation] | None = None
    for kind in (STATIC, DYNAMIC):
        generation = Generation(model, caches, tokens, kind)
        generation()  # the first call warms up
        seconds = min(timeit.repeat(generation, number=1, repeat=2))
        if best is None or seconds < best[0]:
            best = seconds, kind, generation
        del generation
    assert best is not None
    return best[1:]


def memory_of(name: str, config: ReLUFormerConfig, dtype: str, context: int, tokens: int) -> list[PeakMemory]:
    """Measure, in its own process, what decoding with a full cache adds at its peak, as a share of that cache."""
    settings = json.dumps(dataclasses.asdict(config))
    added = harness.bytes_in_a_fresh_process(decoding_bytes, name, settings, dtype, context, tokens)
    entry = partial(PeakMemory, name, DECODING, context, unit="context")
    if isinstance(added, str):
        return [entry(failure=added)]
    size = 2 * config.decoder_layers * config.dim * context * getattr(torch, dtype).itemsize
    return [PeakMemory(name, "cache", context, size, unit="context"), entry(added, added / size)]


def decoding_bytes(name: str, settings: str, dtype: str, context: int, tokens: int) -> int:
    """Return how much memory decoding adds to this process at its peak; what comes with the first call does not."""
    torch.set_num_threads(1)
    models = make_models(ReLUFormer(**json.loads(settings)).eval().requires_grad_(False), dtype)
    model = models.get(name, models[SOFTMAX])

    def call(size: int) -> Callable[[], object]:
        caches = filled(model, size, tokens)
        if name in models:
            return partial(decode, model, caches, tokens)
        return Generation(llama(model.config, dtype), caches, tokens, STATIC if STATIC in name else DYNAMIC)

    call(8)()
    return harness.peak_bytes(call(context))


def _row(case: Case, results: Results) -> list[str]:
    """Return our tokens per second, the others' times over ours, shares of the bandwidth, and shares of zeros."""
    ours, zero = case.ours[0], results.facts["zeros"].get(f"{case.shape}, {case.dtype}", {})
    shares = [case.peak_share(), case.peak_share(SOFTMAX)]
    return [
        render.number(case.per_second(ours), ",.1f"),
        *(times(case.speedup(ours, peer)) for peer in (SOFTMAX, GENERATE)),
        *("–" if share is None else f"{share:.0%}" for share in (*shares, zero.get("attention"), zero.get("memories"))),
    ]


def _table(dtype: str, results: Results) -> RenderableType:
    cases = [case for case in results.cases if case.dtype == dtype]
    rows = [[case.shape, str(case.threads), *_row(case, results)] for case in cases]
    return render.terminal_table(["", "thr.", *COLUMNS], rows, f"Decoding, {dtype}", words=1)


def _memory_rows(results: Results) -> list[list[str]]:
    caches = {(entry.participant, entry.length): entry.bytes for entry in results.memory if entry.mode == "cache"}
    rows = []
    for entry in results.memory:
        if entry.mode == DECODING:
            sizes = caches.get((entry.participant, entry.length)), entry.bytes
            shown = ["–" if size is None else f"{size / 2**20:,.1f} MiB" for size in sizes]
            rows.append([f"{entry.length:,}", entry.participant, shown[0], entry.failure or shown[1]])
    return rows


def report(results: Results) -> list[str]:
    """Return the tables, with the conditions of the measurement."""
    config, kinds = results.facts["config"], results.facts["generate's cache"]
    weights = "random weights" if results.options["model"] is None else "trained weights"
    keys = "random keys and values" if results.options["model"] is None else "those of a text that the model wrote"
    text = (
        f"A language model with {config['decoder_layers']} layers, dim {config['dim']}, {config['heads']} heads, "
        f"{config['slots']:,} slots, {config['vocabulary']:,} tokens, φ = {config['phi']}, {weights}, on "
        f"{render.measured_on(results, 'transformers')}. {render.best_of(results)} One text, "
        f"{results.options['tokens']} tokens in a call; all start from the same cache, {keys}."
    )
    peers = (
        f"“{SOFTMAX}” is the same model on PyTorch's own attention, “{GENERATE}” is `LlamaForCausalLM.generate` of the "
        "same shape with random weights; its feed-forward layers have a gate, and so three matrices instead of two. "
        "Its cache, the faster one of two: " + "; ".join(f"{place}: {kind}" for place, kind in kinds.items()) + "."
    )
    shares = (
        "“bandwidth” is the bytes of all weights and of the whole cache, once per token, by the time, as a share of "
        "how fast a sum reads a gibibyte in the same run; ours does not read values whose weights are zero, and may "
        "exceed it. “zeros” are the exact ones among the weights of attention for one token, and in the memories."
    )
    rows = [[case.shape, case.dtype, str(case.threads), *_row(case, results)] for case in results.cases]
    parts = [text, peers, shares, render.markdown_table(["", "dtype", "threads", *COLUMNS], rows)]
    if memory := _memory_rows(results):
        title = f"**Memory** of the cache, and what decoding adds to it at its peak, {results.options['dtypes'][0]}\n\n"
        parts.append(title + render.markdown_table(["context", "", "cache", "added"], memory))
    return parts


BENCH = Bench("decode", _measure, report, GOALS, partial(render.goal_figure, TITLE, GOALS))
run = partial(run_bench, BENCH)
