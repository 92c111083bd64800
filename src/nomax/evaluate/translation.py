"""Translate texts, and measure BLEU, chrF and perplexity.

Texts are translated in batches, packed if the model knows documents, and split if they are too long.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nomax.data.text import Corpus, Example, Tokenizer, TokenOrder
from nomax.data.text.batches import evaluation_batches, pad
from nomax.evaluate.runs import TrainedTextModel
from nomax.models import ReLUFormer
from nomax.models.decoding import LARGEST_PENALTY, beam_search
from nomax.train import TextConfig
from nomax.train.text import data as text_data
from nomax.train.text.task import measure

# The share of max_length that the source of a stretch of a document may fill. Its translation can be longer and must
# fit, too: of the stretches of bible-en-es in 256 tokens, a fifth would not fit if sources filled all; with 3/4 all do.
SHARE = 0.75
TOKENS = 64  # per unit of --batch-size

# Where to split a segment that is too long: after a sentence, else after a word.
_CUTS = (re.compile(r"(?<=[.!?…;:])\s+"), re.compile(r"\s+"))

Tokens = list[int]
Segment = list[Tokens]  # the parts of a segment: one, unless it had to be cut
SegmentedDocument = list[Segment]
Report = Callable[[int], None]  # called with the number just done
Start = Callable[[int], Report]  # called with the total


def silent(total: int) -> Report:
    """Return a report that shows no progress."""
    return lambda done: None


@dataclass(frozen=True)
class Search:
    """Settings of the beam search, and the number of source tokens that pass through the model at a time."""

    beams: int = 4
    length_penalty: float = 0.6
    tokens: int = 4096


SEARCH = Search()


def search_settings(beams: int, length_penalty: float, batch_size: int) -> Search:
    """Return the settings for these options; a ValueError names the options that are out of range."""
    if beams < 1 or batch_size < 1 or not 0 <= length_penalty <= LARGEST_PENALTY:
        raise ValueError(
            f"--beams {beams} and --batch-size {batch_size} must be at least 1, --length-penalty "
            f"{length_penalty} from 0 to {LARGEST_PENALTY}."
        )
    return Search(beams, length_penalty, TOKENS * batch_size)


def translate(model: ReLUFormer, sources: Sequence[Tokens], search: Search = SEARCH) -> Iterator[tuple[int, Tokens]]:
    """Yield the number and the best translation of each source, as they are found, without begin and end tokens."""
    if not sources:
        return
    lengths = [len(source) + 1 for source in sources]
    order = TokenOrder(lengths, max(search.tokens, max(lengths)), shuffle=False)
    device = next(model.parameters()).device
    for step in range(order.steps_per_epoch):
        numbers = [int(number) for number in order.batch(step)]
        source = pad([[*sources[number], model.config.end] for number in numbers], device)
        best = beam_search(model, source, beams=search.beams, length_penalty=search.length_penalty)
        for number, hypotheses in zip(numbers, best, strict=True):
            yield number, hypotheses[0].tokens


class TooLongError(ValueError):
    """A text has more tokens than the model can read."""


class Translator:
    """Translate documents, which are lists of segments. whole: as many segments at once as fit, else one by one."""

    def __init__(self, model: ReLUFormer, tokenizer: Tokenizer, search: Search = SEARCH, whole: bool = False) -> None:
        self.model, self.tokenizer, self.search, self.whole = model, tokenizer, search, whole
        self.longest = model.config.max_length - 1  # leaves room for the end
        self.room = int(SHARE * model.config.max_length)
        self.stretches, self.uneven = 0, 0

    def segment(self, text: str, split: bool = True) -> Segment:
        """Encode a text as the model reads it. One that is too long is split after sentences or words, or an error."""
        text = " ".join(text.split())
        tokens = self.tokenizer.encode(text)
        if len(tokens) <= self.longest:
            return [tokens]
        if not split:
            limit = f"more than the {self.longest:,} of this model"
            raise TooLongError(f"has {len(tokens):,} tokens, {limit}: “{text[:50]}…”.")
        return [self.tokenizer.encode(part) for part in self._cut(text, 0)]

    def translate(self, documents: Sequence[SegmentedDocument], start: Start = silent) -> list[list[str]]:
        """Return a text for each segment of each document; an empty segment gives an empty text.

        A stretch is what is translated at once. If it comes back with another number of segments, it is `uneven`, and
        its halves are translated again, down to single segments.
        """
        parts = [part for document in documents for segment in document for part in segment]
        texts = ["" for _ in parts]
        stretches = self._packed(documents)
        report = start(sum(map(len, stretches)))
        self.stretches += len(stretches)
        uneven = self._round(parts, stretches, texts, report)
        self.uneven += len(uneven)
        while uneven:
            uneven = self._round(parts, [half for each in uneven for half in _halves(each)], texts, report)
        in_order = iter(texts)
        return [[joined([next(in_order) for _ in segment]) for segment in document] for document in documents]

    def _round(
        self, parts: list[Tokens], stretches: list[list[int]], texts: list[str], report: Report
    ) -> list[list[int]]:
        """Translate stretches, put the results into `texts`, and return the uneven stretches."""
        uneven: list[list[int]] = []
        sources = [self._source(parts, stretch) for stretch in stretches]
        for number, tokens in translate(self.model, sources, self.search):
            stretch = stretches[number]
            # Byte pieces can spell a line break, which would turn one line into two.
            segments = [" ".join(text.split()) for text in self.tokenizer.segments(tokens)]
            segments = [joined(segments)] if len(stretch) == 1 else segments
            if len(segments) != len(stretch):
                uneven.append(stretch)
                continue
            for place, text in zip(stretch, segments, strict=True):
                texts[place] = text
            report(len(stretch))
        return uneven

    def _source(self, parts: list[Tokens], stretch: list[int]) -> Tokens:
        first, *others = stretch
        return parts[first] + [token for place in others for token in (self.tokenizer.separator, *parts[place])]

    def _packed(self, documents: Sequence[SegmentedDocument]) -> list[list[int]]:
        """Group the indices of parts to translate together, without empty ones; parts of a split segment stay alone."""
        stretches: list[list[int]] = []
        place = -1
        for document in documents:
            room = 0
            for segment in document:
                for part in segment:
                    place += 1
                    needed = len(part) + 1  # the separator before it, or the end
                    if not part:
                        continue
                    if not self.whole or len(segment) > 1:
                        stretches.append([place])
                        room = 0
                    elif needed > room:
                        stretches.append([place])
                        room = self.room - needed
                    else:
                        stretches[-1].append(place)
                        room -= needed
        return stretches

    def _cut(self, text: str, level: int) -> list[str]:
        """Split a text into parts that fit, after sentences, else after words, else anywhere."""
        if level == len(_CUTS):
            middle = len(text) // 2
            halves = [text[:middle], text[middle:]] if middle else []
            return [part for half in halves for part in ([half] if self._fits(half) else self._cut(half, level))]
        parts: list[str] = []
        for piece in _CUTS[level].split(text):
            if parts and len(self.tokenizer.encode(f"{parts[-1]} {piece}")) < self.room:
                parts[-1] = f"{parts[-1]} {piece}"
            else:
                parts += [piece] if self._fits(piece) else self._cut(piece, level + 1)
        return parts

    def _fits(self, text: str) -> bool:
        return len(self.tokenizer.encode(text)) <= self.longest


def _halves(stretch: list[int]) -> tuple[list[int], list[int]]:
    middle = len(stretch) // 2
    return stretch[:middle], stretch[middle:]


def joined(texts: Sequence[str]) -> str:
    """Join the texts that are not empty."""
    return " ".join(text for text in texts if text)


def uneven_note(count: int, stretches: int) -> str:
    """Return the note on stretches of documents that were translated again."""
    return (
        f"{count:,} of {stretches:,} stretches of documents came back with another number of segments; these were "
        "translated again in smaller parts, down to single segments."
    )


@dataclass(frozen=True)
class Translations:
    """A translated corpus: a text for each of its pairs, in their order, and for each of its documents."""

    segments: list[str]
    documents: list[str]
    stretches: int
    """Number of stretches, which are single segments, or several of a document."""
    uneven: int
    """Number of stretches that came back with another number of segments and were translated again in smaller parts."""


def translate_corpus(
    trained: TrainedTextModel, corpus: Corpus, search: Search = SEARCH, start: Start = silent
) -> Translations:
    """Translate the source side of a corpus like `nomax translate --split`, with --documents if the run has documents.

    The model's input does not depend on the target side.
    """
    translator = Translator(trained.model, trained.tokenizer, search, whole=trained.config.documents)
    sources = [[translator.segment(pair.source) for pair in document.pairs] for document in corpus.documents]
    translated = translator.translate(sources, start)
    segments = [text for texts in translated for text in texts]
    return Translations(segments, [joined(texts) for texts in translated], translator.stretches, translator.uneven)


@dataclass(frozen=True)
class Quality:
    """sacrebleu's BLEU and chrF, with the signatures that say how they were computed."""

    bleu: float
    chrf: float
    texts: int
    bleu_signature: str
    chrf_signature: str


