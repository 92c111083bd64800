"""`nomax finetune`: calibrate a converted model, distil it from its original, and tell what that brought.

Everything that the command finds out goes to OUT/finetune.json as soon as it is known, and what it has learned to
checkpoints beside it. So the same command goes on after a kill, and its result can be read without running it.
"""

import random
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn

from nomax import __version__, _compat, _files, models
from nomax.console import Console
from nomax.conversion import folders
from nomax.conversion.api import convert
from nomax.conversion.calibrate import LayerFit, calibrate, inner_attentions
from nomax.conversion.own import as_converted
from nomax.phi import ROW_MAPS, SOFTMAX
from nomax.train.console import Bar
from nomax.train.distil import texts
from nomax.train.distil.distillation import DistilConfig, Step, distil, sentence_error
from nomax.train.distil.result import RETRIEVAL, SEARCH, figure, markdown, table

RESULT, TABLE, FIGURE, CHECKPOINTS = "finetune.json", "finetune.md", "finetune.svg", "checkpoints"
ORIGINAL, CONVERTED, CALIBRATED, DISTILLED = "original", "converted", "calibrated", "distilled"
HISTORY_EVERY = 10  # steps between those that the result keeps
PROBE = [
    "a text",
    "a longer text, which shares a batch with the other one",
]  # to find out if the model takes packed ones


@dataclass(frozen=True)
class LabelConfig:
    """How to fine-tune on labels."""

    steps: int = 0
    """Batches to learn from."""
    lr: float = 1e-3
    """The peak learning rate; it rises linearly, then falls to zero as a cosine."""
    warmup: int = 20
    """Steps in which the learning rate rises."""
    teacher_weight: float = 0.0
    """The weight of the divergence from the original's output, next to the labels', which have 1."""


