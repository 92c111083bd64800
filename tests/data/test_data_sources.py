"""data.load: names, paths and other libraries' data sets, and what it says when something is wrong."""

import io
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nomax import data
from nomax.cli import main
from nomax.data.commands.info import pixel_statistics, write_sheet
from nomax.data.prepare.small_images import parse_idx
from nomax.data.registry import IMAGES, TEXTS

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 5, 7, 3), np.uint8)
LABELS = np.arange(12) % 3


def prepared(folder: Path) -> Path:
    """A data set as `nomax data get` leaves it, written by hand."""
    folder.mkdir(parents=True)
    np.save(folder / "images.npy", PIXELS)
    np.save(folder / "labels.npy", LABELS)
    meta = {"name": folder.name, "classes": ["a", "b", "c"], "splits": {"train": [0, 9], "test": [9, 12]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_an_array_source_gives_images_labels_and_names() -> None:
    source = data.ArraySource(PIXELS, LABELS, ["a", "b", "c"], "toys")
    assert len(source) == 12
    assert source.labels.dtype == np.int64
    image = source.image(4)
    assert image.mode == "RGB"
    assert image.size == (7, 5)
    np.testing.assert_array_equal(np.asarray(image), PIXELS[4])
    assert "toys" in source.name(4)
    assert "4" in source.name(4)
    assert data.ArraySource(PIXELS[..., 0], LABELS, "abc", "toys").image(0).mode == "L"


@pytest.mark.parametrize(
    ("images", "labels", "classes", "message"),
    [
        (PIXELS.astype(np.float32), LABELS, "abc", "must be uint8"),
        (PIXELS[..., :2], LABELS, "abc", r"\[N, H, W, 3\]"),
        (PIXELS, LABELS[:-1], "abc", "one integer for each of the 12 images"),
        (PIXELS, LABELS * 0.5, "abc", "one integer for each"),
        (PIXELS, LABELS, "ab", "labels go from 0 to 2, but there are 2 classes"),
        (PIXELS, LABELS - 1, "abc", "labels go from -1"),
    ],
)
def test_an_array_source_refuses_what_does_not_fit(images, labels, classes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.ArraySource(images, labels, classes, "toys")


def test_a_prepared_folder_is_loaded_by_its_path(tmp_path) -> None:
    folder = prepared(tmp_path / "toys")
    source = data.load(folder, "test")
    np.testing.assert_array_equal(source.images, PIXELS[9:])
    np.testing.assert_array_equal(source.labels, LABELS[9:])
    with pytest.raises(ValueError, match="split 'val': toys has the splits train, test"):
        data.load(folder, "val")


def test_writing_into_a_loaded_image_leaves_the_file_alone(tmp_path) -> None:
    folder = prepared(tmp_path / "toys")
    source = data.load(folder)
    source.images[:] = 0
    np.testing.assert_array_equal(data.load(folder).images, PIXELS[:9])


def lying(shape: tuple[int, ...], kind: str = "<i8") -> bytes:
    """An .npy file whose header claims this shape, and that holds nothing."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


CONTENTS = {
    "labels that claim too much": ("labels.npy", lying((1 << 40,))),
    "labels that claim more than can be": ("labels.npy", lying((1 << 62, 1 << 62))),
    "images that claim too much": ("images.npy", lying((1 << 40, 4, 5), "|u1")),
    "deep json": ("meta.json", b"[" * 200_000),
    "not utf-8": ("meta.json", b'{"name": "\xff"}'),
    "a list": ("meta.json", b"[]"),
    "no splits": ("meta.json", b'{"name": "toys"}'),
    "odd splits": ("meta.json", b'{"name": "toys", "classes": ["a"], "splits": {"train": [0, "x"]}}'),
    "json": ("meta.json", b'{"name": '),
}


@pytest.mark.parametrize("damage", ["cut", "missing labels", *CONTENTS])
def test_a_damaged_prepared_folder_says_so(damage: str, tmp_path) -> None:
    folder = prepared(tmp_path / "toys")
    if damage == "cut":
        (folder / "images.npy").write_bytes((folder / "images.npy").read_bytes()[:300])
    elif damage == "missing labels":
        (folder / "labels.npy").unlink()
    else:
        file, content = CONTENTS[damage]
        (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        data.load(folder)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(FileNotFoundError, match=r"'fashon-mnist'.*did you mean fashion-mnist\?.*nomax data list"):
        data.load("fashon-mnist")


def test_an_unknown_split_lists_the_splits() -> None:
    with pytest.raises(ValueError, match="split 'val': fashion-mnist-small has the splits train, test"):
        data.load("fashion-mnist-small", "val")


def test_a_data_set_that_is_not_here_says_how_to_get_it(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="nomax data get cifar10"):
        data.load("cifar10", root=tmp_path)


def test_on_error_takes_two_words() -> None:
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', not 'ignore'"):
        data.load("fashion-mnist-small", on_error="ignore")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path))
    assert data.cache_folder() == tmp_path
    monkeypatch.setenv("NOMAX_DATA", "data")
    with pytest.raises(ValueError, match=r"NOMAX_DATA \(data\) names: a relative path .*give the full path\."):
        data.cache_folder()
    monkeypatch.delenv("NOMAX_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.cache_folder() == tmp_path / ".cache" / "nomax" / "data"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x0d\1" + bytes(8), "not an idx file of bytes: it begins with 00000d01"),
        (struct.pack(">HBB", 0, 8, 3) + bytes(3), "its header alone 16"),
        (struct.pack(">HBBII", 0, 8, 2, 3, 4) + bytes(11), "header says 3×4, but 11 bytes follow"),
        (struct.pack(">HBBII", 0, 8, 2, 1 << 31, 1 << 31), "bytes follow"),
    ],
)
def test_a_broken_idx_file_is_named(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^some file.*{message}"):
        parse_idx(content, "some file")


def test_descriptions_agree_with_numpy() -> None:
    statistics = pixel_statistics(data.ArraySource(PIXELS, LABELS, "abc", "toys"))
    np.testing.assert_allclose(statistics.mean, PIXELS.mean((0, 1, 2)) / 255)
    np.testing.assert_allclose(statistics.std, PIXELS.std((0, 1, 2)) / 255)
    assert statistics.sizes == "7×5 RGB"


def test_the_info_command_counts_the_images_of_classes(tmp_path, capsys) -> None:
    folder = prepared(tmp_path / "toys")
    np.save(folder / "labels.npy", np.array([0] * 5 + [1] * 3 + [2] + [0, 1, 2]))
    assert main(["data", "info", str(folder), "--split", "train"]) == 0
    out = capsys.readouterr().out
    for row in ("images +│ 9", "classes +│ 3", "smallest class +│ 1", "middle one +│ 3", "largest +│ 5"):
        assert re.search(row, out)


def test_the_info_command_describes_a_data_set_and_draws_a_sheet(tmp_path, capsys) -> None:
    from PIL import Image

    assert main(["data", "info", "fashion-mnist-small", "--sheet", str(tmp_path / "new" / "sheet.png")]) == 0
    out = capsys.readouterr().out
    for part in ("10,000", "2,000", "28×28 grey", "MIT", "0.2867"):
        assert part in out
    with Image.open(tmp_path / "new" / "sheet.png") as picture:
        assert np.asarray(picture).std() > 10
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sheet.png"]


def test_a_sheet_shows_a_class_in_each_row(tmp_path) -> None:
    from PIL import Image

    images = np.stack([np.full((8, 8), 100 * label, np.uint8) for label in LABELS])
    write_sheet(data.ArraySource(images, LABELS, "abc", "toys"), tmp_path / "sheet.png", rows=3, columns=2, side=10)
    with Image.open(tmp_path / "sheet.png") as picture:
        pixels = np.asarray(picture)
    assert pixels.shape[0] == 30
    for row in range(3):
        for column in range(2):
            x = pixels.shape[1] - 20 + 10 * column
            assert (pixels[10 * row : 10 * row + 8, x : x + 8] == 100 * row).all()


@pytest.mark.parametrize(
    ("asked", "message"), [("cifra10", "did you mean cifar10?"), ("/nowhere/at/all", "nomax data list")]
)
def test_the_info_command_explains_a_slip(asked: str, message: str, capsys) -> None:
    assert main(["data", "info", asked]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["data info", "train vit --out run --data"])
def test_a_file_is_told_what_data_is(command: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.en").write_text("a house\n")
    assert main([*command.split(), "train.en"]) == 2
    told = capsys.readouterr().err
    assert "train.en is a file" in told
    assert "FILE,FILE" in told


def test_the_list_command_shows_every_name(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path))
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for name, entry in (IMAGES | TEXTS).items():
        assert lines[name].rstrip().endswith("not here") == bool(entry.packages)
    assert "bundled" in lines["fashion-mnist-small"]
    assert "To get one that is not here: nomax data get NAME\n" in out
    assert f"kept in {tmp_path};" in out


@pytest.mark.parametrize("columns", [None, "20", "80"])
def test_the_list_is_never_cut(columns: str | None, capsys, monkeypatch, tmp_path) -> None:
    """Neither in a narrow window nor in a pipe, for which rich assumes one of 80 columns."""
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    for entry in TEXTS.values():
        numbers = [*entry.counts.values(), sum(entry.documents.values())]
        assert re.search(rf"{entry.name} +{' +'.join(f'{number:,}' for number in numbers)} ", out)
    assert max(map(len, out.splitlines()[:-1])) <= 80 or columns is None


def test_the_list_says_how_to_use_what_lacks_a_package(capsys, monkeypatch) -> None:
    monkeypatch.setattr("nomax.data.registry.find_spec", lambda name: None)
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert re.search("digits .*lacks a package", out)
    assert "To use digits: pip install scikit-learn\n" in out


def test_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    theirs = datasets.load_digits()
    train, test = data.load("digits", "train"), data.load("digits", "test")
    assert (len(train), len(test)) == (1297, 500)
    ours = np.concatenate([train.images, test.images]).astype(np.float64)
    np.testing.assert_allclose(ours / 255, theirs.images / 16, rtol=0, atol=0.5 / 255)  # rounded to a level
    np.testing.assert_array_equal(np.concatenate([train.labels, test.labels]), theirs.target)


def test_the_info_command_reads_folders_and_leaves_out_what_it_may(tmp_path, capsys) -> None:
    from PIL import Image

    for index, image in enumerate(PIXELS):
        for split in ("train", "val"):
            file = tmp_path / split / f"class-{LABELS[index]}" / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    assert main(["data", "info", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("train" in line and "test" in line and "val" not in line for line in lines)  # val is the test split
    assert any(line.split()[1:] == ["size", "│", "7×5", "RGB", "│", "7×5", "RGB", "│"] for line in lines)

    (tmp_path / "train" / "class-1" / "4.png").write_bytes(b"broken")
    assert main(["data", "info", str(tmp_path)]) == 2
    assert "4.png" in capsys.readouterr().err
    assert main(["data", "info", str(tmp_path), "--on-error", "skip", "--sheet", str(tmp_path / "sheet.png")]) == 0
    assert "11 images" in capsys.readouterr().out  # that were read


@pytest.mark.parametrize("layout", ["{split}/0.tar", "{split}-0.tar"])
def test_a_folder_of_shards_is_told_from_a_folder_of_images(layout: str, tmp_path) -> None:
    import io
    import tarfile

    from PIL import Image

    for split, part in {"train": slice(0, 9), "val": slice(9, 12)}.items():
        tar = tmp_path / layout.format(split=split)
        tar.parent.mkdir(exist_ok=True)
        with tarfile.open(tar, "w") as archive:
            for key, (image, label) in enumerate(zip(PIXELS[part], LABELS[part], strict=True)):
                png = io.BytesIO()
                Image.fromarray(image).save(png, "PNG")
                for name, content in {f"{key:03}.png": png.getvalue(), f"{key:03}.cls": str(label).encode()}.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    for split, part in {"train": slice(0, 9), "test": slice(9, 12)}.items():
        source = data.load(tmp_path, split)
        np.testing.assert_array_equal(source.labels, LABELS[part])
        np.testing.assert_array_equal(np.asarray(source.image(2)), PIXELS[part][2])


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import nomax.data.images.batches, nomax.data.images.shards; nomax.data.located('a,b')", "nomax.data.text"),
        ("import nomax.data.text.batches", "nomax.data.images"),
    ],
)
def test_images_do_not_import_text_nor_text_images(code: str, absent: str) -> None:
    code = f"import sys; {code}; print([name for name in sys.modules if name.startswith({absent!r})])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"
