"""Load trained models from run folders, saved models or the hub."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nomax import models, train
from nomax.data import Source
from nomax.data import load as load_data
from nomax.data.images.transforms import Evaluation
from nomax.data.text import Corpus, Tokenizer
from nomax.evaluate.fewshot import WHOLE_BELOW
from nomax.models import ReLUFormer, ViT
from nomax.models.hub import VOCABULARY, download, vocabulary_digest
from nomax.models.vit import Probabilities
from nomax.train import TextConfig, VisionConfig
from nomax.train.console import display_name, slug
from nomax.train.text import data as text_data

if TYPE_CHECKING:
    from nomax.evaluate.predict import Guess, Picture

Trained = TypeVar("Trained", bound="TrainedImageModel | TrainedTextModel")


@dataclass(frozen=True)
class TrainedImageModel:
    """An image model in evaluation mode, and its training config, if known."""

    name: str
    model: ViT
    config: VisionConfig | None = None

    @property
    def title(self) -> str:
        """Its name and its φ, or one of them if it says both, for tables and figures."""
        return _title(self.name, self.model.config.phi)

    @property
    def transform(self) -> Evaluation:
        """The transform of its images: as the model or its training says, or else as in the paper."""
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
            raise ValueError(_no_data_set(self.name))
        return self.config.data

    @property
    def probabilities(self) -> Probabilities | None:
        """The function from logits to probabilities, if the model or its training says."""
        return self.model.config.probabilities or (self.config.loss if self.config else None)

    def images(
        self,
        split: str = "test",
        data: str | None = None,
        on_error: str | None = None,
        held_out: float | None = None,
    ) -> Source:
        """Load one split of a data set, or of its own, with held-out share and broken images treated as in training.

        held_out: the share of the training images to use as the test split if the data has none.
        """
        if data is not None or self.config is None:
            return load_data(data or self.data, split, on_error=on_error or "raise", held_out=held_out or 0.0)
        share = self.config.held_out if held_out is None else held_out
        try:
            return load_data(self.data, split, on_error=on_error or self.config.on_error, held_out=share)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.name} was trained on {self.data}. {error} Or give --data.") from error

    def predict(self, image: "Picture", top: int = 5) -> "tuple[Guess, ...]":
        """Return the most probable classes of an image, a file or an image of Pillow."""
        from nomax.evaluate.predict import predict_one  # which imports this module

        return predict_one(self, image, top)


@dataclass(frozen=True)
class TrainedTextModel:
    """A text model in evaluation mode, its vocabulary, and its training config.

    A saved model has none: it is assumed to be trained on single segments, in the direction of the data.
    """

    name: str
    model: ReLUFormer
    tokenizer: Tokenizer
    config: TextConfig
    known: bool = True
    """True if `config` is that of its training."""

    @property
    def title(self) -> str:
        """Its name and its φ, or one of them if it says both, for tables."""
        return _title(self.name, display_name(self.model.config.phi))

    @property
    def translates(self) -> bool:
        """True if it is a translation model, False if it is a language model."""
        return self.model.config.encoder_layers > 0

    def corpus(self, data: str | None = None, split: str = "test") -> tuple[Corpus, str]:
        """Load a split of its own data or of others, and return it with the name of the split."""
        if data is None and not self.known:
            raise ValueError(_no_data_set(self.name))
        languages = self.config.languages if self.known else None
        if data is not None:
            split = "all" if split == "test" and _is_files(data) else split
            return text_data.load_corpus(data, split, self.config.task, languages), split
        own = self.config.data
        if split == "test" and _is_files(own):
            files = "FILE,FILE" if self.translates else "FILE"
            raise ValueError(f"{self.name} was trained on {own}, which has no test split: give --data {files}.")
        try:
            return text_data.of_run(self.config, split), split
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.name} was trained on {own}. {error} Or give --data.") from error


def load(path: str | Path, device: str | None = None) -> TrainedImageModel:
    """Load a run folder, a saved model folder, or a model on the hub ("owner/name"), onto a GPU if there is one."""
    trained = load_any(path, device)
    if isinstance(trained, TrainedTextModel):
        own = "nomax translate" if trained.translates else "nomax generate"
        raise ValueError(f"{path} is a text model, not an image model: nomax evaluate, nomax rows and {own} take it.")
    return trained


def load_text(path: str | Path, device: str | None = None) -> TrainedTextModel:
    """Load a run folder or a saved model folder of a text model, onto a GPU if there is one."""
    trained = load_any(path, device)
    if isinstance(trained, TrainedImageModel):
        raise ValueError(f"{path} is an image model, not a text model: nomax evaluate and nomax probe take it.")
    return trained


def load_any(path: str | Path, device: str | None = None) -> TrainedImageModel | TrainedTextModel:
    """Load a run or a saved model, of images or of text."""
    folder = Path(path).expanduser()
    name = folder.resolve().name if folder.exists() else str(path)
    if not folder.exists() and str(path).count("/") == 1 and str(path)[0] not in "./~":
        folder = download(str(path))
    if (folder / "model.safetensors").is_file():
        model = models.load(str(folder))
        if isinstance(model, ReLUFormer):
            return _saved_text(name, _moved(model, device), folder)
        return TrainedImageModel(name, _moved(model, device))
    if (folder / "config.json").is_file():
        if _is_text(folder / "config.json"):
            text_model, tokenizer, text_config = train.load_text_run(folder)
            return TrainedTextModel(name, _moved(text_model, device), tokenizer, text_config)
        model, config = train.load_run(folder)
        return TrainedImageModel(name, _moved(model, device), config)
    raise FileNotFoundError(f"{path} is neither a run folder nor a saved model: {_instead(folder)}")


def load_all(paths: Sequence[str], device: str | None, loader: Callable[[str, str | None], Trained]) -> list[Trained]:
    """Load several with one of the functions above; models of the same name are named by their paths."""
    if not paths:
        raise ValueError("give at least one run: the folder that `nomax train` wrote, or a saved model.")
    if len(set(paths)) < len(paths):
        raise ValueError(f"the same run is named twice: {' '.join(paths)}.")
    loaded = [loader(path, device) for path in paths]
    names = [trained.name for trained in loaded]
    return [
        trained if names.count(trained.name) == 1 else replace(trained, name=path)
        for trained, path in zip(loaded, paths, strict=True)
    ]


def _title(name: str, phi: str) -> str:
    if name == slug(phi):
        return phi
    return name if phi in name else f"{name} ({phi})"


def _no_data_set(name: str) -> str:
    return f"{name} is a saved model, which does not name its data set; give one with --data."


def _is_files(data: str) -> bool:
    """Return whether the data are files, which have no splits, rather than a name or a folder."""
    path = Path(data).expanduser()
    return path.is_file() or ("," in data and not path.exists())


def _moved(model: Any, device: str | None) -> Any:
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(where).eval()
    except (RuntimeError, AssertionError) as error:  # which torch raises for a device that is not there
        raise ValueError(f"device {where!r} cannot be used: {str(error).partition(chr(10))[0]}") from error


def _is_text(path: Path) -> bool:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return (path.parent / VOCABULARY).is_file()  # reading it next reports what is wrong
    return isinstance(config, dict) and "task" in config


def _saved_text(name: str, model: ReLUFormer, folder: Path) -> TrainedTextModel:
    if not (folder / VOCABULARY).is_file():
        raise FileNotFoundError(f"{folder} has no {VOCABULARY}: a text model cannot be used without its vocabulary.")
    tokenizer = Tokenizer.load(folder / VOCABULARY)
    tokenizer.check(model.config.vocabulary, vocabulary_digest(folder), str(folder))
    task: Any = {"task": "translate"} if model.config.encoder_layers else {"task": "language", "languages": ("en",)}
    return TrainedTextModel(name, model, tokenizer, TextConfig(model=model.config, **task), known=False)


def _instead(folder: Path) -> str:
    """Say what the folder is instead, and what to do."""
    if not folder.is_dir():
        return "there is no such folder. Give the one that `nomax train` wrote (--out)."
    if (folder / "metrics.jsonl").exists():
        model = f", or give {folder / 'model'}" if (folder / "model" / "config.json").is_file() else ""
        return f"it is a run whose config.json is missing or cannot be read. Restore that{model}."
    if runs := sorted(str(config.parent) for config in folder.glob("*/config.json")):
        return f"it holds several. Give one or more of them: {' '.join(runs)}"
    return "it has no config.json, which `nomax train` and nomax.models.save write."
