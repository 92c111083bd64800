"""Distillation: a converted model learns to compute what its original computes, in every layer and at the end."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from nomax._files import to_json
from nomax.conversion.calibrate import as_softmax, call_model, inner_attentions
from nomax.conversion.own import as_converted
from nomax.nn.layers import SLOW
from nomax.phi import ROW_MAPS
from nomax.train import checkpoints
from nomax.train.nonfinite import NonFiniteError
from nomax.train.optimiser import schedule

# Called with the student's output, the teacher's, and the batch.
OutputLoss = Callable[[Any, Any, Any], Tensor]


@dataclass(frozen=True)
class DistilConfig:
    """How to distil."""

    steps: int = 600
    """Batches to learn from."""
    lr: float = 3e-4
    """The peak learning rate; it rises linearly, then falls to zero as a cosine."""
    head_lr: float = 10.0
    """How many times as fast gains, shifts and powers of L learn: they are single numbers of a size of 1 to 10."""
    warmup: int = 20
    """Steps in which the learning rate rises."""
    clip: float = 1.0
    """The largest norm of the gradient."""
    beta2: float = 0.98
    """Of Adam's second moment: runs are short, so it forgets faster than usual."""
    hidden_weight: float = 1.0
    """The weight of the mean error of hidden states, next to the output's, which has 1."""
    last_share: float = 0.0
    """In this share of the steps, the last ones, only the output counts: a short fine-tune."""
    layers: Literal["together", "in turn"] = "together"
    """All layers at once; or one after the other, those to come still with softmax."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of products, by autocast; the weights stay in float32. auto: bfloat16, unless this CPU is slow at it."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        if self.steps < 0 or self.warmup < 0 or self.checkpoint_every < 1:
            raise ValueError("steps and warmup must be at least 0, checkpoint_every at least 1.")
        if not 0 <= self.last_share <= 1:
            raise ValueError(f"last_share={self.last_share!r} must be a share of the steps, from 0 to 1.")


@dataclass(frozen=True)
class Step:
    """One step of distillation."""

    step: int
    loss: float
    output: float
    """The output's part of the loss."""
    positions: int
    """Tokens learned from until now."""
    seconds: float


def distil(
    student: nn.Module,
    teacher: nn.Module | None,
    batches: Iterable[Any],
    config: DistilConfig | None = None,
    *,
    output_loss: OutputLoss | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
    folder: Path | None = None,
    report: Callable[[Step], None] | None = None,
) -> list[Step]:
    """Train a converted model, in place, to give the hidden states and outputs of its original; return each step.

    student: a model that `nomax.convert` has changed. Parameters that need no gradient stay as they are.
    teacher: the original; the names of its modules are the student's. None fine-tunes without one: then output_loss,
        which gets None as the teacher's output, is all that counts.
    batches: as both take them: mappings of keyword arguments, tuples of arguments, or single ones. There must be as
        many as steps; with a folder, the same ones in every call. An attention_mask [B, L] says what is padding.
    output_loss: compares the outputs, given the batch too; `output_error` if not given.
    folder: keeps checkpoints there, and goes on from the newest one; the steps before are then returned as well.
    report: called after each step.
    """
    if teacher is None and output_loss is None:
        raise ValueError("without a teacher, pass an output_loss that compares with the batch's own labels.")
    with as_converted(student):
        return _distilled(
            student,
            teacher,
            batches,
            config or DistilConfig(),
            output_loss or output_error,
            call or call_model,
            folder,
            report,
        )