def quality(hypotheses: Sequence[str], references: Sequence[str]) -> Quality:
    """Return BLEU and chrF of translations, each with one reference."""
    if len(hypotheses) != len(references) or not references:
        raise ValueError(
            f"{len(hypotheses):,} hypotheses and {len(references):,} references: give as many, at least one."
        )
    try:
        import sacrebleu
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install sacrebleu") from error
    metrics: Any = sacrebleu.metrics
    bleu, chrf = metrics.BLEU(), metrics.CHRF()
    scores = [metric.corpus_score(list(hypotheses), [list(references)]).score for metric in (bleu, chrf)]
    return Quality(scores[0], scores[1], len(references), str(bleu.get_signature()), str(chrf.get_signature()))


def references(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Return the references: the target of each pair, and of each document."""
    segments = [pair.target for pair in corpus.pairs()]
    return segments, [joined([pair.target for pair in document.pairs]) for document in corpus.documents]


@dataclass(frozen=True)
class Likelihood:
    """The negative log-likelihood of all tokens of a text, in nats."""

    nll: float
    tokens: int
    characters: int
    """Includes one for the end of each segment."""

    @property
    def per_token(self) -> float:
        """Mean negative log-likelihood of a token; its exp is the perplexity."""
        return self.nll / self.tokens

    @property
    def bits_per_character(self) -> float:
        """Bits per character, which are comparable between vocabularies."""
        return self.nll / self.characters / math.log(2)


def likelihood(trained: TrainedTextModel, corpus: Corpus, tokens: int = 4096, start: Start = silent) -> Likelihood:
    """Measure how likely the model finds the target side of a corpus, cut into examples as in its training."""
    examples = text_data.examples(trained.config, corpus, trained.tokenizer)
    total, count = nll(trained.model, trained.config, examples, tokens, start(len(examples)))
    return Likelihood(total, count, sum(len(pair.target) + 1 for pair in corpus.pairs()))


@torch.inference_mode()
def nll(
    model: ReLUFormer,
    config: TextConfig,
    examples: Sequence[Example],
    tokens: int = 4096,
    report: Report = lambda done: None,
) -> tuple[float, int]:
    """Return the negative log-likelihood of all target tokens of the examples, in nats, and their number."""
    config = replace(config, normalisation_penalty=0.0, entropy_penalty=0.0)
    total, count = 0.0, 0
    device = next(model.parameters()).device
    most = max(tokens, max(example.length for example in examples))
    for batch in evaluation_batches(examples, most, device=device):
        total += float(measure(config, model, batch)["nll"].double())
        count += batch.tokens
        report(len(batch.numbers))
    return total, count
