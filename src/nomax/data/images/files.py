"""Image files, decoded safely, and folders of them: FOLDER/train/CLASS/… or, without splits, FOLDER/CLASS/…

Limits are checked before memory is taken, and every error names the file.
"""

import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from nomax.data.source import DataError

EXTENSIONS = frozenset({"bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # no others are tried, whatever the file claims to be
MOST_BYTES = 1 << 28
MOST_PIXELS = 1 << 26  # 8192 × 8192; a small file can claim to hold far more than fits into memory
# The names of a split on the disk: the first of these that is there counts. Held-out images are often called val.
SPLITS = {"train": ("train",), "test": ("test", "val", "validation"), "val": ("val", "validation")}
KNOWN = ("train", "val", "validation", "test")

log = logging.getLogger("nomax.data")

_GREY_16_BIT = ("I;16", "I;16B", "I;16L", "I;16N")

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


class LazyName:
    """An image's name, looked up only for an error message: doing so for every image could outlast decoding."""

    def __init__(self, name: Callable[[int], str], index: int):
        self.name, self.index = name, index

    def __str__(self) -> str:
        return self.name(self.index)


def decode(data: bytes, name: object) -> Image.Image:
    """Decode an image file that is in memory: to mode L if it is grey, else to RGB.

    Transparent areas become white. Of an animation the first frame is taken, and the orientation that a camera noted
    is not applied, as in big_vision and torchvision. Errors call the image by its `name`, or by what str() makes of it.
    """
    return decoded(open_header(data, name), name)


def read_file(path: Path, name: object) -> bytes:
    """Read an image file, unless it is far too large."""
    try:
        with path.open("rb", buffering=0) as file:
            _check_size(os.fstat(file.fileno()).st_size, name)
            return file.read()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error


def open_header(data: bytes, name: object) -> Image.Image:
    """Open an image by its header alone: its size is known, its pixels are not decoded yet."""
    if not data:
        raise DataError(f"{name} is empty.")
    _check_size(len(data), name)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise DataError(f"{name} is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image.") from None
    except Exception as error:  # a decoder given garbage may raise anything
        raise DataError(f"{name} is a broken image: {_reason(error)}.") from error
    if image.width * image.height > MOST_PIXELS:
        raise DataError(
            f"{name} has {image.width}×{image.height} pixels, more than the limit of {MOST_PIXELS:,}. "
            "It may be made to exhaust the memory; if it is genuine, make it smaller."
        )
    return image


def decode_smaller(image: Image.Image, box: Box, size: int) -> Box:
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size if the box keeps `size` pixels; return the box at that scale.

    This is faster, as the smaller image comes straight out of the cosine transform, but it is not quite the same
    as decoding and then shrinking. On an image in another format, or one decoded already, it does nothing.
    """
    factor = min(box[2] - box[0], box[3] - box[1]) / size
    scale = next((scale for scale in (8, 4, 2) if scale <= factor), 1)
    if scale == 1:
        return box
    width, height = image.size
    drafted = image.draft(image.mode, (width // scale, height // scale))
    if drafted is None:
        return box
    x, y = drafted[1][2] / width, drafted[1][3] / height
    return box[0] * x, box[1] * y, min(box[2] * x, image.width), min(box[3] * y, image.height)


def decoded(image: Image.Image, name: object) -> Image.Image:
    """Decode the pixels of an opened image, to mode L or RGB."""
    try:
        image.load()
        if image.mode in ("L", "RGB") and not image.has_transparency_data:
            return image
        if image.mode == "1":
            return image.convert("L")
        if image.mode in _GREY_16_BIT:
            return image.convert("I").point(lambda value: value / 256).convert("L")
        if image.mode in ("I", "F"):
            raise DataError(
                f"{name} has pixels of kind {image.mode}, of unknown range; 8 or 16 bits a colour can be used."
            )
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
        return image.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # a decoder given garbage may raise anything
        raise DataError(f"{name} is a broken image: {_reason(error)}.") from error


def _check_size(size: int, name: object) -> None:
    if size > MOST_BYTES:
        raise DataError(f"{name} is larger than the limit of {MOST_BYTES >> 20} MiB.")


def _reason(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__


class FileSource:
    """Image files below a folder, each with a label. Broken ones are errors, or replaced, as on_error says."""

    def __init__(
        self, folder: Path, names: Sequence[str], labels: npt.ArrayLike, classes: Sequence[str], on_error: str
    ):
        self.problems = Problems(on_error)
        self.on_error, self.folder = on_error, folder
        self.classes: Sequence[str] = tuple(classes)
        self.labels: npt.NDArray[np.int64] = np.asarray(labels, np.int64)
        self._names = Strings(names)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """Read the file with this number, as it is on the disk."""
        return read_file(self.folder / self._names[index], self.name(index))

    def image(self, index: int) -> Image.Image:
        """Return the image with this number, decoded."""
        return decode(self.read(index), self.name(index))

    def key(self, index: int) -> str:
        """Return the path of this image inside the folder: the same wherever that is, and whatever else is in it."""
        return self._names[index]

    def name(self, index: int) -> str:
        """Return the name of this image in errors: its path."""
        return str(self.folder / self._names[index])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.folder}: {len(self):,} images, {len(self.classes):,} classes)"


class FolderSource(FileSource):
    """Image files in folders that are named after their classes; classes and files are sorted by name.

    A class without images and a symbolic link that leads out of the folder are errors. With on_error="skip" they are
    left out, with a warning, and images that turn out to be broken are replaced when batches are made.
    """

    def __init__(self, folder: str | Path, split: str = "train", on_error: str = "raise"):
        self.problems = problems = Problems(on_error)
        self.folder = split_folder(Path(folder).expanduser(), split)
        self._root = os.path.realpath(self.folder)
        classes: list[str] = []
        names: list[str] = []
        counts: list[int] = []
        for entry in _sorted(str(self.folder)):
            if entry.name.startswith(".") or not entry.is_dir() or not self._stays_inside(entry):
                continue
            paths = list(self._image_files(entry.path))
            if not paths:
                extensions = ", ".join(sorted(EXTENSIONS))
                self.problems.add(
                    entry.path, f"the class folder {entry.path} has no image files ({extensions}). Fill or remove it."
                )
                continue
            classes.append(entry.name)
            counts.append(len(paths))
            names += [path[len(str(self.folder)) + 1 :] for path in paths]
        if not classes:
            raise DataError(
                f"{self.folder} has no class folders with images; what is expected is "
                "FOLDER/train/CLASS/image.jpg, or FOLDER/CLASS/image.jpg if there are no splits."
            )
        super().__init__(self.folder, names, np.repeat(np.arange(len(classes)), counts), classes, on_error)
        self.problems = problems

    def _image_files(self, folder: str) -> Iterator[str]:
        for entry in _sorted(folder):
            if entry.name.startswith(".") or not self._stays_inside(entry):
                continue
            # Links to folders are not followed here: they could lead around in circles.
            if entry.is_dir(follow_symlinks=False):
                yield from self._image_files(entry.path)
            elif entry.name.rpartition(".")[2].lower() in EXTENSIONS and entry.is_file():
                yield entry.path

    def _stays_inside(self, entry: os.DirEntry[str]) -> bool:
        if not entry.is_symlink():
            return True
        target = os.path.realpath(entry.path)
        if f"{target}{os.sep}".startswith(self._root + os.sep) and os.path.exists(target):
            return True
        self.problems.add(entry.path, f"{entry.path} is a symbolic link to {target}, which is not in {self._root}.")
        return False


class Problems:
    """Problems with a source: raised at once, or, if the user says so, collected with a warning."""

    def __init__(self, on_error: str):
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {on_error!r}; it must be 'raise' or 'skip'.")
        self.on_error = on_error
        self.left_out: dict[str, str] = {}
        """The names of what was left out, and the reasons."""

    def add(self, name: str, text: str) -> None:
        """Raise this problem, or record that what has it is left out."""
        if self.on_error == "raise":
            raise DataError(text)
        if name not in self.left_out:
            self.left_out[name] = text
            log.warning("left out: %s", text)


def split_names(split: str) -> tuple[str, ...]:
    """Return the names under which a split may be found on the disk."""
    if not split or not split.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"split is {split!r}; it must be a plain name such as 'train', 'test' or 'val'.")
    return SPLITS.get(split, (split,))


def split_folder(folder: Path, split: str) -> Path:
    """Return the folder with the classes of a split: FOLDER/SPLIT, or FOLDER itself if it has no splits at all."""
    names = split_names(split)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}.")
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    there = [name for name in KNOWN if (folder / name).is_dir()]
    if there:
        raise FileNotFoundError(f"{folder} has no split {split!r}; it has {', '.join(there)}.")
    if split != "train":
        raise FileNotFoundError(
            f"{folder} has no split {split!r}: its subfolders are taken for the classes of a training set. "
            f"To have splits, put the classes into {folder / 'train'} and {folder / names[0]}."
        )
    return folder


class Strings(Sequence[str]):
    """Many strings in two arrays: a list of a million would be copied, page by page, into every worker."""

    def __init__(self, strings: Sequence[str]):
        encoded = [os.fsencode(string) for string in strings]
        self.joined: npt.NDArray[np.uint8] = np.frombuffer(b"".join(encoded), np.uint8)
        self.ends: npt.NDArray[np.int64] = np.cumsum([0, *map(len, encoded)])

    @classmethod
    def of(cls, joined: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> "Strings":
        """Make the strings whose two arrays were saved."""
        if not (len(ends) and ends[0] == 0 and ends[-1] == len(joined) and (np.diff(ends) >= 0).all()):
            raise ValueError("the ends of strings must count up to their length")
        strings = cls(())
        strings.joined, strings.ends = joined, ends
        return strings

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(self.joined[self.ends[index] : self.ends[index + 1]].tobytes())


def image_names(folder: Path) -> list[str]:
    """Return the names of the image files of a folder, sorted."""
    named = (entry.name for entry in _sorted(str(folder)) if entry.is_file() and not entry.name.startswith("."))
    return [name for name in named if name.rpartition(".")[2].lower() in EXTENSIONS]


def _sorted(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)
