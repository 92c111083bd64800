"""Data that is made to do harm: it gets an error that names it, in little memory, and nothing hangs.

What might hang or fill the memory runs in a process of its own that may take 60 seconds of CPU time, whatever the load
of the machine, and a few hundred MB more than it has after its imports.
"""

import io
import os
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harmful import binary, good, header, limited, padded, pax, record
from pictures import encoded, picture

from nomax.data.images import files, shard_index
from nomax.data.images.files import Strings
from nomax.data.images.shard_index import Index
from nomax.data.images.shards import ShardSource
from nomax.data.source import DataError
from nomax.data.tar import DamagedTar, members

ATTACKS: dict[str, bytes] = {
    "negative size of an image": header("x.png", binary(-5)) + header("x.cls", 1) + padded(b"0"),
    "negative size that leads back": header("x.png", binary(-100_000)),
    "negative size of a label": header("x.cls", binary(-1)),
    "negative size in octal": header("x.png", b"-0000000512\0"),
    "negative size in a pax header": pax(record("size", "-512")) + header("x.png", 0),
    "size with a sign": pax(record("size", "+5")) + header("x.png", 0),
    "size of many digits": pax(record("size", "9" * 5000)) + header("x.png", 0),
    "size beyond 64 bits": header("x.png", binary(1 << 90)),
    "size beyond the end": header("x.png", binary(1 << 40)),
    "size of a folder's data": header("x/", binary(1 << 61), b"D"),
    "negative long name": header("././@LongLink", binary(-1), b"L") + padded(b"x") + header("x.png", 0),
    "huge long name": header("././@LongLink", binary(1 << 40), b"L") + padded(b"x") + header("x.png", 0),
    "huge pax header": header("PaxHeader", binary(1 << 40), b"x") + padded(b"x") + header("x.png", 0),
    "negative pax header": header("PaxHeader", binary(-600), b"x") + padded(b"x") + header("x.png", 0),
    "pax record of length 0": header("PaxHeader", 7, b"x") + padded(b"0 a=bc\n") + header("x.png", 0),
    "pax record of length -9": header("PaxHeader", 8, b"x") + padded(b"-9 a=bc\n") + header("x.png", 0),
    "pax record that is too long": header("PaxHeader", 7, b"x") + padded(b"90 a=b\n") + header("x.png", 0),
    "pax header of digits": header("PaxHeader", 60_000, b"x") + padded(b"1" * 60_000) + header("x.png", 0),
    "odd sparse map": pax(record("GNU.sparse.major", "0"), record("GNU.sparse.map", "a,b")) + header("x.png", 0),
    "odd sparse size": pax(record("GNU.sparse.size", "x")) + header("x.png", 0),
    "sparse member": header("x.png", 512, b"S") + padded(b"x" * 512),
    "sparse member without its maps": header("x.png", 0, b"S", {482: b"\1"}),
    "hard link": header("x.png", 0, b"1", {157: b"0.png"}),
    "device": header("x.png", 0, b"3"),
    "bits for a checksum": header("x.png", 0)[:148] + b"\xff" * 8 + header("x.png", 0)[156:],
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What ShardSource says of every attack, once with each way to handle errors."""
    folder = tmp_path_factory.mktemp("attacks")
    cases = {}
    for number, (name, attack) in enumerate(ATTACKS.items()):
        place = folder / str(number)
        place.mkdir()
        (place / "0.tar").write_bytes(good(0) + good(1) + attack + bytes(1024))
        cases |= {f"{name}: {way}": [str(place), "train", way] for way in ("raise", "skip")}
    return limited("ShardSource", cases)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_harmful_tar_is_an_error_with_its_name_or_is_left_out(
    name: str, attacked: dict[str, tuple[str, str]]
) -> None:
    kind, text = attacked[f"{name}: raise"]
    assert kind == "DataError"
    assert "0.tar" in text
    assert len(text) < 500
    kind, text = attacked[f"{name}: skip"]
    assert kind == "fine"
    assert "2 images, 1 classes" in text


def test_many_extended_headers_before_a_member_are_followed(tmp_path: Path) -> None:
    chain = b"".join(pax(record("comment", str(number))) for number in range(3000))
    (tmp_path / "0.tar").write_bytes(good(0) + chain + good(1) + bytes(1024))
    assert len(ShardSource(tmp_path)) == 2


def test_a_name_in_a_pax_header_is_bounded_and_used(tmp_path: Path) -> None:
    data = encoded(picture(0), "PNG")
    named = pax(record("path", "a/b.png"), record("size", str(len(data)))) + header("short", 0) + padded(data)
    (tmp_path / "0.tar").write_bytes(named + header("a/b.cls", 1) + padded(b"0") + bytes(1024))
    source = ShardSource(tmp_path)
    assert source.name(0).endswith("0.tar: a/b.png")
    assert source.read(0) == data


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_walker_finds_what_tarfile_finds(form: int) -> None:
    random = np.random.default_rng(form)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for number in range(60):
            name = ("a/b.png", "é" * 30, "d/" * 60 + f"{number}.jpg", "x" * 100, "y" * 250)[number % 5]
            member = tarfile.TarInfo(name if form != tarfile.USTAR_FORMAT or number % 5 < 4 else "z")
            member.type = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)[max(0, number % 7 - 3)]
            member.mtime, member.linkname = number + 0.5, "0.png" if number % 7 > 4 else ""
            member.size = int(random.integers(0, 1500)) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        wanted = [(m.name, m.isreg(), m.isdir(), m.size, m.offset, m.offset_data) for m in archive]
    read = [(m.name, m.kind == "file", m.kind == "folder", m.size, m.header, m.start) for m in members(file)]
    assert read == wanted
    assert len(read) == 60


def test_no_bytes_in_a_header_do_more_than_damage_it() -> None:
    random = np.random.default_rng(0)
    whole = pax(record("path", "a.png"), record("size", "3")) + header("a", 3) + padded(b"abc") + good(0) + bytes(1024)
    for _ in range(3000):
        damaged = bytearray(whole)
        for block in random.integers(0, 4, 2).tolist():
            place = int(random.choice([0, 124, 125, 135, 148, 156, 257, 345, 482, *random.integers(0, 512, 3)]))
            damaged[512 * block + place] = int(random.integers(0, 256))
            if random.random() < 0.8:  # a checksum that is right, so that more than the checksum is tested
                content = damaged[512 * block : 512 * block + 512]
                content[148:156] = b" " * 8
                damaged[512 * block + 148 : 512 * block + 156] = f"{sum(content):06o}\0 ".encode()
        last = -1
        try:
            for member in members(io.BytesIO(bytes(damaged))):
                assert last < member.header < member.start <= member.end
                assert member.size >= 0
                last = member.header
        except DamagedTar:
            pass


def test_a_shard_of_problems_tells_a_thousand_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_index, "MOST_PROBLEMS", 10)
    lone = b"".join(header(f"l{number}.cls", 1) + padded(b"0") for number in range(50))
    (tmp_path / "0.tar").write_bytes(good(0) + lone + bytes(1024))
    problems = list(ShardSource(tmp_path, on_error="skip").problems.left_out.values())
    assert len(problems) == 11
    assert problems[-1].endswith("0.tar: 40 more members have problems.")


def test_half_a_character_is_no_label(tmp_path: Path) -> None:
    label = b'{"label": "\\ud800"}'
    (tmp_path / "0.tar").write_bytes(
        good(0) + header("x.json", len(label)) + padded(label) + header("x.png", 1) + padded(b"x") + bytes(1024)
    )
    with pytest.raises(DataError, match=r"x\.json holds no label"):
        ShardSource(tmp_path)


# Labels and lists of classes


def labelled(folder: Path, label: bytes) -> Path:
    (folder / "0.tar").write_bytes(
        good(0) + header("x.png", 1) + padded(b"x") + header("x.cls", len(label)) + padded(label) + bytes(1024)
    )
    return folder


def test_an_absurd_label_costs_nothing(tmp_path: Path) -> None:
    labelled(tmp_path, b"9999999")
    kind, text = limited("ShardSource", {"label": [str(tmp_path)]}, megabytes=100)["label"]
    assert kind == "DataError"
    assert "0.tar: the label 9999999 would make 10,000,000 classes" in text
    assert "there may be 100,000" in text
    labelled(tmp_path, b"99999")
    assert len(ShardSource(tmp_path).classes) == 100_000
    labelled(tmp_path, b"9" * 18)
    with pytest.raises(DataError, match="would make 1,000,000,000,000,000,000 classes"):
        ShardSource(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[" * 200_000, "cannot be read"), (b'["a", "b", "b"]', "names a class twice: 'b'"), (b"\xff", "cannot be read")],
)
def test_an_odd_list_of_classes_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    labelled(tmp_path, b"0")
    (tmp_path / "classes.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"classes\.json {message}"):
        ShardSource(tmp_path)


def test_a_huge_list_of_classes_is_not_read(tmp_path: Path) -> None:
    labelled(tmp_path, b"0")
    (tmp_path / "classes.txt").touch()
    os.truncate(tmp_path / "classes.txt", 1 << 40)
    kind, text = limited("ShardSource", {"list": [str(tmp_path)]})["list"]
    assert kind == "DataError"
    assert "classes.txt cannot be read: it has more than 67,108,864 bytes" in text


def test_a_pattern_names_a_million_shards_at_most(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/{{000..999}}-{{000..999}}-{{000..999}}.tar"
    kind, text = limited("ShardSource", {"pattern": [pattern]}, megabytes=100)["pattern"]
    assert kind == "ValueError"
    assert "names 1,000,000,000 shards; at most 1,000,000 are allowed" in text


# Saved indexes


def npy(shape: tuple[int, ...], data: bytes = b"", kind: str = "<i8") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """The .npz file with its members changed."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in contents.items():
            archive.writestr(name, change(name, content))


def expanding(path: Path) -> None:
    """All of it zeros but the stamp: 400 MB in half a MB."""
    with zipfile.ZipFile(path) as archive:
        stamp = archive.read("stamp.npy")
        names = archive.namelist()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("stamp.npy", stamp)
        for name in set(names) - {"stamp.npy"}:
            with archive.open(name, "w") as member:
                size = 50_000_000
                member.write(npy((size // 8,)))
                for _ in range(size // 1_000_000):
                    member.write(bytes(1_000_000))


def flipped(path: Path) -> None:
    """Compressed, and damaged inside: numpy's reader lets zlib.error pass."""
    rewritten(path, lambda _, content: content, zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("offsets.npy").header_offset
    content = bytearray(path.read_bytes())
    place += 30 + struct.unpack_from("<H", content, place + 26)[0] + struct.unpack_from("<H", content, place + 28)[0]
    content[place : place + 8] = b"\xff" * 8
    path.write_bytes(content)


def claims(shape: tuple[int, ...], kind: str = "<i8") -> Callable[[Path], None]:
    return lambda path: rewritten(path, lambda name, old: old if name == "stamp.npy" else npy(shape, b"", kind))


def one(member: str, numbers: list[int], kind: str = "<i8") -> Callable[[Path], None]:
    content = npy((len(numbers),), np.array(numbers, kind).tobytes(), kind)
    return lambda path: rewritten(path, lambda name, old: content if name == f"{member}.npy" else old)


def lying_directory(path: Path) -> None:
    """A zip directory that gives a member 2 ** 62 bytes."""
    content = bytearray(path.read_bytes())
    place = content.rfind(b"PK\1\2")
    length = struct.unpack_from("<H", content, place + 28)[0]
    extra = struct.pack("<HHQQ", 1, 16, 1 << 62, 1 << 62)
    struct.pack_into("<II", content, place + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", content, place + 30, len(extra))
    end = place + 46 + length
    content[end:end] = extra
    tail = content.rfind(b"PK\5\6")
    struct.pack_into("<I", content, tail + 12, struct.unpack_from("<I", content, tail + 12)[0] + len(extra))
    path.write_bytes(content)


INDEXES: dict[str, Callable[[Path], None]] = {
    "expands": expanding,
    "damaged where compressed": flipped,
    "claims a terabyte": claims((1 << 40,)),
    "claims more than can be": claims((1 << 62, 1 << 62)),
    "claims less than nothing": claims((-1,)),
    "of objects": claims((2,), "|O"),
    "of floats": claims((0,), "<f8"),
    "a directory that lies": lying_directory,
    "a huge file": lambda path: os.truncate(path, 1 << 40),
    "offsets that overflow": one("offsets", [(1 << 63) - 1, 0]),
    "sizes that overflow": one("sizes", [(1 << 63) - 1, 0]),
    "negative sizes": one("sizes", [-1, 0]),
    "labels beyond the texts": one("labels", [0, 7], "<i4"),
    "names that end before they begin": one("names_ends", [0, 9, 2]),
    "names that end beyond the end": one("names_ends", [0, 5, 1 << 40]),
    "fewer offsets than names": one("offsets", [0]),
}


def test_a_harmful_index_is_made_anew(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "0.tar").write_bytes(good(0) + good(1) + bytes(1024))
    before = ShardSource(whole)
    cases = {}
    for number, (name, attack) in enumerate(INDEXES.items()):
        place = tmp_path / str(number)
        shutil.copytree(whole, place)  # and its times, on which the index depends
        saved = place / "0.tar.index.npz"
        attack(saved)
        assert saved.stat().st_size < 10_000_000 or name == "a huge file"
        cases[name] = [str(place)]
    call = "lambda place: [(source := ShardSource(place)).read(n)[:4].hex() for n in (0, 1)] + [source.name(1)]"
    for name, (kind, text) in limited(call, cases, megabytes=250).items():
        assert kind == "fine", (name, text)
        assert text == str([before.read(n)[:4].hex() for n in (0, 1)] + [f"{cases[name][0]}/0.tar: 1.png"]), name
        assert (Path(cases[name][0]) / "0.tar.index.npz").stat().st_size < 10_000  # the new one
    # Where the saved one was taken, nothing above was tested: a fitting one must be.
    saved = whole / "0.tar.index.npz"
    stamp = saved.stat().st_mtime_ns
    rewritten(saved, lambda _, content: content)
    os.utime(saved, ns=(stamp, stamp))
    ShardSource(whole)
    assert saved.stat().st_mtime_ns == stamp


def test_an_index_cannot_ask_for_an_image_larger_than_allowed() -> None:
    def index(size: int) -> Index:
        numbers = np.array([size])
        return Index(Strings(["a"]), np.array([0]), numbers, np.array([0], np.int32), Strings(["0"]), Strings([]))

    assert shard_index._is_sound(index(files.MOST_BYTES), 1 << 40)
    assert not shard_index._is_sound(index(files.MOST_BYTES + 1), 1 << 40)
