"""Translation and language modelling as tasks for the loop, and finished runs as models."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nomax import models
from nomax.data.text import Example, Tokenizer, TokenOrder
from nomax.data.text.batches import TextBatch, batches, evaluation_batches
from nomax.models import ReLUFormer
from nomax.models.hub import VOCABULARY, vocabulary_digest
from nomax.train import checkpoints, run, text_data
from nomax.train.losses import smoothed
from nomax.train.text_config import TextConfig

if TYPE_CHECKING:  # it brings in all of torch.distributed, which load_text_run does without
    from nomax.train.distributed import World


class TextTask:
    """Train a ReLUFormer to predict the next token: of a translation, or of a text."""

    unit = "tokens"

    def __init__(self, config: TextConfig, train: Mapping[int, Sequence[Example]], valid: Sequence[Example]) -> None:
        """train: the examples, by the step from which on they are shown."""
        self.config = config
        every = math.ceil(len(valid) / config.valid_examples) if config.valid_examples else 1
        self.valid = valid[::every]
        torch.manual_seed(config.seed)  # every φ starts from the same weights
        self.model: nn.Module = ReLUFormer.from_config(config.model)
        self.stages = {
            start: (examples, TokenOrder([each.length for each in examples], config.batch_size, config.seed))
            for start, examples in train.items()
        }

    def batches(self, start: int, world: "World") -> Iterator[TextBatch]:
        """This rank's part of the batch of each step."""
        shown = []
        for (begin, (examples, order)), end in zip(self.stages.items(), [*self.stages, math.inf][1:], strict=True):
            if start < end:
                first = max(begin, start)
                stage = batches(examples, order, first, world.rank, world.size, device=world.device)
                shown.append(stage if end == math.inf else islice(stage, int(end) - first))
        return chain.from_iterable(shown)

    def size(self, batch: TextBatch) -> int:
        """How many tokens a batch teaches: those of the target, with its end."""
        return int((batch.target[:, 1:] != self.config.model.padding).sum())

    def split(self, batch: TextBatch, parts: int) -> Iterator[TextBatch]:
        """The batch in slices, always so many, even if some are empty: ranks that share a model work in step."""
        sources = [None] * parts if batch.source is None else batch.source.tensor_split(parts)
        for source, target in zip(sources, batch.target.tensor_split(parts), strict=True):
            yield replace(batch, source=source, target=target, numbers=())

    def measure(self, model: nn.Module, batch: TextBatch) -> dict[str, Tensor]:
        """Sums over tokens: the loss, with label smoothing and penalties; without them; and the tokens guessed."""
        return measure(self.config, model, batch)

    def evaluation(self, world: "World") -> Iterator[TextBatch]:
        """This rank's part of the validation split. Ranks that have fewer batches than others end with empty ones."""
        longest = max(example.length for example in self.valid)
        tokens = max(math.ceil(self.config.batch_size / world.size / self.config.accumulate), longest)
        shares = [self.valid[rank :: world.size] for rank in range(world.size)]
        lengths = [[example.length for example in share] for share in shares]
        left = max(TokenOrder(each, tokens, shuffle=False).steps_per_epoch for each in lengths if each)
        if shares[world.rank]:
            for batch in evaluation_batches(shares[world.rank], tokens, device=world.device):
                left -= 1
                yield batch
        nothing = torch.empty(0, 2, dtype=torch.int64, device=world.device)
        for _ in range(left):
            yield TextBatch(0, None if self.config.task == "language" else nothing, nothing, (), 0)

    def describe(self, step: int) -> dict[str, Any]:
        """Which examples the batch of a step holds."""
        examples, order = self.stages[max(start for start in self.stages if start <= step)]
        numbers = order.batch(step).tolist()
        return {"indices": numbers, "names": [examples[number].name for number in numbers]}


def measure(config: TextConfig, model: nn.Module, batch: TextBatch) -> dict[str, Tensor]:
    """Sums over the tokens of a batch: "loss", "nll" (of each token, without smoothing and penalties), "accuracy"."""
    labels = batch.target[:, 1:]
    known = labels != config.model.padding
    # The end of a shorter target has nothing to predict, so the model does not see it.
    shown = batch.target[:, :-1].masked_fill(~known, config.model.padding)
    read = (shown,) if config.task == "language" else (_source(config, batch), shown)
    logits, found = (
        model(*read, penalties="sequences", margin=config.margin) if config.penalised else (model(*read), None)
    )
    losses, nlls = smoothed(logits, labels, config.label_smoothing)
    loss, nll = (each.masked_fill(~known, 0).sum() for each in (losses, nlls))
    measured = {"loss": loss, "nll": nll, "accuracy": ((logits.argmax(-1) == labels) & known).sum()}
    if found is not None:
        # Means over the rows of each sequence, which counts as often as it has tokens: parts of a batch add up.
        weights = {"normalisation": config.normalisation_penalty, "entropy": config.entropy_penalty}
        for name, weight in weights.items():
            measured[name] = (getattr(found, name) * known.sum(-1)).sum()
            measured["loss"] = measured["loss"] + weight * measured[name]
    return measured


def _source(config: TextConfig, batch: TextBatch) -> Tensor:
    if batch.source is not None:
        return batch.source
    # Parts of very uneven pairs may all have nothing but an end.
    return batch.target.new_full((len(batch.target), 1), config.model.end)


def load_text_run(folder: str | Path) -> tuple[ReLUFormer, Tokenizer, TextConfig]:
    """The model of a run of text, in eval mode, its vocabulary and its configuration.

    It is the finished model, or that of the newest checkpoint.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} is not the folder of a run: it has no config.json (nomax train translate --out)."
        )
    config = run.read(folder, TextConfig)
    if not (folder / VOCABULARY).exists():
        raise FileNotFoundError(f"{folder} has no {VOCABULARY}: without its vocabulary a model says nothing.")
    tokenizer = text_data.vocabulary(config, folder)
    if (folder / "model" / "config.json").is_file():  # written after the weights
        model = models.load(folder / "model")
        tokenizer.check(model.config.vocabulary, vocabulary_digest(folder / "model"), str(folder / "model"))
        return model, tokenizer, config
    state = checkpoints.newest(folder / "checkpoints")
    if state is None:
        raise FileNotFoundError(f"{folder} holds neither a model nor a checkpoint yet.")
    model = ReLUFormer.from_config(config.model)
    place = folder / "checkpoints" / checkpoints.name(state["step"])
    models.hub.fill(model, state.get("average") or state["model"], str(place))
    return model.eval(), tokenizer, config
