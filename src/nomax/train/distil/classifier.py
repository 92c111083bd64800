"""`nomax finetune` for text classifiers of transformers, on CSV files with a column of texts and one of labels."""

import csv
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax import _compat
from nomax.conversion import folders
from nomax.conversion.calibrate import inner_attentions
from nomax.train.distil import texts
from nomax.train.distil.command import Options, original_of
from nomax.train.distil.distillation import output_error
from nomax.train.distil.labelled import LabelledRecipe

ARCHITECTURE = "ForSequenceClassification"  # how the names of such classes end
COLUMNS = ("text", "label")
MEASURED = 64  # texts in a batch without gradients

Example = tuple[str, int]  # a text, and the number of its label


class ClassifierRecipe(LabelledRecipe):
    """One run of the recipe for a text classifier."""

    def open(self) -> None:
        """Load the models and the texts."""
        options = self.options
        _check_options(options)
        self.student: nn.Module = folders.from_pretrained(options.folder)
        self.tokenizer: Any = _compat.transformers().AutoTokenizer.from_pretrained(options.folder)
        self.learned = any(layer.gain is not None for layer in inner_attentions(self.student).values())
        self.teacher: nn.Module | None = None
        if options.teacher is not None or not self.learned:
            self.teacher = original_of(options.teacher or options.folder)
        if options.distil.steps or options.labels.teacher_weight or self.teacher is not None:
            self._check()
        config: Any = self.student.config
        self.train = read(options.data[0], "train", config.label2id)
        self.test = read(options.data[0], "test", config.label2id)
        if not options.train_embeddings:
            texts.freeze_embeddings(self.student)

    def batches(self, seed: int) -> Iterator[dict[str, Tensor]]:
        """Yield batches of texts of all lengths, with their labels, without end and the same for the same seed."""
        epoch = 0
        while True:
            examples = list(self.train)
            random.Random(f"{seed} {epoch}").shuffle(examples)
            for start in range(0, len(examples), self.options.batch_size):
                yield self._encoded(examples[start : start + self.options.batch_size])
            epoch += 1

    def call(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        """Return a model's output for a batch."""
        return model(**{name: x for name, x in batch.items() if name != "labels"})

    def predictions(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the classes that a model gives to the texts of the test, and the right ones."""
        predicted, labels = [], []
        with torch.inference_mode():
            for start in range(0, len(self.test), MEASURED):
                batch = self._encoded(self.test[start : start + MEASURED])
                predicted.append(self.call(model.eval(), batch).logits.argmax(-1))
                labels.append(batch["labels"])
        return torch.cat(predicted), torch.cat(labels)

    def label_loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy of the labels."""
        return F.cross_entropy(output.logits.float(), batch["labels"])

    def teacher_loss(self, output: Any, target: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the divergence of the student's probabilities from the original's."""
        return output_error(output, target, batch)

    def _calibration_batches(self) -> tuple[list[Any], int]:
        count = min(self.options.calibration_texts, len(self.train))
        chosen = random.Random(f"{self.options.seed} calibration").sample(self.train, count)
        chosen.sort(key=lambda example: len(example[0]))
        # Few texts in a batch, so that those of similar lengths share it, almost without padding.
        encoded = [texts.encoded([text for text, _ in chosen[i : i + 8]], *self._how) for i in range(0, count, 8)]
        return encoded, sum(int(batch["attention_mask"].sum()) for batch in encoded)

    def _encoded(self, examples: list[Example]) -> dict[str, Tensor]:
        inputs = texts.encoded([text for text, _ in examples], *self._how)
        return {**inputs, "labels": torch.tensor([label for _, label in examples])}

    @property
    def _how(self) -> tuple[Any, int]:
        return self.tokenizer, self.options.length


def read(folder: str, split: str, numbers: Mapping[str, int]) -> list[Example]:
    """Read FOLDER/SPLIT.csv: a text and a label in each row, named as in the model's config, or its number."""
    path = Path(folder) / f"{split}.csv"
    if not path.is_file():
        raise FileNotFoundError(
            f"--data {folder}: there is no {path.name}. A text classifier learns from a folder with train.csv and "
            f"test.csv, whose columns are {' and '.join(COLUMNS)}."
        )
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if not set(COLUMNS) <= set(rows.fieldnames or ()):
            raise ValueError(
                f"{path}: its first line must name the columns {' and '.join(COLUMNS)}, not {rows.fieldnames}."
            )
        known = {**{str(number): number for number in numbers.values()}, **numbers}
        examples = []
        for row in rows:
            if row["label"] not in known:
                raise ValueError(
                    f"{path}, line {rows.line_num}: the label {row['label']!r} is none of the model's, which are "
                    f"{', '.join(numbers)}, or their numbers."
                )
            examples.append((row["text"] or "", known[row["label"]]))
    if not examples:
        raise ValueError(f"{path} has no rows.")
    return examples


def _check_options(options: Options) -> None:
    if len(options.data) != 1:
        raise ValueError(f"--data {' '.join(options.data)}: a text classifier learns from one folder.")
    usual = Options(options.folder, options.data)
    for name in ("pairs", "language", "held_out"):
        if getattr(options, name) != getattr(usual, name):
            raise ValueError(f"--{name.replace('_', '-')} is not for text classifiers, as {options.folder} is one.")
