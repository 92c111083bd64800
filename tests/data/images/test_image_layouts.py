"""Data sets as they are published, in tiny copies: each loads without conversion, and what is wrong is told by name."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import encoded, picture

from nomax import data
from nomax.data.commands import pack
from nomax.data.source import DataError

WNIDS = ("n01440764", "n01443537", "n01484850")


def put(path: Path, number: int = 0, kind: str = "JPEG") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(picture(number, 12, 10), kind))


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def shown(source: data.Source) -> list[tuple[str, str]]:
    """Each image's file and class."""
    return [(Path(source.name(i)).name, source.classes[source.labels[i]]) for i in range(len(source))]


def imagenet(folder: Path, flat: bool = False) -> Path:
    for place, wnid in enumerate(WNIDS):
        for number in range(2):
            put(folder / "train" / wnid / f"{wnid}_{number}.JPEG", 2 * place + number)
    for number, wnid in enumerate((WNIDS[2], WNIDS[0], WNIDS[1]), 1):
        put(folder / "val" / ("" if flat else wnid) / f"ILSVRC2012_val_{number:08d}.JPEG", number)
    put(folder / "test" / "ILSVRC2012_test_00000001.JPEG")  # without a label
    return folder


VALIDATION = [(f"ILSVRC2012_val_{number:08d}.JPEG", WNIDS[place]) for number, place in ((1, 2), (2, 0), (3, 1))]


@pytest.mark.parametrize("split", ["test", "val"])
def test_imagenet_in_folders_of_classes(tmp_path: Path, split: str) -> None:
    imagenet(tmp_path)
    train = data.load(tmp_path)
    assert train.classes == WNIDS
    assert len(train) == 6
    assert sorted(shown(data.load(tmp_path, split))) == VALIDATION


@pytest.mark.parametrize("listing", ["kaggle", "caffe", "synsets", "devkit"])
def test_imagenet_with_flat_validation_images_and_a_list(tmp_path: Path, listing: str) -> None:
    folder = imagenet(tmp_path / "ILSVRC" / "Data" / "CLS-LOC" if listing == "kaggle" else tmp_path, flat=True)
    order = [wnid for _, wnid in VALIDATION]
    if listing == "kaggle":
        lines = [f"{name[:-5]},{wnid} 1 2 3 4 " for name, wnid in reversed(VALIDATION)]
        write(tmp_path / "LOC_val_solution.csv", "ImageId,PredictionString", *lines)
    elif listing == "caffe":
        write(folder / "val.txt", *(f"{name} {WNIDS.index(wnid)}" for name, wnid in VALIDATION))
    elif listing == "synsets":
        write(folder / "imagenet_2012_validation_synset_labels.txt", *order)
    else:
        scipy = pytest.importorskip("scipy.io")
        ids = {wnid: number for number, wnid in enumerate(reversed(WNIDS), 1)}
        synsets = np.array(
            [(number, wnid) for wnid, number in ids.items()], dtype=[("ILSVRC2012_ID", object), ("WNID", object)]
        )
        devkit = folder / "ILSVRC2012_devkit_t12" / "data"
        devkit.mkdir(parents=True)
        scipy.savemat(devkit / "meta.mat", {"synsets": synsets})
        write(devkit / "ILSVRC2012_validation_ground_truth.txt", *(str(ids[wnid]) for wnid in order))
    source = data.load(tmp_path, "test")
    assert source.classes == WNIDS == data.load(tmp_path).classes
    assert shown(source) == VALIDATION
    assert source.image(0).size == (12, 10)


def test_imagenet_without_a_list_says_what_it_needs(tmp_path: Path) -> None:
    imagenet(tmp_path, flat=True)
    with pytest.raises(DataError, match=r"no list says what they show.*LOC_val_solution\.csv, val\.txt"):
        data.load(tmp_path, "test")
    write(tmp_path / "val.txt", "ILSVRC2012_val_00000001.JPEG 0")
    with pytest.raises(DataError, match=r"has 3 images, but .*val\.txt lists 1"):
        data.load(tmp_path, "val")


def test_an_ordinary_folder_with_wordnets_numbers_stays_one(tmp_path: Path) -> None:
    imagenet(tmp_path)
    (tmp_path / "test" / "ILSVRC2012_test_00000001.JPEG").unlink()
    for wnid in WNIDS:
        put(tmp_path / "test" / wnid / "real_test.jpg")
    assert {name for name, _ in shown(data.load(tmp_path, "test"))} == {"real_test.jpg"}


