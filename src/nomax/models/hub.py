"""Models on disk in the layout of the Hugging Face hub: config.json, model.safetensors, and README.md as model card."""

import hashlib
import html
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nomax
from nomax.models.reluformer import ReLUFormer
from nomax.models.reluformer_config import ReLUFormerConfig
from nomax.models.vit import ViT
from nomax.models.vit_config import ViTConfig

# A new kind of model is one more row: config.json names it, the config class checks the rest of that file.
MODELS: dict[str, tuple[type, Any]] = {
    "nomax-vit": (ViTConfig, ViT),
    "nomax-reluformer": (ReLUFormerConfig, ReLUFormer),
}

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
VOCABULARY = "vocabulary.model"  # beside a text model, if whoever trained it put one there
MOST_NAMES = 20  # classes that the card lists; config.json has all of them
# A config may ask for twice the weights there are and 64 MB, so that a slip is told tensor by tensor, and for 1 GiB of
# fixed positions, which no file has.
SLACK, MOST_FIXED = 2**24, 2**28
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def save(model: nn.Module, folder: str | Path, card: Mapping[str, object] | None = None) -> None:
    """Write a model into a folder, from which `load` makes exactly this model again.

    card: what the README should tell besides the config, e.g. data, recipe, accuracy and command.

    If vocabulary.model is in that folder already, the weights note its SHA-256, so that no other passes for it.
    """
    kind = _kind(model)
    config: Any = model.config
    settings = {"model_type": kind, "nomax_version": nomax.__version__, **asdict(config)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": "pt"}
    if (folder / VOCABULARY).is_file():
        about[VOCABULARY] = hashlib.sha256((folder / VOCABULARY).read_bytes()).hexdigest()
    files: dict[str, Callable[[Path], object]] = {
        WEIGHTS: lambda path: _write_weights(tensors, path, about),
        CONFIG: lambda path: path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8"),
        CARD: lambda path: path.write_text(_card(kind, settings, model, card or {}), "utf-8"),
    }
    # All are written aside first, so that a full disk or a crash leaves what was there before.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as aside:
        for name, write in files.items():
            write(Path(aside, name))
            with open(Path(aside, name), "rb+") as file:
                os.fsync(file.fileno())
        for name in files:
            os.replace(Path(aside, name), folder / name)


def _write_weights(tensors: dict[str, Tensor], path: Path, about: dict[str, str]) -> None:
    """Write a safetensors file, the same one for the same content: its library puts `about` into any order."""
    save_file(tensors, path, about)
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = about
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # else some name is spelled otherwise, and the file is right as it is
            file.seek(8)
            file.write(text.ljust(size))


def load(
    name: str | Path,
    revision: str | None = None,
    *,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Any:
    """Read a model from a folder, or by its id ("owner/name") from the Hugging Face hub; it comes in eval mode.

    revision: the branch, tag or commit to fetch from the hub. token, cache_dir and local_files_only are those of
    huggingface_hub.snapshot_download.
    """
    given = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only or None}
    folder = Path(name)
    if not folder.is_dir():
        folder = download(str(name), revision, **{key: value for key, value in given.items() if value is not None})
    config, model_class = _read_config(folder / CONFIG)
    try:
        _check_size(config, folder)
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} has a {CONFIG}, but no {WEIGHTS}: the model's weights are missing."
        ) from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read, it may be damaged: {error}") from None
    model = model_class.from_config(config)
    fill(model, tensors, str(folder / WEIGHTS))
    return model.eval()


def _check_size(config: Any, folder: Path) -> None:
    """Raise if the config asks for a model far beyond the weights, before that model takes any memory.

    A smaller difference is left to `fill`, which names every tensor.
    """
    with safe_open(folder / WEIGHTS, "pt") as file:
        there = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    for asked, most, what in (
        (config.matrix_numbers, 2 * there + SLACK, f"{folder / WEIGHTS} has {there:,}"),
        (config.fixed_numbers, MOST_FIXED, f"no more than {MOST_FIXED:,} may be fixed positions"),
    ):
        if asked > most:
            raise ValueError(
                f"{folder / CONFIG} asks for a model of at least {asked:,} numbers, but {what}: one of its sizes is "
                "wrong."
            )


