"""Folders of images, and the decoding of image files: what is there is found, what is broken is named."""

import json
import logging
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tiny_images
from pictures import encoded, fill, picture
from PIL import Image

from nomax import _compat, data
from nomax.cli import main
from nomax.data.images import files
from nomax.data.images.files import FolderSource
from nomax.data.source import DataError


def test_it_finds_what_torchvision_finds(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"dog": 2, "cat": 3, "Zebra": 1, "été": 1})
    (tmp_path / "train" / "cat" / "deeper").mkdir()
    picture(0).save(tmp_path / "train" / "cat" / "deeper" / "more.PNG")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "README").write_text("no class")
    _compat.torchvision()
    from torchvision.datasets import ImageFolder

    peer = ImageFolder(tmp_path / "train")
    source = FolderSource(tmp_path)
    assert list(source.classes) == peer.classes
    samples = [(source.name(index), int(source.labels[index])) for index in range(len(source))]
    assert sorted(samples) == sorted((str(path), label) for path, label in peer.samples)
    for index in range(len(source)):
        (number,) = (n for n, (path, _) in enumerate(peer.samples) if path == source.name(index))
        assert np.array_equal(np.asarray(source.image(index)), np.asarray(peer[number][0]))


def test_data_load_opens_a_folder(tmp_path: Path) -> None:
    source = data.load(fill(tmp_path, {"a": 1, "b": 2}), "train")
    assert isinstance(source, FolderSource)
    assert len(source) == 3
    assert source.labels.tolist() == [0, 1, 1]


def test_splits_are_subfolders_and_held_out_images_may_be_called_val(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 1})
    fill(tmp_path / "val", {"a": 2})
    assert len(FolderSource(tmp_path, "train")) == 1
    assert len(FolderSource(tmp_path, "val")) == 2
    assert len(FolderSource(tmp_path, "test")) == 2
    fill(tmp_path / "test", {"a": 3})
    assert len(FolderSource(tmp_path, "test")) == 3
    with pytest.raises(FileNotFoundError, match="no split 'holdout'; it has train, val, test"):
        FolderSource(tmp_path, "holdout")
    with pytest.raises(ValueError, match="plain name"):
        FolderSource(tmp_path / "train", "../val")


def test_a_folder_without_splits_is_for_training_only(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 1, "b": 1})
    assert len(FolderSource(tmp_path)) == 2
    with pytest.raises(FileNotFoundError, match="no split 'test'"):
        FolderSource(tmp_path, "test")


def names(source: data.Source) -> set[str]:
    return {source.name(index) for index in range(len(source))}


def parts(folder: Path, share: float) -> list[set[str]]:
    """The names of the images that are trained on, and of those held out."""
    return [names(data.load(folder, split, held_out=share)) for split in ("train", "test")]


def test_a_share_of_a_folder_without_a_test_split_is_held_out(tmp_path: Path) -> None:
    folder = fill(tmp_path / "a", {"cat": 80, "dog": 60, "rare": 1})
    train, test = parts(folder, 0.25)
    assert not train & test
    assert train | test == names(FolderSource(folder))
    assert 20 < len(test) < 50
    assert {Path(name).parent.name for name in test} >= {"cat", "dog"}
    assert str(folder / "rare" / "000.jpg") in train
    assert parts(folder, 0.4)[1] > test  # a larger share holds out these, too
    one, other = (data.load(folder, split, held_out=0.25) for split in ("train", "test"))
    assert one.classes == other.classes == ("cat", "dog", "rare")
    for source in (one, other):
        for index in (0, len(source) - 1):
            name = Path(source.name(index))
            assert source.classes[source.labels[index]] == name.parent.name
            assert np.array_equal(np.asarray(source.image(index)), np.asarray(Image.open(name)))
            assert source.read(index) == name.read_bytes()


def test_what_is_held_out_depends_on_the_name_of_an_image_alone(tmp_path: Path) -> None:
    folder = fill(tmp_path / "a", {"cat": 30, "dog": 30})
    train, test = parts(folder, 0.3)
    assert str(folder / "cat" / "000.jpg") in test  # 0x25e5 of 0x10000, where its SHA-256 begins, are 14.8 %
    assert str(folder / "cat" / "000.jpg") in parts(folder, 0.148 + 1e-4)[1] - parts(folder, 0.148 - 1e-4)[1]
    moved = folder.rename(tmp_path / "b")
    elsewhere = [{str(folder / Path(name).relative_to(moved)) for name in part} for part in parts(moved, 0.3)]
    assert elsewhere == [train, test]
    fill(moved, {"bird": 20})
    for number in range(20):
        picture(number).save(moved / "cat" / f"new {number}.jpg")
    for before, now in zip((train, test), parts(moved, 0.3), strict=True):
        assert {str(moved / Path(name).relative_to(folder)) for name in before} <= now


