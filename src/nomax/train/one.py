"""One run of `nomax train vit`, from its configuration to the model card."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from torch.distributed.checkpoint import state_dict as states

from nomax import models
from nomax.models import ViT
from nomax.train import loop, run
from nomax.train.config import VisionConfig
from nomax.train.distributed import World
from nomax.train.health import NonFiniteError
from nomax.train.progress import Bar
from nomax.train.stop import Stop
from nomax.train.vision import VisionTask, load


def load_and_train(
    config: VisionConfig, folder: Path, command: str, world: World, stop: Stop, console: Console, tensorboard: bool
) -> int:
    """Train, or go on with it, evaluate, and write the model. Returns 0, or the exit code of having been stopped."""
    bar = Bar(config.model.phi, config.steps, VisionTask.unit, console, world.leads)
    with ExitStack() as stack:
        _claim(stack, folder, config, command, world)
        result = world.from_leader(run.result(folder) if world.leads else None)
        if result:
            bar.say(f"{folder} is finished: {summary(result)}. To train again, remove it or choose another --out.")
            return 0
        task = VisionTask(config, *load(config.data, config.on_error))
        with bar:
            try:
                outcome, model = loop.train(task, config, folder, world, stop, bar, tensorboard)
            except NonFiniteError as error:
                error.report["file"] = str(folder / "nonfinite.json")
                if world.leads:
                    run.write_json(folder / "nonfinite.json", error.report)
                raise
        if not outcome.finished:
            bar.say(f"{folder} was stopped after step {outcome.step}. The same command goes on from there.")
            return stop.exit_code or 143
        result = {
            "phi": config.model.phi,
            "steps": outcome.step,
            "seconds": round(outcome.seconds, 1),
            "images_per_second": round(outcome.step * config.batch_size / outcome.seconds, 1),
            **{f"test_{name}": value for name, value in outcome.evaluation.items()},
        }
        whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = states.get_model_state_dict(model, options=whole)
        if world.leads:
            _export(config, folder, command, weights, result)
            run.write_json(folder / "result.json", result)
        bar.say(f"{folder} is finished: {summary(result)}.")
    return 0


def explained(work: Callable[[], int]) -> int:
    """The exit code of some work; what can go wrong in it is told on stderr, and is 1."""
    try:
        return work()
    except NonFiniteError as error:
        print(
            f"nomax train vit: {error}. It first appeared in {error.report['where']}. The batch is in "
            f"{error.report['file']}; the checkpoint before it is kept. A lower --lr or --precision fp32 may help.",
            file=sys.stderr,
        )
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(f"nomax train vit: {error.strerror or error}{place}.", file=sys.stderr)
    except (ValueError, run.BusyError) as error:
        print(f"nomax train vit: {error}", file=sys.stderr)
    return 1


def summary(result: dict[str, Any]) -> str:
    """A result in a few words."""
    return f"{result['test_accuracy']:.2%} of the test images right after {result['steps']} steps"


def _claim(stack: ExitStack, folder: Path, config: VisionConfig, command: str, world: World) -> None:
    """Take the run folder on the leading rank; if that fails, it fails on every rank."""
    failure: Exception | None = None
    if world.leads:
        try:
            stack.enter_context(run.claimed(folder, config, command))
        except (ValueError, OSError, run.BusyError) as error:
            failure = error
    failure = world.from_leader(failure)
    if failure is not None:
        raise failure


def _export(config: VisionConfig, folder: Path, command: str, weights: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the model in the hub layout, with a card."""
    model: nn.Module = ViT.from_config(config.model)
    model.load_state_dict(weights)
    card = {
        "data": config.data,
        "recipe": config.recipe,
        "steps": f"{config.steps:,} of {config.batch_size:,} images",
        "accuracy": f"{result['test_accuracy']:.2%} on the test split",
        "command": command,
    }
    models.save(model, folder / "model", card)
