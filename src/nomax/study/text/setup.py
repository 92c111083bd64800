"""Set-ups of text studies: the data, the model, the number of steps. They have the same names as those of images.

default   a small model and a reduced grid: minutes; it needs `nomax data get bible-en-es`
day       models that translate, on LibreOffice's help: hours; it needs `nomax data get help-de-en`
hour      smaller models on the Bible: one to two hours per study on two cores; five for all of documents
smoke     seconds, only to check that it works
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, Self

from nomax.data import text
from nomax.data.registry import TEXTS
from nomax.data.text import Corpus
from nomax.models import ReLUFormerConfig
from nomax.nn import RELUFORMER
from nomax.study.engine.experiment import TextExperiment, attention_name
from nomax.train.text import data as text_data
from nomax.train.text.config import GAMMA, PENALTY, TextConfig

# What every translation is measured by, so that studies share their runs.
MEASURES = ("bleu", "rows", "memory")

TRIAL_SEED = 9  # of trials, which no verdict uses


@dataclass(frozen=True)
class Settings:
    """Settings chosen by trials for each kind of attention. All kinds get the same number of trials."""

    lr: float
    warmup: float
    """Share of the steps."""
    penalty: float = PENALTY
    """The weight of each of ReLUFormer's losses; no effect on other kinds."""


