"""Measurements of a model after its training, on the test split; of trials, on the validation split.

Of images: accuracy and loss, which the training itself ends with; ten-shot probes, and accuracy among some labels; and
`rows` and `blocks`, as of text.
Of text:

loss      the negative log-likelihood of a token, in nats, without label smoothing and penalties: always
          and, of translations, `source_use`
bleu      sacrebleu's BLEU and chrF of greedy translations
rows      how attention spreads: entropy of rows, share of weights that are zero, sum of rows; all attentions
memory    what the feed-forward layers add: see `memories`
distance  where the encoder looks: see `distances`
blocks    which blocks of a long cache a bound could skip, and how long that takes: nomax.study.engine.blocks;
          long-blocks for a very long one
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nomax import data
from nomax.data.images.batches import evaluation_batches
from nomax.data.source import part
from nomax.data.text import Corpus, Example
from nomax.data.text.batches import pad
from nomax.evaluate import TrainedImageModel, TrainedTextModel, classify, fewshot, load, load_text, row_statistics
from nomax.evaluate.accuracy import load_subset
from nomax.evaluate.attention_weights import attention_weights
from nomax.evaluate.fewshot import features
from nomax.evaluate.probe import probe_sets
from nomax.evaluate.translation import Search, nll, quality, references, translate_corpus
from nomax.study.engine.blocks import LONG, image_blocks, text_blocks
from nomax.study.engine.experiment import ImageExperiment, TextExperiment
from nomax.train.console import Stop
from nomax.train.text import data as text_data

SHOTS = 10
TOP = 0.002  # the paper's share of entries that hold most of softmax's weight
FAR = 64  # tokens: a key farther away than this is distant
FREQUENT = 30  # so many of the most frequent pieces: "the", commas, and parts of words where pieces are few
GREEDY = Search(beams=1)
EXAMPLES = 24  # that are looked into with all of their weights
LOOKED = 64  # images, for the same


def measure_images(
    run: ImageExperiment, folder: Path, training: Mapping[str, Any], device: str, stop: Stop
) -> dict[str, Any] | None:
    """Return all that is measured, by column; None if asked to stop. `training` is its result.json."""
    results = {"accuracy": training["test_accuracy"], "loss": training["test_loss"]}
    if run.subset is None and not run.probes and not run.measures:
        return results
    trained = load(folder, device)
    if run.subset is not None:
        results["subset_accuracy"] = _subset_accuracy(run, trained)
    probes: dict[str, float] = {}
    for name in run.probes:
        if stop.asked:  # the next start does them all: they are short beside the training
            return None
        probes[name.partition("=")[0]] = ten_shot(trained, name, run.probe_images)
    if probes:
        results |= {"probes": probes, "ten_shot": float(np.mean(list(probes.values())))}
    if run.measures:
        test = data.load(run.config.data, "test", on_error=run.config.on_error, held_out=run.config.held_out)
        found = [IMAGE_MEASURES[name](trained, test) for name in run.measures]
        results["measured"] = {name: value for each in found for name, value in each.items()}
    return results


def ten_shot(trained: TrainedImageModel, name: str, test_images: int = 0) -> float:
    """Return the ten-shot accuracy on a data set, the mean over big_vision's three choices of the shots."""
    ((train, test),) = probe_sets([name]).values()
    places = fewshot.needed(train.labels, (SHOTS,), fewshot.SEEDS)
    train_x, _ = features(trained.model, part(train, places))
    test_x, test_y = features(trained.model, _some(test, test_images))
    accuracies = fewshot.accuracies(train_x, train.labels, test_x, test_y, shots=(SHOTS,), places=places)
    return float(accuracies.mean())


def _subset_accuracy(run: ImageExperiment, trained: TrainedImageModel) -> float | None:
    config = run.config
    test = data.load(config.data, "test", on_error=config.on_error, held_out=config.held_out)
    source = _some(test, config.test_images)
    labels = load_subset(run.subset or "", source.classes)
    score = classify(trained.model, source, trained.transform, labels)[1]
    return score.accuracy if score is not None and score.images else None


def _some(source: data.Source, number: int) -> data.Source:
    """Return this many images of a source, spread evenly; all of them for 0."""
    if not 0 < number < len(source):
        return source
    return part(source, np.linspace(0, len(source) - 1, number).astype(np.int64))