def vocabulary_digest(folder: Path) -> str | None:
    """The SHA-256 of the vocabulary that was beside a model when it was saved, if there was one."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        return (file.metadata() or {}).get(VOCABULARY)


def fill(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into a model, all of them and nothing else; an error names each that does not fit."""
    wanted = model.state_dict()
    wrong = [f"missing: {key} {list(tensor.shape)}" for key, tensor in wanted.items() if key not in tensors]
    wrong += [f"unexpected: {key} {list(tensor.shape)}" for key, tensor in tensors.items() if key not in wanted]
    wrong += [
        f"of another shape: {key} is {list(tensors[key].shape)}, the model's is {list(tensor.shape)}"
        for key, tensor in wanted.items()
        if key in tensors and tensors[key].shape != tensor.shape
    ]
    wrong += [f"not floating-point: {key} is {x.dtype}" for key, x in tensors.items() if not x.is_floating_point()]
    if wrong:
        shown = wrong if len(wrong) <= 12 else [*wrong[:12], f"and {len(wrong) - 12} more"]
        raise ValueError(f"the weights in {source} do not fit the model:\n  " + "\n  ".join(shown))
    # A model that was saved in bfloat16 comes back in bfloat16.
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.load_state_dict(dict(tensors))


def _kind(model: nn.Module) -> str:
    for kind, (_, model_class) in MODELS.items():
        if type(model) is model_class:
            return kind
    names = ", ".join(model_class.__name__ for _, model_class in MODELS.values())
    raise TypeError(f"model must be one of {names}, got a {type(model).__name__}.")


def _read_config(path: Path) -> tuple[Any, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {CONFIG}, so it is not a model that nomax.models.save wrote.")
    try:
        settings = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(f"{path}: model_type={kind!r} is unknown; nomax reads {', '.join(MODELS)}.")
    config_class, model_class = MODELS[kind]
    known = [field.name for field in fields(config_class)]
    settings = {key: value for key, value in settings.items() if key not in ("model_type", "nomax_version")}
    if unknown := [key for key in settings if key not in known]:
        nearest = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"{path} has unknown keys: {', '.join(unknown)}; {hint}Known are {', '.join(known)}.")
    try:
        return config_class(**settings), model_class
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def download(name: str, revision: str | None = None, **options: Any) -> Path:
    """The folder of a model of the Hugging Face hub, from its cache or fetched now."""
    if not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"there is no folder {name!r}, nor is that the id of a model on the hub (owner/name).")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(
            f"there is no folder {name!r}; to fetch a model of that name from the Hugging Face hub: "
            "pip install huggingface_hub"
        ) from None
    files = [CONFIG, WEIGHTS, CARD, VOCABULARY]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, **options))
    except (OSError, ValueError) as error:  # no network, no such model, no right to it: all of them are OSErrors
        raise FileNotFoundError(
            f"there is no folder {name!r}, and no model of that name came from the Hugging Face hub: {_why(error)}"
        ) from error


def push(
    model: nn.Module,
    name: str,
    card: Mapping[str, object] | None = None,
    *,
    vocabulary: str | Path | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload a model of nomax",
    create_pr: bool = False,
) -> str:
    """Save a model and upload it to the Hugging Face hub as "owner/name", which is made if there is none; its address.

    card: as for `save`. vocabulary: the file that belongs to a model of text. private: of a new one, whether others
    cannot see it. token: a token of the hub, if not the one that is stored on this machine. revision: the branch.
    create_pr: propose the change instead of making it.
    """
    try:
        from huggingface_hub import create_branch, create_repo, upload_folder
    except ImportError:
        raise ImportError("to push models to the Hugging Face hub: pip install huggingface_hub") from None
    with tempfile.TemporaryDirectory(prefix="nomax-") as folder:
        if vocabulary is not None:
            shutil.copyfile(vocabulary, Path(folder, VOCABULARY))
        save(model, folder, card)
        try:
            place = create_repo(name, private=private, token=token, exist_ok=True).repo_id
            if revision is not None and not create_pr:
                create_branch(place, branch=revision, token=token, exist_ok=True)
            return str(
                upload_folder(
                    repo_id=place,
                    folder_path=folder,
                    commit_message=commit_message,
                    create_pr=create_pr,
                    revision=revision,
                    token=token,
                )
            )
        except OSError as error:
            raise ConnectionError(f"{name} was not pushed to the Hugging Face hub: {_why(error)}") from error


