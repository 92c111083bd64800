"""The config of a run of text, a translation's or a language model's, its recipes, and how it fits its corpora.

Recipes are plain functions; every number can be changed afterwards. A run is recipe(task, φ) → dataclasses.replace →
`fit`, from the command line and in Python.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nomax.data.text import TokenOrder
from nomax.models import ReLUFormerConfig
from nomax.nn import RELUFORMER
from nomax.phi import ACTIVATIONS, ROW_MAPS, Phi
from nomax.train.config import LoopConfig, settle
from nomax.train.text import data as text_data

if TYPE_CHECKING:
    from nomax.train.jobs import RunTask
    from nomax.train.text.data import Corpora

SHORTEST = 128  # tokens, where documents begin to grow
# How much ReLUFormer's penalties count in the loss. The paper's weight is not known to us: this is ours, to be tuned.
PENALTY = 0.03
# Where γ starts: √(n/π) for n = 128. The rows of a new model then sum to about 1, which the penalties ask for.
GAMMA = 6.4


@dataclass(frozen=True)
class TextConfig(LoopConfig):
    """The training of a ReLUFormer: the model, its data, and all the numbers. `batch_size` counts tokens.

    Examples are at most model.max_length tokens long, on each side; longer pairs are cut into parts.
    """

    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *LoopConfig.NOT_NEGATIVE,
        *("normalisation_penalty", "entropy_penalty", "margin", "valid_examples"),
    )
    STAGES: ClassVar[tuple[str, ...]] = (*LoopConfig.STAGES, "memory_l1")
    EVALUATED: ClassVar[str] = "valid"

    warmup: int = 4000
    weight_decay: float = 0.0
    beta2: float = 0.98
    schedule: Literal["cosine", "inverse-sqrt"] = "inverse-sqrt"

    task: Literal["translate", "language"] = "translate"
    recipe: str = "base"
    model: ReLUFormerConfig = field(default_factory=lambda: ReLUFormerConfig(8000))
    data: str = "bible-en-es"
    valid: str = ""
    """Data to evaluate on during training, if --data has no valid split."""
    languages: tuple[str, ...] = ("en", "es")  # source and target; one for a language model
    documents: bool = False  # examples of model.max_length tokens, cut and joined from documents; else single pairs
    growth: float = 0.0
    """Share of the steps, at the start, in which documents grow to their length, doubling from 128 tokens: a model
    learns to use its source from short ones."""
    vocabulary: str = ""  # its SHA-256; "": any
    label_smoothing: float = 0.1
    """Share of each target that is spread over the vocabulary."""
    normalisation_penalty: float = 0.0
    """Weight of ReLUFormer's penalty on row sums, |log Σ|, if it differs from --penalty."""
    entropy_penalty: float = 0.0
    """Weight of ReLUFormer's penalty on row entropies, if it differs from --penalty."""
    margin: float = 0.7
    """Penalise the entropy of a row over n keys above this share of log n."""
    memory_l1: tuple[float, ...] = ()
    """The same as --attention-l1 for the weights of feed-forward layers, which are memories: the mean over tokens of
    Σ|a_ij|. Such as 0 0.001. None: no penalty."""
    valid_examples: int = 0
    """Examples of the validation split to evaluate on; 0 takes all of them."""

    @staticmethod
    def task_type() -> "type[RunTask[Any]]":
        """Return the task that trains such a config."""
        from nomax.train.text.task import TextTask

        return TextTask

    @property
    def command(self) -> str:
        """The `nomax` command that trains such a config."""
        return f"train {self.task}"

    @property
    def stages(self) -> dict[int, int]:
        """Return the longest example in tokens by first step: 128, 256, … for equal numbers of steps, then all."""
        shorter: list[int] = []
        while self.growth and SHORTEST << len(shorter) < self.model.max_length:
            shorter.append(SHORTEST << len(shorter))
        share = self.growth * self.steps / max(len(shorter), 1)
        return {round(share * place): tokens for place, tokens in enumerate([*shorter, self.model.max_length])}

    @property
    def penalised(self) -> bool:
        """Return whether the penalties are in the loss."""
        return self.normalisation_penalty > 0 or self.entropy_penalty > 0

    def check(self) -> None:
        """Raise a ValueError that names the field, unless these values make sense together."""
        super().check()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1.")
        if not 0 <= self.growth < 1:
            raise ValueError(f"growth={self.growth} must be at least 0 and below 1: a share of the steps.")
        if self.growth and not self.documents:
            raise ValueError(f"growth={self.growth}: only documents grow; say how long they are with --documents.")
        activation = Phi.parse(self.model.phi).activation
        if self.penalised and activation not in ROW_MAPS and not ACTIVATIONS[activation].nonnegative:
            raise ValueError(
                f"phi={self.model.phi!r} has weights below zero, whose sums and entropies the penalties cannot hold: "
                "pass --penalty 0, or a φ such as relu/L^0.5."
            )
        self.check_l1(self.model.phi)
        memory = Phi.parse(self.model.memory_phi).activation
        if any(self.memory_l1) and memory in ROW_MAPS:
            raise ValueError(
                f"memory_l1={self.memory_l1}: memory_phi={self.model.memory_phi!r} has rows that always sum to 1, so a "
                "penalty on them would not ask for zeros. Leave out --memory-l1, or use --memory-phi relu."
            )
        if self.batch_size < self.model.max_length:
            raise ValueError(
                f"batch_size={self.batch_size:,} tokens cannot hold an example of {self.model.max_length:,}: pass a "
                "larger --batch-size, or shorter examples (--documents, --max-length)."
            )
        if self.model.max_length < 2:
            raise ValueError(f"max_length={self.model.max_length} must be at least 2: a token and the end.")
        translates, sides = self.task == "translate", len(self.languages)
        if translates != (self.model.encoder_layers > 0) or sides != 1 + translates:
            raise ValueError(
                f"task={self.task!r} with encoder_layers={self.model.encoder_layers} and {sides} languages: a "
                "translation has an encoder and two languages, a language model no encoder and one language."
            )


