"""`convert` and `revert`: find a model's attention, give it φ, prove it by a forward pass, or leave all as it was."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from nomax.conversion import multihead, transformers
from nomax.conversion.apply import UNDO, Undo, apply, settle
from nomax.conversion.discovery import Site, Sites, Watch
from nomax.conversion.inputs import Inputs, NoInputs, given, made_up
from nomax.conversion.report import ConversionError, Layer, Report
from nomax.nn import InnerAttention
from nomax.phi import ROW_MAPS, Phi

# h of these does not vanish for low scores, so a mask of -100 hides nothing from them.
_NOT_VANISHING = ("identity", "cube")

Layers = int | str | Sequence[int | str]


def convert(
    model: nn.Module,
    phi: str | Phi = "relu/L",
    qk_norm: bool | None = None,
    layers: Layers | None = None,
    *,
    inputs: Any = None,
) -> Report:
    """Change the attention of a model to φ, in place, and return what was changed and what was left.

    The model may be of timm, transformers, torchvision or nomax, a layer of torch, or any model that calls
    F.scaled_dot_product_attention or nn.MultiheadAttention. A forward pass before and one after prove that every
    attention layer runs φ; if not, an error names the layers that do not and why, and the model is as it was.

    phi: how scores become weights, e.g. "relu/L" (see `nomax.Phi`). A converted model can be converted again.
    qk_norm: add a LayerNorm of queries and keys over the head dimension, which adds parameters to the model.
    layers: convert only these: indices in the order of the forward pass, or patterns of names such as "blocks.[0-5].*".
    inputs: for the forward pass: a tensor, a tuple, or a dictionary of named ones. Needed where nomax cannot make them
        up, which the error tells.
    """
    phi = Phi.parse(phi)
    _check(model)
    arguments = _inputs(model, inputs)
    undo = Undo()
    try:
        with _as_for_inference(model):
            try:
                sites = _discover(model, arguments, undo)
            except Exception as error:
                raise ConversionError(
                    f"the forward pass of this {type(model).__name__}, before anything is converted, failed. Pass "
                    f"inputs=… that it takes. The error was: {type(error).__name__}: {error}"
                ) from error
            chosen, left = _select(model, sites, layers)
            report = _report(model, chosen, left, phi)
            _check_sites(model, chosen, sites if layers is None else replace(sites, unreached=[]), phi)
            for site in chosen:
                apply(site, phi, qk_norm, undo)
            settle(model, chosen, left, undo)
            _prove(model, arguments, chosen)
    except BaseException:
        undo()
        raise
    undo.stay(model)
    return report


def revert(model: nn.Module) -> None:
    """Give a converted model its original attention back, bitwise; learned gains, shifts and norms of φ are lost."""
    undone = False
    for module in list(model.modules()):
        steps: Undo | None = vars(module).pop(UNDO, None)
        if steps is not None:
            steps()
            undone = True
    if not undone:
        raise ConversionError(
            f"this {type(model).__name__} was not converted by nomax.convert, so nothing was reverted."
        )


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got a {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        raise ConversionError(
            f"a {type(model).__name__} cannot be converted: convert the model first, then compile it."
        )
    devices = sorted({str(x.device) for x in (*model.parameters(), *model.buffers())})
    if "meta" in devices or len({device.partition(":")[0] for device in devices}) > 1:
        raise ConversionError(
            f"the model's weights are on {' and '.join(devices)}, but the forward pass that proves a conversion needs "
            "them on one kind of device (and not on meta). Load them all, or move them with model.to(device), first."
        )


def _inputs(model: nn.Module, inputs: Any) -> Inputs:
    if inputs is not None:
        return given(inputs)
    try:
        return made_up(model)
    except NoInputs as error:
        raise ConversionError(
            f"nomax does not know what a {type(model).__name__} takes ({error}), so it cannot prove a conversion by a "
            "forward pass. Pass inputs=…: a tensor, a tuple of arguments, or a dictionary of named ones."
        ) from None


@contextmanager
def _as_for_inference(model: nn.Module) -> Iterator[None]:
    """Run forward passes without gradients, dropout and other randomness, and leave no trace of them."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
            if isinstance(inner := getattr(module, "inner_attention", None), InnerAttention):
                inner.train(training)


