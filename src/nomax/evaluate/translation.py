"""Translations of texts, their BLEU and chrF, and the perplexity of the text itself.

Texts are searched for in batches, packed where the model knows documents, and cut where they are too long.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nomax.data.text import Corpus, Example, Tokenizer, TokenOrder
from nomax.data.text.batches import evaluation_batches, pad
from nomax.models import ReLUFormer
from nomax.models.decoding import LARGEST_PENALTY, beam_search
from nomax.train import TextConfig
from nomax.train.text import data as text_data
from nomax.train.text.task import measure

# Of max_length, what a stretch of a document fills with its source. The translation must fit into max_length, too, and
# can be longer: of the stretches of bible-en-es in 256 tokens, a fifth would not if they filled all; of 3/4, all do.
SHARE = 0.75
TOKENS = 64  # that count as one of --batch-size

# Where a segment that is too long may be cut: after a sentence, after a word.
_CUTS = (re.compile(r"(?<=[.!?…;:])\s+"), re.compile(r"\s+"))

Tokens = list[int]
Segment = list[Tokens]  # the parts of a segment: one, unless it had to be cut
SegmentedDocument = list[Segment]
Report = Callable[[int], None]  # is told how many more are done
Start = Callable[[int], Report]  # is told how many there will be


def silent(total: int) -> Report:
    """Show no progress: a Start."""
    return lambda done: None


@dataclass(frozen=True)
class Search:
    """Settings of the search for translations, and how many tokens of sources pass through the model at a time."""

    beams: int = 4
    length_penalty: float = 0.6
    tokens: int = 4096


SEARCH = Search()


def search_settings(beams: int, length_penalty: float, batch_size: int) -> Search:
    """Return the settings that some options ask for; a ValueError names those that cannot be served."""
    if beams < 1 or batch_size < 1 or not 0 <= length_penalty <= LARGEST_PENALTY:
        raise ValueError(
            f"--beams {beams} and --batch-size {batch_size} must be at least 1, --length-penalty "
            f"{length_penalty} from 0 to {LARGEST_PENALTY}."
        )
    return Search(beams, length_penalty, TOKENS * batch_size)


def translate(model: ReLUFormer, sources: Sequence[Tokens], how: Search = SEARCH) -> Iterator[tuple[int, Tokens]]:
    """Yield the number and the best translation of each source, as they are found. Tokens are without begin and end."""
    if not sources:
        return
    lengths = [len(source) + 1 for source in sources]
    order = TokenOrder(lengths, max(how.tokens, max(lengths)), shuffle=False)
    device = next(model.parameters()).device
    for step in range(order.steps_per_epoch):
        numbers = [int(number) for number in order.batch(step)]
        source = pad([[*sources[number], model.config.end] for number in numbers], device)
        best = beam_search(model, source, beams=how.beams, length_penalty=how.length_penalty)
        for number, hypotheses in zip(numbers, best, strict=True):
            yield number, hypotheses[0].tokens


class TooLongError(ValueError):
    """A text has more tokens than the model can read."""


class Translator:
    """Translates documents, which are lists of segments. whole: as many segments at once as fit, else one by one."""

    def __init__(self, model: ReLUFormer, tokenizer: Tokenizer, how: Search = SEARCH, whole: bool = False) -> None:
        self.model, self.tokenizer, self.how, self.whole = model, tokenizer, how, whole
        self.longest = model.config.max_length - 1  # and the end
        self.room = int(SHARE * model.config.max_length)
        self.stretches, self.uneven = 0, 0

    def segment(self, text: str, split: bool = True) -> Segment:
        """Encode a text as the model reads it. One that is too long is cut after sentences or words, or is an error."""
        text = " ".join(text.split())
        tokens = self.tokenizer.encode(text)
        if len(tokens) <= self.longest:
            return [tokens]
        if not split:
            limit = f"more than the {self.longest:,} of this model"
            raise TooLongError(f"has {len(tokens):,} tokens, {limit}: “{text[:50]}…”.")
        return [self.tokenizer.encode(part) for part in self._cut(text, 0)]

    def translate(self, documents: Sequence[SegmentedDocument], start: Start = silent) -> list[list[str]]:
        """Return a text for each segment of each document; for an empty one, an empty text.

        What is translated at once is a stretch. One that comes back with another number of segments is `uneven`: its
        halves are translated again, down to single segments.
        """
        parts = [part for document in documents for segment in document for part in segment]
        texts = ["" for _ in parts]
        stretches = self._packed(documents)
        report = start(sum(map(len, stretches)))
        self.stretches += len(stretches)
        uneven = self._round(parts, stretches, texts, report)
        self.uneven += len(uneven)
        while uneven:
            middles = [len(stretch) // 2 for stretch in uneven]
            halves = [
                half for one, middle in zip(uneven, middles, strict=True) for half in (one[:middle], one[middle:])
            ]
            uneven = self._round(parts, halves, texts, report)
        in_order = iter(texts)
        return [[joined([next(in_order) for _ in segment]) for segment in document] for document in documents]

    def _round(
        self, parts: list[Tokens], stretches: list[list[int]], texts: list[str], report: Report
    ) -> list[list[int]]:
        """Translate stretches, put what comes back into `texts`, and return the uneven ones."""
        uneven: list[list[int]] = []
        for number, tokens in translate(self.model, [self._source(parts, one) for one in stretches], self.how):
            stretch = stretches[number]
            # Byte pieces can spell a line break, which would make two lines of one.
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
        """Group places of parts that are translated together. What was cut stays alone; what is empty is left out."""
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
        """Cut a text into parts that fit, after sentences, else after words, else anywhere."""
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


def joined(texts: Sequence[str]) -> str:
    """Join texts, without those that are empty."""
    return " ".join(text for text in texts if text)


def uneven_note(count: int, stretches: int) -> str:
    """Return what is told about stretches of documents that were translated again."""
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
    """Number of stretches, each translated at once: a single segment, or several of a document."""
    uneven: int
    """Of these, those that came back with another number of segments, and were translated again in smaller parts."""


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
    translated = translator.translate(sources, start)
    segments = [text for texts in translated for text in texts]
    return Translations(segments, [joined(texts) for texts in translated], translator.stretches, translator.uneven)


@dataclass(frozen=True)
class Quality:
    """sacrebleu's BLEU and chrF of some texts, with the signatures that say how they were computed."""

    bleu: float
    chrf: float
    texts: int
    bleu_signature: str
    chrf_signature: str


