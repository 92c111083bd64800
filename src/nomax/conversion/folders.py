"""Converted models on the disk: saved with their φ, and loaded with it, whichever library they are of.

A folder holds config.json and safetensors. What config.json says under "nomax" is how the layers were converted.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from nomax import __version__, _compat, models
from nomax._files import read_json, write
from nomax.conversion import transformers
from nomax.conversion.apply import record, restore
from nomax.nn import InnerAttention

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KEY = transformers.CONFIG_KEY
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
LARGEST = 2**16  # heads, or dimensions of one
# Arguments of timm.create_model that load files or fetch them, which a config may not do.
FORBIDDEN = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
SETTINGS = "_timm_settings"  # what timm_model made a model with
TIMM_LOADER = "nomax_from_pretrained"  # the architecture that timm finds in the config of a converted model

Library = Literal["nomax", "timm", "transformers"]


def from_pretrained(name: str | Path, **options: Any) -> Any:
    """Load a converted model, with its φ and in eval mode, from a folder, or by its id from the Hugging Face hub.

    options: for transformers, those of its own from_pretrained, such as dtype; "class_name" chooses another class than
    the one that was saved, such as "BertForMaskedLM".
    """
    folder = found(name)
    settings = config_of(folder)
    library = library_of(settings, folder)
    if library == "nomax":
        return models.load(folder, **options)
    if KEY not in settings:
        raise ValueError(
            f"{folder} holds a model of {library} whose attention is softmax still: it was not saved after "
            f"nomax.convert. Load it with {library} and call nomax.convert(model), or run: nomax convert {folder} "
            "--phi relu/L --out CONVERTED"
        )
    _check_description(folder, settings[KEY])
    model = load_original(folder, settings, **options)
    modules = dict(model.named_modules())
    described = settings[KEY]
    renamed = {name: _renamed(name, model, modules) for name in (*described["layers"], *described["left"])}
    layers = {renamed[name]: layer for name, layer in described["layers"].items()}
    restore(model, {**described, "layers": layers, "left": [renamed[name] for name in described["left"]]})
    _load_learned(model, folder, renamed)
    return model.eval()


def save_pretrained(model: nn.Module, folder: str | Path, settings: Mapping[str, Any] | None = None) -> None:
    """Save a model with its φ, so that nomax.from_pretrained loads it as it is.

    settings: the arguments that made a model of timm, if they were others than its name: timm.create_model(name,
    **settings). What nomax.timm_model made knows them.
    """
    folder = Path(folder)
    if isinstance(model, models.ViT | models.ReLUFormer):
        models.save(model, folder)
    elif callable(save := getattr(model, "save_pretrained", None)):
        save(folder)
    elif type(model).__module__.startswith("timm."):
        _save_timm(model, folder, dict(getattr(model, SETTINGS, {}) if settings is None else settings))
    else:
        raise TypeError(
            f"a {type(model).__name__} has no config that could make it again. Save its weights with "
            "safetensors.torch.save_model(model, file); to load them, make the model, nomax.convert it as before, and "
            "call safetensors.torch.load_model(model, file)."
        )


def found(name: str | Path) -> Path:
    """Return the folder of a model, from the disk or fetched from the hub; of a run of `nomax train`, its model."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "run.json").is_file() or any(folder.glob("*.safetensors")):
            return folder
        if not (folder / "model" / CONFIG).is_file():
            raise FileNotFoundError(
                f"{folder} is a run without a model: its training has not ended. Give its command again to go on."
            )
        return folder / "model"
    return models.hub.download(str(name), files=["*.json", "*.safetensors", "*.txt", "*.model"])


def config_of(folder: Path) -> dict[str, Any]:
    """Return what config.json says, if the folder has weights that are safe to load."""
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}, so it is no folder of a model.")
    settings = read_json(folder / CONFIG, "Save the model again, or fetch it again.")
    if not isinstance(settings, dict):
        raise ValueError(f"{folder / CONFIG} must hold a JSON object.")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder / pickles[0]} is a pickle, which can run any code when it is loaded, so nomax does not. If "
                "you trust it, write it as safetensors once: tensors = torch.load(file, weights_only=True), then "
                f'safetensors.torch.save_file(tensors, "{WEIGHTS}").'
            )
        raise FileNotFoundError(f"{folder} has no weights: there should be a {WEIGHTS}.")
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read, it may be damaged: {error}") from None
    return settings


