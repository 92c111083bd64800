"""Save and load models in the layout of the Hugging Face hub: config.json, model.safetensors, and a README.md card."""

import hashlib
import html
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nomax
from nomax._files import atomic, did_you_mean, read_json

VIT, RELUFORMER = "nomax-vit", "nomax-reluformer"  # model_type in config.json
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
VOCABULARY = "vocabulary.model"  # beside a text model, if its training put one there
FILES = (CONFIG, WEIGHTS, CARD, VOCABULARY)
MOST_NAMES = 20  # classes listed on the card; config.json has all of them
# A config may ask for twice the stored weights plus 64 MB, so that a slip is reported tensor by tensor, and for 1 GiB
# of fixed positions, which are not stored.
SLACK, MOST_FIXED = 2**24, 2**28
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Pretrained(nn.Module):
    """A model with from_pretrained, save_pretrained and push_to_hub."""

    @classmethod
    def from_pretrained(cls, name: str | Path, revision: str | None = None, **hub: Any) -> Self:
        """Load a model in eval mode from a folder, or by its id ("owner/name") from the Hugging Face hub.

        revision: the branch, tag or commit to fetch from the hub; hub: token, cache_dir, local_files_only.
        """
        model = load(name, revision, **hub)
        if not isinstance(model, cls):
            kind = type(model).__name__
            raise TypeError(f"{name} is a {kind}, not a {cls.__name__}: {kind}.from_pretrained reads it.")
        return model

    def save_pretrained(self, folder: str | Path, card: Mapping[str, object] | None = None) -> None:
        """Write config.json, model.safetensors and the model card, README.md, to a folder.

        card: entries for the model card besides the config, e.g. data, recipe, accuracy and command.
        """
        save(self, folder, card)

    def push_to_hub(
        self,
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
        """Upload the model to the Hugging Face hub as "owner/name", creating it if need be, and return its URL.

        card: as for save_pretrained. vocabulary: the file of a text model. private: hide a new repository from others.
        token: a token for the hub, if not the one stored on this machine. revision: the branch. create_pr: propose the
        change instead of making it.
        """
        try:
            from huggingface_hub import create_branch, create_repo, upload_folder
        except ImportError:
            raise ImportError("to push models to the Hugging Face hub: pip install huggingface_hub") from None
        with tempfile.TemporaryDirectory(prefix="nomax-") as folder:
            if vocabulary is not None:
                shutil.copyfile(vocabulary, Path(folder, VOCABULARY))
            save(self, folder, card)
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


def _model_classes() -> dict[str, tuple[Any, Any]]:
    """Return the config and model class of each model_type; a new kind of model is one more row."""
    from nomax.models.reluformer import ReLUFormer, ReLUFormerConfig  # these import this module
    from nomax.models.vit import ViT, ViTConfig

    return {VIT: (ViTConfig, ViT), RELUFORMER: (ReLUFormerConfig, ReLUFormer)}


def save(model: nn.Module, folder: str | Path, card: Mapping[str, object] | None = None) -> None:
    """Write a model to a folder, from which `load` restores it exactly.

    card: entries for the model card besides the config, e.g. data, recipe, accuracy and command.

    If vocabulary.model is already in the folder, the weights record its SHA-256, so that no other is mistaken for it.
    """
    kind = _model_type(model)
    config: Any = model.config
    settings = {"model_type": kind, "nomax_version": nomax.__version__, **asdict(config)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # A single entry, since safetensors writes several in any order, and equal models should make equal files.
    metadata = {"format": "pt"}
    if (folder / VOCABULARY).is_file():
        metadata = {VOCABULARY: hashlib.sha256((folder / VOCABULARY).read_bytes()).hexdigest()}
    with ExitStack() as files:
        config_file, card_file, weights_file = (
            files.enter_context(atomic(folder / name)) for name in (CONFIG, CARD, WEIGHTS)
        )
        config_file.write((json.dumps(settings, indent=2) + "\n").encode())
        card_file.write(_card(kind, settings, model, card or {}).encode())
        save_file(tensors, weights_file.name, metadata)
        # All are on the disk before the first is renamed, so that a full disk or a crash leaves the old model.
        for file in (config_file, card_file, weights_file):
            file.flush()
            os.fsync(file.fileno())


def load(
    name: str | Path,
    revision: str | None = None,
    *,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Any:
    """Load a model in eval mode from a folder, or by its id ("owner/name") from the Hugging Face hub.

    revision: the branch, tag or commit to fetch from the hub. token, cache_dir and local_files_only: as for
    huggingface_hub.snapshot_download.
    """
    given: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only or None}
    folder = Path(name)
    if not folder.is_dir():
        folder = download(str(name), revision, **{key: value for key, value in given.items() if value is not None})
    config, model_class = _read_config(folder / CONFIG)
    with _reading(folder / WEIGHTS):
        _check_size(config, folder)
        tensors = load_file(folder / WEIGHTS)
    model = model_class.from_config(config)
    fill(model, tensors, str(folder / WEIGHTS))
    return model.eval()


@contextmanager
def _reading(weights: Path) -> Iterator[None]:
    """Name the file in errors if its weights cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{weights.parent} has no {WEIGHTS}: the model's weights are missing.") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights} cannot be read, it may be damaged: {error}") from None


def _check_size(config: Any, folder: Path) -> None:
    """Raise, before allocating memory, if the config asks for a model far larger than the weights.

    A smaller difference is left to `fill`, which names every tensor.
    """
    with safe_open(folder / WEIGHTS, "pt") as file:
        stored = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    for asked, most, what in (
        (config.matrix_numbers, 2 * stored + SLACK, f"{folder / WEIGHTS} has {stored:,}"),
        (config.fixed_numbers, MOST_FIXED, f"no more than {MOST_FIXED:,} may be fixed positions"),
    ):
        if asked > most:
            raise ValueError(
                f"{folder / CONFIG} asks for a model of at least {asked:,} numbers, but {what}: one of its sizes is "
                "wrong."
            )


def vocabulary_digest(folder: Path) -> str | None:
    """Return the SHA-256 of the vocabulary that was saved with a model, if any."""
    with _reading(folder / WEIGHTS), safe_open(folder / WEIGHTS, "pt") as file:
        return (file.metadata() or {}).get(VOCABULARY)


def fill(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into a model, exactly all of them; an error names each that does not fit."""
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


def _model_type(model: nn.Module) -> str:
    classes = _model_classes()
    for model_type, (_, model_class) in classes.items():
        if type(model) is model_class:
            return model_type
    names = ", ".join(model_class.__name__ for _, model_class in classes.values())
    raise TypeError(f"model must be one of {names}, got a {type(model).__name__}.")


def _read_config(path: Path) -> tuple[Any, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {CONFIG}, so it is not a model that nomax.models.save wrote.")
    settings = read_json(path, "Save the model again, or fetch it again.")
    classes = _model_classes()
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str) or kind not in classes:
        raise ValueError(f"{path}: model_type={kind!r} is unknown; nomax reads {', '.join(classes)}.")
    config_class, model_class = classes[kind]
    known = [field.name for field in fields(config_class)]
    settings = {key: value for key, value in settings.items() if key not in ("model_type", "nomax_version")}
    if unknown := [key for key in settings if key not in known]:
        hint = did_you_mean(unknown[0], known)
        raise ValueError(f"{path} has unknown keys: {', '.join(unknown)}{hint} Known are {', '.join(known)}.")
    try:
        return config_class(**settings), model_class
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def download(name: str, revision: str | None = None, files: Sequence[str] = FILES, **options: Any) -> Path:
    """Return the folder of a model from the Hugging Face hub, cached or fetched now; of it only these files."""
    if not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"there is no folder {name!r}, nor is it the id of a model on the hub (owner/name).")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(
            f"there is no folder {name!r}; to fetch a model of that name from the Hugging Face hub: "
            "pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files), **options))
    except (OSError, ValueError) as error:  # no network, no such model, no access: all are OSErrors
        raise FileNotFoundError(
            f"there is no folder {name!r}, and no model of that name came from the Hugging Face hub: {_why(error)}"
        ) from error


def _why(error: Exception) -> str:
    """Return in one line why the hub failed."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set, so only models that were downloaded before can be read. Unset it to go online."
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _card(kind: str, settings: Mapping[str, object], model: nn.Module, card: Mapping[str, object]) -> str:
    """Return the model card: metadata for the hub between dashes, then text for people."""
    phi = settings["phi"]
    title = " ".join([type(model).__name__, *([str(settings["variant"])] if "variant" in settings else [])])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    front = {"library_name": "nomax", "tags": ["nomax", kind, "attention"], "pipeline_tag": _task(kind, model)}
    entries = {"φ": f"`{phi}`", "parameters": f"{parameters:,}", **{str(key): value for key, value in card.items()}}
    if kind == VIT:
        entries |= _use(model)
    rows = "".join(f"| {_cell(key)} | {_cell(_code(key, value))} |\n" for key, value in entries.items())
    config = "".join(f"| {key} | `{json.dumps(value)}` |\n" for key, value in settings.items() if key != "classes")
    # JSON is YAML, so no value can break out of the header.
    header = "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items())
    text = (
        f"---\n{header}---\n\n# {title} with φ = `{phi}`\n\n"
        f"Attention weights are `{phi}` of the scores, in the notation of nomax.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n{_example(kind, model)}\n"
        f"| config | |\n| --- | --- |\n{config}"
    )
    # The name of a class may be that of a folder that is not UTF-8.
    return text.encode(errors="backslashreplace").decode()


def _use(model: nn.Module) -> dict[str, object]:
    """Return what a user of an image classifier needs to know."""
    config: Any = model.config
    rows: dict[str, object] = {}
    if config.preprocessing is not None:
        rows["images"] = config.preprocessing.spelled(*config.image, config.channels)
    if config.probabilities is not None:
        rows["probabilities"] = f"the {config.probabilities} of the logits"
    if config.classes is not None:
        names = ", ".join(f"{label}: {html.escape(name)}" for label, name in enumerate(config.classes[:MOST_NAMES]))
        more = len(config.classes) - MOST_NAMES
        rows["classes"] = f"{names}, and {more:,} more in {CONFIG}" if more > 0 else names
    return rows


def _example(kind: str, model: Any) -> str:
    """Return an example of loading and using the model."""
    place = '"path of this folder, or its id on the hub"'
    if kind == VIT and model.head is not None:
        return (
            "```console\n$ nomax predict FOLDER photo.jpg\n```\n\n"
            f"```python\nfrom nomax import evaluate\n\nrun = evaluate.load({place})\n"
            'for guess in run.predict("photo.jpg"):\n    print(f"{guess.probability:.1%} {guess.name}")\n```\n\n'
            "`run.model` is the model: a module that maps images [batch, channels, height, width] to logits.\n"
        )
    command = ""
    if kind == RELUFORMER:
        use = "translate FOLDER < in.txt" if model.config.encoder_layers else 'generate FOLDER "How the text begins"'
        command = f"```console\n$ nomax {use}\n```\n\n"
    return f"{command}```python\nimport nomax.models\n\nmodel = nomax.models.load({place})\n```\n"


def _task(kind: str, model: Any) -> str:
    """Return the hub's name for the model's task."""
    if kind == RELUFORMER:
        return "translation" if model.config.encoder_layers else "text-generation"
    return "image-classification" if model.head is not None else "image-feature-extraction"


def _code(key: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"`{value}`" if key == "command" else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
