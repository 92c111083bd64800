"""What differs between runs of images and runs of text. Everything else about a run is the same for both."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from nomax import models
from nomax.models.hub import VOCABULARY
from nomax.train import run, text_data, vision
from nomax.train.config import VisionConfig
from nomax.train.distributed import World
from nomax.train.loop import Outcome
from nomax.train.phis import spoken
from nomax.train.progress import perplexity
from nomax.train.task import Task
from nomax.train.text import TextTask
from nomax.train.text_config import TextConfig
from nomax.train.vision import VisionTask

RunConfig = VisionConfig | TextConfig


class Kind(Protocol):
    """Runs of one kind: how they begin, and what is told about their end."""

    unit: str
    """What is counted, in the plural."""

    measured: frozenset[str]
    """The numbers of result.json that are told."""

    def command(self, config: Any) -> str:
        """The command that trains it."""
        ...

    def task(self, config: Any, folder: Path, world: World) -> Task[Any]:
        """The model, its data and its loss. Of many ranks, the leading one may write into the run folder."""
        ...

    def result(self, config: Any, outcome: Outcome) -> dict[str, Any]:
        """What result.json holds."""
        ...

    def summary(self, result: dict[str, Any]) -> str:
        """A result in a few words."""
        ...

    def row(self, result: dict[str, Any]) -> dict[str, str]:
        """A result as a row of the table that compares runs, by its columns."""
        ...

    def export(self, config: Any, folder: Path, weights: dict[str, Any], result: dict[str, Any], command: str) -> None:
        """Write the model, in the hub layout, below the run folder."""
        ...

    def advice(self, config: Any, folders: list[Path]) -> str:
        """What to do next with finished runs."""
        ...


class _Vision:
    unit = VisionTask.unit
    measured = frozenset({"test_accuracy", "test_loss", "images_per_second"})

    def command(self, config: VisionConfig) -> str:
        return "train vit"

    def task(self, config: VisionConfig, folder: Path, world: World) -> VisionTask:
        train, test = vision.load(config.data, config.on_error, config.held_out)
        run.check(folder, config, classes=train.classes)
        if world.leads:
            run.note(folder, classes=list(train.classes))
        return VisionTask(config, train, test)

    def result(self, config: VisionConfig, outcome: Outcome) -> dict[str, Any]:
        speed = round(outcome.step * config.batch_size / outcome.seconds, 1)
        return _result(config, outcome) | {"images_per_second": speed} | _evaluation(config, outcome)

    def summary(self, result: dict[str, Any]) -> str:
        return f"{result['test_accuracy']:.2%} of the test images right after {result['steps']} steps"

    def row(self, result: dict[str, Any]) -> dict[str, str]:
        return {
            "φ": result["phi"],
            "test accuracy": f"{result['test_accuracy']:.2%}",
            "test loss": f"{result['test_loss']:.4f}",
            "steps": str(result["steps"]),
            "images/s": f"{result['images_per_second']:.0f}",
            "minutes": f"{result['seconds'] / 60:.1f}",
        }

    def export(
        self, config: VisionConfig, folder: Path, weights: dict[str, Any], result: dict[str, Any], command: str
    ) -> None:
        card = {
            "data": config.data + (f", with {config.held_out:.0%} held out as test split" if config.held_out else ""),
            "recipe": config.recipe,
            "steps": f"{config.steps:,} of {config.batch_size:,} images",
            "accuracy": f"{result['test_accuracy']:.2%} on the test split",
            "command": command,
        }
        _save(models.ViT.from_config(vision.described(config, run.classes(folder))), weights, folder, card)

    def advice(self, config: VisionConfig, folders: list[Path]) -> str:
        names = shlex.join(map(str, folders))
        predict = f"nomax predict {shlex.quote(str(folders[0]))} IMAGE (what it shows)"
        return f"{predict}, nomax probe {names} (few-shot accuracy), or nomax.train.load_run({str(folders[0])!r})"


class _Text:
    unit = TextTask.unit
    measured = frozenset({"valid_perplexity", "valid_nll", "valid_accuracy", "tokens_per_second", "tokens"})

    def command(self, config: TextConfig) -> str:
        return f"train {config.task}"

    def task(self, config: TextConfig, folder: Path, world: World) -> TextTask:
        corpora = {split: text_data.of_run(config, split) for split in ("train", "valid")}
        text = {split: corpus.digest() for split, corpus in corpora.items()}
        run.check(folder, config, text)
        tokenizer = text_data.vocabulary(config, folder)
        if world.leads:
            run.note(folder, text=text)
            if not (folder / VOCABULARY).exists():
                tokenizer.save(folder / VOCABULARY)
        train = text_data.stages(config, corpora["train"], tokenizer)
        return TextTask(config, train, text_data.examples(config, corpora["valid"], tokenizer))

    def result(self, config: TextConfig, outcome: Outcome) -> dict[str, Any]:
        speed = round(outcome.units / outcome.seconds, 1)
        found = {"tokens_per_second": speed, "tokens": outcome.units} | _evaluation(config, outcome)
        return _result(config, outcome) | found | {"valid_perplexity": perplexity(outcome.evaluation["nll"])}

    def summary(self, result: dict[str, Any]) -> str:
        return f"a perplexity of {result['valid_perplexity']:.4g} on the validation split after {result['steps']} steps"

    def row(self, result: dict[str, Any]) -> dict[str, str]:
        return {
            "φ": spoken(result["phi"]),
            "perplexity": f"{result['valid_perplexity']:.4g}",
            "nats per token": f"{result['valid_nll']:.4f}",
            "accuracy": f"{result['valid_accuracy']:.2%}",
            "steps": str(result["steps"]),
            "tokens/s": f"{result['tokens_per_second']:.0f}",
            "minutes": f"{result['seconds'] / 60:.1f}",
        }

    def export(
        self, config: TextConfig, folder: Path, weights: dict[str, Any], result: dict[str, Any], command: str
    ) -> None:
        length = f"documents of {config.model.max_length:,} tokens" if config.documents else "single segments"
        length += f", to which they grew in {config.growth:.0%} of the steps" if config.growth else ""
        weight = (config.normalisation_penalty, config.entropy_penalty)
        card = {
            "data": f"{config.data}, {' to '.join(config.languages)}, {length}",
            "recipe": config.recipe,
            "steps": f"{config.steps:,} of at most {config.batch_size:,} tokens; {result['tokens']:,} in all",
            "penalties": "normalisation × {:g}, entropy × {:g}".format(*weight),
            "perplexity": f"{result['valid_perplexity']:.4g} per token on the validation split",
            "vocabulary": f"{VOCABULARY}, SHA-256 {config.vocabulary or 'not noted'}",
            "command": command,
        }
        tokenizer = text_data.vocabulary(config, folder)
        tokenizer.save(folder / "model" / VOCABULARY)
        _save(models.ReLUFormer.from_config(config.model), weights, folder, card)

    def advice(self, config: TextConfig, folders: list[Path]) -> str:
        test = text_data.has_test(config)
        evaluate = f"nomax evaluate {shlex.join(map(str, folders))}{'' if test else ' --split valid'}"
        if config.task == "language":
            split = "test" if test else "validation"
            generate = f"nomax generate {shlex.quote(str(folders[0]))} (texts)"
            return f"{evaluate} (perplexity on the {split} split), or {generate}"
        return f"{evaluate} (BLEU), or nomax translate {shlex.quote(str(folders[0]))} < in.txt > out.txt"


_VISION, _TEXT = _Vision(), _Text()


def kind_of(config: RunConfig) -> Kind:
    """The kind of a run."""
    return _TEXT if isinstance(config, TextConfig) else _VISION


def _result(config: RunConfig, outcome: Outcome) -> dict[str, Any]:
    return {"phi": config.model.phi, "steps": outcome.step, "seconds": round(outcome.seconds, 1)}


def _evaluation(config: RunConfig, outcome: Outcome) -> dict[str, float]:
    return {f"{config.EVALUATED}_{name}": value for name, value in outcome.evaluation.items()}


def _save(model: nn.Module, weights: dict[str, Any], folder: Path, card: Mapping[str, object]) -> None:
    model.load_state_dict(weights)
    models.save(model, folder / "model", card)