def _why(error: Exception) -> str:
    """Why the hub did not serve, in a line."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set, so only models that were downloaded before can be read. Unset it to go online."
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _card(kind: str, settings: Mapping[str, object], model: nn.Module, card: Mapping[str, object]) -> str:
    """The model card: what the hub reads between the dashes, then what people read."""
    phi = settings["phi"]
    title = " ".join([type(model).__name__, *([str(settings["variant"])] if "variant" in settings else [])])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    front = {"library_name": "nomax", "tags": ["nomax", kind, "attention"], "pipeline_tag": _task(model)}
    told = {"φ": f"`{phi}`", "parameters": f"{parameters:,}", **{str(key): value for key, value in card.items()}}
    if isinstance(model, ViT):
        told |= _use(model)
    rows = "".join(f"| {_cell(key)} | {_cell(_code(key, value))} |\n" for key, value in told.items())
    config = "".join(f"| {key} | `{json.dumps(value)}` |\n" for key, value in settings.items() if key != "classes")
    # JSON is YAML, so no value can break out of the header.
    header = "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items())
    text = (
        f"---\n{header}---\n\n# {title} with φ = `{phi}`\n\n"
        f"Attention weights are `{phi}` of the scores, in the notation of nomax.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n{_example(model)}\n"
        f"| config | |\n| --- | --- |\n{config}"
    )
    # The name of a class may be that of a folder that is not UTF-8.
    return text.encode(errors="backslashreplace").decode()


def _use(model: ViT) -> dict[str, object]:
    """What the user of an image classifier has to know."""
    config = model.config
    told: dict[str, object] = {}
    if config.preprocessing is not None:
        told["images"] = config.preprocessing.spelled(*config.image, config.channels)
    if config.probabilities is not None:
        told["probabilities"] = f"the {config.probabilities} of the logits"
    if config.classes is not None:
        names = ", ".join(f"{label}: {html.escape(name)}" for label, name in enumerate(config.classes[:MOST_NAMES]))
        more = len(config.classes) - MOST_NAMES
        told["classes"] = f"{names}, and {more:,} more in {CONFIG}" if more > 0 else names
    return told


def _example(model: nn.Module) -> str:
    """How to load the model, and how to put it to use."""
    place = '"path of this folder, or its id on the hub"'
    if isinstance(model, ReLUFormer):
        use = "translate FOLDER < in.txt" if model.config.encoder_layers else 'generate FOLDER "How the text begins"'
        command = f"```console\n$ nomax {use}\n```\n\n"
    else:
        command = ""
    if not (isinstance(model, ViT) and model.head is not None):
        return f"{command}```python\nimport nomax.models\n\nmodel = nomax.models.load({place})\n```\n"
    return (
        "```console\n$ nomax predict FOLDER photo.jpg\n```\n\n"
        f"```python\nfrom nomax import evaluate\n\nrun = evaluate.load({place})\n"
        'for guess in run.predict("photo.jpg"):\n    print(f"{guess.probability:.1%} {guess.name}")\n```\n\n'
        "`run.model` is the model: a module that maps images [batch, channels, height, width] to logits.\n"
    )


def _task(model: nn.Module) -> str:
    """What the model does, in the words of the hub."""
    if isinstance(model, ReLUFormer):
        return "translation" if model.config.encoder_layers else "text-generation"
    return "image-classification"


def _code(key: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"`{value}`" if key == "command" else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