def test_a_class_keeps_an_image_to_train_on_whatever_the_share(tmp_path: Path) -> None:
    folder = fill(tmp_path, {"a": 3, "b": 1, "c": 2})
    train = data.load(folder, held_out=0.999)
    assert np.bincount(train.labels).tolist() == [1, 1, 1]
    assert len(data.load(folder, "test", held_out=0.999)) == 3


def test_images_in_an_array_are_held_out_by_their_numbers(tmp_path: Path) -> None:
    folder = tiny_images.write(tmp_path / "tiny", train=400, test=0)
    meta = json.loads((tmp_path / "tiny" / "meta.json").read_text())
    (tmp_path / "tiny" / "meta.json").write_text(json.dumps({**meta, "splits": {"train": [0, 400]}}))
    whole, train, test = (
        data.load(folder, split, held_out=s) for split, s in (("train", 0), ("train", 0.2), ("test", 0.2))
    )
    assert isinstance(train, data.ArraySource)
    assert 60 < len(test) < 100
    joined = np.concatenate([train.images, test.images])
    assert sorted(image.tobytes() for image in joined) == sorted(image.tobytes() for image in whole.images)


@pytest.mark.parametrize(
    ("share", "split", "words"),
    [
        (1.0, "train", "above 0 and below 1"),
        (-0.1, "test", "above 0 and below 1"),
        (float("nan"), "test", "above 0 and below 1"),
        (0.5, "val", "there are 'train' and 'test'"),
        (1e-9, "train", "holds out none of the 4 images"),
    ],
)
def test_a_share_that_makes_no_sense_is_refused(tmp_path: Path, share: float, split: str, words: str) -> None:
    fill(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(ValueError, match=words):
        data.load(tmp_path, split, held_out=share)


def test_a_validation_split_leaves_the_test_split_alone(tmp_path: Path) -> None:
    for split in ("train", "val"):
        fill(tmp_path / split, {"a": 20, "b": 20})
    parts = [data.load(tmp_path, split, held_out=0.5) for split in ("train", "test")]
    names = [{part.name(i) for i in range(len(part))} for part in parts]
    assert not names[0] & names[1]
    assert all("train" in name for name in names[0] | names[1])
    assert len(names[0] | names[1]) == 40
    assert len(data.load("digits", "train", held_out=0.5)) + len(data.load("digits", "test", held_out=0.5)) == 1297


def test_data_info_counts_what_is_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill(tmp_path, {"a": 20, "b": 20})
    counts = [len(data.load(folder, split, held_out=0.3)) for split in ("train", "test")]
    assert main(["data", "info", str(folder), "--held-out", "0.3"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("│ images  "))
    assert [int(cell) for cell in row.replace("│", " ").split()[1:]] == counts


def test_an_empty_class_is_an_error_or_left_out_where_the_user_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, {"a": 1, "c": 1})
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=f"{tmp_path / 'b'} has no image files"):
        FolderSource(tmp_path)
    with caplog.at_level(logging.WARNING, "nomax.data"):
        source = FolderSource(tmp_path, on_error="skip")
    assert list(source.classes) == ["a", "c"]
    assert source.labels.tolist() == [0, 1]
    assert list(source.problems.left_out) == [str(tmp_path / "b")]
    assert str(tmp_path / "b") in caplog.text