def _forward(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return all floating-point tensors in the output of the model."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)  # for models that draw numbers
        out = model(*inputs[0], **inputs[1])
    tensors: list[Tensor] = []

    def collect(x: Any) -> None:
        if isinstance(x, Tensor):
            tensors.extend([x] if x.is_floating_point() and not x.is_nested else [])
        elif isinstance(x, dict):
            for part in x.values():
                collect(part)
        elif isinstance(x, tuple | list):
            for part in x:
                collect(part)

    collect(out)
    return tensors


def _discover(model: nn.Module, inputs: Inputs, undo: Undo) -> Sites:
    """Find all attention by a forward pass through a door that φ can enter by, still with softmax."""
    configs = transformers.configs(model) if "transformers" in sys.modules else []
    # timm's modules have two ways to the same result, and the other one has a softmax.
    unfused = [module for module in model.modules() if getattr(module, "fused_attn", None) is False]
    if not configs and not unfused:
        return _watched(model, inputs, None)
    try:
        original: list[Tensor] | None = _forward(model, inputs)
    except transformers.Unconverted:  # it was made with the name of our implementation
        original = None
    for module in unfused:
        undo.set(module, "fused_attn", True)
    if not configs:
        return _watched(model, inputs, original)

    # transformers has an interface; some of its models call F.scaled_dot_product_attention instead of that.
    transformers.register()
    best: tuple[str, Sites] | None = None
    for implementation in transformers.DOORS:
        trial = Undo()
        trial.set_all(configs, "_attn_implementation_internal", implementation)
        try:
            sites = _watched(model, inputs, original)
        except Exception:  # the implementation is not one that this model can have
            continue
        finally:
            trial()
        perfect = not sites.problem and not any(site.reason for site in sites)
        if best is None or perfect:
            best = (implementation, sites)
        if perfect:
            break
    if best is None:
        return _watched(model, inputs, None)
    undo.set_all(configs, "_attn_implementation_internal", best[0])
    return best[1]


def _watch(
    model: nn.Module, inputs: Inputs, *, observing: bool = False, causal: dict[nn.Module, bool] | None = None
) -> tuple[Watch, list[Tensor]]:
    """Watch a forward pass, and return what it gave."""
    watch = transformers.watch = Watch(model)
    watch.observing, watch.causal = observing, causal or {}
    try:
        with watch.watching():
            return watch, _forward(model, inputs)
    finally:
        transformers.watch = None


def _watched(model: nn.Module, inputs: Inputs, original: list[Tensor] | None) -> Sites:
    """Return the attention that a forward pass reaches, and compare its output with the original one."""
    watch, out = _watch(model, inputs)
    new = [site.module for site in watch.sites if site.kind == "interface" and site.phi == "softmax"]
    if any(not hasattr(module, "is_causal") for module in new):
        # Whether these are causal where they get no mask, the masks tell that they could get.
        causal = _watch(model, inputs, observing=True)[0].causal
        watch, out = _watch(model, inputs, causal={x: causal[x] for x in causal if not hasattr(x, "is_causal")})
    sites = watch.sites
    sites.unreached = watch.unreached()
    for before, after in zip(original or [], out if original else [], strict=True):
        # Half precision rounds differently in other kernels, through all layers.
        most = 1e-3 if before.dtype in (torch.float32, torch.float64) else 5e-2
        off = (before.float().nan_to_num() - after.float().nan_to_num()).abs()
        if before.numel() and float(off.max()) > most * max(float(before.nan_to_num().abs().max()), 1.0):
            sites.problem = (
                f"with softmax in the place where φ would be, its output is off by {float(off.max()):.2g}: "
                "it treats attention implementations or their masks in its own way"
            )
    return sites


def _select(model: nn.Module, sites: Sites, layers: Layers | None) -> tuple[list[Site], list[Site]]:
    """Return the sites to convert, and the others."""
    every = list(sites)
    if not every:
        unreached = f" Its forward pass did not reach {', '.join(sites.unreached)}." if sites.unreached else ""
        raise ConversionError(
            f"nothing was converted: the forward pass of this {type(model).__name__} computes no attention that nomax "
            f"knows.{unreached}"
        )
    if layers is None:
        return every, []
    chosen: set[str] = set()
    wishes = [layers] if isinstance(layers, int | str) else list(layers)
    if not wishes:
        raise ValueError("layers is empty, so nothing would be converted. None stands for all layers.")
    if wrong := [wish for wish in wishes if isinstance(wish, bool) or not isinstance(wish, int | str)]:
        raise TypeError(f"layers={layers!r} must be indices or patterns of names; {wrong[0]!r} is neither.")
    for wish in wishes:
        if isinstance(wish, int):
            if not -len(every) <= wish < len(every):
                raise ValueError(f"layers: there is no layer {wish}; the model has {len(every)}, counted from 0.")
            chosen.add(every[wish].name)
            continue
        names = {site.name for site in every if fnmatchcase(site.name, wish)}
        if not names:
            shown = ", ".join(site.name for site in every[:12]) + (", …" if len(every) > 12 else "")
            raise ValueError(f"layers: no attention layer matches {wish!r}. There are {shown}.")
        chosen |= names
    return [site for site in every if site.name in chosen], [site for site in every if site.name not in chosen]


def _check_sites(model: nn.Module, chosen: list[Site], sites: Sites, phi: Phi) -> None:
    """Raise if a site that was chosen cannot take φ, or if attention may be hidden from the forward pass."""
    for site in chosen:
        if isinstance(site.module, nn.MultiheadAttention) and site.kind == "multihead":
            if not hasattr(type(site.module), "original_class"):
                site.reason = multihead.unsupported(site.module)
        elif site.kind == "nomax" and phi.activation in ROW_MAPS:
            learned = [name for name in ("gain", "alpha", "shift") if getattr(site.module, name, None) is not None]
            site.reason = f"it learns {' and '.join(learned)} of φ, which {phi} does not have" if learned else ""
        if not site.reason and site.low_masks and phi.activation in _NOT_VANISHING:
            site.reason = f"it hides keys by a mask of about -100, from which {phi.activation} does not vanish"
    if refused := [site for site in chosen if site.reason]:
        # Many layers of one kind have one reason.
        by_reason: dict[tuple[str, str], list[str]] = {}
        for site in refused:
            by_reason.setdefault((type(site.module).__name__, site.reason), []).append(site.name)
        lines = [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} ({kind}): {reason}"
            for (kind, reason), names in by_reason.items()
        ]
        possible = len(chosen) - len(refused)
        raise ConversionError(
            f"{len(refused)} of {len(chosen)} attention layers of this {type(model).__name__} cannot be converted to "
            f"{phi}, so they would go on as they are:\n  " + "\n  ".join(lines)
            + (f"\nlayers=… converts the other {possible} alone." if possible and not sites.problem else "")
        )  # fmt: skip
    if sites.problem:
        raise ConversionError(f"this {type(model).__name__} cannot be converted: {sites.problem}.")
    if unreached := sites.unreached:
        raise ConversionError(
            f"the forward pass did not reach {', '.join(unreached[:6])}{', …' if unreached[6:] else ''}, so it cannot "
            "be proved that they would run φ. Pass inputs=… that reach them, or name the layers to convert in layers=…."
        )


