"""`nomax bench translate`: ReLUFormer against the same model with softmax, sparsemax and entmax, and against Marian."""

import copy
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from torch import Tensor

from nomax import _compat
from nomax.bench import harness, render
from nomax.bench.harness import Bench, Run, run_bench
from nomax.bench.render import times
from nomax.bench.results import CannotMeasureError, Case, Check, Goal, Results
from nomax.models import ReLUFormer, ReLUFormerConfig
from nomax.models.decoding import Hypothesis, beam_search
from nomax.nn import Attention
from nomax.ops.row_maps import row_map

INFERENCE, TRAINING, DECODING = "inference", "training", "decoding"
OURS, PLAIN, FREE, MARIAN = "ReLUFormer", "without penalties", "free attention", "Marian"
SOFTMAX, SPARSEMAX, ENTMAX = "softmax", "sparsemax", "entmax15"
PEERS = (SOFTMAX, SPARSEMAX, ENTMAX, MARIAN)

TOKENS = 2048  # of the source, and as many of the target, in a step or a forward pass, however long the documents are
WITH_ENTMAX = 512  # tokens: longer, the entmax package's matrices take minutes
BEAMS, SENTENCES, LENGTH_PENALTY = 4, 64, 0.6
SMOOTHING, WEIGHT = 0.1, 0.01  # of the labels, and of each penalty
NEVER = -30.0  # below all other logits of a new model, and finite: where nothing else is allowed, it may be chosen
TITLE = "ReLUFormer: speed relative to softmax, sparsemax, entmax and Marian"
COLUMNS = ("tokens/s", *(f"vs {peer}" for peer in PEERS), "penalties", "limit vs softmax")


def documents(length: int) -> str:
    """Return the name of a training or inference case."""
    return f"documents of {length:,}"


def sentences(length: int) -> str:
    """Return the name of a decoding case."""
    return f"sentences of {length:,}"


GOALS = (
    Goal("against softmax (SDPA), 512 tokens", "speedup", 1.1, TRAINING, SOFTMAX, (documents(512),)),
    Goal("against softmax (SDPA), 2,048 tokens", "speedup", 1.3, TRAINING, SOFTMAX, (documents(2048),)),
    Goal("against Hugging Face's Marian, 4 beams", "speedup", 3.0, DECODING, MARIAN, (sentences(32), sentences(128))),
    *(
        Goal(f"against the entmax package's {peer}", "speedup", 3.0, mode, peer, (documents(512), documents(2048)))
        for peer in (SPARSEMAX, ENTMAX)
        for mode in (INFERENCE, TRAINING)
    ),
)