def test_a_folder_without_classes_says_what_is_expected(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "lonely.jpg")
    with pytest.raises(DataError, match="FOLDER/train/CLASS"):
        FolderSource(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        FolderSource(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_a_link_out_of_the_folder_is_refused(kind: str, tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", {"secret": 1})
    folder = fill(tmp_path / "inside", {"a": 1, "b": 1})
    link = folder / "a" / "link.jpg" if kind != "folder" else folder / "c"
    targets = {"file": outside / "secret" / "000.jpg", "folder": outside / "secret", "dangling": folder / "gone.jpg"}
    link.symlink_to(targets[kind])
    with pytest.raises(DataError, match=f"{link} is a symbolic link to"):
        FolderSource(folder)
    if kind != "dangling" or link.exists():
        assert len(FolderSource(folder, on_error="skip")) == 2


def test_links_inside_the_folder_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    folder = fill(tmp_path, {"a": 2, "b": 1})
    (folder / "b" / "again.jpg").symlink_to(folder / "a" / "000.jpg")
    (folder / "c").symlink_to(folder / "a", target_is_directory=True)
    (folder / "a" / "round").symlink_to(folder, target_is_directory=True)
    source = FolderSource(folder)
    assert list(source.classes) == ["a", "b", "c"]
    assert np.bincount(source.labels).tolist() == [2, 2, 2]


def test_names_that_are_not_unicode_are_read(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 1})
    path = os.fsencode(tmp_path / "a") + b"/caf\xe9.jpg"
    with open(path, "wb") as file:
        file.write(encoded(picture(5)))
    source = FolderSource(tmp_path)
    assert len(source) == 2
    assert source.image(1).size == (40, 30)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BROKEN = {
    "empty": (b"", "is empty"),
    "text": (b"hello", "is not a JPEG, PNG, WEBP, BMP, GIF or TIFF image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a JPEG"),
    "cut off": (encoded(picture(1, 200, 200))[:2000], "is a broken image: image file is truncated"),
    "cut off early": (encoded(picture(1))[:30], "is a"),
    "cut off PNG": (encoded(picture(1, 200, 200), "PNG")[:900], "is a broken image"),
    "noise in a PNG": (encoded(picture(1), "PNG")[:60] + b"x" * 500, "is a broken image"),
    "bomb": (bomb(9000, 9000), "has 9000×9000 pixels, more than the limit of 67,108,864"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_is_an_error_with_its_name_and_reason(kind: str, tmp_path: Path) -> None:
    content, reason = BROKEN[kind]
    fill(tmp_path, {"a": 1})
    path = tmp_path / "a" / "broken.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        FolderSource(tmp_path).image(1)
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)


def test_an_enormous_bomb_is_refused_too() -> None:
    with pytest.raises(DataError, match=r"x\.png .*pixels"):
        files.decode(bomb(100_000, 100_000), "x.png")


def test_a_file_that_disappeared_is_named(tmp_path: Path) -> None:
    source = FolderSource(fill(tmp_path, {"a": 1}))
    (tmp_path / "a" / "000.jpg").unlink()
    with pytest.raises(DataError, match=r"000\.jpg cannot be read: No such file"):
        source.image(0)


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    source = FolderSource(fill(tmp_path, {"a": 1}))
    with (tmp_path / "a" / "000.jpg").open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)  # takes no space on the disk
    with pytest.raises(DataError, match="larger than the limit of 256 MiB"):
        source.image(0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_every_format_is_decoded(kind: str) -> None:
    image = files.decode(encoded(picture(3), kind), "x")
    assert (image.mode, image.size) == ("RGB", (40, 30))
    assert (
        np.abs(np.asarray(image).astype(int) - np.asarray(picture(3))).mean() < 10
    )  # a GIF has 256 colours: about six levels a channel, 255 / 6 / 4 = 10.6 off on average


def test_grey_stays_grey_and_the_rest_becomes_rgb() -> None:
    grey = picture(3).convert("L")
    assert files.decode(encoded(grey, "PNG"), "x").mode == "L"
    assert files.decode(encoded(grey.convert("1"), "PNG"), "x").mode == "L"
    for mode, kind in (("P", "GIF"), ("CMYK", "JPEG"), ("YCbCr", "JPEG"), ("P", "PNG")):
        assert files.decode(encoded(picture(3).convert(mode), kind), "x").mode == "RGB", mode


def test_sixteen_bits_become_eight() -> None:
    values = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    image = files.decode(encoded(Image.fromarray(values), "PNG"), "x")
    assert image.mode == "L"
    assert np.array_equal(np.asarray(image), np.arange(256).reshape(16, 16))
    with pytest.raises(DataError, match=r"x\.tif has pixels of kind F"):
        files.decode(encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "x.tif")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(mode: str) -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    settings = {"transparency": 0} if mode == "P" else {}
    if mode == "P":
        image = Image.new("P", (2, 1), 0)
        image.putpalette([9, 9, 9, 0, 0, 0])
        image.putpixel((1, 0), 1)
    decoded = files.decode(encoded(image if mode == "P" else image.convert(mode), "PNG", **settings), "x")
    assert np.asarray(decoded).tolist() == [[[255, 255, 255], [0, 0, 0]]]


def test_decoding_a_jpeg_at_a_fraction_is_nearly_decoding_and_shrinking() -> None:
    data = encoded(picture(4, 1001, 803), quality=95)
    for box in ((0, 0, 1001, 803), (100, 50, 901, 651), (0, 0, 300, 300)):
        image = files.open_header(data, "x")
        smaller = files.decode_smaller(image, box, 100)
        fraction = (box[2] - box[0]) / (smaller[2] - smaller[0])
        assert fraction == pytest.approx(2 if box[2] == 300 else 4 if box[2] == 901 else 8)
        part = files.decoded(image, "x").resize((100, 100), Image.Resampling.BILINEAR, smaller)
        whole = files.decode(data, "x").resize((100, 100), Image.Resampling.BILINEAR, box)
        assert np.abs(np.asarray(part).astype(int) - np.asarray(whole)).mean() < 1  # less than one level on average
    image = files.open_header(data, "x")
    assert files.decode_smaller(image, (0, 0, 150, 150), 100) == (0, 0, 150, 150)
    assert files.decoded(image, "x").size == (1001, 803)
    png = files.open_header(encoded(picture(4, 300, 300), "PNG"), "x")
    assert files.decode_smaller(png, (0, 0, 300, 300), 10) == (0, 0, 300, 300)


def test_a_wrong_on_error_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_error"):
        FolderSource(fill(tmp_path, {"a": 1}), on_error="ignore")