def measure_text(run: TextExperiment, folder: Path, device: str, stop: Stop) -> dict[str, Any] | None:
    """Return all that is measured, by column; None if asked to stop."""
    trained = load_text(folder, device)
    corpus = text_data.of_run(run.config, run.split)
    examples = text_data.examples(run.config, corpus, trained.tokenizer)
    total, count = nll(trained.model, run.config, examples)
    results: dict[str, Any] = {"loss": total / count, "measured": {}}
    if trained.translates:
        results["measured"]["source_use"] = source_use(trained, examples, results["loss"])
    some = first(corpus, run.test_pairs)
    for name in run.measures:
        if stop.asked:  # the next start does them all: they are short beside the training
            return None
        results["measured"] |= TEXT_MEASURES[name](trained, some)
    return results


def first(corpus: Corpus, pairs: int) -> Corpus:
    """Return the first documents of a corpus, as many as hold this many pairs; all of them for 0."""
    chosen, count = [], 0
    for document in corpus.documents:
        if pairs and count >= pairs:
            break
        chosen.append(document)
        count += len(document.pairs)
    return Corpus(tuple(chosen), corpus.languages, corpus.title)


def source_use(trained: TrainedTextModel, examples: Sequence[Example], loss: float) -> float:
    """Return how much the loss rises if each example gets the source of another, half of the test split away.

    A model whose loss does not rise does not translate, however well it continues a target.
    """
    half = len(examples) // 2
    others = [replace(each, source=examples[i - half].source) for i, each in enumerate(examples)]
    total, count = nll(trained.model, trained.config, others)
    return total / count - loss


def bleu(trained: TrainedTextModel, corpus: Corpus) -> dict[str, float]:
    """Return BLEU and chrF of the segments."""
    translation = translate_corpus(trained, corpus, GREEDY)
    scores = quality(translation.segments, references(corpus)[0])
    return {"bleu": scores.bleu, "chrf": scores.chrf}


@torch.inference_mode()
def rows(trained: TrainedTextModel, corpus: Corpus) -> dict[str, float]:
    """Average over all rows of all attentions: the entropy of a row's weights divided by their sum, and so on.

    A row of nothing but zeros has no entropy; it counts as empty, and its zeros count among the zeros.
    """
    entropies, sums, zeros, empty, count, seen = 0.0, 0.0, 0, 0, 0, 0
    for weights, visible, _ in _looks(trained, corpus):
        total = weights.sum(-1)
        some = total.abs() > 0
        share = weights / torch.where(some, total, 1).unsqueeze(-1)
        entropies += float(torch.special.entr(share.clamp(min=0)).sum(-1)[some].sum())
        sums += float(total.sum())
        zeros += int(((weights == 0) & visible).sum())
        seen += int(visible.sum()) * weights.shape[0]
        empty += int((~some).sum())
        count += total.numel()
    full = max(count - empty, 1)
    return {"entropy": entropies / full, "row_sum": sums / count, "zeros": zeros / seen, "empty_rows": empty / count}


@torch.inference_mode()
def memories(trained: TrainedTextModel, corpus: Corpus) -> dict[str, float]:
    """Average over the feed-forward layers, each seen by the tokens of the test examples.

    variance_ratio: the variance of what a memory adds, over that of the residual stream to which it is added.
    top_share: of the weights of all tokens and slots, the part that the largest 0.2 % hold.
    anisotropy: the mean cosine of two different values of the memory.
    """
    model = trained.model
    statistics: dict[str, list[float]] = {"variance_ratio": [], "top_share": [], "anisotropy": []}
    for layer in (*model.encoder, *model.decoder):
        kept: dict[str, list[Tensor]] = {"residual": [], "read": [], "added": []}

        def residual(module: Any, given: Any, kept: dict[str, list[Tensor]] = kept) -> None:
            kept["residual"].append(given[0].flatten(0, -2))

        def look(module: Any, given: Any, out: Tensor, kept: dict[str, list[Tensor]] = kept) -> None:
            kept["read"].append(given[0].flatten(0, -2))
            kept["added"].append(out.flatten(0, -2))

        with ExitStack() as stack:
            stack.callback(layer.memory.register_forward_hook(look).remove)
            if not layer.post:
                stack.callback(layer.memory_norm.register_forward_pre_hook(residual).remove)
            for example in _examples(trained, corpus):
                _pass(trained, example)
        read, added = (torch.cat(kept[name]) for name in ("read", "added"))
        beside = torch.cat(kept["residual"]) if kept["residual"] else read
        weights = layer.memory.weights(read).flatten().abs()
        top = weights.topk(max(1, round(TOP * len(weights)))).values.sum()
        statistics["variance_ratio"].append(float(added.var(-1).mean() / beside.var(-1).mean()))
        statistics["top_share"].append(float(top / weights.sum().clamp(min=1e-12)))
        statistics["anisotropy"].append(anisotropy(layer.memory.values))
    return {name: fmean(each) for name, each in statistics.items()}


