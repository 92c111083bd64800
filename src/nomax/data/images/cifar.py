"""CIFAR-10 and CIFAR-100 as their authors publish them: the binary version, or the Python version without its pickle.

The Python version is pickled. Nothing in it is executed here: where it asks for numpy's functions it gets stand-ins,
which keep the bytes of arrays, and anything else is refused.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax.data.source import ArraySource, DataError

SIDE = 32
PIXELS = 3 * SIDE * SIDE  # bytes of an image, plane after plane
LARGEST = 1 << 28  # bytes of a file; CIFAR-100's have 155 million


@dataclass(frozen=True)
class Kind:
    """A version of CIFAR: its files, by which it is recognised."""

    title: str
    signs: tuple[str, ...]
    inside: tuple[str, ...]
    files: dict[str, tuple[str, ...]]
    parse: Callable[[bytes, Path], tuple[npt.NDArray[np.uint8], Sequence[int]]]
    names: Callable[[Path], Sequence[str]]

    def read(self, folder: Path, split: str, on_error: str) -> ArraySource:
        """Return the images of a split; the test images also go by the name of val."""
        split = "test" if split in ("val", "validation") else split
        if split not in self.files:
            raise ValueError(f"split {split!r}: {self.title} has the splits train, test.")
        parts = [self.parse(_bytes(folder / name), folder / name) for name in self.files[split]]
        images = np.concatenate([images for images, _ in parts])
        labels = [label for _, labels in parts for label in labels]
        planes = images.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        return ArraySource(np.ascontiguousarray(planes), labels, self.names(folder), f"{self.title} ({split})")


def _binary(label: int, labels: int) -> Callable[[bytes, Path], tuple[npt.NDArray[np.uint8], list[int]]]:
    """Return a parser of records: so many bytes of labels, of which one counts, then the image."""

    def parse(data: bytes, path: Path) -> tuple[npt.NDArray[np.uint8], list[int]]:
        if not data or len(data) % (labels + PIXELS):
            raise DataError(f"{path} has {len(data):,} bytes, not a multiple of the {labels + PIXELS:,} of an image.")
        records = np.frombuffer(data, np.uint8).reshape(-1, labels + PIXELS)
        return records[:, labels:], records[:, label].tolist()

    return parse


def _pickled(labels: str) -> Callable[[bytes, Path], tuple[npt.NDArray[np.uint8], list[int]]]:
    """Return a parser of a batch of the Python version: a dict of "data" and labels."""

    def parse(data: bytes, path: Path) -> tuple[npt.NDArray[np.uint8], list[int]]:
        content = unpickle(data, path)
        array, numbers = content.get("data"), content.get(labels)
        raw = array.raw if isinstance(array, _Array) else None
        if raw is None or not isinstance(numbers, list) or len(raw) != PIXELS * len(numbers) or not numbers:
            raise DataError(f"{path} does not hold an array of images of {PIXELS:,} bytes and as many {labels}.")
        if not all(isinstance(number, int) for number in numbers):
            raise DataError(f"{path}: its {labels} are not all numbers.")
        return np.frombuffer(raw, np.uint8), numbers

    return parse


def _listed(name: str) -> Callable[[Path], Sequence[str]]:
    return lambda folder: [line for line in _bytes(folder / name).decode().splitlines() if line.strip()]


def _pickled_names(name: str, key: str) -> Callable[[Path], Sequence[str]]:
    def names(folder: Path) -> Sequence[str]:
        content = unpickle(_bytes(folder / name), folder / name).get(key)
        if not isinstance(content, list) or not all(isinstance(each, bytes | str) for each in content):
            raise DataError(f"{folder / name} has no list {key} of the names of the classes.")
        return [each.decode() if isinstance(each, bytes) else each for each in content]

    return names


class _Array:
    """What an array is made of, kept as it is in the file."""

    raw: bytes | None = None

    def __setstate__(self, state: Any) -> None:
        raw = state[-1] if isinstance(state, tuple) and len(state) == 5 else None
        self.raw = raw.encode("latin-1") if isinstance(raw, str) else raw if isinstance(raw, bytes) else None


class _Dtype:
    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _encode(text: object, _: object = None) -> bytes:
    """Stand in for _codecs.encode, with which newer Pythons write bytes."""
    return text.encode("latin-1") if isinstance(text, str) else b""


class _Unpickler(pickle.Unpickler):
    """Builds lists, dicts, numbers and strings; arrays become _Array, and nothing else can be named."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return lambda *_: _Array()
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _Dtype if name == "dtype" else _Array
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no version of CIFAR does")


def unpickle(data: bytes, path: Path) -> dict[str, Any]:
    """Return the dict in a file of the Python version, without running anything that it names."""
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # damage may raise anything
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not a batch of images.")
    return {key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path} has more than {LARGEST:,} bytes.")
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing.") from None


_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
KINDS = (
    Kind(
        "CIFAR-100",
        ("train.bin", "test.bin", "fine_label_names.txt"),
        ("cifar-100-binary",),
        {"train": ("train.bin",), "test": ("test.bin",)},
        _binary(label=1, labels=2),  # the coarse one comes first
        _listed("fine_label_names.txt"),
    ),
    Kind(
        "CIFAR-100",
        ("train", "test", "meta"),
        ("cifar-100-python",),
        {"train": ("train",), "test": ("test",)},
        _pickled("fine_labels"),
        _pickled_names("meta", "fine_label_names"),
    ),
    Kind(
        "CIFAR-10",
        ("data_batch_1.bin", "test_batch.bin", "batches.meta.txt"),
        ("cifar-10-batches-bin",),
        {"train": tuple(f"{name}.bin" for name in _TEN), "test": ("test_batch.bin",)},
        _binary(label=0, labels=1),
        _listed("batches.meta.txt"),
    ),
    Kind(
        "CIFAR-10",
        ("data_batch_1", "test_batch", "batches.meta"),
        ("cifar-10-batches-py",),
        {"train": _TEN, "test": ("test_batch",)},
        _pickled("labels"),
        _pickled_names("batches.meta", "label_names"),
    ),
)