def library_of(settings: Mapping[str, Any], folder: Path) -> Library:
    """Return which library can make the model of a config."""
    if str(settings.get("model_type", "")).startswith("nomax-"):
        return "nomax"
    if "architecture" in settings:
        return "timm"
    if "model_type" in settings:
        return "transformers"
    raise ValueError(
        f"{folder / CONFIG} is of none of nomax, timm and transformers: it has no model_type or architecture."
    )


def load_original(folder: Path, settings: Mapping[str, Any], **options: Any) -> Any:
    """Load a model of timm or transformers, before its conversion."""
    if library_of(settings, folder) == "timm":
        arguments = dict(settings.get("model_args") or {})
        if KEY in settings:
            settings = {**settings, "architecture": settings[KEY].get("architecture", settings["architecture"])}
            if arguments.get("attn_layer") == KEY:  # as earlier versions of nomax kept others from loading it
                del arguments["attn_layer"]
        model = _make_timm(settings, arguments)
        stored = {name: x for name, x in load_file(folder / WEIGHTS).items() if ".inner_attention." not in name}
        try:
            model.load_state_dict(stored)
        except RuntimeError as error:
            raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {error}") from None
        setattr(model, SETTINGS, arguments)
        return model
    library = _compat.transformers()
    transformers.register()
    name = options.pop("class_name", None) or next(iter(settings.get("architectures") or ()), "AutoModel")
    model_class: Any = getattr(library, name, None)
    is_model = isinstance(model_class, type) and hasattr(model_class, "from_pretrained")
    if not is_model or (not name.startswith("AutoModel") and not issubclass(model_class, library.PreTrainedModel)):
        raise ValueError(
            f"{folder / CONFIG} asks for the class {name}, which transformers {library.__version__} lacks."
        )
    verbosity = library.logging.get_verbosity()
    if any(_learned_names(folder)):
        library.logging.set_verbosity_error()  # it would warn of what it does not know, which is ours
    if KEY in settings:
        options["attn_implementation"] = transformers.implementation(settings[KEY])
    try:
        model = _from_transformers(model_class, folder, options)
    finally:
        library.logging.set_verbosity(verbosity)
    for config in transformers.configs(model) if KEY in settings else []:
        config._attn_implementation_internal = model.get_correct_attn_implementation(None)  # until it is converted
    return model


def _from_transformers(model_class: Any, folder: Path, options: Mapping[str, Any]) -> Any:
    try:
        return model_class.from_pretrained(folder, use_safetensors=True, **options)
    except KeyError as error:
        # Models with a table of their own (SAM) do not know our name when they are made; their layers call SDPA.
        if error.args != (transformers.NAME,):
            raise
        return model_class.from_pretrained(folder, use_safetensors=True, **{**options, "attn_implementation": "sdpa"})


def _check_description(folder: Path, description: Any) -> None:
    """Raise if this version cannot read how a model was converted, or if that is not what `record` writes."""

    def parts(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)]

    def damaged(what: str) -> ValueError:
        return ValueError(
            f"{folder / CONFIG}: {what} under {KEY!r} is not what nomax.convert writes. Convert the model again."
        )

    def is_layer(layer: Any) -> bool:
        names = {"kind", "phi", "num_heads", "head_dim", "qk_norm"}
        if not isinstance(layer, dict) or not names <= layer.keys() <= names | {"is_causal"}:
            return False
        sizes = [layer["num_heads"], layer["head_dim"]]
        return (
            layer["kind"] in ("interface", "sdpa", "multihead")
            and isinstance(layer["phi"], str)
            and isinstance(layer["qk_norm"], bool)
            and isinstance(layer.get("is_causal", False), bool)
            and all(size is None or (type(size) is int and 0 < size <= LARGEST) for size in sizes)
        )

    if not isinstance(description, dict):
        raise ValueError(f"{folder / CONFIG}: {KEY!r} must be an object, as nomax.convert writes it.")
    version = description.get("version")
    if not isinstance(version, str) or not parts(version):
        raise damaged(f"the version {version!r}")
    if parts(version) > parts(__version__) or not {"layers", "left"} <= description.keys():
        raise ValueError(
            f"{folder / CONFIG} was written by nomax {version}, but this is {__version__}: install a newer nomax to "
            "load it."
        )
    layers, left = description["layers"], description["left"]
    if not isinstance(layers, dict) or not layers:
        raise damaged("what stands under 'layers'")
    if not isinstance(left, list) or not all(isinstance(name, str) for name in left):
        raise damaged("what stands under 'left'")
    for name, layer in layers.items():
        if not is_layer(layer):
            raise damaged(f"the layer {name!r}")