def anisotropy(values: Tensor) -> float:
    """Return the mean cosine of two different rows of values [slots, dim]."""
    count = len(values)
    if count < 2:
        return math.nan
    unit = torch.nn.functional.normalize(values.double(), dim=1)
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))


@torch.inference_mode()
def distances(trained: TrainedTextModel, corpus: Corpus) -> dict[str, float]:
    """Return where the encoder's attention (of a language model the decoder's) looks.

    Means over the rows that are not all zero, then over examples and layers.

    distant: the share of a row's weight on keys that are more than 64 tokens away; sequences that are shorter than
        twice that are left out.
    frequent: the share on the 30 most frequent pieces of these examples, which stand in for commas and stop words.
    frequent_keys: how many of the keys are such pieces, which would be the share of attention that looks everywhere.
    """
    examples = _examples(trained, corpus)
    counts = Counter(token for example in examples for token in (example.source or example.target))
    common = torch.tensor([token for token, _ in counts.most_common(FREQUENT)])
    distant: list[float] = []
    frequent: list[float] = []
    share: list[float] = []
    for weights, _, tokens in _looks(trained, corpus, own=True):
        total = weights.sum(-1)
        some = total > 0
        part = weights / torch.where(some, total, 1).unsqueeze(-1)
        is_common = torch.isin(tokens, common.to(tokens))
        frequent.append(float(part[..., is_common].sum(-1)[some].mean()) if some.any() else math.nan)
        share.append(float(is_common.double().mean()))
        if len(tokens) > 2 * FAR:
            place = torch.arange(len(tokens), device=tokens.device)
            far = (place[:, None] - place).abs() > FAR
            distant.append(float((part * far).sum(-1)[some].mean()) if some.any() else math.nan)
    shares = {"distant": distant, "frequent": frequent, "frequent_keys": share}
    return {name: fmean(known) for name, each in shares.items() if (known := [v for v in each if v == v])}


def image_rows(trained: TrainedImageModel, test: data.Source) -> dict[str, float]:
    """Average over the heads of all layers what `rows` measures of text, on some test images."""
    with evaluation_batches(_some(test, LOOKED), trained.transform, 8) as batches:
        heads = row_statistics(trained.model, (image for images, _ in batches for image in images))
    columns = {"row_sum": "row_sum", "zeros": "zeros", "empty_rows": "empty", "entropy": "entropy"}
    means = {name: fmean(getattr(head, column) for head in heads) for name, column in columns.items()}
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


IMAGE_MEASURES: Mapping[str, Callable[[TrainedImageModel, data.Source], dict[str, float]]] = {
    "rows": image_rows,
    "blocks": image_blocks,
}
TEXT_MEASURES: Mapping[str, Callable[[TrainedTextModel, Corpus], dict[str, float]]] = {
    "bleu": bleu,
    "rows": rows,
    "memory": memories,
    "distance": distances,
    "blocks": text_blocks,
    "long-blocks": partial(text_blocks, lengths=LONG),
}


def _examples(trained: TrainedTextModel, corpus: Corpus) -> list[Example]:
    """Return the first examples, as the model is trained on them."""
    return text_data.examples(trained.config, corpus, trained.tokenizer)[:EXAMPLES]


def _pass(trained: TrainedTextModel, example: Example) -> None:
    """Pass one example through the model."""
    model, device = trained.model, trained.model.embedding.weight.device
    target = pad([[model.config.begin, *example.target]], device)
    model(*([pad([[*example.source, model.config.end]], device)] if trained.translates else []), target)


def _looks(trained: TrainedTextModel, corpus: Corpus, own: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for every attention and example: weights [heads, queries, keys], which are visible, and the keys' tokens.

    own: only the encoder's, or those of a language model.
    """
    model = trained.model
    first = "encoder" if trained.translates else "decoder"
    for example in _examples(trained, corpus):
        for look in attention_weights(model, example):
            if own and look.part != first:
                continue
            own_text = look.part == "decoder"
            read = [model.config.begin, *example.target] if own_text else [*example.source, model.config.end]
            yield look.weights, look.visible, torch.tensor(read, device=look.weights.device)
