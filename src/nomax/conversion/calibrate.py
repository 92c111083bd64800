"""Calibration: a gain and a shift for every head, so that its output is close to what it was with softmax.

Pointwise weights have no row to normalise over, so a converted head's output has another size than before, and the
scores at which weights begin to matter are others. Two numbers per head repair most of that, without any training.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nomax.conversion.own import as_converted
from nomax.nn.inner_attention import InnerAttention
from nomax.phi import ROW_MAPS, SOFTMAX, Phi

Order = Literal["in turn", "at once"]

# Shifts to try first: minus the scores below which this share of a head's scores lies, and, in standard deviations, how
# far beyond the least of them; there every weight is positive, and h nearly linear.
QUANTILES = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.997)
BEYOND = (0.5, 1.0, 2.0, 4.0)
ROUNDS, POINTS = 2, 7  # of narrowing the search between the best shift's neighbours
SAMPLE = 1 << 16  # scores of a head that the quantiles are taken from


@dataclass(frozen=True)
class LayerFit:
    """What calibration found for one layer, [heads] each."""

    name: str
    gain: Tensor
    shift: Tensor
    error: Tensor
    """The squared error that is left, as a share of the squared output with softmax."""


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of an InnerAttention, and which queries count."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    counts: Tensor  # [B or 1, 1, Lq or 1, 1], 0 for padding


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    order: Order = "in turn",
    call: Callable[[nn.Module, Any], Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerFit]:
    """Give every head of a converted model the gain and shift that bring it closest to softmax on these batches.

    model: one that `nomax.convert` has changed, of nomax or any other library; its weights are still the original's.
    batches: a few, as the model takes them: a mapping of keyword arguments, a tuple of arguments, or one argument.
    order: "in turn" fits one layer after the other, on the inputs that the layers before it now give, to the outputs
        that the original gave; "at once" fits every layer on the original's inputs, in one pass.
    call: how to call the model with a batch, if not as above.
    progress: called with the number of layers fitted, and of all.

    The gain has a closed form; the shift is found by a search. Padding, that is keys which no query may see, does not
    count. Layers whose φ normalises rows itself are left alone.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("batches must hold at least one batch to calibrate on.")
    with as_converted(model):
        return _calibrated(model, batches, order, call or call_model, progress)


def _calibrated(
    model: nn.Module,
    batches: Sequence[Any],
    order: Order,
    call: Callable[[nn.Module, Any], Any],
    progress: Callable[[int, int], None] | None,
) -> list[LayerFit]:
    layers = inner_attentions(model)
    pointwise = {name: layer for name, layer in layers.items() if layer.phi.activation not in ROW_MAPS}
    if not pointwise:
        raise ValueError("the model has no attention with a pointwise φ: convert it first, with nomax.convert.")
    for name, layer in pointwise.items():
        if layer.num_heads is None:
            raise ValueError(f"{name} does not know its number of heads, so there is no gain or shift per head.")
    fits = []
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for done, (name, layer) in enumerate(pointwise.items()):
                later = list(pointwise.values())[done if order == "in turn" else 0 :]
                with as_softmax(pointwise.values()):
                    targets = _recorded(model, layer, batches, call)
                with as_softmax(later):
                    calls = targets if order == "at once" else _recorded(model, layer, batches, call)
                fit = _fit(name, layer, calls, targets)
                layer.add_gain_and_shift(fit.gain, fit.shift)
                fits.append(fit)
                if progress is not None:
                    progress(done + 1, len(pointwise))
    finally:
        model.train(training)
    return fits


def inner_attentions(model: nn.Module) -> dict[str, InnerAttention]:
    """Return the converted attentions of a model by name, in the order of its modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, InnerAttention)}


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping is keyword arguments, a tuple or list arguments, anything else is one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def as_softmax(layers: Iterable[InnerAttention]) -> Iterator[None]:
    """Let layers compute what they did before the conversion: softmax, without gain, shift and norms."""
    saved = []
    try:
        for layer in layers:
            saved.append((layer, layer.phi, layer.gain, layer.shift, layer.query_norm, layer.key_norm))
            layer.phi = Phi(SOFTMAX)
            layer.gain = layer.shift = layer.query_norm = layer.key_norm = None
        yield
    finally:
        for layer, phi, gain, shift, query_norm, key_norm in saved:
            layer.phi, layer.gain, layer.shift = phi, gain, shift
            layer.query_norm, layer.key_norm = query_norm, key_norm


def _recorded(
    model: nn.Module, layer: InnerAttention, batches: Sequence[Any], call: Callable[[nn.Module, Any], Any]
) -> list[tuple[_Call, Tensor]]:
    """Run the model, and return every call of one layer with its output."""
    record: list[tuple[_Call, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = (given.pop(name) for name in ("query", "key", "value"))
        record.append((_Call(query, key, value, given, _counting(query, key, given.get("attn_mask"))), output))

    handle = layer.register_forward_hook(keep, with_kwargs=True)
    try:
        for batch in batches:
            call(model, batch)
    finally:
        handle.remove()
    if not record:
        raise ValueError(f"the model did not call {layer} on these batches.")
    return record


def _counting(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return 0 for queries at places that no query may see as keys, which are padding, and 1 for others."""
    if mask is None or mask.shape[-1] != key.shape[2] or query.shape[2] != key.shape[2]:
        return query.new_ones(1, 1, 1, 1)
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
    seen = (~hidden).flatten(1, -2).any(1) if mask.dim() > 2 else (~hidden).any(0, keepdim=True)
    return seen.to(query.dtype)[:, None, :, None]


