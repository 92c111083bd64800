"""Translations of a corpus, their BLEU and chrF, and the perplexity of the text itself."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nomax.data.text import Corpus, Example, Tokenizer, TokenOrder
from nomax.data.text.batches import evaluation_batches, pad
from nomax.models import ReLUFormer
from nomax.models.search import search
from nomax.train import TextConfig, text_data
from nomax.train.text import measure

Tokens = list[int]
Report = Callable[[int], None]


@dataclass(frozen=True)
class Search:
    """How translations are searched for, and how many tokens of sources pass through the model at a time."""

    beams: int = 4
    length_penalty: float = 0.6
    tokens: int = 4096


SEARCH = Search()


@dataclass(frozen=True)
class Quality:
    """sacrebleu's BLEU and chrF of some texts, with the signatures that say how they were computed."""

    bleu: float
    chrf: float
    texts: int
    bleu_signature: str
    chrf_signature: str


@dataclass(frozen=True)
class Translations:
    """A translated corpus: a text for each of its pairs, in their order, and for each of its documents."""

    segments: list[str]
    documents: list[str]
    examples: int
    aligned: int
    """Of the examples, those that came back with as many segments as they had. In others the segments that are too
    many are counted to the last pair, and those that are missing are empty."""


@dataclass(frozen=True)
class Likelihood:
    """How well a model knows a text: the negative log-likelihood of all of its tokens, in nats."""

    nll: float
    tokens: int
    characters: int
    """With one for the end of each segment."""

    @property
    def per_token(self) -> float:
        """Mean negative log-likelihood of a token, whose exp is the perplexity."""
        return self.nll / self.tokens

    @property
    def bits_per_character(self) -> float:
        """What models of different vocabularies can be compared by."""
        return self.nll / self.characters / math.log(2)


def quality(hypotheses: Sequence[str], references: Sequence[str]) -> Quality:
    """BLEU and chrF of translations, each with one reference."""
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses):,} hypotheses and {len(references):,} references: as many, and some.")
    metrics = _library().metrics
    bleu, chrf = metrics.BLEU(), metrics.CHRF()
    found = [metric.corpus_score(list(hypotheses), [list(references)]).score for metric in (bleu, chrf)]
    return Quality(found[0], found[1], len(references), str(bleu.get_signature()), str(chrf.get_signature()))


def translate(
    model: ReLUFormer, sources: Sequence[Tokens], how: Search = SEARCH, report: Report = lambda done: None
) -> list[Tokens]:
    """The best translation of each source, in their order; of nothing, nothing. Tokens are without begin and end."""
    found: list[Tokens] = [[] for _ in sources]
    chosen = [number for number, source in enumerate(sources) if source]
    report(len(sources) - len(chosen))
    if not chosen:
        return found
    lengths = [len(sources[number]) + 1 for number in chosen]
    order = TokenOrder(lengths, max(how.tokens, max(lengths)), shuffle=False)
    device = next(model.parameters()).device
    for step in range(order.steps_per_epoch):
        numbers = [chosen[place] for place in order.batch(step)]
        source = pad([[*sources[number], model.config.end] for number in numbers], device)
        best = search(model, source, beams=how.beams, length_penalty=how.length_penalty)
        for number, hypotheses in zip(numbers, best, strict=True):
            found[number] = hypotheses[0].tokens
        report(len(numbers))
    return found


def translate_corpus(
    model: ReLUFormer,
    tokenizer: Tokenizer,
    config: TextConfig,
    corpus: Corpus,
    how: Search = SEARCH,
    report: Report = lambda done: None,
) -> Translations:
    """Translate the source side of a corpus: pair by pair, or in stretches of documents where the run has them."""
    examples = examples_of(config, corpus, tokenizer)
    found = translate(model, [example.source for example in examples], how, report)
    parts: dict[tuple[int, int], list[str]] = {}
    documents: list[list[str]] = [[] for _ in corpus.documents]
    aligned = 0
    for example, tokens in zip(examples, found, strict=True):
        texts = [" ".join(text.split()) for text in tokenizer.segments(tokens)]
        documents[example.places[0][0]] += texts
        aligned += len(texts) == len(example.places)
        for place, text in zip(example.places, _fitted(texts, len(example.places)), strict=True):
            parts.setdefault(place, []).append(text)
    segments = [_joined(parts[place]) for place in sorted(parts)]
    return Translations(segments, [_joined(texts) for texts in documents], len(examples), aligned)


def references(corpus: Corpus) -> tuple[list[str], list[str]]:
    """What translations are compared with: the target of each pair, and of each document."""
    segments = [pair.target for pair in corpus.pairs()]
    return segments, [_joined([pair.target for pair in document.pairs]) for document in corpus.documents]


@torch.inference_mode()
def likelihood(
    model: ReLUFormer,
    tokenizer: Tokenizer,
    config: TextConfig,
    corpus: Corpus,
    tokens: int = 4096,
    report: Report = lambda done: None,
) -> Likelihood:
    """How likely the model finds the target side of a corpus, cut as in its training."""
    examples = text_data.examples(config, corpus, tokenizer)
    config = replace(config, normalisation_penalty=0.0, entropy_penalty=0.0)
    total, count = 0.0, 0
    device = next(model.parameters()).device
    most = max(tokens, max(example.length for example in examples))
    for batch in evaluation_batches(examples, most, device=device):
        total += float(measure(config, model, batch)["nll"].double())
        count += batch.tokens
        report(len(batch.numbers))
    return Likelihood(total, count, sum(len(pair.target) + 1 for pair in corpus.pairs()))


def examples_of(config: TextConfig, corpus: Corpus, tokenizer: Tokenizer) -> list[Example]:
    """What is translated at once; it ends where a document ends."""
    return text_data.examples(config, corpus, tokenizer, join=False)


def _fitted(texts: list[str], count: int) -> list[str]:
    texts = texts + [""] * (count - len(texts))
    return [*texts[: count - 1], _joined(texts[count - 1 :])]


def _joined(texts: Sequence[str]) -> str:
    return " ".join(text for text in texts if text)


def _library() -> Any:
    try:
        import sacrebleu
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install nomax[text]") from error
    return sacrebleu
