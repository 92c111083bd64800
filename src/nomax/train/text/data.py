"""The text of a run: its corpora, its vocabulary, and its training examples."""

import hashlib
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from filelock import FileLock

from nomax._files import write
from nomax.data import cache_folder, text
from nomax.data.registry import TEXTS
from nomax.data.text import Corpus, Document, Example, Pair, Tokenizer
from nomax.data.text.corpus import read_jsonl, read_text_files
from nomax.data.text.load import has_splits
from nomax.models.hub import VOCABULARY

if TYPE_CHECKING:
    from nomax.train.text.config import TextConfig


@dataclass(frozen=True)
class Corpora:
    """The training and validation text of a run, loaded and hashed once."""

    train: Corpus
    valid: Corpus

    @classmethod
    def of(cls, config: "TextConfig") -> Self:
        """Load the corpora of a config."""
        return cls(of_run(config, "train"), of_run(config, "valid"))

    @cached_property
    def digests(self) -> dict[str, str]:
        """A SHA-256 of the text of each split."""
        return {"train": self.train.digest(), "valid": self.valid.digest()}

    def learn(self, size: int) -> Tokenizer:
        """Return a vocabulary of that many pieces, learned from the training split."""
        return learned(self.train, size, self.digests["train"])


def load_corpus(data: str, split: str, task: str = "translate", languages: tuple[str, ...] | None = None) -> Corpus:
    """Load one split of a data set. For a language model both sides of a pair are the same text.

    A language model also reads plain text: a file, or a folder with train.txt, valid.txt and test.txt, in which an
    empty line ends a document.
    """
    if task == "translate":
        return text.load(data, split, languages=languages)
    language = languages[0] if languages else None
    path = Path(data).expanduser()
    plain = [path / f"{split}.txt", path / f"{split}.{language}"] if path.is_dir() else [path]
    for file in plain:
        if file.is_file() and file.suffix != ".jsonl":
            mark = language or file.suffix[1:] or "text"
            if file == path and split not in ("train", "all"):
                raise ValueError(f"split {split!r}: {data} has no splits, it is one text.")
            return read_text_files(file, file, (mark, mark))
    documents = path / f"{split}.jsonl" if path.is_dir() else path
    if language and documents.is_file():
        return read_jsonl(documents, (language, language))
    return _one_side(text.load(data, split), language)


def of_run(config: "TextConfig", split: str) -> Corpus:
    """Load one split of a run's data."""
    if split == "valid" and config.valid:
        split = split if has_splits(config.valid) else "all"
        return load_corpus(config.valid, split, config.task, config.languages)
    return load_corpus(config.data, split, config.task, config.languages)


def has_test(config: "TextConfig") -> bool:
    """Return whether a run's data has a test split."""
    path = Path(config.data).expanduser()
    return has_splits(config.data) and (config.data in TEXTS or any(path.glob("test.*")))


def vocabulary(config: "TextConfig", folder: Path, corpora: Corpora | None = None) -> Tokenizer:
    """Return the vocabulary of a run: the one in its folder, or else learned from its training split."""
    tokenizer = kept(folder) or (corpora or Corpora.of(config)).learn(config.model.vocabulary)
    tokenizer.check(config.model.vocabulary, config.vocabulary or None, str(folder))
    return tokenizer


def kept(folder: Path | None) -> Tokenizer | None:
    """Load the vocabulary in the folder of a run to resume, if there is one."""
    if folder is None or not (folder / VOCABULARY).exists():
        return None
    try:
        return Tokenizer.load(folder / VOCABULARY)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error} Remove it, and it is learned again from the training split.") from error


def learned(corpus: Corpus, size: int, digest: str | None = None) -> Tokenizer:
    """Return a vocabulary of that many pieces, learned once from a corpus and kept beside the data sets.

    digest: that of the corpus, if known.
    """
    name = hashlib.sha256(f"{size} {digest or corpus.digest()}".encode()).hexdigest()[:32]
    file = cache_folder() / "vocabularies" / f"{name}.model"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):  # ranks, and runs side by side, learn it once
            if file.is_file():
                try:
                    return _cached(file, size)
                except ValueError as error:
                    print(f"nomax: {error} It is learned again.", file=sys.stderr)
            tokenizer = Tokenizer.train(corpus, size, file)
            write(_digest_file(file), tokenizer.digest)
            return tokenizer
    except OSError:  # a home that cannot be written to: then it is learned anew each time
        return Tokenizer.train(corpus, size)


def _cached(file: Path, size: int) -> Tokenizer:
    """Load a vocabulary learned earlier; a ValueError if it is damaged. Old ones have no SHA-256 beside them."""
    tokenizer = Tokenizer.load(file)
    tokenizer.check(size, title=str(file))
    digest = _digest_file(file)
    if digest.exists() and digest.read_bytes() != tokenizer.digest.encode():
        raise ValueError(f"{file} is damaged: its SHA-256 is not the one it was written with.")
    return tokenizer


def _digest_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")


def stages(config: "TextConfig", corpus: Corpus, tokenizer: Tokenizer) -> dict[int, list[Example]]:
    """Return the training examples by the first step of each stage: more than one stage if documents grow."""
    return {start: examples(config, corpus, tokenizer, tokens) for start, tokens in config.stages.items()}


def examples(config: "TextConfig", corpus: Corpus, tokenizer: Tokenizer, longest: int | None = None) -> list[Example]:
    """Return the pairs of a corpus, or stretches of its documents, of at most `longest` tokens, as the config says."""
    side = "both" if config.task == "translate" else "target"
    longest = longest or config.model.max_length
    if config.documents:
        return text.documents(corpus, tokenizer, longest, too_long="split", side=side)
    return text.sentences(corpus, tokenizer, longest=longest, too_long="split", side=side)


def _one_side(corpus: Corpus, language: str | None) -> Corpus:
    mark = language or corpus.languages[0]
    if mark not in corpus.languages:
        raise ValueError(f"language {mark!r}: {corpus.title} has {' and '.join(corpus.languages)}.")
    side = corpus.languages.index(mark)
    documents = (
        Document(document.name, tuple(Pair(pair[side], pair[side]) for pair in document.pairs))
        for document in corpus.documents
    )
    return Corpus(tuple(documents), (mark, mark), corpus.title)