def _learned_names(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the names of what converted layers have learned besides, with their files."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from ((path, name) for name in file.keys() if ".inner_attention." in name)  # noqa: SIM118


def _renamed(name: str, model: nn.Module, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of a saved layer in a model of transformers, which may be another one with the same base."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    return next((other for other in (name, name.removeprefix(base), base + name) if other in modules), name)


def _load_learned(model: nn.Module, folder: Path, renamed: Mapping[str, str]) -> None:
    """Load gains, shifts and norms of converted layers."""
    tensors: dict[str, Tensor] = {}
    for path, name in _learned_names(folder):
        layer, _, rest = name.partition(".inner_attention.")
        with safe_open(path, "pt") as file:
            tensors[f"{renamed.get(layer, layer)}.inner_attention.{rest}"] = file.get_tensor(name)
    for name, inner in model.named_modules():
        if not isinstance(inner, InnerAttention):
            continue
        own = {key: tensors.pop(f"{name}.{key}", None) for key in ("gain", "shift", "alpha")}
        inner.learn(own["gain"], own["shift"], own["alpha"])
        for norm in ("query_norm", "key_norm"):
            if getattr(inner, norm) is not None:
                weight = tensors.pop(f"{name}.{norm}.weight", None)
                if weight is None or weight.shape != getattr(inner, norm).weight.shape:
                    raise ValueError(f"{folder} has no weights that fit {name}.{norm}, which its {CONFIG} asks for.")
                getattr(inner, norm).weight.data.copy_(weight)
    if tensors:
        raise ValueError(f"{folder} has weights for layers that are not converted: {', '.join(tensors)}.")


def _make_timm(settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> nn.Module:
    timm, name = _compat.timm(), settings["architecture"]
    if not timm.is_model(name):
        raise ValueError(f"{CONFIG}: architecture={name!r} is none of timm {timm.__version__}.")
    if wrong := [key for key in FORBIDDEN if key in arguments]:
        raise ValueError(f"{CONFIG}: model_args may not have {wrong[0]}, which would load other files.")
    arguments = dict(arguments)
    if "num_classes" in settings:
        arguments.setdefault("num_classes", settings["num_classes"])
    model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    return model


def _save_timm(model: Any, folder: Path, arguments: dict[str, Any]) -> None:
    """Save a model of timm in the layout that it reads from the hub."""
    _compat.timm()
    from timm.models import save_for_hf

    described = record(model)
    with tempfile.TemporaryDirectory(prefix="nomax-") as name:
        scratch = Path(name)
        save_for_hf(model, str(scratch), model_args=arguments, safe_serialization=True)
        settings = json.loads((scratch / CONFIG).read_text())
        shapes = {name: x.shape for name, x in model.state_dict().items() if ".inner_attention." not in name}
        if {name: x.shape for name, x in _make_timm(settings, arguments).state_dict().items()} != shapes:
            raise ValueError(
                f"timm.create_model({settings['architecture']!r}, **{arguments}) makes another model than this. Pass "
                "settings=…, the arguments that made it."
            )
        if described["layers"]:
            # timm knows no model of this name, so that nobody loads the model with softmax by mistake.
            settings[KEY] = {**described, "architecture": settings["architecture"]}
            settings["architecture"] = TIMM_LOADER
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(scratch / WEIGHTS, folder / f".{WEIGHTS}.aside")
        os.replace(folder / f".{WEIGHTS}.aside", folder / WEIGHTS)
        write(folder / CONFIG, json.dumps(settings, indent=2) + "\n")
