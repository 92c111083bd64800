"""`nomax train translate` and `nomax train language`: options, and the configs and runs made from them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from nomax.data.text.tokenizer import SizeError
from nomax.models import ReLUFormerConfig
from nomax.train import cli, run_folder
from nomax.train.console import display_name, slug
from nomax.train.jobs import Job
from nomax.train.text import data as text_data
from nomax.train.text.config import RECIPES, TextConfig, fit
from nomax.train.text.data import Corpora

MODEL = {
    "dim": "Width of the model.",
    "heads": "Attention heads per layer.",
    "encoder_layers": "Layers of the encoder.",
    "decoder_layers": "Layers of the decoder.",
    "slots": "Slots of each feed-forward layer, which is a memory.",
    "gamma": "γ, by which relu/√L is divided, or where it starts if learned: with √(n/π) rows of a new model over n "
    "keys sum to about 1. Of other φ, 1.",
    "learned_shift": "Learn a shift of the scores, one per layer or head. It starts at φ's: at -1 for relu(x-1)/L.",
    "memory_phi": "φ of the feed-forward layers: relu, softmax, …",
    "memory_norm": "Apply LayerNorm to the output of each feed-forward layer.",
    "joined_norm": "ReLA's gated RMSNorm of the joined heads; with --phi relu, this is ReLA.",
    "norm": "Apply LayerNorm to the input of each sublayer (pre), or to the residual sum after it (post).",
    "positions": "Position encoding.",
    "max_length": "Longest segment in tokens, unless --documents sets it; longer ones are cut into parts.",
    "dropout": "Dropout of the embedded tokens and of each sublayer's output.",
}
SMOKE: dict[str, Any] = {
    "steps": 6,
    "epochs": 0.0,
    "batch_size": 512,
    "checkpoint_every": 2,
    "evaluate_every": 3,
    "valid_examples": 16,
}
SMOKE_MODEL: dict[str, Any] = {"dim": 32, "heads": 2, "decoder_layers": 1, "slots": 64, "max_length": 128}
SMOKE_VOCABULARY = 512


@dataclass(frozen=True)
class TrainText(cli.Command):
    """Options of both commands beyond their config."""

    task: ClassVar[Literal["translate", "language"]]
    phi: tuple[str, ...] = ("reluformer",)
    """Map from scores to weights: reluformer (√2·relu/√L), softmax, relu/L, relu, sparsemax, entmax15, … Several train
    one after the other and are compared."""
    data: str = "bible-en-es"
    """A name (`nomax data list`), a folder with train, valid and test files, JSONL documents, or texts as FILE,FILE."""
    recipe: Literal["small", "iwslt"] = "small"
    """small: an hour on one CPU core. iwslt: the usual recipe for IWSLT14, not the paper's, for a GPU. The recipe sets
    the defaults of the other options: --recipe iwslt --help shows those of iwslt."""
    documents: int | None = None
    """Train on documents cut and joined to this many tokens, such as 128 to 4,096, or, with 0, on single segments."""
    vocabulary: int | None = None
    """Pieces of the vocabulary, learned from the training split."""
    penalty: float | None = None
    """Weight of ReLUFormer's two penalties in the loss; by default 0.03 for relu/√L and 0 for other φ. The paper's
    value is unknown: a number to tune."""
    learned_gain: Literal["layer", "head", "none"] | None = None
    """Learn φ's gain (√2/γ), one per layer or head; by default per head for relu/√L and not at all for other φ."""

    @property
    def asked(self) -> tuple[str, ...] | None:
        """Return the languages asked for, in order; None for those of the data."""
        raise NotImplementedError

    @classmethod
    def defaults(cls, arguments: list[str]) -> Self:
        """Return the options with the values of the recipe that a command line names, for the φ trained by default."""
        options = cls()
        config = cli.named_recipe(arguments, RECIPES)(cls.task)
        others = {"penalty": config.normalisation_penalty, "vocabulary": config.model.vocabulary}
        shown = cli.with_defaults(options, config, **others)
        return replace(shown, documents=options.documents, valid=None)

    def run(self) -> int:
        """Train; the exit codes are those of cli.run."""
        return cli.run(self, f"train {self.task}", lambda command: _jobs(self, command))


@dataclass(frozen=True)
class TrainTranslate(TrainText):
    """Train a ReLUFormer to translate sentences or documents, with one φ or with several side by side.

    Stop it whenever you like (Ctrl-C, SIGTERM, even kill -9) and give the same command again: it resumes from the last
    checkpoint, with bitwise the same result. On several GPUs or machines: torchrun --nproc-per-node 8 -m nomax.cli
    train translate ...

    The peers of ReLUFormer: --phi softmax, sparsemax, entmax15, relu (as a drop-in), relu/L, and ReLA as --phi relu
    --joined-norm rela; its factor alone is --penalty 0.

    The run folder has the same files as for `nomax train vit`, and vocabulary.model. Afterwards, nomax evaluate RUN
    gives BLEU (with --split valid if the data has no test split), and nomax translate RUN < in.txt > out.txt
    translates. Exit codes: 0 finished, 1 failed (a non-finite loss, a full disk), 2 wrong options, 130 stopped by
    Ctrl-C and 143 by SIGTERM, both with a checkpoint.
    """

    task = "translate"
    languages: tuple[str, str] | None = None
    """Source and target, such as --languages es en; by default in the order of the data. File names such as train.en
    give their language; for a.txt,b.txt name both here."""

    @property
    def asked(self) -> tuple[str, ...] | None:
        """Return --languages."""
        return self.languages


