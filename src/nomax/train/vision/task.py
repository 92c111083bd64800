"""Image classification as a task for the loop, its losses, and finished runs as models."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax import data, models
from nomax.data.images.batches import Batch, batches, evaluation_batches
from nomax.data.images.shards import ShardSource
from nomax.data.order import Order
from nomax.data.source import DataError, part
from nomax.data.storage import PATIENCE, Patience
from nomax.models import Preprocessing, ViT, ViTConfig
from nomax.train import run_folder
from nomax.train.config import sine_stages
from nomax.train.vision import diagnostics
from nomax.train.vision.config import VisionConfig

if TYPE_CHECKING:  # they bring in all of torch.distributed, which load_run does without
    from nomax.train.distributed import World
    from nomax.train.loop import Outcome

Images = tuple[data.Source, data.Source]  # to train on, and to test with

SHARD_BLOCK = 256  # neighbours that stay near each other, so that shards are read almost in sequence


def sigmoid(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross-entropies summed over the classes: [batch] from logits [batch, classes].

    Targets are labels [batch], or, if images are mixed, shares [batch, classes].
    """
    shares = targets if targets.is_floating_point() else F.one_hot(targets, logits.shape[-1])
    losses = F.binary_cross_entropy_with_logits(logits.float(), shares.float(), reduction="none")
    return losses.sum(-1)


def softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy over all classes: [batch] from logits [batch, classes] and labels or shares."""
    targets = targets.float() if targets.is_floating_point() else targets
    return F.cross_entropy(logits.float(), targets, reduction="none")


LOSSES = {"sigmoid": sigmoid, "softmax": softmax}


class VisionTask:
    """Train a ViT to classify images."""

    unit = "images"
    measured = frozenset({"test_accuracy", "test_loss", "images_per_second"})

    @classmethod
    def open(cls, config: VisionConfig, folder: Path, world: "World", images: Images | None = None) -> Self:
        """Start or resume the run in a folder; `images`, if already loaded."""
        if config.diagnose and config.distribute == "fsdp" and world.size > 1:
            raise ValueError("diagnose looks into whole models: use --distribute ddp with it, or --diagnose 0.")
        patience = Patience(config.read_retries, config.read_timeout)
        train, test = images or load_images(config.data, config.on_error, config.held_out, patience)
        run_folder.check(folder, config, classes=train.classes)
        if world.leads:
            run_folder.note(folder, classes=list(train.classes))
        return cls(config, train, test)

    def __init__(self, config: VisionConfig, train: data.Source, test: data.Source) -> None:
        self.config, self.train, self.test = config, train, test
        self.loss = LOSSES[config.loss]
        torch.manual_seed(config.seed)  # every φ starts from the same weights
        self.model: nn.Module = ViT.from_config(config.model)
        block = SHARD_BLOCK if isinstance(getattr(train, "source", train), ShardSource) else 1
        self.recorded = diagnostics.steps_to_record(config.steps, config.diagnose)
        self.order = Order(len(train), config.batch_size, config.seed, block=block)

    def batches(self, start: int, world: "World") -> Iterator[Batch]:
        """Yield this rank's part of the batch of each step."""
        config = self.config
        with batches(
            self.train,
            self.order,
            config.augment,
            num_classes=config.model.num_classes,
            mixup=config.mixup,
            start=start,
            rank=world.rank,
            world=world.size,
            workers=config.workers,
            device=world.device,
        ) as made:
            yield from made

    def size(self, batch: Batch) -> int:
        """Return the number of images in a batch."""
        return len(batch.images)

    def split(self, batch: Batch, parts: int) -> Iterator[Batch]:
        """Split a batch into slices."""
        length = math.ceil(len(batch.images) / parts)
        for images, targets in zip(batch.images.split(length), batch.targets.split(length), strict=True):
            yield Batch(batch.step, images, targets)

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the loss and the number of correct images; a mixed image counts as the one with the larger share.

        In training the loss has the L1 penalty of the config.
        """
        pressed = self.config.presses_attention and model.training
        logits, penalties = model(batch.images, penalties="sequences") if pressed else (model(batch.images), None)
        labels = batch.targets.argmax(-1) if batch.targets.is_floating_point() else batch.targets
        measured = {"loss": self.loss(logits, batch.targets).sum(), "accuracy": (logits.argmax(-1) == labels).sum()}
        if penalties is not None:
            measured["l1"] = penalties.l1.sum()
            weight = sine_stages(self.config.attention_l1, batch.step, self.config.steps)
            measured["loss"] = measured["loss"] + weight * measured["l1"]
        return measured

    def evaluation(self, world: "World") -> Iterator[Batch]:
        """Yield this rank's part of the test images. Ranks with fewer batches than others end with empty ones."""
        config, total = self.config, len(self.test)
        chosen = np.arange(total)
        if 0 < config.test_images < total:
            chosen = np.linspace(0, total - 1, config.test_images).astype(np.int64)
        mine = chosen[world.rank :: world.size]
        size = math.ceil(config.batch_size / world.size / config.accumulate)
        left = math.ceil(math.ceil(len(chosen) / world.size) / size)
        transform = config.augment.evaluation()
        with evaluation_batches(
            part(self.test, mine), transform, size, workers=config.workers, device=world.device
        ) as made:
            for images, labels in made:
                left -= 1
                yield Batch(0, images, labels)
        for _ in range(left):
            images = torch.empty(0, config.model.channels, *config.model.image, device=world.device)
            yield Batch(0, images, torch.empty(0, dtype=torch.int64, device=world.device))

    def observe(self, model: nn.Module, batch: Batch, step: int, folder: Path) -> None:
        """Inspect attention at the steps that config.diagnose asks for."""
        if step in self.recorded:
            with torch.compiler.set_stance("force_eager"):  # compiled layers would be compiled again to be looked into
                layers = diagnostics.diagnose(model, batch.images)
            diagnostics.write(folder, step, layers)

    def describe(self, step: int) -> dict[str, Any]:
        """Name the images that the batch of a step holds."""
        positions, indices = self.order.batch(step)
        names = [self.train.name(index) for index in indices.tolist()]
        return {"positions": positions.tolist(), "indices": indices.tolist(), "names": names}

    @staticmethod
    def result(config: VisionConfig, outcome: "Outcome") -> dict[str, Any]:
        """Return the contents of result.json."""
        return {
            "phi": config.model.phi,
            "steps": outcome.step,
            "seconds": round(outcome.seconds, 1),
            "images_per_second": round(outcome.step * config.batch_size / outcome.seconds, 1),
            **{f"{config.EVALUATED}_{name}": value for name, value in outcome.evaluation.items()},
        }

    @staticmethod
    def summary(result: dict[str, Any]) -> str:
        """Return a result in a few words."""
        return f"{result['test_accuracy']:.2%} of the test images right after {result['steps']} steps"

    @staticmethod
    def row(result: dict[str, Any]) -> dict[str, str]:
        """Return a result as a row of the table that compares runs, by its columns."""
        return {
            "φ": result["phi"],
            "test accuracy": f"{result['test_accuracy']:.2%}",
            "test loss": f"{result['test_loss']:.4f}",
            "steps": str(result["steps"]),
            "images/s": f"{result['images_per_second']:.0f}",
            "minutes": f"{result['seconds'] / 60:.1f}",
        }

    def export(self, folder: Path, weights: dict[str, Any], result: dict[str, Any], command: str) -> None:
        """Write the model, in the hub layout, below the run folder."""
        config = self.config
        card = {
            "data": config.data + (f", with {config.held_out:.0%} held out as test split" if config.held_out else ""),
            "recipe": config.recipe,
            "steps": f"{config.steps:,} of {config.batch_size:,} images",
            "accuracy": f"{result['test_accuracy']:.2%} on the test split",
            "command": command,
        }
        model = ViT.from_config(described(config, run_folder.classes(folder)))
        model.load_state_dict(weights)
        models.save(model, folder / "model", card)

    @staticmethod
    def next_steps(config: VisionConfig, folders: Sequence[Path]) -> str:
        """Return what to do next with finished runs, in words."""
        names = shlex.join(map(str, folders))
        predict = f"nomax predict {shlex.quote(str(folders[0]))} IMAGE (what it shows)"
        return f"{predict}, nomax probe {names} (few-shot accuracy), or nomax.train.load_run({str(folders[0])!r})"


