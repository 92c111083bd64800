"""Image classification as a task for the loop, and finished runs as models."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nomax import data, models
from nomax.data.batches import Batch, batches, evaluation_batches
from nomax.data.images import DataError
from nomax.data.order import Order
from nomax.data.shards import ShardSource
from nomax.data.source import part
from nomax.models import Preprocessing, ViT, ViTConfig
from nomax.train import checkpoints, run
from nomax.train.config import VisionConfig
from nomax.train.losses import LOSSES

if TYPE_CHECKING:  # it brings in all of torch.distributed, which load_run does without
    from nomax.train.distributed import World

SHARD_BLOCK = 256  # neighbours that stay near each other, so that shards are read almost in sequence


class VisionTask:
    """Train a ViT to classify images."""

    unit = "images"

    def __init__(self, config: VisionConfig, train: data.Source, test: data.Source) -> None:
        self.config, self.train, self.test = config, train, test
        self.loss = LOSSES[config.loss]
        torch.manual_seed(config.seed)  # every φ starts from the same weights
        self.model: nn.Module = ViT.from_config(config.model)
        block = SHARD_BLOCK if isinstance(getattr(train, "source", train), ShardSource) else 1
        self.order = Order(len(train), config.batch_size, config.seed, block=block)

    def batches(self, start: int, world: "World") -> Iterator[Batch]:
        """This rank's part of the batch of each step."""
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
        """How many images a batch has."""
        return len(batch.images)

    def split(self, batch: Batch, parts: int) -> Iterator[Batch]:
        """The batch in slices."""
        length = math.ceil(len(batch.images) / parts)
        for images, targets in zip(batch.images.split(length), batch.targets.split(length), strict=True):
            yield Batch(batch.step, images, targets)

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss and the number of images recognised (where images are mixed: as the one with the larger share)."""
        logits = model(batch.images)
        labels = batch.targets.argmax(-1) if batch.targets.is_floating_point() else batch.targets
        return {"loss": self.loss(logits, batch.targets).sum(), "accuracy": (logits.argmax(-1) == labels).sum()}

    def evaluation(self, world: "World") -> Iterator[Batch]:
        """This rank's part of the test images. Ranks that have fewer batches than others end with empty ones."""
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

    def describe(self, step: int) -> dict[str, Any]:
        """Which images the batch of a step holds."""
        positions, indices = self.order.batch(step)
        names = [self.train.name(index) for index in indices.tolist()]
        return {"positions": positions.tolist(), "indices": indices.tolist(), "names": names}


def load(name: str, on_error: str = "raise", held_out: float = 0.0) -> tuple[data.Source, data.Source]:
    """The training and the test images of a data set, or a share of the training images that is held out."""
    train = data.load(name, "train", on_error=on_error, held_out=held_out)
    try:
        test = data.load(name, "test", on_error=on_error, held_out=held_out)
    except DataError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{error} Or hold out a share of the training images: --held-out 0.1.") from error
    if list(train.classes) != list(test.classes):
        raise ValueError(f"data {name!r}: its train and test splits do not have the same classes.")
    return train, test


def described(config: VisionConfig, classes: Sequence[str] | None) -> ViTConfig:
    """The model of a run with what its user has to know: the names of its classes, and how it is evaluated."""
    shown = config.augment.evaluation()
    crop = "resize" if shown.crop == "none" else shown.crop  # the same for images of the right size
    return replace(
        config.model,
        classes=None if classes is None else tuple(classes),
        probabilities=config.loss,
        preprocessing=Preprocessing(crop, shown.antialias),
    )


def load_run(folder: str | Path) -> tuple[ViT, VisionConfig]:
    """The model of a run, in eval mode, and its configuration: the finished model, or that of the newest checkpoint."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no config.json (nomax train vit --out).")
    config = run.read(folder, VisionConfig)
    if (folder / "model" / "config.json").is_file():  # written after the weights
        return models.load(folder / "model"), config
    state = checkpoints.newest(folder / "checkpoints")
    if state is None:
        raise FileNotFoundError(f"{folder} holds neither a model nor a checkpoint yet.")
    model = ViT.from_config(described(config, run.classes(folder)))
    place = folder / "checkpoints" / checkpoints.name(state["step"])
    models.hub.fill(model, state.get("average") or state["model"], str(place))
    return model.eval(), config
