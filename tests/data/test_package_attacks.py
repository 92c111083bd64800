"""Packages and pictures that are made to do harm: an error names them, in little memory."""

import gzip
import io
import lzma
import os
import struct
import tarfile
import zlib
from pathlib import Path

import pytest
from harmful import binary, header, limited

from nomax.data.prepare import fetch, packages
from nomax.data.prepare.fetch import MOST_SPARE, check_size
from nomax.data.registry import Package

# Packages


def gluttonous() -> bytes:
    """A small .xz file whose header asks for a dictionary of 4 GB."""
    content = bytearray(lzma.compress(b"Package: x\n", check=lzma.CHECK_CRC32))
    size = 4 * (content[12] + 1)
    assert content[12 + 2] == 0x21  # LZMA2; then the length of its properties, 1, and the size of the dictionary
    content[12 + 4] = 40
    content[12 + size - 4 : 12 + size] = struct.pack("<I", zlib.crc32(content[12 : 12 + size - 4]))
    return bytes(content)


def packed(files: dict[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


READ = "lambda file: [packages.unpack(data, Path(name).suffix, f'{file}: {name}') for name, data in "
READ += "packages.members(Path(file), lambda name: name.startswith('wanted'))]"


def test_bombs_in_a_package_are_named(tmp_path: Path) -> None:
    """The registry's checksums keep them out, but the readers do not rely on it."""
    zeros = bytes(10_000_000)
    contents = {
        "xz bomb": packed({"wanted.xz": lzma.compress(zeros, preset=0) * 30}),
        "gz bomb": packed({"wanted": b"", "wanted.gz": gzip.compress(zeros) * 30}),
        "xz that asks for 4 GB": packed({"wanted.xz": gluttonous()}),
        "bomb around the whole": gzip.compress(header("wanted", 150_000_000)) + gzip.compress(zeros) * 15,
        "bomb that is skipped": lzma.compress(header("other", 150_000_000)) + lzma.compress(zeros, preset=0) * 15,
        "outer xz that asks for 4 GB": gluttonous(),
        "member larger than allowed": header("wanted", binary(1 << 40)),
        "negative size": header("wanted", binary(-512)),
        "huge pax header": header("x", binary(1 << 40), b"x"),
        "cut off": packed({"wanted.xz": lzma.compress(os.urandom(10_000))})[:5000],
        "cut off inside": packed({"wanted.xz": lzma.compress(os.urandom(10_000))[:5000]}),
        "not compressed at all": packed({"wanted.xz": b"hello"}),
    }
    cases = {}
    for number, (name, content) in enumerate(contents.items()):
        assert len(content) < 1_000_000
        place = tmp_path / str(number)
        place.mkdir()
        (place / "package.tgz").write_bytes(content)
        cases[name] = [str(place / "package.tgz")]
    for name, (kind, text) in limited(READ, cases, megabytes=800).items():
        assert kind == "ValueError", (name, kind, text)
        assert cases[name][0] in text, (name, text)
        assert ("unpacks to more than" in text) == ("bomb" in name), (name, text)


def test_several_streams_in_one_file_are_unpacked_one_after_the_other() -> None:
    for suffix, pack in ((".xz", lzma.compress), (".gz", gzip.compress)):
        streams = pack(b"one ") + pack(b"two ") + (bytes(8) if suffix == ".xz" else b"") + pack(bytes(200_000))
        assert packages.unpack(streams, suffix, "x") == b"one two " + bytes(200_000)
    assert packages.unpack(b"as it is", "", "x") == b"as it is"
    for suffix in (".xz", ".gz"):
        with pytest.raises(ValueError, match=r"the title cannot be read: "):
            packages.unpack(b"hello, this is not compressed", suffix, "the title")
    assert packages.unpack(gzip.compress(b"12345"), ".gz", "x", most=5) == b"12345"
    with pytest.raises(ValueError, match="x unpacks to more than 4 bytes"):
        packages.unpack(gzip.compress(b"12345"), ".gz", "x", most=4)


@pytest.mark.parametrize("size", [b"-100      ", b"9999999999", b"x         ", b"          "])
def test_an_odd_size_in_a_debian_package_is_an_error(size: bytes, tmp_path: Path) -> None:
    file = tmp_path / "odd.deb"
    file.write_bytes(b"!<arch>\n" + b"debian-binary   " + b"0" * 32 + size + b"`\n" + b"2.0\n")
    with pytest.raises(ValueError, match=r"odd\.deb is damaged: debian-binary has"):
        list(packages.members(file, lambda name: True))


def test_a_download_far_larger_than_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package("npm", "tiny", "1.0.0", 100, "0" * 64)
    check_size(package, MOST_SPARE, "it")
    with pytest.raises(ValueError, match=r"it: 67,110,465 bytes for tiny 1\.0\.0, which .* limit is 67,110,464"):
        check_size(package, 16 * 100 + MOST_SPARE + 1, "it")

    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "npm").write_text("#!/bin/sh\ntruncate -s 1G tiny-1.0.0.tgz\nexec sleep 600\n")
    (programs / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with pytest.raises(ValueError, match=r"npm pack .*tiny@1\.0\.0`: 1,073,7.* bytes for tiny"):  # and npm is ended
        fetch.download(package, tmp_path, lambda *_: None)
    assert not list(tmp_path.glob("downloading-*"))


# Images


def tiff(width: int, height: int, strip: int) -> bytes:
    """A grey TIFF of so many pixels in one strip that claims so many bytes."""
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    entries += [(273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, height), (279, 4, 1, strip)]
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0))
    return start + b"".join(chunks) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    content = (
        b"VP8X" + struct.pack("<II", 10, 0) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + struct.pack("<I", 4 + len(content)) + b"WEBP" + content


def test_pictures_made_to_fill_the_memory_are_refused(tmp_path: Path) -> None:
    zeros = zlib.compress(bytes(300_000_000), 1)
    contents = {
        "png of many pixels": png(60_000, 60_000),
        "png with a large text": png(4, 4, chunk(b"zTXt", b"a\0\0" + zeros)),
        "png with a large profile": png(4, 4, chunk(b"iCCP", b"a\0\0" + zeros)),
        "tiff of many pixels": tiff(1 << 31, 1 << 31, 100),
        "tiff with a large strip": tiff(8000, 8000, (1 << 32) - 1),
        "gif of many pixels": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
        "bmp of many pixels": b"BM"
        + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 1 << 30, 1 << 30, 1, 24, 0, 0, 0, 0, 0, 0),
        "webp of many pixels": webp(1 << 24, 1 << 24),
    }
    cases = {}
    for name, content in contents.items():
        path = tmp_path / name.replace(" ", "-")
        path.write_bytes(content)
        cases[name] = [str(path)]
    outcomes = limited("lambda place: files.decode(Path(place).read_bytes(), place).size", cases, megabytes=300)
    for name, (kind, text) in outcomes.items():
        assert kind == "DataError", (name, kind, text)
        assert cases[name][0] in text
