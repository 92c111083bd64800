"""`nomax convert`: the model of a folder with φ attention, as another folder."""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from torch import nn

from nomax.console import Console
from nomax.conversion import folders
from nomax.conversion.api import convert
from nomax.phi import NOTATION, Phi

WEIGHTS = (*folders.PICKLES, "*.safetensors", "*.safetensors.index.json", "*.h5", "*.msgpack", "*.onnx")


@dataclass(frozen=True)
class Options:
    """Convert the attention of a model to φ: a folder of transformers, of timm (the hub's layout) or of nomax.

    The weights stay the same, so the model needs training to adapt. Load it with nomax.from_pretrained(OUT).
    """

    folder: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FOLDER")]]
    """The folder of the model, with config.json and safetensors; a run of `nomax train`; or an id on the hub."""
    out: Path
    """The folder for the converted model, new or empty. Tokenizers and other small files are copied to it."""
    phi: Annotated[str, tyro.conf.arg(help=f"How scores become weights: {NOTATION}.")] = "relu/L"
    layers: tuple[str, ...] = ()
    """Convert only these attention layers: numbers, from 0, or patterns of their names; if not given, all."""
    qk_norm: bool = False
    """Add a LayerNorm of queries and keys."""


def run(options: Options) -> int:
    """Return 0, or 2 if the model cannot be converted."""
    try:
        phi = Phi.parse(options.phi)
        if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
            raise ValueError(f"--out {options.out} must be a new or empty folder.")
        folder = folders.found(options.folder)
        settings = folders.config_of(folder)
        if folders.KEY in settings or folders.library_of(settings, folder) == "nomax":
            model = folders.from_pretrained(folder)
        else:
            model = folders.load_original(folder, settings).eval()
        layers = [int(layer) if layer.lstrip("-").isdigit() else layer for layer in options.layers]
        report = convert(model, phi, options.qk_norm or None, layers or None)
        _write(model, folder, options.out)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"nomax convert: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(report)
    console.print(f"Written: {options.out}. Load it with nomax.from_pretrained({str(options.out)!r}).")
    return 0


def _write(model: nn.Module, source: Path, out: Path) -> None:
    """Write a model and what else its source has besides weights, all of it or nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        scratch = Path(name) / out.name
        folders.save_pretrained(model, scratch)
        for path in sorted(source.iterdir()):
            if path.is_file() and not (scratch / path.name).exists() and not any(map(path.match, WEIGHTS)):
                shutil.copyfile(path, scratch / path.name)
        scratch.replace(out)
