"""Translation and language modelling as tasks for the loop, their loss, and finished runs as models."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from nomax import models
from nomax.data.text import Example, Tokenizer, TokenOrder
from nomax.data.text.batches import TextBatch, batches, evaluation_batches
from nomax.models import ReLUFormer
from nomax.models.hub import VOCABULARY, vocabulary_digest
from nomax.ops.rowwise import cross_entropy
from nomax.train import run_folder
from nomax.train.config import sine_stages
from nomax.train.console import display_name, perplexity
from nomax.train.text import data as text_data
from nomax.train.text.config import TextConfig

if TYPE_CHECKING:  # they bring in all of torch.distributed, which load_text_run does without
    from nomax.train.distributed import World
    from nomax.train.loop import Outcome


class TextTask:
    """Train a ReLUFormer to predict the next token: of a translation, or of a text."""

    unit = "tokens"
    measured = frozenset({"valid_perplexity", "valid_nll", "valid_accuracy", "tokens_per_second", "tokens"})

    @classmethod
    def open(cls, config: TextConfig, folder: Path, world: "World", corpora: "text_data.Corpora | None" = None) -> Self:
        """Start or resume the run in a folder; `corpora`, if already loaded."""
        corpora = corpora or text_data.Corpora.of(config)
        run_folder.check(folder, config, corpora.digests)
        tokenizer = text_data.vocabulary(config, folder, corpora)
        if world.leads:
            run_folder.note(folder, text=corpora.digests)
            if not (folder / VOCABULARY).exists():
                tokenizer.save(folder / VOCABULARY)
        train = text_data.stages(config, corpora.train, tokenizer)
        return cls(config, train, text_data.examples(config, corpora.valid, tokenizer))

    def __init__(self, config: TextConfig, train: Mapping[int, Sequence[Example]], valid: Sequence[Example]) -> None:
        """train: the examples, by the step from which they are shown."""
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
        """Yield this rank's part of the batch of each step."""
        shown = []
        for (begin, (examples, order)), end in zip(self.stages.items(), [*self.stages, math.inf][1:], strict=True):
            if start < end:
                first = max(begin, start)
                stage = batches(examples, order, first, world.rank, world.size, device=world.device)
                shown.append(stage if end == math.inf else islice(stage, int(end) - first))
        return chain.from_iterable(shown)

    def size(self, batch: TextBatch) -> int:
        """Return the number of tokens to predict in a batch: those of the target, with its end."""
        return int((batch.target[:, 1:] != self.config.model.padding).sum())

    def split(self, batch: TextBatch, parts: int) -> Iterator[TextBatch]:
        """Split a batch into exactly that many slices, some perhaps empty: ranks that share a model work in step."""
        sources = [None] * parts if batch.source is None else batch.source.tensor_split(parts)
        for source, target in zip(sources, batch.target.tensor_split(parts), strict=True):
            yield replace(batch, source=source, target=target, numbers=())

    def measure(self, model: nn.Module, batch: TextBatch) -> dict[str, Tensor]:
        """Return sums over tokens: loss with label smoothing and penalties, loss without, number of correct tokens."""
        return measure(self.config, model, batch)

    def evaluation(self, world: "World") -> Iterator[TextBatch]:
        """Yield this rank's part of the validation split. Ranks with fewer batches than others end with empty ones."""
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

    def observe(self, model: nn.Module, batch: TextBatch, step: int, folder: Path) -> None:
        """Record nothing."""

    def describe(self, step: int) -> dict[str, Any]:
        """Name the examples that the batch of a step holds."""
        examples, order = self.stages[max(start for start in self.stages if start <= step)]
        numbers = order.batch(step).tolist()
        return {"indices": numbers, "names": [examples[number].name for number in numbers]}

    @staticmethod
    def result(config: TextConfig, outcome: "Outcome") -> dict[str, Any]:
        """Return the contents of result.json."""
        return {
            "phi": config.model.phi,
            "steps": outcome.step,
            "seconds": round(outcome.seconds, 1),
            "tokens_per_second": round(outcome.units / outcome.seconds, 1),
            "tokens": outcome.units,
            **{f"{config.EVALUATED}_{name}": value for name, value in outcome.evaluation.items()},
            "valid_perplexity": perplexity(outcome.evaluation["nll"]),
        }

    @staticmethod
    def summary(result: dict[str, Any]) -> str:
        """Return a result in a few words."""
        return f"a perplexity of {result['valid_perplexity']:.4g} on the validation split after {result['steps']} steps"

    @staticmethod
    def row(result: dict[str, Any]) -> dict[str, str]:
        """Return a result as a row of the table that compares runs, by its columns."""
        return {
            "φ": display_name(result["phi"]),
            "perplexity": f"{result['valid_perplexity']:.4g}",
            "nats per token": f"{result['valid_nll']:.4f}",
            "accuracy": f"{result['valid_accuracy']:.2%}",
            "steps": str(result["steps"]),
            "tokens/s": f"{result['tokens_per_second']:.0f}",
            "minutes": f"{result['seconds'] / 60:.1f}",
        }

    def export(self, folder: Path, weights: dict[str, Any], result: dict[str, Any], command: str) -> None:
        """Write the model and its vocabulary, in the hub layout, below the run folder."""
        config = self.config
        length = f"documents of {config.model.max_length:,} tokens" if config.documents else "single segments"
        length += f", to which they grew in {config.growth:.0%} of the steps" if config.growth else ""
        card = {
            "data": f"{config.data}, {' to '.join(config.languages)}, {length}",
            "recipe": config.recipe,
            "steps": f"{config.steps:,} of at most {config.batch_size:,} tokens; {result['tokens']:,} in all",
            "penalties": f"normalisation × {config.normalisation_penalty:g}, entropy × {config.entropy_penalty:g}",
            "perplexity": f"{result['valid_perplexity']:.4g} per token on the validation split",
            "vocabulary": f"{VOCABULARY}, SHA-256 {config.vocabulary or 'not noted'}",
            "command": command,
        }
        text_data.vocabulary(config, folder).save(folder / "model" / VOCABULARY)
        model = ReLUFormer.from_config(config.model)
        model.load_state_dict(weights)
        models.save(model, folder / "model", card)

    @staticmethod
    def next_steps(config: TextConfig, folders: Sequence[Path]) -> str:
        """Return what to do next with finished runs, in words."""
        test = text_data.has_test(config)
        evaluate = f"nomax evaluate {shlex.join(map(str, folders))}{'' if test else ' --split valid'}"
        if config.task == "language":
            split = "test" if test else "validation"
            generate = f"nomax generate {shlex.quote(str(folders[0]))} (texts)"
            return f"{evaluate} (perplexity on the {split} split), or {generate}"
        return f"{evaluate} (BLEU), or nomax translate {shlex.quote(str(folders[0]))} < in.txt > out.txt"


