"""Calibration: a gain and a shift for every head, so that its output is close to what it was with softmax.

Pointwise weights have no row to normalise over, so a converted head's output has another size than before, and the
scores at which weights begin to matter are others. Two numbers per head repair most of that, without any training. A
third, a power of L of its own, serves texts of many lengths: a head that looks at the same few words in each of them
should not divide by L.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nomax.conversion.own import as_converted
from nomax.nn.inner_attention import LEARNED, InnerAttention
from nomax.phi import ROW_MAPS

Order = Literal["in turn", "at once"]

# Shifts to try first: minus the scores below which this share of a head's scores lies, and, in standard deviations, how
# far beyond the least of them; there every weight is positive, and h nearly linear.
QUANTILES = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.997)
BEYOND = (0.5, 1.0, 2.0, 4.0)
LESS = (0.0, 0.25, 0.5, 0.75, 1.0)  # by how much a head's α may be smaller than φ's
ROUNDS, POINTS = 2, 7  # of narrowing the search between the best shift's neighbours
SAMPLE = 1 << 16  # scores of a head that the quantiles are taken from


@dataclass(frozen=True)
class LayerFit:
    """What calibration found for one layer, [heads] each."""

    name: str
    gain: Tensor
    shift: Tensor
    alpha: Tensor
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
    alpha: bool = False,
    call: Callable[[nn.Module, Any], Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerFit]:
    """Give every head of a converted model the gain and shift that bring it closest to softmax on these batches.

    model: one that `nomax.convert` has changed, of nomax or any other library; its weights are still the original's.
    batches: a few, as the model takes them: a mapping of keyword arguments, a tuple of arguments, or one argument.
    order: "in turn" fits one layer after the other, on the inputs that the layers before it now give, to the outputs
        that the original gave; "at once" fits every layer on the original's inputs, in one pass.
    alpha: fit each head's power of L, too, at most φ's own; for batches of several lengths.
    call: how to call the model with a batch, if not as above.
    progress: called with the number of layers fitted, and of all.

    The gain has a closed form; the shift and the power are found by a search. Padding, that is keys which no query may
    see, does not count. Layers whose φ normalises rows itself are left alone.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("batches must hold at least one batch to calibrate on.")
    with as_converted(model):
        return _calibrated(model, batches, order, alpha, call or call_model, progress)


def _calibrated(
    model: nn.Module,
    batches: Sequence[Any],
    order: Order,
    alpha: bool,
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
                powers = alpha or layer.alpha is not None
                fit = _fit(name, layer, calls, targets, LESS if powers else LESS[:1])
                layer.learn(fit.gain, fit.shift, fit.alpha if powers else None)
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
    """Let layers compute what they did before the conversion: softmax, without what they learn besides."""
    saved = []
    try:
        for layer in layers:
            saved.append((layer, layer.phi, [getattr(layer, name) for name in LEARNED]))
            layer.become_softmax()
        yield
    finally:
        for layer, phi, learned in saved:
            layer.phi = phi
            for name, value in zip(LEARNED, learned, strict=True):
                setattr(layer, name, value)


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
    name: str,
    layer: InnerAttention,
    calls: Sequence[tuple[_Call, Tensor]],
    targets: Sequence[tuple[_Call, Tensor]],
    less: Sequence[float],
) -> LayerFit:
    """Search each head's shift and power of L, with the best gain for them, on a layer's calls and wanted outputs."""
    shifts = _first_shifts(layer, calls[0][0])
    heads = torch.arange(len(shifts), device=shifts.device)
    powers_of_length = [torch.stack([_lengths(layer, each) ** power for power in less]) for each, _ in calls]
    whole = sum((output.double().square() * each.counts).sum((0, 2, 3)) for each, output in targets)
    assert isinstance(whole, Tensor)
    for narrowing in range(ROUNDS + 1):
        gains, errors, found = [], [], []
        for shift in shifts.unbind(1):
            layer.gain, layer.alpha, layer.shift = None, None, nn.Parameter(shift)
            product, square = whole.new_zeros(2, len(less), len(whole))
            for (each, _), (_, target), powers in zip(calls, targets, powers_of_length, strict=True):
                out = layer(each.query, each.key, each.value, **each.options)
                products = (out * target * each.counts).sum(3, dtype=torch.float64)
                squares = (out * out * each.counts).sum(3, dtype=torch.float64)
                product += (powers * products).sum((1, 3))
                square += (powers.square() * squares).sum((1, 3))
            # A shift at which all weights are zero has no gain: it explains nothing.
            gain = torch.where(square > 0, product / square.clamp_min(1e-300), 0)
            error, power = (1 - gain * product / whole.clamp_min(1e-300)).min(0)
            gains.append(gain[power, heads])
            errors.append(error)
            found.append(power)
        best = torch.stack(errors, 1).argmin(1)
        if narrowing < ROUNDS:
            low = shifts[heads, (best - 1).clamp_min(0)]
            high = shifts[heads, (best + 1).clamp_max(shifts.shape[1] - 1)]
            between = torch.linspace(0, 1, POINTS, device=shifts.device)
            chosen = shifts[heads, best, None]
            shifts = torch.cat([low[:, None] + (high - low)[:, None] * between, chosen], 1).sort(1).values
    layer.gain = layer.shift = None
    gain, error, power = (torch.stack(x, 1)[heads, best] for x in (gains, errors, found))
    alpha = layer.phi.alpha - torch.tensor(less, device=power.device)[power]
    return LayerFit(name, gain.float(), shifts[heads, best].float(), alpha.float(), error.float())


def _lengths(layer: InnerAttention, call: _Call) -> Tensor:
    """Return L for each query of a call, broadcasting to [B, H, Lq]."""
    given = call.options
    bounds = None if given.get("cu_seqlens_q") is None else (given["cu_seqlens_q"], given["cu_seqlens_k"])
    causal, grouped = (bool(given.get(name)) for name in ("is_causal", "enable_gqa"))
    return layer.lengths(call.query, call.key, given.get("attn_mask"), causal, grouped, bounds).double()


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