@dataclass(frozen=True)
class TrainLanguage(TrainText):
    """Train a ReLUFormer without encoder as a language model on one side of a corpus, or on plain text.

    Options, run folder, exit codes and exact resume are those of `nomax train translate`. It trains on documents of 256
    tokens unless --documents says otherwise. Data may also be a text file (with another for --valid), or a folder with
    train.txt, valid.txt and test.txt; an empty line ends a document. Afterwards, nomax evaluate RUN gives the
    perplexity on the test split, and nomax generate RUN continues texts.
    """

    task = "language"
    documents: int | None = 256
    """Train on documents cut and joined to this many tokens (128 to 4,096), or, with 0, on single segments."""
    language: str | None = None
    """Side of the corpus to learn: en, es, …; by default the first."""

    @property
    def asked(self) -> tuple[str, ...] | None:
        """Return --language."""
        return (self.language,) if self.language else None


Translate = cli.options(TrainTranslate, TextConfig, ReLUFormerConfig, MODEL)
Language = cli.options(TrainLanguage, TextConfig, ReLUFormerConfig, MODEL, without=("encoder_layers",))


def configure(options: Any, phi: str, task: str, languages: tuple[str, ...] | None = None) -> TextConfig:
    """Return the recipe with the options' changes, except for what depends on the text itself: see `fit`."""
    given = cli.given(options)
    model = {name: given[name] for name in ("learned_gain", *MODEL) if name in given}
    if options.smoke:
        model = {**SMOKE_MODEL, **({"encoder_layers": 1} if task == "translate" else {}), **model}
        given = {**SMOKE, "vocabulary": SMOKE_VOCABULARY, **given}
    if model.get("learned_gain") == "none":
        model["learned_gain"] = None
    if options.documents:
        if "max_length" in given:
            raise ValueError("--documents says how long examples are: leave out --max-length.")
        model["max_length"] = options.documents
    size = {"vocabulary": given["vocabulary"]} if "vocabulary" in given else {}
    config = RECIPES[options.recipe](task=task, phi=phi, **size, **model)
    changes: dict[str, Any] = {"documents": bool(options.documents)}
    if options.penalty is not None:
        changes |= dict.fromkeys(("normalisation_penalty", "entropy_penalty"), options.penalty)
    others = vars(config).keys() - {"model", "recipe", "vocabulary", "documents", "languages"}
    changes |= {name: given[name] for name in others if name in given}
    if languages:
        changes["languages"] = languages
    return replace(config, **changes)


def _jobs(options: Any, command: str) -> list[Job]:
    task, languages = options.task, options.asked
    length = [f"documents-{options.documents}"] if options.documents else []
    words = [options.data.rstrip("/").rpartition("/")[2], options.recipe, *length, *(["smoke"] * options.smoke)]
    named = Path("runs", "-".join(map(slug, [*([task] if task == "language" else []), *words])))
    wanted: list[Job] = []
    corpora: Corpora | None = None
    for phi, folder in cli.places(options, named, display_name):
        config = configure(options, phi, task, languages)
        corpora = corpora or _load(config, languages)
        if options.smoke and options.vocabulary is None:
            size = _possible_size(corpora, config.model.vocabulary, folder)
            config = replace(config, model=replace(config.model, vocabulary=size))
        config = fit(config, corpora, folder, cli.given(options))
        run_folder.check(folder, config, corpora.digests)
        wanted.append(Job(config, folder, command, options.tensorboard, corpora))
    return wanted


def _load(config: TextConfig, languages: tuple[str, ...] | None) -> Corpora:
    train = text_data.load_corpus(config.data, "train", config.task, languages)
    config = replace(config, languages=train.languages[: len(config.languages)])
    try:
        return Corpora(train, text_data.of_run(config, "valid"))
    except (ValueError, FileNotFoundError) as error:
        if config.valid:
            raise
        raise type(error)(f"{error} Or name other data to evaluate on: --valid.") from error


def _possible_size(corpora: Corpora, size: int, folder: Path) -> int:
    """Return a vocabulary size, or the nearest that a text allows; for a run to resume, the size that it has."""
    if tokenizer := text_data.kept(folder):
        return len(tokenizer)
    try:
        corpora.learn(size)
    except SizeError as error:
        return error.nearest
    return size