def measure(config: TextConfig, model: nn.Module, batch: TextBatch) -> dict[str, Tensor]:
    """Return sums over the tokens of a batch: "loss", "nll" (without smoothing and penalties) and "accuracy".

    Penalties that are in the loss are there by name; L1 penalties are in that of training only.
    """
    labels = batch.target[:, 1:]
    known = labels != config.model.padding
    # The end of a shorter target has nothing to predict, so the model does not see it.
    shown = batch.target[:, :-1].masked_fill(~known, config.model.padding)
    read = (shown,) if config.task == "language" else (_source(config, batch), shown)
    weights: dict[str, float] = {}
    if config.penalised:
        weights = {"normalisation": config.normalisation_penalty, "entropy": config.entropy_penalty}
    wanted: dict[str, Any] = {}
    if config.presses_attention and model.training:
        weights["l1"] = sine_stages(config.attention_l1, batch.step, config.steps)
    if weights:
        wanted = {"penalties": "sequences", "margin": config.margin}
    if any(config.memory_l1) and model.training:
        weights["memory_l1"] = sine_stages(config.memory_l1, batch.step, config.steps)
        wanted["memory_penalty"] = "sequences"
    logits, penalties = model(*read, **wanted) if wanted else (model(*read), None)
    losses, nlls, right = cross_entropy(logits, labels, config.label_smoothing)
    loss, nll = (each.masked_fill(~known, 0).sum() for each in (losses, nlls))
    measured = {"loss": loss, "nll": nll, "accuracy": (right & known).sum()}
    # Means over the rows of each sequence, which counts as often as it has tokens: parts of a batch add up.
    for name, weight in weights.items():
        measured[name] = penalty = (getattr(penalties, name) * known.sum(-1)).sum()
        measured["loss"] = measured["loss"] + weight * penalty
    return measured


def _source(config: TextConfig, batch: TextBatch) -> Tensor:
    if batch.source is not None:
        return batch.source
    # Parts of very uneven pairs may all have nothing but an end.
    return batch.target.new_full((len(batch.target), 1), config.model.end)


def load_text_run(folder: str | Path) -> tuple[ReLUFormer, Tokenizer, TextConfig]:
    """Return the model of a text run, in eval mode, with its vocabulary and its config.

    This is the finished model, or that of the newest checkpoint.
    """
    folder = Path(folder)
    config = run_folder.read(folder, TextConfig)
    if not (folder / VOCABULARY).exists():
        raise FileNotFoundError(f"{folder} has no {VOCABULARY}: without its vocabulary a model says nothing.")
    tokenizer = text_data.vocabulary(config, folder)
    model = run_folder.model(folder, lambda: ReLUFormer.from_config(config.model))
    if (folder / "model" / "config.json").is_file():
        tokenizer.check(model.config.vocabulary, vocabulary_digest(folder / "model"), str(folder / "model"))
    return model, tokenizer, config