def _fit(
    name: str, layer: InnerAttention, calls: Sequence[tuple[_Call, Tensor]], targets: Sequence[tuple[_Call, Tensor]]
) -> LayerFit:
    """Search each head's shift, with the best gain for it, on calls of a layer and the outputs that it should have."""
    shifts = _first_shifts(layer, calls[0][0])
    heads = torch.arange(len(shifts), device=shifts.device)
    whole = sum((output.double().square() * each.counts).sum((0, 2, 3)) for each, output in targets)
    assert isinstance(whole, Tensor)
    for narrowing in range(ROUNDS + 1):
        gains, errors = [], []
        for shift in shifts.unbind(1):
            layer.gain, layer.shift = None, nn.Parameter(shift)
            product, square = torch.zeros_like(whole), torch.zeros_like(whole)
            for (each, _), (_, target) in zip(calls, targets, strict=True):
                out = layer(each.query, each.key, each.value, **each.options)
                product += (out * target * each.counts).sum((0, 2, 3), dtype=torch.float64)
                square += (out * out * each.counts).sum((0, 2, 3), dtype=torch.float64)
            # A shift at which all weights are zero has no gain: it explains nothing.
            gain = torch.where(square > 0, product / square.clamp_min(1e-300), 0)
            gains.append(gain)
            errors.append(1 - gain * product / whole.clamp_min(1e-300))
        best = torch.stack(errors, 1).argmin(1)
        if narrowing < ROUNDS:
            low = shifts[heads, (best - 1).clamp_min(0)]
            high = shifts[heads, (best + 1).clamp_max(shifts.shape[1] - 1)]
            between = torch.linspace(0, 1, POINTS, device=shifts.device)
            chosen = shifts[heads, best, None]
            shifts = torch.cat([low[:, None] + (high - low)[:, None] * between, chosen], 1).sort(1).values
    layer.gain = layer.shift = None
    gain, error = (torch.stack(x, 1)[heads, best].float() for x in (gains, errors))
    return LayerFit(name, gain, shifts[heads, best].float(), error)


def _first_shifts(layer: InnerAttention, call: _Call) -> Tensor:
    """Return the shifts to try first, [heads, several] in rising order, from the scores of one call."""
    query, key = call.query.float(), call.key.float()
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = layer.query_norm(query), layer.key_norm(key)
    heads, (batch, _, length, dim) = query.shape[1], query.shape
    generator = torch.Generator().manual_seed(0)
    pairs = torch.stack([torch.randint(size, (SAMPLE,), generator=generator) for size in (batch, length, key.shape[2])])
    sequence, row, column = pairs.to(query.device)
    # Padding is drawn as any other place: its queries do not count, its keys are masked.
    counted = call.counts.expand(batch, 1, length, 1)[:, 0, :, 0] > 0
    valid = counted[sequence, row]
    if length == key.shape[2]:
        valid = valid & counted[sequence, column]
    sequence, row, column = sequence[valid], row[valid], column[valid]
    group = heads // key.shape[1]
    scale = call.options.get("scale") or dim**-0.5
    scores = torch.stack(
        [(query[sequence, head, row] * key[sequence, head // group, column]).sum(-1) * scale for head in range(heads)]
    )
    points = torch.quantile(scores, torch.tensor(QUANTILES, device=scores.device), 1).T
    least, spread = scores.amin(1, keepdim=True), scores.std(1, keepdim=True)
    beyond = -least + spread * torch.tensor(BEYOND, device=scores.device)
    return torch.cat([-points, beyond, torch.zeros_like(least)], 1).sort(1).values