def test_tiny_imagenet(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    write(folder / "wnids.txt", *reversed(WNIDS))
    for wnid in WNIDS:
        put(folder / "train" / wnid / "images" / f"{wnid}_0.JPEG")
        write(folder / "train" / wnid / f"{wnid}_boxes.txt", f"{wnid}_0.JPEG\t0\t0\t62\t62")
    put(folder / "test" / "images" / "test_0.JPEG")
    for number in range(2):
        put(folder / "val" / "images" / f"val_{number}.JPEG")
    write(
        folder / "val" / "val_annotations.txt",
        *(f"val_{number}.JPEG\t{WNIDS[2 - number]}\t0\t32\t44\t62" for number in range(2)),
    )
    for place in (tmp_path, folder):
        assert data.load(place).classes == data.load(place, "test").classes == WNIDS
        assert shown(data.load(place, "test")) == [("val_0.JPEG", WNIDS[2]), ("val_1.JPEG", WNIDS[1])]


CIFAR = {"train": [(3, 0), (1, 1)], "test": [(0, 2)]}  # fine label, number of the image


def planes(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, 3072, dtype=np.uint8)


def cifar100(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"thing {label}" for label in range(4)]
    for split, rows in CIFAR.items():
        if kind == "binary":
            records = [bytes([label // 2, label]) + planes(number).tobytes() for label, number in rows]
            (folder / f"{split}.bin").write_bytes(b"".join(records))
        else:
            batch = {
                b"data": np.stack([planes(number) for _, number in rows]),
                b"fine_labels": [label for label, _ in rows],
                b"coarse_labels": [label // 2 for label, _ in rows],
            }
            (folder / split).write_bytes(pickle.dumps(batch, protocol=2))
    if kind == "binary":
        write(folder / "fine_label_names.txt", *names)
    else:
        (folder / "meta").write_bytes(
            pickle.dumps({b"fine_label_names": [name.encode() for name in names]}, protocol=2)
        )


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar_100(tmp_path: Path, kind: str) -> None:
    cifar100(tmp_path / f"cifar-100-{kind}", kind)
    for place in (tmp_path, tmp_path / f"cifar-100-{kind}"):
        for split, rows in CIFAR.items():
            source = data.load(place, split)
            assert list(source.classes) == [f"thing {label}" for label in range(4)]
            assert source.labels.tolist() == [label for label, _ in rows]
            for index, (_, number) in enumerate(rows):
                wanted = planes(number).reshape(3, 32, 32).transpose(1, 2, 0)
                assert np.array_equal(np.asarray(source.image(index)), wanted)


@pytest.mark.parametrize("kind", ["bin", "py"])
def test_cifar_10(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / f"cifar-10-batches-{kind}"
    folder.mkdir()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        if kind == "bin":
            (folder / f"{name}.bin").write_bytes(bytes([number]) + planes(number).tobytes())
        else:
            batch = {b"data": planes(number)[None], b"labels": [number]}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    if kind == "bin":
        write(folder / "batches.meta.txt", *"abcdef", "")
    else:
        (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": list("abcdef")}, protocol=2))
    assert data.load(tmp_path).labels.tolist() == [0, 1, 2, 3, 4]
    assert data.load(tmp_path, "test").labels.tolist() == [5]
    assert list(data.load(tmp_path).classes) == list("abcdef")


def test_the_original_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    """Python 2 wrote strings where Python 3 writes bytes; this is what its cPickle made of a batch, by hand."""
    cifar100(tmp_path, "python")
    raw = planes(1).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(K\x01M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )
    batch = b"\x80\x02}(U\x04data" + array + b"U\x0bfine_labels](K\x02eu."
    (tmp_path / "test").write_bytes(batch)
    source = data.load(tmp_path, "test")
    assert source.labels.tolist() == [2]
    assert np.array_equal(np.asarray(source.image(0)), planes(1).reshape(3, 32, 32).transpose(1, 2, 0))


class Harmful:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], tuple(self.call[1:])


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    cifar100(tmp_path, "python")
    for harm in (
        Harmful(os.mkdir, str(tmp_path / "harmed")),
        Harmful(eval, "1"),
        Harmful(getattr, [], "append"),
        {b"data": Harmful(np.zeros, 10**12)},
    ):
        (tmp_path / "train").write_bytes(pickle.dumps(harm, protocol=2))
        with pytest.raises(DataError, match=r"train cannot be read: it asks for .*, which no version of CIFAR does"):
            data.load(tmp_path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1], "holds a list"),
        ({}, "does not hold an array"),
        ({b"data": b"abc", b"fine_labels": [1]}, "does not hold an array"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [1]}, "does not hold an array"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": ["1"]}, "not all numbers"),
    ],
)
def test_a_pickle_of_something_else_is_named(tmp_path: Path, content: Any, said: str) -> None:
    cifar100(tmp_path, "python")
    (tmp_path / "train").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=said):
        data.load(tmp_path)


def test_a_cut_binary_file_is_named(tmp_path: Path) -> None:
    cifar100(tmp_path, "binary")
    (tmp_path / "train.bin").write_bytes(b"x" * 3075)
    with pytest.raises(DataError, match=r"train\.bin has 3,075 bytes, not a multiple of the 3,074"):
        data.load(tmp_path)


def birds(folder: Path) -> Path:
    classes = ("001.Albatross", "002.Auklet")
    names = [f"{name}/{name[4:]}_{number}.jpg" for name in classes for number in range(2)]
    for number, name in enumerate(names):
        put(folder / "images" / name, number)
    write(folder / "classes.txt", *(f"{number} {name}" for number, name in enumerate(classes, 1)))
    write(folder / "images.txt", *(f"{number} {name}" for number, name in enumerate(names, 1)))
    write(folder / "image_class_labels.txt", "1 1", "2 1", "3 2", "4 2")
    write(folder / "train_test_split.txt", "1 1", "2 0", "3 0", "4 1")
    return folder


def test_birds(tmp_path: Path) -> None:
    birds(tmp_path / "CUB_200_2011")
    train, test = (data.load(tmp_path, split) for split in ("train", "test"))
    assert shown(train) == [("Albatross_0.jpg", "001.Albatross"), ("Auklet_1.jpg", "002.Auklet")]
    assert shown(test) == [("Albatross_1.jpg", "001.Albatross"), ("Auklet_0.jpg", "002.Auklet")]


def test_birds_of_2010(tmp_path: Path) -> None:
    for name in ("001.A/x.jpg", "002.B/y.jpg", "002.B/z.jpg"):
        put(tmp_path / "images" / name)
    write(tmp_path / "lists" / "train.txt", "001.A/x.jpg", "002.B/z.jpg")
    write(tmp_path / "lists" / "test.txt", "002.B/y.jpg")
    assert shown(data.load(tmp_path)) == [("x.jpg", "001.A"), ("z.jpg", "002.B")]
    assert shown(data.load(tmp_path, "test")) == [("y.jpg", "002.B")]


def test_caltech_101_has_thirty_training_images_of_each_class(tmp_path: Path) -> None:
    for name, count in {"BACKGROUND_Google": 31, "accordion": 33, "yin_yang": 40}.items():
        for number in range(count):
            put(tmp_path / "101_ObjectCategories" / name / f"image_{number:04d}.jpg", number)
    train, test = (data.load(tmp_path, split) for split in ("train", "test"))
    assert np.bincount(train.labels).tolist() == [30, 30, 30]
    assert np.bincount(test.labels).tolist() == [1, 3, 10]
    names = [source.name(index) for source in (train, test) for index in range(len(source))]
    assert len(set(names)) == 104


def test_cars(tmp_path: Path) -> None:
    scipy = pytest.importorskip("scipy.io")
    kind = [("bbox_x1", object), ("class", object), ("fname", object)]
    (tmp_path / "devkit").mkdir()
    names = np.array(["Audi TT", "BMW M3", "Fiat 500"], dtype=object)
    scipy.savemat(tmp_path / "devkit" / "cars_meta.mat", {"class_names": names})
    for split, labels in {"train": (2, 1, 3), "test": (3, 1)}.items():
        rows = [(7, label, f"{number:05d}.jpg") for number, label in enumerate(labels, 1)]
        for _, _, name in rows:
            put(tmp_path / f"cars_{split}" / name)
        file = "devkit/cars_train_annos.mat" if split == "train" else "cars_test_annos_withlabels.mat"
        scipy.savemat(tmp_path / file, {"annotations": np.array(rows, dtype=kind)})
    assert shown(data.load(tmp_path)) == [
        ("00001.jpg", "BMW M3"),
        ("00002.jpg", "Audi TT"),
        ("00003.jpg", "Fiat 500"),
    ]
    assert shown(data.load(tmp_path, "test")) == [("00001.jpg", "Fiat 500"), ("00002.jpg", "Audi TT")]
    (tmp_path / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(DataError, match=r"neither devkit/cars_test_annos_withlabels\.mat nor"):
        data.load(tmp_path, "test")


def test_describable_textures(tmp_path: Path) -> None:
    for name in ("banded/a.jpg", "banded/b.jpg", "dotted/c.jpg"):
        put(tmp_path / "dtd" / "images" / name)
    write(tmp_path / "dtd" / "labels" / "train1.txt", "banded/a.jpg")
    write(tmp_path / "dtd" / "labels" / "val1.txt", "dotted/c.jpg")
    write(tmp_path / "dtd" / "labels" / "test1.txt", "banded/b.jpg", "dotted/c.jpg")
    assert data.load(tmp_path).classes == ("banded", "dotted")
    assert shown(data.load(tmp_path, "test")) == [("b.jpg", "banded"), ("c.jpg", "dotted")]
    assert shown(data.load(tmp_path, "val")) == [("c.jpg", "dotted")]


def test_pets(tmp_path: Path) -> None:
    for name in ("Abyssinian_1", "great_pyrenees_10", "great_pyrenees_2"):
        put(tmp_path / "images" / f"{name}.jpg")
    write(
        tmp_path / "annotations" / "trainval.txt",
        *("#Image CLASS-ID SPECIES BREED ID", "great_pyrenees_10 2 2 1", "Abyssinian_1 1 1 1"),
    )
    write(tmp_path / "annotations" / "test.txt", "great_pyrenees_2 2 2 1")
    assert shown(data.load(tmp_path)) == [
        ("great_pyrenees_10.jpg", "great_pyrenees"),
        ("Abyssinian_1.jpg", "Abyssinian"),
    ]
    assert data.load(tmp_path, "test").classes == ("Abyssinian", "great_pyrenees")


@pytest.mark.parametrize(
    ("folder", "classes"),
    [
        ("Kather_texture_2016_image_tiles_5000", ("01_TUMOR", "02_STROMA")),
        ("UCMerced_LandUse/Images", ("agricultural", "tenniscourt")),
    ],
)
def test_histology_and_land_use_are_folders_without_splits(
    tmp_path: Path, folder: str, classes: tuple[str, ...]
) -> None:
    for name in classes:
        for number in range(5):
            put(tmp_path / folder / name / f"{name}{number:02d}.tif", number, "TIFF")
    source = data.load(tmp_path)
    assert source.classes == classes
    assert len(source) == 10
    with pytest.raises(FileNotFoundError, match="no split 'test'"):
        data.load(tmp_path, "test")
    assert len(data.load(tmp_path, "train", held_out=0.3)) < 10


def test_what_a_list_names_must_be_there_and_stay_inside(tmp_path: Path) -> None:
    folder = birds(tmp_path / "birds")
    put(tmp_path / "outside.jpg")
    (folder / "images" / "001.Albatross" / "Albatross_0.jpg").unlink()
    with pytest.raises(DataError, match=r"image_class_labels\.txt names images/.*Albatross_0\.jpg, but there is no"):
        data.load(folder)
    assert len(data.load(folder, on_error="skip")) == 1
    (folder / "images" / "001.Albatross" / "Albatross_0.jpg").symlink_to(tmp_path / "outside.jpg")
    with pytest.raises(DataError, match="a symbolic link that leads out of"):
        data.load(folder)
    write(folder / "images.txt", "1 ../../outside.jpg", "4 002.Auklet/Auklet_1.jpg")
    with pytest.raises(DataError, match=r"names 'images/\.\./\.\./outside\.jpg', which leads out of"):
        data.load(folder)
    write(folder / "images.txt", "1")
    with pytest.raises(DataError, match=r"images\.txt, line 1: '1' has 1 fields; 2 are expected"):
        data.load(folder)
    (folder / "images.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match=r"images\.txt is not text"):
        data.load(folder)


def test_a_split_that_a_set_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split 'extra': Caltech-UCSD Birds has the splits train, test"):
        data.load(birds(tmp_path), "extra")


def test_imagenet_with_flat_validation_images_can_be_packed(tmp_path: Path) -> None:
    imagenet(tmp_path / "in", flat=True)
    write(tmp_path / "in" / "val.txt", *(f"{name} {WNIDS.index(wnid)}" for name, wnid in VALIDATION))
    for split in ("train", "val"):
        pack.pack(pack.Options(tmp_path / "in", tmp_path / "out", split=split))
    packed = data.load(tmp_path / "out", "test")
    assert packed.classes == WNIDS
    assert sorted(packed.labels.tolist()) == [0, 1, 2]
    cifar100(tmp_path / "arrays", "binary")
    with pytest.raises(ValueError, match="not each image is a file"):
        pack.pack(pack.Options(tmp_path / "arrays", tmp_path / "more"))