def _prove(model: nn.Module, inputs: Inputs, chosen: list[Site]) -> None:
    """Raise unless φ is called as often as the original attention was."""
    counts: dict[nn.Module, int] = {}
    hooks = []
    for site in chosen:
        counted = site.module if site.kind == "nomax" else site.module.inner_attention
        counts[counted] = 0  # type: ignore[index]
        hooks.append(counted.register_forward_pre_hook(_count(counts)))  # type: ignore[union-attr]
    try:
        _forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for site, count in zip(chosen, counts.values(), strict=True):
        if count < site.calls:
            raise ConversionError(
                f"{site.name} ({type(site.module).__name__}) attended {site.calls} times, but called φ {count} times: "
                "softmax would go on in it. It was not converted."
            )


def _count(counts: dict[nn.Module, int]) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        counts[module] += 1

    return hook


def _report(model: nn.Module, chosen: list[Site], left: list[Site], phi: Phi) -> Report:
    def layer(site: Site, after: str, reason: str = "") -> Layer:
        kind = type(site.module).__name__
        return Layer(site.name, kind, site.kind, site.num_heads, site.phi, after, reason)

    return Report(
        type(model).__name__,
        tuple(layer(site, str(phi)) for site in chosen),
        tuple(layer(site, site.phi, site.reason or "not in layers=…") for site in left),
    )
