"""A trained model, wherever it is: the folder of a run, a saved model, or a model on the hub."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nomax import models, train
from nomax.data import Source
from nomax.data import load as load_data
from nomax.data.images import DataError
from nomax.data.text import Tokenizer
from nomax.data.transforms import Evaluation
from nomax.evaluate.features import WHOLE_BELOW
from nomax.evaluate.predict import Guess, Picture, predict
from nomax.models import ReLUFormer, ViT
from nomax.models.hub import VOCABULARY, download, vocabulary_digest
from nomax.models.vit_config import Probabilities
from nomax.train import TextConfig, VisionConfig
from nomax.train.phis import slug, spoken


@dataclass(frozen=True)
class Run:
    """A model in evaluation mode, and how it was trained, where that is known."""

    name: str
    model: ViT
    config: VisionConfig | None = None

    @property
    def title(self) -> str:
        """What tables and figures call it: its name and its φ, or one of them where it says both."""
        phi = self.model.config.phi
        if self.name == slug(phi):
            return phi
        return self.name if phi in self.name else f"{self.name} ({phi})"

    @property
    def transform(self) -> Evaluation:
        """How it wants images in evaluation: as the model says, or its training, or else as the paper evaluates."""
        height, width = self.model.config.image
        if height != width:
            raise ValueError(f"{self.name} takes images of {height}×{width} pixels; only square ones can be evaluated.")
        channels, known = self.model.config.channels, self.model.config.preprocessing
        if known is not None:
            return Evaluation(height, known.crop, channels, known.antialias)
        if self.config is None:
            return Evaluation(height, "small" if height >= WHOLE_BELOW else "resize", channels)
        chosen = self.config.augment.evaluation()
        # Images of another data set may have another size.
        return replace(chosen, crop="resize") if chosen.crop == "none" else chosen

    @property
    def data(self) -> str:
        """The data set that it was trained on."""
        if self.config is None:
            raise ValueError(f"{self.name} is a saved model, which does not say its data set; give one with --data.")
        return self.config.data

    @property
    def probabilities(self) -> Probabilities | None:
        """What makes probabilities of logits, where the model or its training says it."""
        return self.model.config.probabilities or (self.config.loss if self.config else None)

    def images(
        self,
        split: str = "test",
        data: str | None = None,
        on_error: str | None = None,
        held_out: float | None = None,
    ) -> Source:
        """One split of a data set, or of its own; there, the held-out share and broken images are as in its training.

        held_out: the share of the training images that is the test split of data without one.
        """
        if data is not None or self.config is None:
            return load_data(data or self.data, split, on_error=on_error or "raise", held_out=held_out or 0.0)
        share = self.config.held_out if held_out is None else held_out
        try:
            return load_data(self.data, split, on_error=on_error or self.config.on_error, held_out=share)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.name} was trained on {self.data}. {error} Or give --data.") from error

    def predict(self, image: Picture, top: int = 5) -> tuple[Guess, ...]:
        """The most probable classes of an image: a file, or an image of Pillow."""
        (found,) = predict(self, [image], top)
        if found.error:
            raise DataError(found.error)
        return found.guesses


@dataclass(frozen=True)
class TextRun:
    """A model of text in evaluation mode, its vocabulary, and how it was trained.

    A saved model does not say how: it is taken for one of single segments, in the direction that the data have.
    """

    name: str
    model: ReLUFormer
    tokenizer: Tokenizer
    config: TextConfig
    known: bool = True
    """Whether the configuration is that of its training."""

    @property
    def title(self) -> str:
        """What tables call it: its name and its φ, or one of them where it says both."""
        phi = spoken(self.model.config.phi)
        return phi if self.name == slug(phi) else self.name if phi in self.name else f"{self.name} ({phi})"

    @property
    def translates(self) -> bool:
        """Whether it is not a language model."""
        return self.model.config.encoder_layers > 0


def load(path: str | Path, device: str | None = None) -> Run:
    """Load a run folder, a saved model folder, or a model of the hub ("owner/name"); onto a GPU if there is one."""
    run = load_any(path, device)
    if isinstance(run, TextRun):
        own = "nomax translate" if run.translates else "nomax generate"
        raise ValueError(f"{path} is a model of text, not of images: nomax evaluate, nomax rows and {own} take it.")
    return run


def load_text(path: str | Path, device: str | None = None) -> TextRun:
    """Load a run folder or a saved model folder of text, onto a GPU if there is one."""
    run = load_any(path, device)
    if isinstance(run, Run):
        raise ValueError(f"{path} is a model of images, not of text: nomax evaluate and nomax probe take it.")
    return run


def load_any(path: str | Path, device: str | None = None) -> Run | TextRun:
    """Load a run or a saved model of images or of text."""
    folder = Path(path).expanduser()
    name = folder.resolve().name if folder.exists() else str(path)
    if not folder.exists() and str(path).count("/") == 1 and str(path)[0] not in "./~":
        folder = download(str(path))
    if (folder / "model.safetensors").is_file():
        model = models.load(str(folder))
        if isinstance(model, ReLUFormer):
            return _saved_text(name, _moved(model, device), folder)
        return Run(name, _moved(model, device))
    if (folder / "config.json").is_file():
        if _is_text(folder / "config.json"):
            text_model, tokenizer, text_config = train.load_text_run(folder)
            return TextRun(name, _moved(text_model, device), tokenizer, text_config)
        model, config = train.load_run(folder)
        return Run(name, _moved(model, device), config)
    raise FileNotFoundError(f"{path} is neither a run folder nor a saved model: {_instead(folder)}")


def _moved(model: Any, device: str | None) -> Any:
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(where).eval()
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that is not there
        raise ValueError(f"device {where!r} cannot be used: {str(error).partition(chr(10))[0]}") from error


def _is_text(config: Path) -> bool:
    try:
        found = json.loads(config.read_bytes())
    except (ValueError, RecursionError):
        return (config.parent / VOCABULARY).is_file()  # whoever reads it next says what is wrong with it
    return isinstance(found, dict) and "task" in found


def _saved_text(name: str, model: ReLUFormer, folder: Path) -> TextRun:
    if not (folder / VOCABULARY).is_file():
        raise FileNotFoundError(f"{folder} has no {VOCABULARY}: without its vocabulary a model says nothing.")
    tokenizer = Tokenizer.load(folder / VOCABULARY)
    tokenizer.check(model.config.vocabulary, vocabulary_digest(folder), str(folder))
    task: Any = {"task": "translate"} if model.config.encoder_layers else {"task": "language", "languages": ("en",)}
    return TextRun(name, model, tokenizer, TextConfig(model=model.config, **task), known=False)


def _instead(folder: Path) -> str:
    """What is there instead of a run, and what to do."""
    if not folder.is_dir():
        return "there is no such folder. Give the one that `nomax train` wrote (--out)."
    if (folder / "metrics.jsonl").exists():
        model = f", or give {folder / 'model'}" if (folder / "model" / "config.json").is_file() else ""
        return f"it is a run whose config.json is missing or cannot be read. Restore that{model}."
    if runs := sorted(str(config.parent) for config in folder.glob("*/config.json")):
        return f"it holds several. Give one or more of them: {' '.join(runs)}"
    return "it has no config.json, which `nomax train` and nomax.models.save write."


def load_all(paths: Sequence[str], device: str | None = None) -> list[Run]:
    """Load several of images; those of the same name are told apart by their paths."""
    return _several(paths, device, load)


def load_mixed(paths: Sequence[str], device: str | None = None) -> list[Run | TextRun]:
    """Load several of images and text; those of the same name are told apart by their paths."""
    return _several(paths, device, load_any)


def _several(paths: Sequence[str], device: str | None, one: Callable[[str, str | None], Any]) -> list[Any]:
    if not paths:
        raise ValueError("give at least one run: the folder that `nomax train` wrote, or a saved model.")
    if len(set(paths)) < len(paths):
        raise ValueError(f"the same run is named twice: {' '.join(paths)}.")
    runs = [one(path, device) for path in paths]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=path) for run, path in zip(runs, paths, strict=True)
    ]