def load_images(name: str, on_error: str = "raise", held_out: float = 0.0, patience: Patience = PATIENCE) -> Images:
    """Load the training images of a data set, and its test images or a held-out share of the training images."""
    train = data.load(name, "train", on_error=on_error, held_out=held_out, patience=patience)
    try:
        test = data.load(name, "test", on_error=on_error, held_out=held_out, patience=patience)
    except DataError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{error} Or hold out a share of the training images: --held-out 0.1.") from error
    if list(train.classes) != list(test.classes):
        raise ValueError(f"data {name!r}: its train and test splits do not have the same classes.")
    return train, test


def described(config: VisionConfig, classes: Sequence[str] | None) -> ViTConfig:
    """Return the model of a run with what its user needs to know: class names, and how it is evaluated."""
    shown = config.augment.evaluation()
    crop = "resize" if shown.crop == "none" else shown.crop  # the same for images of the right size
    return replace(
        config.model,
        classes=None if classes is None else tuple(classes),
        probabilities=config.loss,
        preprocessing=Preprocessing(crop, shown.antialias),
    )


def load_run(folder: str | Path) -> tuple[ViT, VisionConfig]:
    """Return the model of a run, in eval mode, and its config: the finished model, or that of the newest checkpoint."""
    folder = Path(folder)
    config = run_folder.read(folder, VisionConfig)
    model = run_folder.model(folder, lambda: ViT.from_config(described(config, run_folder.classes(folder))))
    return model, config