@dataclass(frozen=True)
class Options(harness.ThreadedOptions):
    """Measure the speed of ReLUFormer: training, inference and decoding, each against a peer in the same run.

    training: tokens per second of ReLUFormer, its penalties included, against the same model with softmax on PyTorch's
    own attention, and with the entmax package's sparsemax and 1.5-entmax; with the same number of tokens per step
    whatever the length of the documents. A step is forward, label smoothing, backward and AdamW. inference: only the
    forward pass. decoding: beam search with 4 beams of 64 sentences, against MarianMTModel.generate of Hugging Face's
    transformers with the same numbers of layers, dimensions, heads and words, and random weights in both. Neither may
    end before the last token: both compute the same number of steps, and their output is checked. "free attention" is
    the same model without any attention: the upper limit.

    Correctness comes first: loss, gradients and scores must match float64 to a few roundings, otherwise nothing is
    timed, and the exit code is 1. Then all take turns, round after round, and the best round of each counts.

    Writes translate.json (every sample, machine, versions), translate.md (tables) and translate.svg (a figure). Ctrl-C
    stops it and keeps the measurements so far.
    """

    documents: tuple[int, ...] = (512, 2048)
    """Lengths of documents in tokens, for training and inference. Up to 512, sparsemax and entmax take part."""
    sentences: tuple[int, ...] = (32, 128)
    """Lengths of sentences in tokens, for decoding: of both the source and the translation."""
    modes: tuple[Literal["training", "inference", "decoding"], ...] = ("training", "inference", "decoding")
    """The work: training, inference and decoding, or some of them."""
    layers: int = 6
    """Layers of the encoder, and also of the decoder."""
    dim: int = 256
    """Width of the model; heads are 64 wide, and a feed-forward layer has four times as many slots."""
    vocabulary: int = 8000
    """Size of the vocabulary."""

    def validate(self) -> None:
        if unsuitable := [length for length in self.documents if TOKENS % length]:
            raise ValueError(f"--documents {unsuitable[0]}: lengths must divide {TOKENS:,}, the tokens of a step.")
        if min(self.sentences) < 2:
            raise ValueError("--sentences must be at least 2: the last token is the end.")
        if DECODING in self.modes:
            transformers()
        if self.with_entmax():
            row_map(SPARSEMAX)  # without the package, its error says how to get it

    def shrunk(self) -> Self:
        return dataclasses.replace(super().shrunk(), documents=(8, 16), sentences=self.sentences[:1])

    def with_entmax(self) -> bool:
        """Return whether sparsemax and entmax take part."""
        return bool(set(self.modes) - {DECODING}) and min(self.documents) <= WITH_ENTMAX

    def config(self) -> ReLUFormerConfig:
        """Return the model to measure."""
        longest = max(TOKENS, *self.sentences)
        if self.smoke:
            return ReLUFormerConfig(50, 32, 2, 1, 1, 64, dropout=0.0, max_length=longest)
        heads, slots = max(self.dim // 64, 1), 4 * self.dim
        sizes = (self.vocabulary, self.dim, heads, self.layers, self.layers, slots)
        return ReLUFormerConfig(*sizes, dropout=0.0, max_length=longest)


def _measure(options: Options, run: Run) -> Iterator[RenderableType]:
    run.note_versions(*["transformers"] * (DECODING in options.modes), *["entmax"] * options.with_entmax())
    config = options.config()
    run.results.facts["config"] = dataclasses.asdict(config)
    modes = [str(mode) for mode in options.modes if mode != DECODING]
    lengths = options.sentences if DECODING in options.modes else ()
    races = len(options.documents) * len(modes) + len(lengths)
    run.expect(bool(modes) + len(lengths) + races * len(options.threads))
    if modes:
        yield from _measure_documents(options, run, config, modes)
    for length in lengths:
        yield _measure_sentences(options, run, config, length)


def _measure_documents(
    options: Options, run: Run, config: ReLUFormerConfig, modes: list[str]
) -> Iterator[RenderableType]:
    models = make_models(config)
    torch.manual_seed(0)
    size = 16 if options.smoke else 96
    with run.checking("model", "float32", OURS) as check:
        compare(check, models[OURS], _text(config, 2, size), _text(config, 2, size + 1))
    tokens = 2 * max(options.documents) if options.smoke else TOKENS
    for length in options.documents if check.right else ():
        source, target = _text(config, tokens // length, length), _text(config, tokens // length, length + 1)
        for threads in options.threads:
            for mode in modes:
                calls: dict[str, Callable[[], Any]] = {}
                for name, model in models.items():
                    if name in (SPARSEMAX, ENTMAX) and length > WITH_ENTMAX:
                        continue
                    if mode == TRAINING:
                        calls[name] = training(name, model, source, target)
                    elif name != PLAIN:  # whose inference is the same
                        calls[name] = inference(model, source, target)
                run.race(Case(documents(length), "float32", mode, threads, ours=(OURS,), items=tokens), calls)
        yield _table(documents(length), run.results)


def _measure_sentences(options: Options, run: Run, config: ReLUFormerConfig, length: int) -> RenderableType:
    shape = sentences(length)
    torch.manual_seed(0)
    model = Endless.from_config(config).eval().requires_grad_(False)
    source = _text(config, 4 if options.smoke else SENTENCES, length)
    with run.checking(shape, "float32", OURS) as check:
        compare_scores(check, model, source[:4], length)
    peer = generation(marian(config), source, length)
    for threads in options.threads if check.right else ():
        case = Case(shape, "float32", DECODING, threads, ours=(OURS,), items=source.numel())
        calls: dict[str, Callable[[], Any]] = {OURS: translation(model, source, length)}
        with case.attempting(MARIAN):
            check_lengths(peer(), length, config)
            calls[MARIAN] = peer
        run.race(case, calls)
    return _table(shape, run.results)


def _text(config: ReLUFormerConfig, count: int, length: int) -> Tensor:
    """Return random tokens, none of them special."""
    return torch.randint(3, config.vocabulary, (count, length))


def make_models(config: ReLUFormerConfig) -> dict[str, ReLUFormer]:
    """Return the same model with each kind of attention; the weights that they share are equal."""
    torch.manual_seed(0)
    ours = ReLUFormer.from_config(config)
    models = {OURS: ours, PLAIN: ours}
    for phi in (SOFTMAX, SPARSEMAX, ENTMAX):
        models[phi] = ReLUFormer(**{**vars(config), "phi": phi, "learned_gain": None})
        own = models[phi].state_dict()
        models[phi].load_state_dict({name: weight for name, weight in ours.state_dict().items() if name in own})
    models[FREE] = copy.deepcopy(ours)
    for attention in _attentions(models[FREE]):
        attention._attend = lambda query, key, value, *rest, **settings: (value, None)  # type: ignore[method-assign]
    return models


def _attentions(model: ReLUFormer) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def training(name: str, model: ReLUFormer, source: Tensor, target: Tensor) -> Callable[[], None]:
    """Return a step: forward with label smoothing, and with the penalties for ReLUFormer, backward, and AdamW."""
    # A rate of zero: many steps on random tokens would only make the numbers strange.
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1, fused=True)

    def step() -> None:
        _loss(model, source, target, penalised=name == OURS).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def _loss(model: ReLUFormer, source: Tensor, target: Tensor, *, penalised: bool) -> Tensor:
    """Return the smoothed cross entropy of target's tokens after the first, and the penalties."""
    logits: Any = model(source, target[:, :-1], penalties=penalised)
    total: Tensor = torch.zeros(())
    if penalised:
        logits, penalties = logits
        total = WEIGHT * (penalties.normalisation + penalties.entropy)
    return total + F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=SMOOTHING)


