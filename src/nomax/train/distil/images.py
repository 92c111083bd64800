"""`nomax finetune` for image models of nomax."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax.conversion import folders
from nomax.conversion.api import convert
from nomax.conversion.calibrate import inner_attentions
from nomax.conversion.own import as_converted
from nomax.data.images.batches import batches, evaluation_batches
from nomax.data.images.transforms import Augment, Evaluation
from nomax.data.order import Order
from nomax.data.source import Source, listed
from nomax.models import Preprocessing, ViT
from nomax.train.distil.command import Options
from nomax.train.distil.labelled import LabelledRecipe
from nomax.train.vision.config import image_side
from nomax.train.vision.task import LOSSES, load_images

MEASURED = 256  # images in a batch without gradients

Labelled = tuple[Tensor, Tensor]  # images, and their labels


class ImageRecipe(LabelledRecipe):
    """One run of the recipe for an image model of nomax."""

    unit = "images"
    tokenizer = None

    def open(self) -> None:
        """Load the models and the images."""
        options = self.options
        _check_options(options)
        model, teacher = (_vit(folder) for folder in (options.folder, options.teacher or options.folder))
        self.student: nn.Module = model
        with as_converted(model):
            self._check()
            self.learned = any(layer.gain is not None for layer in inner_attentions(model).values())
        if options.teacher is None:
            convert(teacher, "softmax")
        self.teacher: nn.Module | None = teacher.requires_grad_(False)
        self.loss = LOSSES[model.config.probabilities or "softmax"]
        self.train, self.test = load_images(options.data[0], held_out=options.held_out)
        _check_images(options.data[0], self.train, model)
        self.shown, self.learned_from = _transforms(model, self.train)
        self.positions_each = model.config.tokens

    def predictions(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the classes that a model gives to the test images, and the right ones."""
        predicted, labels = [], []
        with torch.inference_mode(), evaluation_batches(self.test, self.shown, MEASURED) as made:
            for images, wanted in made:
                predicted.append(model.eval()(images).argmax(-1))
                labels.append(wanted)
        return torch.cat(predicted), torch.cat(labels)

    def batches(self, seed: int, size: int | None = None) -> Iterator[Labelled]:
        """Yield batches of images and labels without end, the same for the same seed."""
        order = Order(len(self.train), size or self.options.batch_size, seed)
        with batches(self.train, order, self.learned_from) as made:
            for batch in made:
                yield batch.images, batch.targets

    def call(self, model: nn.Module, batch: Labelled) -> Tensor:
        """Return a model's output for the images of a batch."""
        logits: Tensor = model(batch[0])
        return logits

    def _calibration_batches(self) -> tuple[list[Any], int]:
        """Return images to calibrate on: the first of another order than that of the training."""
        count = min(self.options.calibration_images, len(self.train))
        ((images, _),) = islice(self.batches(self.options.seed + 1, count), 1)
        return list(images.split(MEASURED)), count

    def label_loss(self, output: Tensor, batch: Labelled) -> Tensor:
        """Compare an output with the labels, by the loss that the model was trained with."""
        return self.loss(output, batch[1]).mean()

    def teacher_loss(self, output: Tensor, target: Tensor, batch: Labelled) -> Tensor:
        """Return the divergence of the student's probabilities from the original's."""
        output, target = output.float(), target.float()
        if self.loss is LOSSES["softmax"]:
            logs = output.log_softmax(-1), target.log_softmax(-1)
            return F.kl_div(*logs, reduction="batchmean", log_target=True)
        # A probability for each class by itself: the divergences of the classes add up.
        losses = (F.binary_cross_entropy_with_logits(x, target.sigmoid(), reduction="sum") for x in (output, target))
        mine, least = losses
        return (mine - least) / len(output)


def _vit(folder: Any) -> ViT:
    model = folders.from_pretrained(folder)
    if not isinstance(model, ViT):
        raise ValueError(f"{folder} is a {type(model).__name__}, not the image model that FOLDER is.")
    return model


def _check_options(options: Options) -> None:
    if len(options.data) != 1:
        raise ValueError(f"--data {' '.join(options.data)}: an image model learns from one data set.")
    usual = Options(options.folder, options.data)
    for name in ("pairs", "language", "train_embeddings"):
        if getattr(options, name) != getattr(usual, name):
            raise ValueError(f"--{name.replace('_', '-')} is for texts; {options.folder} is an image model.")


def _check_images(name: str, images: Source, model: ViT) -> None:
    """Raise unless the classes and the size of images are those of the model."""
    config, side = model.config, image_side(images)
    if config.image[0] != config.image[1]:
        raise ValueError(
            f"the model takes images of {config.image[0]}×{config.image[1]}; only square ones are handled."
        )
    if side and side != config.image[0]:
        raise ValueError(
            f"--data {name}: its images are {side}×{side}, but the model takes {config.image[0]}×{config.image[0]}. "
            "Take the data that it was trained on, or model.resized(…)."
        )
    if config.classes is not None and list(images.classes) != list(config.classes):
        other = [each for each in images.classes if each not in config.classes]
        raise ValueError(
            f"--data {name}: its classes are not the model's"
            + (f": {listed(other)} are not among them." if other else ", or in another order.")
        )
    if len(images.classes) > config.num_classes:
        raise ValueError(f"--data {name} has {len(images.classes)} classes, but the model's head {config.num_classes}.")


def _transforms(model: ViT, images: Source) -> tuple[Evaluation, Augment]:
    """Return how images are shown to a model for measuring and for learning: as they are, if they have one size."""
    size, channels, as_is = model.config.image[0], model.config.channels, image_side(images) > 0
    known = model.config.preprocessing or Preprocessing("resize")
    shown = Evaluation(size, "none" if as_is else known.crop, channels, known.antialias)
    crop: Any = "none" if as_is else "resize" if known.crop == "resize" else "inception"
    return shown, Augment(size, crop, flip=False, channels=channels, antialias=known.antialias)