def small(task: str = "translate", vocabulary: int = 4000, phi: str = RELUFORMER, **model: Any) -> TextConfig:
    """A small model on a small corpus, such as the Bible, in about an hour on one CPU core.

    nomax train translate --data bible-en-es --phi reluformer softmax --parallel. 3 + 3 layers of width 192 (a language
    model has 4), 2,000 steps of 4,096 tokens: 8 million, about nine times the Bible. AdamW with betas (0.9, 0.98) at a
    learning rate of 2e-3, 400 steps of warm-up and a cosine, label smoothing of 0.1 (a language model has none).
    """
    layers = {"encoder_layers": 3, "decoder_layers": 3} if task == "translate" else {"decoder_layers": 4}
    size = {"dim": 192, "heads": 3, "slots": 768, "dropout": 0.1, "max_length": 256, **layers}
    return _make(
        task,
        phi,
        vocabulary,
        {**size, **model},
        recipe="small",
        steps=2000,
        lr=2e-3,
        warmup=400,
        schedule="cosine",
        checkpoint_every=200,
        evaluate_every=400,
    )


def iwslt(task: str = "translate", vocabulary: int = 10_000, phi: str = RELUFORMER, **model: Any) -> TextConfig:
    """The usual recipe for IWSLT14 German to English, not the paper's, whose settings we do not know.

    nomax train translate --recipe iwslt --data FOLDER --languages de en --phi reluformer softmax --precision bf16.
    6 + 6 layers of width 512, 1,024 slots, 4 heads, dropout 0.3; Adam (0.9, 0.98) at 5e-4, 4,000 steps of warm-up, then
    1/√step; 4,096 tokens a step, label smoothing 0.1. 50,000 steps, the norm of gradients clipped at 1 and post-norm
    are our choices. Meant for a GPU. Evaluate it with --beams 5.
    """
    size = {"dim": 512, "heads": 4, "slots": 1024, "dropout": 0.3, "norm": "post", "max_length": 512}
    return _make(
        task,
        phi,
        vocabulary,
        {**size, **model},
        recipe="iwslt",
        steps=50_000,
        lr=5e-4,
        warmup=4000,
        schedule="inverse-sqrt",
        checkpoint_every=1000,
        evaluate_every=1000,
    )


RECIPES = {"small": small, "iwslt": iwslt}


def fit(config: TextConfig, corpora: "Corpora", folder: Path | None = None, given: Collection[str] = ()) -> TextConfig:
    """Return the config with what follows from its corpora: languages, vocabulary, and the steps of its epochs.

    folder: of the run, which may have its vocabulary. given: see nomax.train.config.settle.
    """
    languages = corpora.train.languages if config.task == "translate" else corpora.train.languages[:1]
    tokenizer = text_data.kept(folder) or corpora.learn(config.model.vocabulary)
    tokenizer.check(config.model.vocabulary, title="this configuration")
    config = replace(config, languages=languages, vocabulary=tokenizer.digest)

    def steps_per_epoch() -> float:
        lengths = [example.length for example in text_data.examples(config, corpora.train, tokenizer)]
        return TokenOrder(lengths, max(config.batch_size, *lengths)).steps_per_epoch

    return settle(config, steps_per_epoch, given)


def is_reluformers(phi: str) -> bool:
    """Return whether φ is relu/√L, with any factor: the one that the penalties and a learned gain are for."""
    parsed = Phi.parse(phi)
    return parsed.activation == "relu" and parsed.alpha == 0.5


def _make(task: str, phi: str, vocabulary: int, model: dict[str, Any], **settings: Any) -> TextConfig:
    """Make a config: ReLUFormer's own φ learns its gain per head and has penalties, its peers do not."""
    own = is_reluformers(phi)
    defaults: dict[str, Any] = {"learned_gain": "head" if own else None}
    if Phi.parse(phi) == Phi.parse(RELUFORMER):  # a φ with a factor of its own says itself where the gain starts
        defaults["gamma"] = GAMMA
    if task == "language":
        defaults["encoder_layers"] = 0
        settings |= {"task": "language", "label_smoothing": 0.0, "languages": ("en",)}
    weight = PENALTY if own else 0.0
    return TextConfig(
        model=ReLUFormerConfig(vocabulary, phi=phi, **{**defaults, **model}),
        normalisation_penalty=weight,
        entropy_penalty=weight,
        **settings,
    )