def inference(model: ReLUFormer, source: Tensor, target: Tensor) -> Callable[[], None]:
    """Return a call that computes the logits of every token, given those before."""

    def call() -> None:
        with torch.inference_mode():
            model(source, target[:, :-1])

    return call


def compare(check: Check, model: ReLUFormer, source: Tensor, target: Tensor) -> None:
    """Compare loss and gradients, including penalties, with float64 and with plain PyTorch."""
    reference = copy.deepcopy(model)
    for attention in _attentions(reference):
        attention.backend = "reference"
    models = (model, reference, copy.deepcopy(reference).double())
    mine, plain, exact = (_gradients(each, source, target) for each in models)
    check.compare(mine, plain, exact, roundings=4)  # of thousands of sums, some round better there by chance


def _gradients(model: ReLUFormer, source: Tensor, target: Tensor) -> dict[str, Tensor]:
    total = _loss(model, source, target, penalised=True)
    weights = {
        "gradient of the embedding": model.embedding.weight,
        **{f"gradient of {name}": weight for name, weight in _attentions(model)[-1].named_parameters()},
    }
    gradients = torch.autograd.grad(total, list(weights.values()))
    return {"loss": total.detach().double(), **dict(zip(weights, (g.double() for g in gradients), strict=True))}


class Endless(ReLUFormer):
    """A ReLUFormer whose translations end at a fixed length, like min_new_tokens in Hugging Face's generate."""

    def decode(self, *arguments: Any, **settings: Any) -> Tensor:
        logits = super().decode(*arguments, **settings)
        logits[..., self.config.end] = NEVER
        return logits


def translation(model: ReLUFormer, source: Tensor, tokens: int) -> Callable[[], list[list[Hypothesis]]]:
    """Return a beam search of `tokens` tokens, the last of which is `end`."""
    return lambda: beam_search(model, source, beams=BEAMS, length_penalty=LENGTH_PENALTY, max_length=tokens)


def compare_scores(check: Check, model: ReLUFormer, source: Tensor, tokens: int) -> None:
    """Check the length of translations, and compare their scores with those of the whole texts without a cache."""
    config, translations = model.config, translation(model, source, tokens)()
    lengths = {len(hypothesis.tokens) + 1 for hypotheses in translations for hypothesis in hypotheses}
    if lengths != {tokens}:
        raise ValueError(f"translations of {sorted(lengths)} tokens instead of {tokens}")
    texts = torch.tensor([[config.begin, *hypotheses[0].tokens, config.end] for hypotheses in translations])
    with torch.inference_mode():
        logits = model.decode(texts[:, :-1], model.encode(source)).double()
        logits[..., [config.padding, config.begin]] = -torch.inf
        log_p = logits.log_softmax(2).gather(2, texts[:, 1:, None])[..., 0]
    exact = log_p.sum(1) / ((5 + tokens) / 6) ** LENGTH_PENALTY
    scores = torch.tensor([hypotheses[0].score for hypotheses in translations], dtype=torch.float64)
    check.bound("score", float((scores - exact).abs().max()), 1e-4 * float(exact.abs().max()))


