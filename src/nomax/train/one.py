"""One run of `nomax train`, from its configuration to the model card."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch.distributed.checkpoint import state_dict as states

from nomax.console import Console
from nomax.train import loop, run
from nomax.train.distributed import World
from nomax.train.health import NonFiniteError
from nomax.train.kinds import RunConfig, kind_of
from nomax.train.phis import spoken
from nomax.train.progress import Bar
from nomax.train.stop import Stop


def load_and_train(
    config: RunConfig, folder: Path, command: str, world: World, stop: Stop, console: Console, tensorboard: bool
) -> int:
    """Train, or go on with it, evaluate, and write the model. Returns 0, or the exit code of having been stopped."""
    kind = kind_of(config)
    bar = Bar(spoken(config.model.phi), config.steps, kind.unit, console, world.leads)
    with ExitStack() as stack:
        _claim(stack, folder, config, command, world)
        result = world.from_leader(run.result(folder) if world.leads else None)
        if result:
            bar.say(f"{folder} is finished: {kind.summary(result)}. To train again, remove it or choose another --out.")
            return 0
        task = kind.task(config, folder, world)
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
        result = kind.result(config, outcome)
        whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = states.get_model_state_dict(model, options=whole)
        if world.leads:
            kind.export(config, folder, weights, result, command)
            run.write_json(folder / "result.json", result)
        bar.say(f"{folder} is finished: {kind.summary(result)}.")
    return 0


def explained(work: Callable[[], int], command: str) -> int:
    """The exit code of some work of a command; what can go wrong in it is told on stderr, and is 1."""
    try:
        return work()
    except NonFiniteError as error:
        print(
            f"nomax {command}: {error}. It first appeared in {error.report['where']}. The batch is in "
            f"{error.report['file']}; the checkpoint before it is kept. A lower --lr or --precision fp32 may help.",
            file=sys.stderr,
        )
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(f"nomax {command}: {error.strerror or error}{place}.", file=sys.stderr)
    except (ValueError, run.BusyError) as error:
        print(f"nomax {command}: {error}", file=sys.stderr)
    return 1


def _claim(stack: ExitStack, folder: Path, config: RunConfig, command: str, world: World) -> None:
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
