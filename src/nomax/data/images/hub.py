"""Data sets that other libraries load: Hugging Face's `datasets`, and torchvision."""

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nomax import _compat
from nomax._files import did_you_mean
from nomax.data.registry import make_folder
from nomax.data.source import DataError, Source

if TYPE_CHECKING:
    from PIL import Image

# The names of a split elsewhere, best first. A labelled validation set stands in where there is no test set.
SPLITS = {
    "train": ("train", "training", "trainval", "train-standard"),
    "val": ("val", "validation", "valid"),
    "test": ("test", "testing", "val", "validation", "valid"),
}


class HubSource:
    """A split that another library holds: `dataset[index][column]` is an image."""

    def __init__(self, dataset: Any, column: str | int, labels: npt.ArrayLike, classes: Sequence[str], title: str):
        self.dataset, self.column = dataset, column
        self.labels: npt.NDArray[np.int64] = np.asarray(labels, np.int64)
        self.classes: Sequence[str] = tuple(classes)
        self.title = title
        unlabelled = int(((self.labels < 0) | (self.labels >= len(self.classes))).sum())
        if unlabelled:
            raise DataError(
                f"{title}: {unlabelled:,} of {len(self.labels):,} images have no label in 0 … {len(self.classes) - 1}; "
                "this split cannot be used. Try another, such as 'val'."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> "Image.Image":
        """Return the image with this number, decoded."""
        try:
            picture: Image.Image = self.dataset[int(index)][self.column]
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for broken files
            raise DataError(f"{self.name(index)} cannot be read: {error}") from error
        return picture

    def name(self, index: int) -> str:
        """Return the name of this image in errors."""
        return f"{self.title}, image {index}"


def huggingface(name: str, split: str) -> Source:
    """Load a data set of Hugging Face's hub or a folder saved by `datasets`; "NAME#image,label" names its columns."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ImportError(f"hf:{name} needs the datasets package: pip install datasets") from error
    address, _, columns = name.partition("#")
    title = f"hf:{address} ({split})"
    try:
        if Path(address, "dataset_dict.json").is_file() or Path(address, "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(address)
        else:
            loaded = datasets.load_dataset(address)
    except (OSError, ValueError, RuntimeError) as error:  # a name that is not there, no network, a damaged file
        raise FileNotFoundError(f"hf:{address} cannot be loaded: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_split(split, list(loaded), f"hf:{address}")]
    elif split != "train":
        raise ValueError(f"split {split!r}: hf:{address} was saved without splits, so all of it is 'train'.")
    image, label = _columns(datasets, loaded, columns, title)
    labels, classes = _labels(datasets, loaded, label)
    return HubSource(loaded, image, labels, classes, title)


def _columns(datasets: Any, loaded: Any, wanted: str, title: str) -> tuple[str, str]:
    features = loaded.features
    if wanted:
        names = [column.strip() for column in wanted.split(",")]
        if len(names) != 2 or not set(names) <= set(features):
            raise ValueError(
                f"{title}: #{wanted} must name two of its columns, image and label: {', '.join(features)}."
            )
        return names[0], names[1]
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    labels = labels or [name for name in ("label", "labels", "class") if name in features]
    if len(images) != 1 or len(labels) != 1:
        raise ValueError(
            f"{title}: found {len(images)} image columns and {len(labels)} label columns among {', '.join(features)}. "
            f"Say which: {title.split(' ')[0]}#image,label"
        )
    return images[0], labels[0]


def _labels(datasets: Any, loaded: Any, column: str) -> tuple[npt.ArrayLike, Sequence[str]]:
    values = np.asarray(loaded.with_format("numpy", columns=[column])[:][column])
    feature = loaded.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return values, feature.names
    classes, labels = np.unique(values, return_inverse=True)
    return labels, [str(value) for value in classes]


def torchvision(name: str, split: str, root: Path) -> Source:
    """Load a data set with a class in torchvision.datasets; it is downloaded into `root` if the network allows."""
    datasets = import_module(f"{_compat.torchvision().__name__}.datasets")
    names = {known.casefold(): known for known in datasets.__all__}
    if name.casefold() not in names:
        raise ValueError(f"torchvision.datasets has no class {name!r}{did_you_mean(name, names.values())}")
    name = names[name.casefold()]
    loaded = _construct(getattr(datasets, name), name, split, root)
    title = f"torchvision:{name} ({split})"
    labels = _targets(loaded)
    if labels is None:
        raise ValueError(f"{title}: torchvision gives no list of its labels, so it cannot be used for classification.")
    classes = getattr(loaded, "classes", None) or [str(label) for label in range(int(labels.max()) + 1)]
    return HubSource(loaded, 0, labels, [str(label) for label in classes], title)


def _construct(kind: Any, name: str, split: str, root: Path) -> Any:
    parameters = inspect.signature(kind).parameters
    options: dict[str, Any] = {"download": True} if "download" in parameters else {}
    if "train" in parameters:
        if split not in ("train", "test"):
            raise ValueError(f"split {split!r}: torchvision:{name} has the splits train, test.")
        attempts: list[dict[str, Any]] = [{"train": split == "train"}]
    elif "split" in parameters:
        attempts = [{"split": candidate} for candidate in SPLITS.get(split, (split,))]
    else:
        raise ValueError(
            f"torchvision:{name} has no splits; save it as a folder PATH/train/CLASS/*, PATH/test/CLASS/*."
        )
    make_folder(root)
    refused: Exception | None = None
    for attempt in attempts:
        try:
            return kind(str(root), **attempt, **options)
        except (OSError, RuntimeError) as error:  # no network, a file that is not there or damaged
            raise FileNotFoundError(
                f"torchvision:{name} is not in {root} and could not be downloaded: {error}. "
                "It needs an open network, or its files in that folder."
            ) from error
        except ValueError as error:  # a split by another name
            refused = error
        except TypeError as error:
            raise ValueError(f"torchvision:{name} needs more than a split to be opened: {error}") from error
    raise ValueError(f"split {split!r}: torchvision:{name} does not have it: {refused}") from refused


def _targets(loaded: Any) -> npt.NDArray[np.int64] | None:
    for attribute in ("targets", "labels", "_labels"):
        if hasattr(loaded, attribute):
            return np.asarray(getattr(loaded, attribute), np.int64)
    for attribute in ("samples", "_samples"):
        if hasattr(loaded, attribute):
            return np.asarray([label for _, label in getattr(loaded, attribute)], np.int64)
    return None


def _split(wanted: str, there: Sequence[str], title: str) -> str:
    for candidate in (wanted, *SPLITS.get(wanted, ())):
        if candidate in there:
            return candidate
    raise ValueError(f"split {wanted!r}: {title} has the splits {', '.join(there)}.")
