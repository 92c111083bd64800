"""A trained model, wherever it is: the folder of a run, a saved model, or a model on the hub."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nomax import models, train
from nomax.data.transforms import Evaluation
from nomax.evaluate.features import WHOLE_BELOW
from nomax.models import ViT
from nomax.train import VisionConfig
from nomax.train.configure import slug


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
        """How it wants images in evaluation: as its training says, or else as the paper evaluates."""
        height, width = self.model.config.image
        if height != width:
            raise ValueError(f"{self.name} takes images of {height}×{width} pixels; only square ones can be evaluated.")
        if self.config is None:
            return Evaluation(height, "small" if height >= WHOLE_BELOW else "resize", self.model.config.channels)
        chosen = self.config.augment.evaluation()
        # Images of another data set may have another size.
        return replace(chosen, crop="resize") if chosen.crop == "none" else chosen

    @property
    def data(self) -> str:
        """The data set that it was trained on."""
        if self.config is None:
            raise ValueError(f"{self.name} is a saved model, which does not say its data set; give one with --data.")
        return self.config.data


def load(path: str | Path, device: str | None = None) -> Run:
    """Load a run folder, a saved model folder, or a model of the hub ("owner/name"); onto a GPU if there is one."""
    folder = Path(path).expanduser()
    if (folder / "model.safetensors").is_file():
        model, config = models.load(str(folder)), None
    elif (folder / "config.json").is_file():
        model, config = train.load_run(folder)
    elif not folder.exists() and str(path).count("/") == 1 and str(path)[0] not in "./~":
        model, config = models.load(str(path)), None
    else:
        raise FileNotFoundError(f"{path} is neither a run folder nor a saved model: {_instead(folder)}")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = model.to(where).eval()
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that is not there
        raise ValueError(f"device {where!r} cannot be used: {str(error).partition(chr(10))[0]}") from error
    return Run(folder.resolve().name if folder.exists() else str(path), model, config)


def _instead(folder: Path) -> str:
    """What is there instead of a run, and what to do."""
    if not folder.is_dir():
        return "there is no such folder. Give the one that `nomax train` wrote (--out)."
    if runs := sorted(str(config.parent) for config in folder.glob("*/config.json")):
        return f"it holds several. Give one or more of them: {' '.join(runs)}"
    return "it has no config.json, which `nomax train` and nomax.models.save write."


def load_all(paths: Sequence[str], device: str | None = None) -> list[Run]:
    """Load several; those of the same name are told apart by their paths."""
    if not paths:
        raise ValueError("give at least one run: the folder that `nomax train` wrote, or a saved model.")
    if len(set(paths)) < len(paths):
        raise ValueError(f"the same run is named twice: {' '.join(paths)}.")
    runs = [load(path, device) for path in paths]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=path) for run, path in zip(runs, paths, strict=True)
    ]
