"""The named data sets: the entries themselves, the bundled one, and the readers of what packages hold."""

import importlib
import importlib.resources
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nomax import data
from nomax.data.prepare import emoji, icons, small_images
from nomax.data.prepare.icons import class_names, on_white, render
from nomax.data.prepare.packages import Job
from nomax.data.registry import IMAGES


@pytest.mark.parametrize("entry", IMAGES.values(), ids=IMAGES)
def test_every_entry_is_complete(entry) -> None:
    assert set(entry.counts) == {"train", "test"}
    assert entry.summary
    assert entry.licence
    module, _, function = entry.reader.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    for package in entry.packages:
        assert package.version
        assert package.size > 0
        assert re.fullmatch("[0-9a-f]{64}", package.sha256)
        assert package.version in package.file
    if entry.packages:
        assert set(entry.checksums) == {"images.npy", "labels.npy"}
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in entry.checksums.values())


def test_the_bundled_images_are_balanced_and_look_like_fashion_mnist() -> None:
    train, test = data.load("fashion-mnist-small", "train"), data.load("fashion-mnist-small", "test")
    assert (len(train), len(test)) == (10_000, 2_000)
    assert (np.bincount(train.labels) == 1_000).all()
    assert (np.bincount(test.labels) == 200).all()
    assert train.images.shape == (10_000, 28, 28)
    # The mean of the whole of Fashion-MNIST is 0.2860; that of a part is so to three standard errors.
    means = train.images.mean((1, 2)) / 255
    assert abs(means.mean() - 0.2860) < 3 * means.std() / np.sqrt(len(means)) < 0.005
    assert train.classes[9] == "Ankle boot"
    assert list(train.classes) == list(test.classes)
    assert len({image.tobytes() for image in test.images} & {image.tobytes() for image in train.images}) == 0


def test_the_bundled_images_come_with_their_licence_and_are_small() -> None:
    folder = importlib.resources.files("nomax.data") / "bundled"
    texts = [file.read_text() for file in folder.iterdir() if file.name.startswith("LICENSE")]
    assert len(texts) == 1
    assert "Zalando" in texts[0]
    assert "Permission is hereby granted" in texts[0]
    assert sum(len(file.read_bytes()) for file in folder.iterdir() if file.is_file()) < 5_000_000