@dataclass(frozen=True)
class Options:
    """Bring a converted model back to its original: calibrate every head, then distil hidden states and outputs.

    FOLDER is a model that `nomax convert` has written: a sentence encoder or a text classifier of transformers, or an
    image model of nomax. Its weights are still the original's, so it is its own teacher, with softmax. It learns from
    the train splits of data sets, and is measured on their test splits: a sentence encoder by the cosine of its
    embeddings to the original's at about 15, 55 and 135 tokens, a classifier by its accuracy. Texts are split by
    document. A classifier can go on to learn from labels.

    The same command goes on where a killed one was. OUT/finetune.json has the table, the settings and every tenth step;
    OUT/finetune.md the table alone, and OUT/finetune.svg a figure of how a sentence encoder learned.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The converted model."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…")]
    """What to learn from. Sentence encoders: names (`nomax data list`), folders with train and test files, or JSONL
    files; bible-kjv-en:kjv takes kjv, not English, of its two languages. Text classifiers: a folder with train.csv and
    test.csv, whose columns are text and label. Images: one name, folder or set of shards, as in `nomax train vit`."""
    out: Path | None = None
    """Where the model goes, with finetune.json; FOLDER-finetuned if not given."""
    teacher: Path | None = None
    """The folder of the original, for a FOLDER that was trained since it was converted."""
    pairs: str | None = None
    """Pairs of texts that mean the same, to measure retrieval on, such as bible-kjv-en."""
    language: str | None = None
    """The language to learn from, of the two that the data sets have; English if not given."""
    length: int = 256
    """The longest texts, in tokens."""
    batch_tokens: int = 512
    """Tokens in a batch of a sentence encoder. It has texts of all lengths, packed; or, where the model does not take
    packed ones, texts of similar lengths, and padding counts."""
    short_texts: float = 0.0
    """The share of a sentence encoder's texts that are a few words cut out of a sentence: without them, few texts are
    short."""
    batch_size: int = 64
    """Images, or texts with labels, in a batch."""
    held_out: float = 0.0
    """For images: the share of the training images to measure on, instead of the test split, to choose settings by."""
    calibration: Literal["in turn", "at once", "none"] = "in turn"
    """Fit gains and shifts layer by layer, or every layer on the original's inputs, or not at all, as where they are
    learned already."""
    learn_alpha: bool = False
    """Fit and learn a power of L for every head, too, for texts of many lengths."""
    calibration_texts: int = 32
    """Texts to fit them on."""
    calibration_images: int = 256
    """Images to fit them on."""
    test_texts: int = 256
    """Texts of each length to measure on."""
    test_queries: int = 1000
    """Texts to find by a few of their words, among as many."""
    train_embeddings: bool = False
    """Train the table of word embeddings, too."""
    seed: int = 0
    """Of the order of the texts."""
    threads: int | None = None
    """Threads of the CPU; all cores if not given."""
    distil: DistilConfig = field(default_factory=DistilConfig)
    """How to distil; --distil.steps 0 only calibrates."""
    labels: LabelConfig = field(default_factory=LabelConfig)
    """How to fine-tune a classifier on labels, after that; --labels.steps 0 does not."""
    smoke: bool = False
    """Shrink everything to seconds, only to check that it works."""


def run(options: Options) -> int:
    """Run the recipe, and return 0, or 2 if the options are wrong or something is missing."""
    console = Console()
    try:
        if options.threads:
            torch.set_num_threads(options.threads)
        recipe = _recipe_type(options.folder)(_shrunk(options) if options.smoke else options, console)
        if not recipe.result.get("finished"):
            recipe.open()
            recipe.run()
        console.print(table(recipe.result))
        console.print(f"The model and {RESULT} are in {recipe.out}.")
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax finetune: {error}", file=sys.stderr)
        return 2
    return 0


def _recipe_type(folder: Path) -> type["Recipe"]:
    """Return the recipe for the kind of model in a folder."""
    settings = folders.config_of(folders.found(folder))
    if folders.library_of(settings, folder) == "transformers":
        from nomax.train.distil.classifier import ARCHITECTURE, ClassifierRecipe  # which imports this module

        architecture = next(iter(settings.get("architectures") or ()), "")
        return ClassifierRecipe if architecture.endswith(ARCHITECTURE) else Recipe
    if settings.get("model_type") == models.hub.VIT:
        from nomax.train.distil.images import ImageRecipe  # which imports this module

        return ImageRecipe
    raise ValueError(
        f"{folder} holds a {settings.get('model_type') or settings.get('architecture')}; nomax finetune takes sentence "
        "encoders and text classifiers of transformers, and image models of nomax. nomax.calibrate and nomax.distil "
        "take any model."
    )


class Recipe:
    """One run of the recipe: its models, its texts and what is known so far."""

    unit = "tokens"

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console = options, console
        self.out = options.out or options.folder.with_name(f"{options.folder.name}-finetuned")
        if self.out.resolve() == options.folder.resolve():
            raise ValueError(f"--out {self.out} is the model itself, which stays as it is: name another folder.")
        self.settings = _settings(options)
        self.result = self._known()

    def open(self) -> None:
        """Load the models and the texts."""
        options, tokenizers = self.options, _compat.transformers()
        if options.labels.steps or options.held_out:
            raise ValueError(
                "--labels and --held-out are for classifiers; this is a sentence encoder. This gives it a head: "
                'nomax.from_pretrained(FOLDER, class_name="BertForSequenceClassification", num_labels=…), to be saved '
                "by its save_pretrained."
            )
        if not 0 <= options.short_texts <= 1:
            raise ValueError(f"--short-texts {options.short_texts} must be a share of the texts, from 0 to 1.")
        self.student: nn.Module = folders.from_pretrained(options.folder)
        self.teacher: nn.Module | None = original_of(options.teacher or options.folder)
        self.tokenizer: Any = tokenizers.AutoTokenizer.from_pretrained(options.folder)
        self._check()
        self.learned = any(layer.gain is not None for layer in inner_attentions(self.student).values())
        read = partial(texts.documents, options.data, language=options.language, tokenizer=self.tokenizer)
        self.train_documents = read(split="train")
        special = len(self.tokenizer("")["input_ids"])
        test_documents = read(split="test")
        self.tests = texts.measured(test_documents, options.test_texts, special)
        self.queries = texts.queries(test_documents, options.test_queries, self.tokenizer)
        self.pairs = texts.pairs(options.pairs, "test", self.tokenizer) if options.pairs else None
        self._targets: dict[int, Tensor] = {}

    def run(self) -> None:
        """Measure, calibrate, measure, distil, measure, save; what is known already is not done again."""
        self._measure_and_distil()
        self._save()

    def _measure_and_distil(self) -> None:
        if self.teacher is not None:
            self._stage(ORIGINAL, self.teacher)
        self._stage(CONVERTED, self.student)
        if self.options.calibration != "none" and not self.learned:
            with as_converted(self.student):
                self._calibrate()
            self._stage(CALIBRATED, self.student)
        if self.options.distil.steps:
            self._distil()
            self._stage(DISTILLED, self.student)

    def _known(self) -> dict[str, Any]:
        path = self.out / RESULT
        if not path.exists():
            if self.out.is_dir() and any(self.out.iterdir()):
                raise FileExistsError(f"--out {self.out} holds something else already: name an empty or new folder.")
            return {"settings": self.settings, "command": spelled(self.options), "nomax": __version__, "stages": {}}
        known = _files.read_json(path, f"Remove {self.out} to begin again.")
        if known.get("settings") != self.settings:
            raise ValueError(
                f"{path} has the results of another command: {known.get('command')}. Run that one to go on with it, or "
                "name another folder with --out."
            )
        return dict(known)

    def _check(self) -> None:
        layers = inner_attentions(self.student).values()
        if all(layer.phi.activation in ROW_MAPS for layer in layers):
            raise ValueError(
                f"{self.options.folder} is not converted: first run nomax convert {self.options.folder} --out OTHER."
            )
        if self.options.teacher is None and any(layer.gain is not None for layer in layers):
            raise ValueError(
                f"{self.options.folder} has learned gains, so its other weights may be trained too: name the original "
                "with --teacher."
            )

    def _stage(self, name: str, model: nn.Module) -> None:
        if name in self.result["stages"]:
            return
        self.console.print(f"measuring the {name} model …")
        self.result["stages"][name] = self._measured(name, model)
        self._write()

    def _measured(self, name: str, model: nn.Module) -> dict[str, Any]:
        """Return what a model of a stage is measured by."""
        measured: dict[str, Any] = {}
        for length, pieces in self.tests.items():
            vectors = texts.embedded(model, pieces, self.tokenizer, self.options.length)
            if length not in self._targets:
                teacher = vectors if name == ORIGINAL else self._embedded_by_teacher(pieces)
                self._targets[length] = teacher
            cosines = (vectors * self._targets[length]).sum(-1)
            measured[f"cosine at {length}"] = float(cosines.mean())
        self.result["tests"] = {str(length): len(pieces) for length, pieces in self.tests.items()}
        for title, sides in ((SEARCH, self.queries), (RETRIEVAL, self.pairs)):
            if sides is not None:
                source, target = (texts.embedded(model, side, self.tokenizer, self.options.length) for side in sides)
                measured[title] = texts.retrieval(source, target, both_ways=title == RETRIEVAL)
                self.result["tests"][title] = len(source)
        return measured

    def _embedded_by_teacher(self, pieces: list[texts.Piece]) -> Tensor:
        assert self.teacher is not None  # a sentence encoder has one
        return texts.embedded(self.teacher, pieces, self.tokenizer, self.options.length)

    def _calibrate(self) -> None:
        if fits := self.result.get("calibration"):
            layers = inner_attentions(self.student)
            for name, fit in fits["layers"].items():
                alpha = torch.tensor(fit["alpha"]) if self.options.learn_alpha else None
                layers[name].learn(torch.tensor(fit["gain"]), torch.tensor(fit["shift"]), alpha)
            return
        batches, count = self._calibration_batches()
        begun = time.monotonic()
        order: Any = self.options.calibration
        with Bar("calibrating", len(inner_attentions(self.student)), "layers", self.console) as bar:
            fitted = calibrate(
                self.student,
                batches,
                order=order,
                alpha=self.options.learn_alpha,
                progress=lambda done, _: bar.update(done, {"layers": done}),
            )
        self.result["calibration"] = {
            "seconds": time.monotonic() - begun,
            self.unit: count,
            "layers": {fit.name: _numbers(fit) for fit in fitted},
        }
        self._write()

    def _calibration_batches(self) -> tuple[list[Any], int]:
        """Return batches to calibrate on, and how many tokens they have."""
        generator = random.Random(f"{self.options.seed} calibration")
        pieces = texts.cut(self.train_documents, self.options.length, generator)
        chosen = generator.sample(pieces, min(self.options.calibration_texts, len(pieces)))
        chosen.sort(key=lambda piece: piece.tokens)
        batches = [
            texts.encoded([piece.text for piece in group], self.tokenizer, self.options.length)
            for group in texts.grouped(chosen, texts.CALIBRATED_TOKENS, self.options.length)
        ]
        return batches, sum(int(batch["attention_mask"].sum()) for batch in batches)

    def _distil(self) -> None:
        if not self.options.train_embeddings:
            texts.freeze_embeddings(self.student)
        batches = texts.batches(
            self.train_documents,
            self.tokenizer,
            tokens=self.options.batch_tokens,
            longest=self.options.length,
            seed=self.options.seed,
            short=self.options.short_texts,
            packing=texts.packing_of(self.student, texts.encoded(PROBE, self.tokenizer, self.options.length)),
        )
        steps = self.options.distil.steps
        with Bar("distilling", steps, "tokens", self.console) as bar:

            def report(step: Step) -> None:
                bar.update(step.step, {"loss": step.loss, "tokens": step.positions})

            history = distil(
                self.student,
                self.teacher,
                batches,
                self.options.distil,
                output_loss=sentence_error,
                folder=self.out / CHECKPOINTS,
                report=report,
            )
        self.result["distillation"] = {
            "tokens": history[-1].positions,
            "seconds": history[-1].seconds,
            "steps": [rounded(step) for step in history if step.step % HISTORY_EVERY == 0 or step.step == steps],
        }

    def _save(self) -> None:
        self.student.eval().save_pretrained(self.out)  # type: ignore[operator]
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(self.out)
        self.result["finished"] = True
        self._write()
        _files.write(self.out / TABLE, markdown(self.result))
        if (drawn := figure(self.result)) is not None:
            _files.write(self.out / FIGURE, drawn)
        for folder in sorted(self.out.glob(f"{CHECKPOINTS}*")):
            for path in sorted(folder.glob("step-*")):
                path.unlink()
            folder.rmdir()

    def _write(self) -> None:
        _files.write_json(self.out / RESULT, self.result)


def spelled(options: Options) -> str:
    """Return the command that has these options, without those that are as usual."""
    words = ["nomax", "finetune", str(options.folder), "--data", *options.data]
    usual = Options(options.folder, options.data)
    parts = [("--", options, usual)]
    parts += [(f"--{name}.", getattr(options, name), getattr(usual, name)) for name in ("distil", "labels")]
    for prefix, given, default in parts:
        for name, value in vars(given).items():
            if name in ("folder", "data", "distil", "labels", "threads") or value == getattr(default, name):
                continue
            option = f"{prefix}{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def _shrunk(options: Options) -> Options:
    few = {"length": 32, "batch_tokens": 256, "calibration_texts": 2, "test_texts": 2, "test_queries": 4, "pairs": None}
    few |= {"batch_size": 8, "calibration_images": 8}
    labels = replace(options.labels, steps=min(options.labels.steps, 3))
    return replace(options, **few, distil=replace(options.distil, steps=3), labels=labels)  # type: ignore[arg-type]


def _settings(options: Options) -> dict[str, Any]:
    """Return what a result depends on, as plain data."""
    settings = asdict(options)
    for name in ("out", "smoke", "threads"):
        del settings[name]
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    return plain | {"data": list(options.data)}


def original_of(folder: Path) -> nn.Module:
    """Load the original of a converted model, from its own folder or from that of the converted one."""
    settings = folders.config_of(folders.found(folder))
    if folders.KEY not in settings:
        model = folders.load_original(folders.found(folder), settings)
        convert(model, SOFTMAX)  # so that it takes packed batches, as the student does
    else:
        model = folders.from_pretrained(folder)
        for layer in inner_attentions(model).values():
            layer.become_softmax()
    original: nn.Module = model.requires_grad_(False).eval()
    return original


def _numbers(fit: LayerFit) -> dict[str, list[float]]:
    return {
        name: [float(f"{x:.7g}") for x in getattr(fit, name).tolist()] for name in ("gain", "shift", "alpha", "error")
    }


def rounded(step: Step) -> dict[str, float]:
    """Return a step as a result keeps it."""
    return {name: round(value, 5) for name, value in vars(step).items()}
