"""The training loop: any Task, one process or many, resumed exactly where its last checkpoint left it.

Everything at a step is a function of the configuration and the step alone: the batch, the random numbers, the learning
rate. So a checkpoint holds only the weights, Adam's moments and the step; nothing else needs to be restored.
"""

import copy
import ctypes
import hashlib
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states

from nomax.train import checkpoints, distributed, nonfinite, optimiser, sharded
from nomax.train.config import LoopConfig, digest
from nomax.train.console import Bar, Stop
from nomax.train.distributed import World
from nomax.train.metrics import Metrics

Batch = TypeVar("Batch")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


class Task(Protocol[Batch]):
    """A model, its data and its loss. Everything here is a pure function of the step, so the step is all the state."""

    model: nn.Module
    """The model to train, not yet wrapped, on any device."""
    unit: str
    """The unit of counting, in the plural: "images", "tokens"."""

    def batches(self, start: int, world: World) -> Iterator[Batch]:
        """Yield this rank's part of the batch of step `start`, of the step after it, and so on without end."""
        ...

    def size(self, batch: Batch) -> int:
        """Return the number of units in a batch: the loss is the mean over the units of all ranks."""
        ...

    def split(self, batch: Batch, parts: int) -> Iterable[Batch]:
        """Split a batch into at most that many smaller ones, for gradient accumulation."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return sums over the batch's units: "loss", with its gradient, and whatever else is worth watching."""
        ...

    def evaluation(self, world: World) -> Iterator[Batch]:
        """Yield this rank's part of the test data, once; every rank has as many batches, some perhaps empty."""
        ...

    def observe(self, model: nn.Module, batch: Batch, step: int, folder: Path) -> None:
        """Record anything of interest about this step's gradients, before they are clipped and used."""
        ...

    def describe(self, step: int) -> dict[str, Any]:
        """Describe the data of this step's batch, as JSON, for the report if something goes wrong with it."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call of `train`: how far it got, and its measurements."""

    step: int
    finished: bool
    seconds: float
    evaluation: dict[str, float]
    units: int = 0
    """Images or tokens trained on."""


def train(
    task: Task[Batch],
    config: LoopConfig,
    folder: Path,
    world: World,
    stop: Stop,
    bar: Bar,
    *,
    tensorboard: bool = False,
) -> tuple[Outcome, nn.Module]:
    """Train from the newest checkpoint in the folder, or from the start, to the last step or until asked to stop.

    Returns how far it got and the model to keep: the averaged weights if the config asks for them.
    """
    keep_freed_memory()
    loop = Loop(task, config, folder, world)
    loop.resume()
    if loop.step:
        bar.say(f"Continuing from step {loop.step}.")
    if world.leads:
        with Metrics(folder, loop.step, tensorboard, config.EVALUATED, config.log_every) as metrics:
            return loop.run(stop, bar, metrics), loop.kept
    return loop.run(stop, bar, None), loop.kept