def transformers() -> Any:
    """Import Hugging Face's package with a working torchvision, since it imports any that it finds."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("the peer is missing: pip install transformers")
    if importlib.util.find_spec("torchvision") is not None:
        _compat.torchvision()
    return importlib.import_module("transformers")


def marian(config: ReLUFormerConfig) -> Any:
    """Return Hugging Face's translation model in the shape of a ReLUFormer, with random weights."""
    package = transformers()
    torch.manual_seed(0)
    settings: dict[str, int] = {}
    for side in ("encoder", "decoder"):
        sizes = {"layers": getattr(config, f"{side}_layers"), "attention_heads": config.heads, "ffn_dim": config.slots}
        settings |= {f"{side}_{name}": size for name, size in sizes.items()}
    shape = package.MarianConfig(
        vocab_size=config.vocabulary,
        d_model=config.dim,
        activation_function="relu",
        max_position_embeddings=config.max_length,
        scale_embedding=True,
        pad_token_id=config.padding,
        bos_token_id=config.begin,
        eos_token_id=config.end,
        decoder_start_token_id=config.begin,
        forced_eos_token_id=config.end,
        **settings,
    )
    return package.MarianMTModel(shape).eval()


def generation(model: Any, source: Tensor, tokens: int) -> Callable[[], Tensor]:
    """Return Hugging Face's beam search of the same number of tokens, the last of which is forced to be the end."""
    lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens, "length_penalty": LENGTH_PENALTY}
    settings = {"attention_mask": torch.ones_like(source), "num_beams": BEAMS, "do_sample": False, "use_cache": True}

    def call() -> Tensor:
        with torch.inference_mode():
            translations: Tensor = model.generate(source, **settings, **lengths)
        return translations

    return call


def check_lengths(translations: Tensor, tokens: int, config: ReLUFormerConfig) -> None:
    """Raise an error if `generate` did not return what was asked for."""
    if translations.shape[1] != tokens + 1 or not (translations[:, -1] == config.end).all():
        shape = list(translations.shape)
        raise CannotMeasureError(f"its translations are {shape}, not {tokens} tokens after the first, the end the last")
    if ((translations[:, 1:-1] == config.end) | (translations[:, 1:-1] == config.padding)).any():
        raise CannotMeasureError("some of its translations end too early")


def _row(case: Case) -> list[str]:
    """Return our tokens per second, others' times over ours, the cost of penalties, and the gain of free attention."""
    without = case.speedup(OURS, PLAIN)
    return [
        render.number(case.per_second(OURS)),
        *(times(case.speedup(OURS, peer)) for peer in PEERS),
        "–" if without is None else f"{1 / without - 1:+.0%}",
        times(case.speedup(FREE, SOFTMAX)),
    ]


def _table(shape: str, results: Results) -> RenderableType:
    rows = [[case.mode, str(case.threads), *_row(case)] for case in results.cases if case.shape == shape]
    return render.terminal_table(["mode", "thr.", *COLUMNS], rows, f"{shape} tokens", words=1)


def report(results: Results) -> list[str]:
    """Return the table for the README, with the conditions of the measurement."""
    config = results.facts["config"]
    parts = [
        f"ReLUFormer with {config['encoder_layers']}+{config['decoder_layers']} layers, dim {config['dim']}, "
        f"{config['heads']} heads, {config['slots']:,} slots, {config['vocabulary']:,} tokens, float32, on "
        f"{render.measured_on(results, 'entmax', 'transformers')}. {render.best_of(results)}",
        f"training, inference: {TOKENS:,} tokens of source and as many of target, the same model with another φ. A "
        "step is forward, label smoothing, backward and AdamW; “penalties” is what ReLUFormer's two add to its own "
        "step, and they are in its time. “limit” is how many times as fast as softmax the model would be if attention "
        "took no time.",
    ]
    if any(case.mode == DECODING for case in results.cases):
        parts.append(
            f"decoding: {SENTENCES} sentences, {BEAMS} beams, against `MarianMTModel.generate` with the same number of "
            "layers, heads, dimensions and words, random weights in both. The last token is the end and none before "
            "is: both compute one step per token, and what they return was checked for it. Tokens are those of the "
            "translations."
        )
    rows = [[case.shape, case.mode, str(case.threads), *_row(case)] for case in results.cases]
    return [*parts, render.markdown_table(["tokens", "mode", "threads", *COLUMNS], rows)]


BENCH = Bench("translate", _measure, report, GOALS, partial(render.goal_figure, TITLE, GOALS))
run = partial(run_bench, BENCH)
