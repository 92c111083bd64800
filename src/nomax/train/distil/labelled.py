"""`nomax finetune` for classifiers: the same recipe, measured by accuracy, with a last part that learns labels."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from nomax.train.console import Bar
from nomax.train.distil.command import CHECKPOINTS, HISTORY_EVERY, ORIGINAL, Recipe, rounded
from nomax.train.distil.distillation import DistilConfig, OutputLoss, Step, distil

FINE_TUNED = "fine-tuned"
LABELS = f"{CHECKPOINTS}-labels"


class LabelledRecipe(Recipe):
    """One run of the recipe for a classifier: an image model or a text model says what a batch of its is."""

    predicted: Tensor | None = None  # by the original, once it is measured
    positions_each = 1  # positions of the model that are one `unit`

    def batches(self, seed: int) -> Iterator[Any]:
        """Yield batches to learn from without end, the same for the same seed."""
        raise NotImplementedError

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Return a model's output for a batch."""
        raise NotImplementedError

    def predictions(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the classes that a model gives to the test's inputs, and the right ones."""
        raise NotImplementedError

    def label_loss(self, output: Any, batch: Any) -> Tensor:
        """Compare an output with the batch's labels."""
        raise NotImplementedError

    def teacher_loss(self, output: Any, target: Any, batch: Any) -> Tensor:
        """Compare an output with the original's."""
        raise NotImplementedError

    def run(self) -> None:
        """Do what is done for sentence encoders, then learn the labels."""
        self._measure_and_distil()
        if self.options.labels.steps:
            self._learn_labels()
            self._stage(FINE_TUNED, self.student)
        self._save()

    def _measured(self, name: str, model: nn.Module) -> dict[str, Any]:
        """Return how often a model is right, and how often it says what the original says."""
        predicted, labels = self.predictions(model)
        if name == ORIGINAL:
            self.predicted = predicted
        elif self.predicted is None and self.teacher is not None:  # it was measured before a kill
            self.predicted, _ = self.predictions(self.teacher)
        self.result["tests"] = {"inputs": len(labels)}
        shares = {"accuracy": predicted == labels}
        if self.predicted is not None:
            shares["agreement"] = predicted == self.predicted
        return {title: float(right.double().mean()) for title, right in shares.items()}

    def _distil(self) -> None:
        self.result["distillation"] = self._taught("distilling", self.options.distil, self.teacher_loss, CHECKPOINTS)

    def _learn_labels(self) -> None:
        chosen = self.options.labels
        config = DistilConfig(steps=chosen.steps, lr=chosen.lr, warmup=chosen.warmup, last_share=1.0)

        def loss(output: Any, target: Any, batch: Any) -> Tensor:
            own = self.label_loss(output, batch)
            return own if target is None else own + chosen.teacher_weight * self.teacher_loss(output, target, batch)

        self.result["labels"] = self._taught(
            "fine-tuning", config, loss, LABELS, with_teacher=chosen.teacher_weight > 0
        )

    def _taught(
        self, title: str, config: DistilConfig, loss: OutputLoss, folder: str, *, with_teacher: bool = True
    ) -> dict[str, Any]:
        """Train the student on batches, and return what came of it; after a kill, go on."""
        # Another order for each part, so that the second does not begin with the inputs of the first.
        order = 2 * self.options.seed + (folder == LABELS)
        with Bar(title, config.steps, self.unit, self.console) as bar:

            def report(step: Step) -> None:
                bar.update(step.step, {"loss": step.loss, self.unit: step.positions // self.positions_each})

            history = distil(
                self.student,
                self.teacher if with_teacher else None,
                self.batches(order),
                config,
                output_loss=loss,
                call=self.call,
                folder=self.out / folder,
                report=report,
            )
        return {
            self.unit: history[-1].positions // self.positions_each,
            "seconds": history[-1].seconds,
            "steps": [rounded(step) for step in history if step.step % HISTORY_EVERY == 0 or step.step == config.steps],
        }
