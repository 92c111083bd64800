"""Give attention layers φ, and remember how to take it back."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import nn

from nomax import __version__
from nomax.conversion import multihead, packing, swapped, transformers
from nomax.conversion.discovery import Site, kind_of_converted
from nomax.conversion.own import PER_HEAD
from nomax.conversion.report import ConversionError
from nomax.nn import Attention, InnerAttention
from nomax.phi import ROW_MAPS, Phi

UNDO = "_undo_conversion"  # the attribute of a converted model


class Absent:
    """Stands for the value of an attribute that there was not; a class stays itself in copies and pickles."""


class Undo:
    """What to do to get back to where a conversion began, the last thing first."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, and remember the former value."""
        self.steps.append((owner, name, getattr(owner, name, Absent)))
        setattr(owner, name, value)

    def set_all(self, owners: Iterable[Any], name: str, value: Any) -> None:
        """Set an attribute of several objects."""
        for owner in owners:
            self.set(owner, name, value)

    def __call__(self) -> None:
        for owner, name, value in reversed(self.steps):
            if name == packing.HOOK:
                getattr(owner, name).remove()
            if name == "inner_attention" and value is Absent and hasattr(type(owner), "original_class"):
                swapped.swap_back(owner)
            elif value is Absent:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self.steps.clear()

    def stay(self, model: nn.Module) -> None:
        """Stay with a converted model, after what it has to undo already."""
        vars(model).setdefault(UNDO, Undo()).steps.extend(self.steps)


def apply(site: Site, phi: Phi, qk_norm: bool | None, undo: Undo) -> None:
    """Give one site φ."""
    module: Any = site.module
    if isinstance(module, Attention):
        if qk_norm is not None:
            raise ConversionError("qk_norm is part of a nomax.nn.Attention when it is made: leave qk_norm=None.")
        undo.set(module, "phi", phi)
        for name in PER_HEAD:  # which calibration may replace
            undo.set(module, name, getattr(module, name))
        return
    inner = getattr(module, "inner_attention", None)
    if isinstance(inner, InnerAttention):
        if qk_norm is not None and qk_norm != (inner.query_norm is not None):
            raise ConversionError("qk_norm cannot be changed after conversion: call nomax.revert(model) first.")
        if inner.shift is not None and phi.activation in ROW_MAPS:
            raise ConversionError(f"{site.name} has learned a shift, which {phi} does not have: nomax.revert it first.")
        undo.set(inner, "phi", phi)
        return
    inner = InnerAttention(phi, site.num_heads, head_dim=site.head_dim, qk_norm=qk_norm)
    like = next((x for x in module.parameters() if x.is_floating_point()), None)
    inner = (inner if like is None else inner.to(like)).train(module.training)
    inner.is_causal = site.is_causal
    undo.set(module, "inner_attention", inner)
    if site.kind == "multihead":
        module.__class__ = multihead.converted_class(cast(Any, type(module)))
    elif site.kind == "sdpa":
        module.__class__ = swapped.converted_class(cast(Any, type(module)))


def settle(model: nn.Module, chosen: list[Site], left: list[Site], undo: Undo) -> None:
    """Do what concerns the model as a whole: close shortcuts, and keep φ in configs."""
    for module, name, value in multihead.shortcuts(model):
        undo.set(module, name, value)
    for site in left:
        if site.kind == "interface" and not isinstance(getattr(site.module, "inner_attention", None), InnerAttention):
            undo.set(site.module, "inner_attention", None)
    config = getattr(model, "config", None)
    if chosen[0].kind == "nomax":
        if hasattr(config, "phi") and type(model).__module__.startswith("nomax."):
            if left:
                raise ConversionError(f"a {type(model).__name__} has one φ in all its layers: leave layers=None.")
            phi = Phi.parse(chosen[0].phi)
            undo.set(model, "config", replace(config, phi=str(phi)))  # type: ignore[type-var]
            if (gamma := getattr(config, "gamma", 1)) != 1:
                undo.set_all([site.module for site in chosen], "phi", replace(phi, gain=phi.gain / gamma))
        return
    if "transformers" in sys.modules:
        for part in transformers.models(model):
            if (description := record(part))["layers"]:
                if packing.HOOK not in vars(part):
                    undo.set(part, packing.HOOK, part.register_forward_pre_hook(packing.prove, with_kwargs=True))
                undo.set(part.config, transformers.CONFIG_KEY, description)
                undo.set(part.config, "attn_implementation", transformers.LOADER)


def record(model: nn.Module) -> dict[str, Any]:
    """Describe the φ of every converted layer, as plain data."""
    layers = {
        name.removesuffix("inner_attention").removesuffix("."): {
            "kind": kind_of_converted(model.get_submodule(name.rpartition(".")[0])),
            "phi": str(inner.phi),
            "num_heads": inner.num_heads,
            "head_dim": inner.head_dim,
            "qk_norm": inner.query_norm is not None,
            **({} if inner.is_causal is None else {"is_causal": inner.is_causal}),
        }
        for name, inner in model.named_modules()
        if isinstance(inner, InnerAttention)
    }
    left = [name for name, module in model.named_modules() if getattr(module, "inner_attention", Absent) is None]
    return {"version": __version__, "layers": layers, "left": left}


def restore(model: nn.Module, description: Mapping[str, Any]) -> None:
    """Convert a model, as `record` describes it, without a forward pass to prove it: it was proved before."""
    undo = Undo()
    modules = dict(model.named_modules())
    if absent := [name for name in description["layers"] if name not in modules]:
        raise ConversionError(
            f"this {type(model).__name__} has no module {absent[0]!r}, which was converted when the model was saved."
        )
    chosen = []
    for name, layer in description["layers"].items():
        module: Any = modules[name]
        if getattr(module, "fused_attn", None) is False:
            undo.set(module, "fused_attn", True)
        site = Site(name, module, layer["kind"], layer["num_heads"], layer["head_dim"])
        site.is_causal = layer.get("is_causal")
        apply(site, Phi.parse(layer["phi"]), layer["qk_norm"] or None, undo)
        chosen.append(site)
    left = [Site(name, modules[name], "interface") for name in description["left"] if name in modules]
    if "transformers" in sys.modules:
        name = transformers.implementation(description)
        undo.set_all(transformers.configs(model), "_attn_implementation_internal", name)
    settle(model, chosen, left, undo)
    undo.stay(model)