@dataclass(frozen=True)
class TextSetup:
    """The common settings of a text study's runs, and the size of its grid."""

    name: str
    data: str = "bible-en-es"
    vocabulary: int = 1000
    dim: int = 64
    heads: int = 2
    layers: int = 2
    """Layers of the encoder and of the decoder; a language model has one and a half times as many."""
    slots: tuple[int, ...] = (32, 256, 1024, 4096)
    """Numbers of slots that the study of memories compares."""
    base_slots: int = 256
    """Slots of a feed-forward layer in all other studies."""
    length: int = 128
    """Tokens of the longest segment; longer ones are cut into parts."""
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    """Lengths of documents in tokens."""
    text_length: int = 256
    """Length of the language model's documents in tokens."""
    activations: tuple[str, ...] = ("relu", "relu2", "gelu", "softplus", "identity")
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    shown_seeds: int | None = None
    """Seeds of kinds of attention that are shown beside those of claims; None: all."""
    steps: int = 1600
    batch_size: int = 1024
    """Tokens per step and side."""
    document_passes: int = 5
    """Documents get so many times as many tokens, in larger steps: models learn to use a source late."""
    document_growth: float = 0.75
    """Share of the steps in which documents grow to their length: see TextConfig.growth."""
    lr: float = 4e-3
    """Softmax's best rate: the study text-rate chose this and the following."""
    reluformer_lr: float = 8e-3
    """ReLUFormer's best rate. Documents, which train longer, use `lr` for both."""
    gamma: float = GAMMA
    """The initial value of its γ."""
    penalty: float = PENALTY
    """The weight of each of its losses."""
    warmup: int = 60
    chosen: tuple[tuple[str, Settings], ...] = ()
    """The study text-rate's choices for a kind of attention on the validation split, if they differ from the above."""
    trials: tuple[Settings, ...] = (Settings(2e-3, 0.04), Settings(4e-3, 0.04), Settings(8e-3, 0.04))
    """The settings that it tries with every kind."""
    trial_steps: int = 0
    """Steps of a trial; 0: as many as a run has."""
    dropout: float = 0.0
    precision: Literal["fp32", "bf16"] = "fp32"
    test_pairs: int = 120
    """Pairs of the test split to translate and inspect; the test loss is over all."""
    device: str = "auto"

    @property
    def document_batch(self) -> int:
        """Return the tokens per step of documents, the same for every length: at least the longest document."""
        return max(self.batch_size, *self.lengths)

    @property
    def document_steps(self) -> int:
        """Return the steps of a run of documents, the same for every length."""
        return max(2, self.document_passes * self.steps * self.batch_size // self.document_batch)

    def run(
        self,
        phi: str,
        *,
        seed: int = 0,
        task: Literal["translate", "language"] = "translate",
        losses: tuple[bool, bool] = (False, False),
        reluformers: bool = False,
        joined_norm: Literal["rela"] | None = None,
        memory: str = "relu",
        memory_norm: bool = False,
        slots: int | None = None,
        documents: int | None = None,
        measures: tuple[str, ...] = MEASURES,
        settings: Settings | None = None,
    ) -> TextExperiment:
        """Return a run of this set-up. losses: ReLUFormer's, of normalisation and of entropy.

        reluformers: with its learned gain and its learning rate. settings: replace the chosen ones.
        """
        translates = task == "translate"
        length = documents or self.length
        languages = sides(self.data)
        model = ReLUFormerConfig(
            self.vocabulary,
            dim=self.dim,
            heads=self.heads,
            encoder_layers=self.layers if translates else 0,
            decoder_layers=self.layers if translates else self.layers + self.layers // 2,
            slots=slots or self.base_slots,
            phi=phi,
            learned_gain="head" if reluformers else None,
            gamma=self.gamma if reluformers else 1.0,
            memory_phi=memory,
            memory_norm=memory_norm,
            joined_norm=joined_norm,
            max_length=length,
            dropout=self.dropout,
        )
        large = documents is not None and translates
        steps = self.document_steps if large else self.steps
        config = TextConfig(
            task=task,
            recipe="study",
            model=model,
            data=self.data,
            languages=languages if translates else languages[:1],
            documents=documents is not None,
            growth=self.document_growth if large else 0.0,
            steps=steps,
            batch_size=self.document_batch if large else self.batch_size,
            lr=self.reluformer_lr if reluformers and not large else self.lr,
            warmup=steps // 10 if large else self.warmup,
            schedule="cosine",
            label_smoothing=0.1 if translates else 0.0,
            normalisation_penalty=self.penalty * losses[0],
            entropy_penalty=self.penalty * losses[1],
            precision=self.precision,
            seed=seed,
            checkpoint_every=min(1000, max(1, steps // 5)),
            keep=1,
            device=self.device,
        )
        settings = settings or dict(self.chosen).get(attention_name(config))
        if settings is not None:
            config = replace(
                config,
                lr=settings.lr,
                warmup=round(settings.warmup * steps),
                normalisation_penalty=settings.penalty * losses[0],
                entropy_penalty=settings.penalty * losses[1],
            )
        config.check()
        return TextExperiment(config, measures, self.test_pairs)

    def trial(self, settings: Settings, phi: str, **others: Any) -> TextExperiment:
        """Return a run for choosing settings: shorter, and judged on the validation split."""
        shorter = replace(self, steps=self.trial_steps or self.steps)
        run = shorter.run(phi, seed=TRIAL_SEED, settings=settings, measures=("bleu",), **others)
        return replace(run, split="valid")

    def reluformer(self, *, losses: tuple[bool, bool] = (True, True), **others: Any) -> TextExperiment:
        """Return a run with ReLUFormer's φ, its gain learned per head, and its two losses or some of them."""
        return self.run(RELUFORMER, reluformers=True, losses=losses, **others)

    def adapted(self, **given: Any) -> Self:
        """Return the set-up with other values; None leaves a value as it is."""
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("steps", math.inf) <= given.get("warmup", self.warmup) and "warmup" not in given:
            given["warmup"] = given["steps"] // 5
        if "lr" in given:  # one rate for everything
            given.setdefault("reluformer_lr", given["lr"])
        return replace(self, **given)


SETUPS = {
    setup.name: setup
    for setup in (
        TextSetup(
            "default",
            slots=(32, 256, 1024),
            lengths=(128, 512),
            activations=("relu", "identity"),
            alphas=(0.0, 0.5, 1.0, 2.0),
            seeds=(0, 1),
            steps=200,
            warmup=20,
            test_pairs=40,
        ),
        TextSetup("hour"),
        TextSetup(
            "day",
            data="help-de-en",
            vocabulary=2000,
            dim=128,
            heads=4,
            layers=3,
            slots=(64, 512, 4096),
            base_slots=512,
            lengths=(128, 256, 512, 1024),
            shown_seeds=1,
            steps=6000,
            batch_size=2048,
            document_passes=2,
            lr=4e-3,
            reluformer_lr=4e-3,
            penalty=0.1,
            warmup=1200,
            chosen=(
                ("softmax", Settings(4e-3, 0.2)),
                ("ReLUFormer", Settings(4e-3, 0.2, 0.1)),
                ("relu/L", Settings(4e-3, 0.2)),
                ("relu", Settings(8e-3, 0.2)),
            ),
            # A kind without losses of its own has its warm-up tried where ReLUFormer has their weight, too.
            trials=tuple(
                Settings(rate, *others) for others in ((0.05, 0.03), (0.2, 0.1)) for rate in (4e-3, 2e-3, 8e-3)
            ),
            trial_steps=1500,
            dropout=0.1,
            precision="bf16",
            test_pairs=600,
        ),
        TextSetup(
            "smoke",
            dim=32,
            layers=1,
            vocabulary=340,
            slots=(32, 512),
            base_slots=32,
            length=64,
            lengths=(128, 512),
            text_length=64,
            activations=("relu",),
            alphas=(0.0, 1.0),
            seeds=(0, 1),
            trials=(Settings(1e-3, 0.25), Settings(2e-3, 0.25)),
            steps=4,
            batch_size=256,
            warmup=1,
            test_pairs=4,
        ),
    )
}


def sides(data: str) -> tuple[str, str]:
    """Return the languages of a data set, without loading it if its name gives them."""
    return TEXTS[data].languages if data in TEXTS else corpus(data).languages


@lru_cache(maxsize=4)
def corpus(data: str) -> Corpus:
    """Return the training text, loaded once for a whole grid."""
    return text.load(data, "train")


def check(runs: list[TextExperiment]) -> None:
    """Raise now, rather than after an hour, if text, a vocabulary or a package that runs need is missing."""
    for task in dict.fromkeys(run.config.task for run in runs):
        config = next(run.config for run in runs if run.config.task == task)
        text_data.learned(text_data.of_run(config, "train"), config.model.vocabulary)
        for split in ("valid", "test"):
            text_data.of_run(config, split)
    if any(run.facts["activation"] in ("sparsemax", "entmax15") for run in runs):
        _needed("entmax", "sparsemax and 1.5-entmax need entmax")
    if any("bleu" in run.measures for run in runs):
        _needed("sacrebleu", "BLEU needs sacrebleu")


def _needed(package: str, why: str) -> None:
    if find_spec(package) is None:
        raise ImportError(f"{why}: pip install {package}")