def test_loading_imports_no_library_that_it_does_not_need() -> None:
    code = (
        "import sys, nomax.data; source = nomax.data.load('fashion-mnist-small', 'test'); "
        "print({'PIL', 'torchvision', 'datasets', 'sklearn', 'rich', 'resvg_py'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "set()"


# Readers, on packages of a few members that are made here. Fetching itself is tested in test_data_fetch.py.


def package(file: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def prepared(reader, packages: dict[str, Path], folder: Path) -> tuple[dict, np.ndarray, np.ndarray]:
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    meta = reader(Job("cifar10", packages, folder, folder / "parts"))
    return meta, np.load(folder / "images.npy"), np.load(folder / "labels.npy")


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def cifar_files() -> tuple[dict[str, bytes], np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)
    names = [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]
    files = {name: png(images[2 * i : 2 * i + 2].reshape(2, 1024, 3)) for i, name in enumerate(names)}
    files["train_lables.json"] = json.dumps([index % 10 for index in range(10)]).encode()
    files["test_lables.json"] = b"[4, 2]"
    return files, images


def test_cifar_is_put_into_its_canonical_order(tmp_path) -> None:
    files, images = cifar_files()
    shuffled = dict(sorted(files.items(), key=lambda item: item[0][::-1]))
    meta, written, labels = prepared(
        small_images.prepare_cifar, {"x": package(tmp_path / "x.tgz", shuffled)}, tmp_path / "out"
    )
    np.testing.assert_array_equal(written, images)
    np.testing.assert_array_equal(labels, [*range(10), 4, 2])
    assert meta["splits"] == {"train": (0, 10), "test": (10, 12)}


def test_cifar_with_a_part_missing_or_misshapen_is_an_error(tmp_path) -> None:
    files, _ = cifar_files()
    broken = {**files, "data_batch_3.png": png(np.zeros((2, 1000, 3), np.uint8))}
    with pytest.raises(ValueError, match=r"data_batch_3\.png is 1000×2 RGB; expected 1024×10000"):
        prepared(small_images.prepare_cifar, {"x": package(tmp_path / "x.tgz", broken)}, tmp_path / "out")
    del files["data_batch_3.png"], files["test_lables.json"]
    with pytest.raises(ValueError, match=r"lacks data_batch_3, test_lables\."):
        prepared(small_images.prepare_cifar, {"x": package(tmp_path / "x.tgz", files)}, tmp_path / "out")


def test_a_style_is_dropped_where_a_set_uses_it_and_kept_where_it_is_part_of_a_name() -> None:
    with_style = [f"{name}-{style}" for name in ("home", "cat-face", "chart") for style in ("line", "fill")]
    many = [
        *with_style,
        *(f"thing{number}-line" for number in range(10)),
        *(f"thing{number}-fill" for number in range(10)),
    ]
    classes = class_names(many)
    assert classes["home-line"] == classes["home-fill"] == "home"
    assert classes["cat-face-fill"] == "cat-face"
    few = class_names(["chart-line", *(f"thing{number}" for number in range(30))])
    assert few["chart-line"] == "chart-line"


def test_declared_styles_sizes_and_variants_are_dropped() -> None:
    classes = class_names(
        ["round-home", "sharp-home-24px", "bell-outline-rounded", "bell-02", "bell-20", "24", "line"],
        prefixes=["round", "sharp"],
        suffixes=["", "outline", "outline-rounded"],
    )
    assert list(classes.values()) == ["home", "home", "bell", "bell", "bell", "24", "line"]


def icon(body: str, **more: object) -> dict:
    return {"body": body, **more}


SHAPES = {
    "square": '<path fill="currentColor" d="M{0} {0}h10v10H{0}z"/>',
    "small square": '<path fill="currentColor" d="M{0} {0}h8v8H{0}z"/>',
    "bar": '<path fill="currentColor" d="M{0} 2h3v12H{0}z"/>',
}


@pytest.fixture
def icon_package(tmp_path):
    """Six sets to train on, one to test with, and three that must be left out."""

    def about(author: str, licence: str = "MIT", palette: bool = False) -> dict:
        return {
            "name": author,
            "author": {"name": author},
            "license": {"title": "", "spdx": licence},
            "palette": palette,
        }

    sets = {f"set{number}": about(f"author {number}") for number in range(6)}
    sets |= {
        "eva": about("the tester"),
        "nc": about("a", "CC-BY-NC-4.0"),
        "gpl": about("b", "GPL-3.0"),
        "flags": about("c", palette=True),
    }
    files = {"collections.json": json.dumps(sets).encode()}
    for number, prefix in enumerate(sets):
        icons = {name: icon(shape.format(number / 2)) for name, shape in SHAPES.items() if " " not in name}
        icons["square-24"] = icon(SHAPES["small square"].format(number / 2))
        icons["once"] = icon(SHAPES["bar"].format(number + 5))
        icons["bar-hidden"] = icon(SHAPES["bar"].format(9), hidden=True)
        if prefix == "eva":
            icons["bar"] = icon(SHAPES["bar"].format(0))  # that of set0
        files[f"json/{prefix}.json"] = json.dumps({"prefix": prefix, "icons": icons, "suffixes": {}}).encode()
    files["json/../../evil.json"] = b"{}"
    return package(tmp_path / "icons.tgz", files)


def test_icons_are_divided_by_set_and_shared_drawings_stay_out_of_the_test(icon_package, tmp_path) -> None:
    pytest.importorskip("resvg_py")
    meta, images, labels = prepared(icons.prepare, {"x": icon_package}, tmp_path / "out")
    assert meta["classes"] == ["bar", "once", "square"]
    train, total = meta["splits"]["test"]
    assert (train, total) == (6 * 4, len(images))
    tested = [meta["classes"][label] for label in labels[train:]]
    assert sorted(tested) == ["once", "square", "square"]  # its bar is that of a training set
    assert not {image.tobytes() for image in images[:train]} & {image.tobytes() for image in images[train:]}
    assert set(meta["sets"]) == {*(f"set{number}" for number in range(6)), "eva"}
    assert meta["sets"]["eva"]["split"] == "test"
    assert "author 3" in (tmp_path / "out" / "ATTRIBUTION.txt").read_text()
    first_square = images[:train][labels[:train] == 2][0]
    assert first_square.shape == (32, 32)
    assert first_square[:20, :20].max() == 0  # a square of 10 in a box of 16 is one of 20 in 32 pixels, black …
    assert first_square[20:].min() == first_square[:, 20:].min() == 255  # … on white


def test_icon_sets_that_were_rendered_are_not_rendered_again(icon_package, tmp_path, monkeypatch) -> None:
    pytest.importorskip("resvg_py")
    once = prepared(icons.prepare, {"x": icon_package}, tmp_path / "out")[1]
    (tmp_path / "out" / "parts" / "set3.npy").unlink()
    calls = []
    monkeypatch.setattr(icons, "render", lambda svg, side: calls.append(svg) or render(svg, side))
    again = prepared(icons.prepare, {"x": icon_package}, tmp_path / "out")[1]
    np.testing.assert_array_equal(once, again)
    assert len(calls) == 4


def test_emoji_of_one_family_are_never_on_both_sides(tmp_path) -> None:
    pytest.importorskip("resvg_py")
    rows, annotations = [], []
    names = [
        f"{who} {what}" for what in ("running", "cooking", "singing", "rowing") for who in ("man", "woman", "person")
    ]
    circle = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><circle cx="16" cy="16" r="{}" fill="#{}"/></svg>'
    )
    files: dict[str, dict[str, bytes]] = {"openmoji": {}, "@twemoji/svg": {}, "fluentui-emoji": {}}
    for number, name in enumerate(names):
        code = f"1F60{number:X}"
        rows.append(
            {
                "name": name.upper(),
                "unified": f"{code}-FE0F",
                "non_qualified": None,
                "category": "People",
                "sort_order": number,
            }
            | {"subcategory": "person-activity", "has_img_google": True, "sheet_x": number, "sheet_y": 0}
        )
        annotations.append({"hexcode": code, "annotation": name})
        colour = f"{number:x}" * 3
        files["openmoji"][f"color/svg/{code}.svg"] = circle.format(8, colour).encode()
        files["@twemoji/svg"][f"{code.lower()}.svg"] = circle.format(10, colour).encode()
        files["fluentui-emoji"][f"icons/flat/{name.replace(' ', '-')}-default.svg"] = circle.format(12, colour).encode()
    files["openmoji"]["data/openmoji.json"] = json.dumps(annotations).encode()
    sheet = np.zeros((34, 34 * len(names), 4), np.uint8)
    sheet[:, :, 3] = 255
    sheet[:, :, 0] = np.repeat(np.arange(len(names)) * 10, 34)
    files["emoji-datasource"] = {"emoji.json": json.dumps(rows).encode(), "img/google/sheets/32.png": png(sheet)}
    files["emoji-datasource"]["img/apple/sheets/32.png"] = b"not to be read"
    packages = {
        name: package(tmp_path / f"{number}.tgz", content) for number, (name, content) in enumerate(files.items())
    }

    meta, images, labels = prepared(emoji.prepare, packages, tmp_path / "out")
    assert meta["classes"] == ["person-activity"]
    assert len(images) == 4 * len(names)
    assert meta["splits"] == {"train": (0, 36), "test": (36, 48)}
    assert meta["emoji"] == {"train": 9, "test": 3}
    google = [image[0, 0, 0] // 10 for image in images[36:] if (image == image[0, 0]).all()]
    families = {names[number].split()[1] for number in google}
    assert len(google) == 3
    assert len(families) == 1
    assert not labels.any()


def test_pictures_are_blended_with_white() -> None:
    rgba = np.zeros((2, 1, 4), np.uint8)
    rgba[0, 0] = (200, 100, 0, 128)
    square = on_white(rgba, 3)
    expected = np.full((3, 3, 3), 255.0)
    expected[0, 1] = np.array([200, 100, 0]) * (128 / 255) + 255 * (127 / 255)
    np.testing.assert_allclose(square, expected, rtol=0, atol=0.5)  # rounded to the nearest level
