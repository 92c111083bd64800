"""Data sets of other libraries: Hugging Face's and torchvision's."""

import gzip
import struct
from importlib import import_module

import numpy as np
import pytest

from nomax import _compat, data

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 5, 7, 3), np.uint8)
LABELS = np.arange(12) % 3


def torchvision_datasets():
    try:
        return import_module(f"{_compat.torchvision().__name__}.datasets")
    except ImportError:
        pytest.skip("torchvision is not installed")


@pytest.fixture
def saved_dataset(tmp_path):
    """A data set that Hugging Face's library saved, with splits, an image column and a label column."""
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["a", "b", "c"]),
            "text": datasets.Value("string"),
        }
    )

    def part(which: slice):
        columns = {
            "picture": [Image.fromarray(image) for image in IMAGES[which]],
            "kind": LABELS[which].tolist(),
            "text": [f"kind-{label}" for label in LABELS[which]],
        }
        return datasets.Dataset.from_dict(columns, features=features)

    datasets.DatasetDict({"train": part(slice(0, 8)), "validation": part(slice(8, 12))}).save_to_disk(
        tmp_path / "saved"
    )
    return tmp_path / "saved"


def test_a_saved_hugging_face_data_set_is_loaded(saved_dataset) -> None:
    train = data.load(f"hf:{saved_dataset}")
    assert list(train.classes) == ["a", "b", "c"]
    np.testing.assert_array_equal(train.labels, LABELS[:8])
    np.testing.assert_array_equal(np.asarray(train.image(3)), IMAGES[3])
    assert "image 3" in train.name(3)
    validation = data.load(f"hf:{saved_dataset}", "test")  # there is no test split, so the validation split stands in
    np.testing.assert_array_equal(validation.labels, LABELS[8:])


def test_hugging_face_columns_can_be_named(saved_dataset) -> None:
    train = data.load(f"hf:{saved_dataset}#picture,text")
    assert list(train.classes) == ["kind-0", "kind-1", "kind-2"]
    np.testing.assert_array_equal(train.labels, LABELS[:8])
    with pytest.raises(ValueError, match="#picture,colour must name two of its columns"):
        data.load(f"hf:{saved_dataset}#picture,colour")


def test_a_hugging_face_data_set_lists_its_splits(saved_dataset) -> None:
    with pytest.raises(ValueError, match=r"split 'extra': .* has the splits train, validation"):
        data.load(f"hf:{saved_dataset}", "extra")


def test_what_is_local_is_found_from_every_working_directory(saved_dataset, tmp_path, monkeypatch) -> None:
    (tmp_path / "here" / "photos").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "here" / "photos")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    here = tmp_path / "here"
    for typed, place in {
        "photos": f"{here}/photos",
        "./photos/": f"{here}/photos",
        "../here/photos": f"{here}/photos",
        "../elsewhere/link/../photos": f"{here}/../elsewhere/link/../photos",  # not what it is without "link/.."
        "~/here/photos": f"{here}/photos",
        "train-{000..009}.tar": f"{here}/train-{{000..009}}.tar",
        "a,b-{000..009}.tar": f"{here}/a,b-{{000..009}}.tar",
        str(here / "photos"): f"{here}/photos",
        "hf:../saved#picture,text": f"hf:{saved_dataset}#picture,text",
        "hf:owner/name": "hf:owner/name",
        "torchvision:DTD": "torchvision:DTD",
        "fashion-mnist-small": "fashion-mnist-small",
        "bible-en-es": "bible-en-es",
    }.items():
        assert data.located(typed) == place
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(data.load(data.located(f"hf:{saved_dataset}"))) == 8


@pytest.fixture
def torchvision_root(tmp_path):
    """MNIST's files where torchvision looks for them."""
    torchvision_datasets()
    folder = tmp_path / "torchvision" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, part in {"train": slice(0, 9), "t10k": slice(9, 12)}.items():
        for what, array in {"images-idx3": IMAGES[part, :, :, 0], "labels-idx1": LABELS[part].astype(np.uint8)}.items():
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            (folder / f"{name}-{what}-ubyte").write_bytes(content)
            (folder / f"{name}-{what}-ubyte.gz").write_bytes(gzip.compress(content))
    return tmp_path


def test_a_torchvision_data_set_is_loaded(torchvision_root) -> None:
    test = data.load("torchvision:mnist", "test", root=torchvision_root)
    np.testing.assert_array_equal(test.labels, LABELS[9:])
    np.testing.assert_array_equal(np.asarray(test.image(1)), IMAGES[10, :, :, 0])
    assert len(test.classes) == 10
    with pytest.raises(ValueError, match="split 'val': torchvision:MNIST has the splits train, test"):
        data.load("torchvision:MNIST", "val", root=torchvision_root)


def test_a_torchvision_data_set_that_cannot_be_downloaded_says_so(tmp_path) -> None:
    datasets = torchvision_datasets()

    def refuse(self) -> None:
        raise OSError("no route to anywhere")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.MNIST, "download", refuse)
        with pytest.raises(
            FileNotFoundError, match=r"torchvision:MNIST is not in .*no route to anywhere.*open network"
        ):
            data.load("torchvision:MNIST", root=tmp_path)


def test_an_unknown_torchvision_data_set_gets_the_nearest_one() -> None:
    torchvision_datasets()
    with pytest.raises(ValueError, match="did you mean CIFAR100"):
        data.load("torchvision:cifar1000")