def quality(hypotheses: Sequence[str], references: Sequence[str]) -> Quality:
    """Return BLEU and chrF of translations, each with one reference."""
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses):,} hypotheses and {len(references):,} references: as many, and some.")
    try:
        import sacrebleu
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install sacrebleu") from error
    metrics: Any = sacrebleu.metrics
    bleu, chrf = metrics.BLEU(), metrics.CHRF()
    scores = [metric.corpus_score(list(hypotheses), [list(references)]).score for metric in (bleu, chrf)]
    return Quality(scores[0], scores[1], len(references), str(bleu.get_signature()), str(chrf.get_signature()))


def references(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Return what translations are compared with: the target of each pair, and of each document."""
    segments = [pair.target for pair in corpus.pairs()]
    return segments, [joined([pair.target for pair in document.pairs]) for document in corpus.documents]


@dataclass(frozen=True)
class Likelihood:
    """The negative log-likelihood of all tokens of a text, in nats: how well a model knows it."""

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
        """Bits per character, by which models of different vocabularies can be compared."""
        return self.nll / self.characters / math.log(2)


def likelihood(
    model: ReLUFormer,
    tokenizer: Tokenizer,
    config: TextConfig,
    corpus: Corpus,
    tokens: int = 4096,
    start: Start = silent,
) -> Likelihood:
    """Measure how likely the model finds the target side of a corpus, cut as in its training."""
    examples = text_data.examples(config, corpus, tokenizer)
    total, count = nll(model, config, examples, tokens, start(len(examples)))
    return Likelihood(total, count, sum(len(pair.target) + 1 for pair in corpus.pairs()))


@torch.inference_mode()
def nll(
    model: ReLUFormer,
    config: TextConfig,
    examples: Sequence[Example],
    tokens: int = 4096,
    report: Report = lambda done: None,
) -> tuple[float, int]:
    """Return the negative log-likelihood of all tokens of the examples' targets, in nats, and their number."""
    config = replace(config, normalisation_penalty=0.0, entropy_penalty=0.0)
    total, count = 0.0, 0
    device = next(model.parameters()).device
    most = max(tokens, max(example.length for example in examples))
    for batch in evaluation_batches(examples, most, device=device):
        total += float(measure(config, model, batch)["nll"].double())
        count += batch.tokens
        report(len(batch.numbers))
    return total, count
