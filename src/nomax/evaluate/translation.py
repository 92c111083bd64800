"""Translations of a corpus, their BLEU and chrF, and the perplexity of the text itself."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nomax.data.text import Corpus, Example, Tokenizer
from nomax.data.text.batches import evaluation_batches
from nomax.evaluate.translator import SEARCH, Search, Start, Translator, joined, silent
from nomax.models import ReLUFormer
from nomax.train import TextConfig, text_data
from nomax.train.text import measure

__all__ = [
    "Likelihood",
    "Quality",
    "Search",
    "Translations",
    "likelihood",
    "nll",
    "quality",
    "references",
    "translate_corpus",
]


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
    stretches: int
    """What was translated at once: single segments, or several of a document."""
    uneven: int
    """Of these, those that came back with another number of segments, and were translated again in smaller parts."""


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


def translate_corpus(
    model: ReLUFormer,
    tokenizer: Tokenizer,
    config: TextConfig,
    corpus: Corpus,
    how: Search = SEARCH,
    start: Start = silent,
) -> Translations:
    """Translate the source side of a corpus as `nomax translate --split` does, with --documents where the run has them.

    What the model is shown does not depend on the target side.
    """
    translator = Translator(model, tokenizer, how, whole=config.documents)
    sources = [[translator.segment(pair.source) for pair in document.pairs] for document in corpus.documents]
    found = translator.translate(sources, start)
    segments = [text for texts in found for text in texts]
    return Translations(segments, [joined(texts) for texts in found], translator.stretches, translator.uneven)


def references(corpus: Corpus) -> tuple[list[str], list[str]]:
    """What translations are compared with: the target of each pair, and of each document."""
    segments = [pair.target for pair in corpus.pairs()]
    return segments, [joined([pair.target for pair in document.pairs]) for document in corpus.documents]


@torch.inference_mode()
def likelihood(
    model: ReLUFormer,
    tokenizer: Tokenizer,
    config: TextConfig,
    corpus: Corpus,
    tokens: int = 4096,
    start: Start = silent,
) -> Likelihood:
    """How likely the model finds the target side of a corpus, cut as in its training."""
    examples = text_data.examples(config, corpus, tokenizer)
    total, count = nll(model, config, examples, tokens, start(len(examples)))
    return Likelihood(total, count, sum(len(pair.target) + 1 for pair in corpus.pairs()))


@torch.inference_mode()
def nll(
    model: ReLUFormer,
    config: TextConfig,
    examples: Sequence[Example],
    tokens: int = 4096,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[float, int]:
    """The negative log-likelihood of all tokens of the examples' targets, in nats, and how many these are."""
    config = replace(config, normalisation_penalty=0.0, entropy_penalty=0.0)
    total, count = 0.0, 0
    device = next(model.parameters()).device
    most = max(tokens, max(example.length for example in examples))
    for batch in evaluation_batches(examples, most, device=device):
        total += float(measure(config, model, batch)["nll"].double())
        count += batch.tokens
        report(len(batch.numbers))
    return total, count


def _library() -> Any:
    try:
        import sacrebleu
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install sacrebleu") from error
    return sacrebleu
