"""`nomax finetune` for image models: the recipe of texts, measured by accuracy, with a last part that learns labels."""

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
from nomax.train.console import Bar
from nomax.train.distil.command import CHECKPOINTS, HISTORY_EVERY, ORIGINAL, Options, Recipe, rounded
from nomax.train.distil.distillation import DistilConfig, OutputLoss, Step, distil
from nomax.train.vision.config import image_side
from nomax.train.vision.task import LOSSES, load_images

FINE_TUNED = "fine-tuned"
LABELS = f"{CHECKPOINTS}-labels"
MEASURED = 256  # images in a batch without gradients

Labelled = tuple[Tensor, Tensor]  # images, and their labels


class ImageRecipe(Recipe):
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
        self.teacher: nn.Module = teacher.requires_grad_(False)
        self.loss = LOSSES[model.config.probabilities or "softmax"]
        self.train, self.test = load_images(options.data[0], held_out=options.held_out)
        _check_images(options.data[0], self.train, model)
        self.shown, self.learned_from = _transforms(model, self.train)
        self.predicted: Tensor | None = None  # by the original

    def run(self) -> None:
        """Do what is done for texts, then learn the labels."""
        self._measure_and_distil()
        if self.options.labels.steps:
            self._learn_labels()
            self._stage(FINE_TUNED, self.student)
        self._save()

    def _measured(self, name: str, model: nn.Module) -> dict[str, Any]:
        """Return how many images a model gets right, and for how many it says what the original says."""
        if self.predicted is None:
            self.predicted, self.labels = self._predictions(self.teacher)
        predicted = self.predicted if name == ORIGINAL else self._predictions(model)[0]
        self.result["tests"] = {"images": len(self.labels)}
        shares = {"accuracy": predicted == self.labels, "agreement": predicted == self.predicted}
        return {title: float(right.double().mean()) for title, right in shares.items()}

    def _predictions(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        predicted, labels = [], []
        with torch.inference_mode(), evaluation_batches(self.test, self.shown, MEASURED) as made:
            for images, wanted in made:
                predicted.append(model.eval()(images).argmax(-1))
                labels.append(wanted)
        return torch.cat(predicted), torch.cat(labels)

    def _batches(self, seed: int, size: int) -> Iterator[Labelled]:
        order = Order(len(self.train), size, seed)
        with batches(self.train, order, self.learned_from) as made:
            for batch in made:
                yield batch.images, batch.targets

    def _calibration_batches(self) -> tuple[list[Any], int]:
        """Return images to calibrate on: the first of another order than that of the training."""
        count = min(self.options.calibration_images, len(self.train))
        ((images, _),) = islice(self._batches(self.options.seed + 1, count), 1)
        return list(images.split(MEASURED)), count

    def _distil(self) -> None:
        self.result["distillation"] = self._taught(
            "distilling", self.options.distil, self._as_the_original, CHECKPOINTS
        )

    def _learn_labels(self) -> None:
        chosen = self.options.labels
        config = DistilConfig(steps=chosen.steps, lr=chosen.lr, warmup=chosen.warmup, last_share=1.0)

        def loss(output: Tensor, target: Tensor | None, batch: Labelled) -> Tensor:
            own = self.loss(output, batch[1]).mean()
            return own if target is None else own + chosen.teacher_weight * self._as_the_original(output, target, batch)

        self.result["labels"] = self._taught(
            "fine-tuning", config, loss, LABELS, with_teacher=chosen.teacher_weight > 0
        )

    def _taught(
        self, title: str, config: DistilConfig, loss: OutputLoss, folder: str, *, with_teacher: bool = True
    ) -> dict[str, Any]:
        """Train the student on batches of images, and return what came of it; after a kill, go on."""
        tokens: Any = self.student.config.tokens  # type: ignore[union-attr]
        # Another order for each part, so that the second does not begin with the images of the first.
        order = 2 * self.options.seed + (folder == LABELS)
        with Bar(title, config.steps, self.unit, self.console) as bar:

            def report(step: Step) -> None:
                bar.update(step.step, {"loss": step.loss, self.unit: step.positions // tokens})

            history = distil(
                self.student,
                self.teacher if with_teacher else None,
                self._batches(order, self.options.batch_size),
                config,
                output_loss=loss,
                call=lambda model, batch: model(batch[0]),
                folder=self.out / folder,
                report=report,
            )
        return {
            self.unit: history[-1].positions // tokens,
            "seconds": history[-1].seconds,
            "steps": [rounded(step) for step in history if step.step % HISTORY_EVERY == 0 or step.step == config.steps],
        }

    def _as_the_original(self, output: Tensor, target: Tensor, batch: Labelled) -> Tensor:
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