class Loop(Generic[Batch]):
    """Hold the state of a training run and take its steps."""

    def __init__(self, task: Task[Batch], config: LoopConfig, folder: Path, world: World) -> None:
        self.task, self.config, self.folder, self.world = task, config, folder, world
        self.step, self.units, self.seconds = 0, 0, 0.0
        self.model = task.model.to(world.device)
        self.average = copy.deepcopy(self.model) if config.ema else None
        self.kept = self.model if self.average is None else self.average
        self.called = self.model
        # From the inside out: compiled code runs again in the backward pass, with weights that are gathered once.
        if config.compile:
            distributed.compile_layers(self.model)
        if config.activation_checkpointing:
            distributed.checkpoint_activations(self.model)
        self.sharded = world.size > 1 and config.distribute == "fsdp"
        if self.sharded:
            distributed.shard(self.model)
            if self.average is not None:
                distributed.shard(self.average)
        elif world.size > 1:
            self.called = distributed.replicate(self.model, world)
        self.optimiser = optimiser.make(self.model, config)

    def run(self, stop: Stop, bar: Bar, metrics: Metrics | None) -> Outcome:
        """Take steps, evaluate and write checkpoints until the end or until asked to stop."""
        config, saved, asked = self.config, self.step, False
        evaluations = self.world.from_leader(metrics.evaluations if metrics else None)
        batches = self.task.batches(self.step, self.world)
        while True:
            finished = self.step == config.steps
            due = finished or (config.evaluate_every and self.step and self.step % config.evaluate_every == 0)
            if due and self.step not in evaluations and not asked:
                evaluation = self.evaluate(stop)
                asked = evaluation is None  # the next start will do it
                if evaluation:
                    evaluations[self.step] = evaluation
                    bar.say(f"step {self.step}, {config.EVALUATED}: {_words(evaluation)}")
                    if metrics:
                        metrics.write({"step": self.step, "evaluation": evaluation})
            if self.step != saved and (finished or asked or self.step % config.checkpoint_every == 0):
                if metrics:
                    metrics.sync()
                self.save()
                saved = self.step
            if finished or asked:
                newest = evaluations.get(self.step, {})
                return Outcome(self.step, finished and not asked, self.seconds, newest, self.units)
            began = time.monotonic()
            line, asked = self.update(next(batches), stop)
            self.seconds += time.monotonic() - began
            line |= {self.task.unit: self.units, "seconds": round(self.seconds, 3)}
            bar.update(self.step, line)
            if metrics and (self.step % config.log_every == 0 or self.step == config.steps):
                metrics.write(line)

    def update(self, batch: Batch, stop: Stop) -> tuple[dict[str, float], bool]:
        """Take one step of AdamW with the clipped gradient of the mean loss over all ranks.

        Returns the line of metrics, and whether any rank was asked to stop.
        """
        size = self.world.sum({"size": self.task.size(batch)})["size"]
        config = self.config
        rate = config.lr * optimiser.schedule(self.step, config.steps, config.warmup, config.schedule)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        sums: dict[str, float | Tensor] = {"stop": float(stop.asked)}
        for measured in self._measured(self.called, batch):
            (measured["loss"] * (self.world.size / size)).backward()  # ranks average their gradients
            for name, value in measured.items():
                sums[name] = sums.get(name, 0) + value.detach()
        if self.world.leads:
            self.task.observe(self.model, batch, self.step, self.folder)
        norm = float(optimiser.clip(self.model, self.config.clip))
        totals = self.world.sum(sums)
        if not (math.isfinite(totals["loss"]) and math.isfinite(norm)):
            raise self._non_finite(batch, totals["loss"] / size, norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        if self.average is not None:
            optimiser.average(self.average, self.model, self.config.ema)
        self.step += 1
        self.units += int(size)
        asked = totals.pop("stop") > 0
        means = {name: total / size for name, total in totals.items()}
        return {"step": self.step, **means, "lr": rate, "norm": norm}, asked

    @torch.no_grad()
    def evaluate(self, stop: Stop) -> dict[str, float] | None:
        """Return means over the test data, with the weights that will be kept; None if asked to stop in between."""
        sums: dict[str, float | Tensor] = {"size": 0.0}
        self.kept.eval()
        for batch in self.task.evaluation(self.world):
            with self._autocast():
                measured = self.task.measure(self.kept, batch)
            for name, value in measured.items():
                sums[name] = sums.get(name, 0) + value
            sums["size"] += self.task.size(batch)
            # Among several ranks nobody may leave alone.
            if self.world.size == 1 and stop.asked:
                return None
        distributed.resharded(self.kept)
        totals = self.world.sum(sums)
        size = totals.pop("size")
        return {name: total / size for name, total in totals.items()}

    def save(self) -> None:
        """Write a checkpoint; every rank takes part: each writes its shards, or the leading one writes all."""
        folder = self.folder / "checkpoints"
        state: dict[str, Any] = {
            "step": self.step,
            "units": self.units,
            "seconds": self.seconds,
            "config": digest(self.folder, self.config),
        }
        if self.sharded:
            path = folder / checkpoints.name(self.step, sharded=True)
            try:
                sharded.save(path, state, sharded.tensors(self.model, self.optimiser, self.average)[0], self.world)
            except OSError as error:
                raise checkpoints.not_written(path, error) from error
            if self.world.leads:
                checkpoints.prune(folder, self.config.keep)
            return
        whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state["model"] = states.get_model_state_dict(self.model, options=whole)
        state["optimiser"] = states.get_optimizer_state_dict(self.model, self.optimiser, options=whole)
        state["average"] = states.get_model_state_dict(self.average, options=whole) if self.average else None
        if self.world.leads:
            checkpoints.save(folder, self.step, state, self.config.keep)

    def resume(self) -> None:
        """Restore the newest intact checkpoint, if there is one."""
        state: dict[str, Any] | None = None
        facts: dict[str, Any] | ValueError | None = None
        if self.world.leads:
            try:
                state = self._state()
                facts = {name: state[name] for name in ("step", "units", "seconds", "path")} if state else None
            except ValueError as error:  # it is one on every rank
                facts = error
        facts = self.world.from_leader(facts)
        if isinstance(facts, ValueError):
            raise facts
        if facts is None:
            return
        self.step, self.units, self.seconds = facts["step"], facts["units"], facts["seconds"]
        try:
            if facts["path"].suffix == ".pt":
                self._restore(state or {"model": {}, "optimiser": {}, "average": {}})
            else:
                self._restore_shards(facts["path"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
            raise ValueError(
                f"the checkpoint {facts['path']} has no state of this optimiser. Move it away to go on from the one "
                "before."
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint that the leading rank holds."""
        several = self.world.size > 1
        whole = states.StateDictOptions(full_state_dict=several, broadcast_from_rank0=several)
        states.set_model_state_dict(self.model, state["model"], options=whole)
        states.set_optimizer_state_dict(self.model, self.optimiser, state["optimiser"], options=whole)
        if self.average is not None:
            states.set_model_state_dict(self.average, state["average"], options=whole)

    def _restore_shards(self, path: Path) -> None:
        """Restore a sharded checkpoint, of which every rank reads what it holds of the model."""
        tensors, of_optimiser = sharded.tensors(self.model, self.optimiser, self.average)
        sharded.load(path, tensors, self.world)  # into the model itself
        for name, moments in of_optimiser["state"].items():
            moments |= {kind: tensors[f"optimiser/{kind}/{name}"] for kind in moments}
        states.set_optimizer_state_dict(self.model, self.optimiser, of_optimiser)

    def _state(self) -> dict[str, Any] | None:
        """Load the newest intact checkpoint and check that it fits; move damaged ones after it aside."""
        folder = self.folder / "checkpoints"
        state = checkpoints.newest(folder, with_shards=False)
        if state is None:
            return None
        path: Path = state["path"]
        checkpoints.tidy(folder, state["step"])
        if state["config"] != digest(self.folder, self.config):
            raise ValueError(f"the checkpoints in {self.folder} are of another configuration than its config.json.")
        for name, model in {"model": self.model, "average": self.average}.items():
            if model is not None:
                wanted = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
                if wanted != _shapes(state, path, name):
                    raise ValueError(
                        f"the checkpoint {path} has other weights ({name}) than this model, though its configuration "
                        "is the same. Move it away to go on from the one before."
                    )
        return state

    def _measured(self, model: nn.Module, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """Yield sums over the parts of a batch, computed with the random numbers of this step and rank."""
        model.train()
        _reseed(_seed(self.config.seed, self.step, self.world.rank), self.world.device)
        parts = list(self.task.split(batch, self.config.accumulate))
        for i, part in enumerate(parts):
            with distributed.synchronised(model, last=i == len(parts) - 1):
                with self._autocast():
                    measured = self.task.measure(model, part)
                yield measured

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _non_finite(self, batch: Batch, loss: float, norm: float) -> nonfinite.NonFiniteError:
        """Make the error for a step whose loss or gradient is not finite. The weights are still those before it."""
        with torch.compiler.set_stance("force_eager"):  # a compiled model shows no layers
            finding = nonfinite.locate(self.model, lambda: (m["loss"] for m in self._measured(self.model, batch)))
        place = min(self.world.gather(finding))[1]
        report = {"step": self.step + 1, "loss": str(loss), "norm": str(norm), "where": place}
        report["batch"] = self.task.describe(self.step)
        return nonfinite.NonFiniteError(
            f"step {self.step + 1} has the loss {loss} and a gradient of norm {norm}", report
        )


def _shapes(state: Mapping[str, Any], path: Path, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a checkpoint, whole or sharded, by name."""
    if path.suffix == ".pt":
        return {key: tuple(tensor.shape) for key, tensor in (state.get(name) or {}).items()}
    shapes = sharded.shapes(path)
    return {key.removeprefix(f"{name}/"): shape for key, shape in shapes.items() if key.startswith(f"{name}/")}


def _seed(seed: int, step: int, rank: int) -> int:
    """Return a seed for the random numbers of one step on one rank."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8], "little") >> 1


def _reseed(seed: int, device: torch.device) -> None:
    """Do what torch.manual_seed does, but skip the stack traces that it formats on a CPU for other kinds of device."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next one: getting it back takes a tenth of a small step.

    By default it returns blocks above some megabytes to the system, which has to zero every page again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**30)


def _words(evaluation: dict[str, float]) -> str:
    shown = (
        f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}" for name, value in evaluation.items()
    )
    return ", ".join(shown)