def _distilled(
    student: nn.Module,
    teacher: nn.Module | None,
    batches: Iterable[Any],
    config: DistilConfig,
    output_loss: OutputLoss,
    call: Callable[[nn.Module, Any], Any],
    folder: Path | None,
    report: Callable[[Step], None] | None,
) -> list[Step]:
    layers = [layer for layer in inner_attentions(student).values() if layer.phi.activation not in ROW_MAPS]
    if not layers:
        raise ValueError("the student has no attention with a pointwise φ: convert it first, with nomax.convert.")
    names = blocks(student)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimiser = _optimiser(student, config)
    history = _resume(folder, config, student, optimiser)
    training = student.training
    student.eval()  # dropout would be noise between two models that should agree
    if teacher is not None:
        teacher.eval()
    begun = time.monotonic() - (history[-1].seconds if history else 0.0)
    positions = history[-1].positions if history else 0
    device = next(student.parameters()).device.type
    slow = device == "cpu" and torch.bfloat16 in SLOW
    bfloat16 = config.precision == "bfloat16" or (config.precision == "auto" and not slow)
    warmup = min(config.warmup, config.steps // 4)
    for step, batch in enumerate(islice(batches, len(history), config.steps), len(history)):
        for group in optimiser.param_groups:
            group["lr"] = group["initial_lr"] * schedule(step + 1, config.steps + 1, warmup)
        waiting = layers[step * len(layers) // config.steps + 1 :] if config.layers == "in turn" else []
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            wanted, target = (None, None) if teacher is None else _wanted(teacher, names, batch, call)
            with as_softmax(waiting), recorded(student, names) as states:
                output = call(student, batch)
        mask = padding_mask(batch)
        loss = at_end = output_loss(output, target, batch)
        if wanted is not None and step < config.steps * (1 - config.last_share):
            errors = [relative_error(states[name], wanted[name], mask) for name in names]
            loss = at_end + config.hidden_weight * torch.stack(errors).mean()
        if not bool(torch.isfinite(loss)):
            raise NonFiniteError(
                f"the loss is {loss.item()} at step {step}. A lower learning rate than {config.lr:g} may help; the "
                "last checkpoint is intact.",
                {"step": step},
            )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, config.clip)
        optimiser.step()
        positions += _positions(batch, states[names[0]], mask)
        history.append(Step(step + 1, loss.item(), at_end.item(), positions, time.monotonic() - begun))
        if folder is not None and ((step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps):
            _save(folder, config, student, optimiser, history)
        if report is not None:
            report(history[-1])
    if len(history) < config.steps:
        raise ValueError(f"batches has {len(history)} batches, fewer than the {config.steps} steps.")
    student.train(training)
    return history


@torch.no_grad()
def _wanted(
    teacher: nn.Module, names: Sequence[str], batch: Any, call: Callable[[nn.Module, Any], Any]
) -> tuple[dict[str, Tensor], Any]:
    """Return the teacher's hidden states and its output."""
    with recorded(teacher, names) as states:
        output = call(teacher, batch)
    return states, output


def blocks(model: nn.Module) -> list[str]:
    """Return the names of the layers around a model's converted attentions, whose outputs are its hidden states.

    A layer is what stands in the innermost nn.ModuleList or nn.Sequential around an attention, or the module that holds
    the attention if there is none.
    """
    names = []
    for inner in inner_attentions(model):
        path = inner.split(".")
        ends = [
            end
            for end in range(len(path) - 1, 0, -1)
            if isinstance(model.get_submodule(".".join(path[: end - 1])), nn.ModuleList | nn.Sequential)
        ]
        name = ".".join(path[: ends[0]] if ends else path[:-1])
        if name not in names:
            names.append(name)
    return names


@contextlib.contextmanager
def recorded(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Record what the named modules return, while the block runs."""
    states: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states[name] = first_tensor(output)

        return hook

    handles = []
    try:
        for name in names:
            try:
                handles.append(model.get_submodule(name).register_forward_hook(keep(name)))
            except AttributeError:
                raise ValueError(
                    f"the teacher has no module {name!r}, which the student has: they must be the same model."
                ) from None
        yield states
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Tensor:
    """Return the main tensor of a module's output: its logits, its last hidden state, or the first there is."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    for each in output.values() if isinstance(output, Mapping) else output:
        if isinstance(each, Tensor):
            return each
    raise ValueError(f"the output, a {type(output).__name__}, holds no tensor to compare.")


def padding_mask(batch: Any) -> Tensor | None:
    """Return a batch's attention_mask [B, L], nonzero for tokens, if it has one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def relative_error(states: Tensor, wanted: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the squared error, relative to the square of what is wanted; padding does not count."""
    states, wanted = states.float(), wanted.float()
    if mask is not None and wanted.shape[:2] == mask.shape:
        states, wanted = states[mask.bool()], wanted[mask.bool()]
    return (states - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12)


def output_error(output: Any, target: Any, batch: Any) -> Tensor:
    """Compare outputs: the Kullback-Leibler divergence of logits, the relative error of anything else."""
    mask = padding_mask(batch)
    if isinstance(getattr(output, "logits", None), Tensor):
        logits, wanted = output.logits.float(), target.logits.float()
        if mask is not None and logits.dim() == 3 and logits.shape[:2] == mask.shape:
            logits, wanted = logits[mask.bool()], wanted[mask.bool()]
        logits, wanted = logits.flatten(0, -2).log_softmax(-1), wanted.flatten(0, -2).log_softmax(-1)
        return nn.functional.kl_div(logits, wanted, reduction="batchmean", log_target=True)
    return relative_error(first_tensor(output), first_tensor(target), mask)


def sentence_error(output: Any, target: Any, batch: Any) -> Tensor:
    """Compare sentence embeddings: one minus the cosine, where an embedding is the mean of its tokens."""
    given, wanted = (embeddings(first_tensor(states), batch) for states in (output, target))
    return 1 - nn.functional.cosine_similarity(given, wanted, dim=-1).mean()


def embeddings(states: Tensor, batch: Any) -> Tensor:
    """Return the mean of each sequence's tokens, [sequences, dim] in float32; padded or packed as the batch is."""
    states = states.float()
    bounds = batch.get("cu_seq_lens_q") if isinstance(batch, Mapping) else None
    if bounds is not None:
        lengths = bounds.diff().long()
        owner = torch.arange(len(lengths), device=states.device).repeat_interleave(lengths)
        sums = states.new_zeros(len(lengths), states.shape[-1]).index_add(0, owner, states.squeeze(0))
        return sums / lengths.unsqueeze(1)
    mask = padding_mask(batch)
    if mask is None:
        return states.mean(1)
    weights = mask[..., None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


def _optimiser(student: nn.Module, config: DistilConfig) -> AdamW:
    layers = inner_attentions(student).values()
    per_head = {id(x) for layer in layers for x in (layer.gain, layer.shift, layer.alpha)}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in student.parameters():
        if parameter.requires_grad:
            groups[id(parameter) in per_head].append(parameter)
    rates = (config.lr, config.lr * config.head_lr)
    return AdamW(
        [{"params": each, "lr": lr, "initial_lr": lr} for each, lr in zip(groups, rates, strict=True) if each],
        betas=(0.9, config.beta2),
        weight_decay=0.0,
        fused=True,
    )


def _positions(batch: Any, states: Tensor, mask: Tensor | None) -> int:
    return int(mask.count_nonzero()) if mask is not None else states.shape[:-1].numel()


def _save(folder: Path, config: DistilConfig, student: nn.Module, optimiser: AdamW, history: list[Step]) -> None:
    state = {
        "step": len(history),
        "units": history[-1].positions,
        "seconds": history[-1].seconds,
        "config": to_json(asdict(config)),
        "model": student.state_dict(),
        "optimiser": optimiser.state_dict(),
        "history": [list(asdict(step).values()) for step in history],
    }
    checkpoints.save(folder, len(history), state, keep=2)


def _resume(folder: Path | None, config: DistilConfig, student: nn.Module, optimiser: AdamW) -> list[Step]:
    state = checkpoints.newest(folder) if folder is not None else None
    if state is None:
        return []
    if state["config"] != to_json(asdict(config)):
        raise ValueError(
            f"{folder} holds checkpoints of a distillation with other settings. Give it the same settings to go on, or "
            "remove the folder to begin again."
        )
    student.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return [Step(*row) for row in state["history"]]
