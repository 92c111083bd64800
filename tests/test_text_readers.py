"""The readers of the named sets, on packages of a few members that are made here, and fetching them."""

import bz2
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import struct
import tarfile
import zlib

import pytest
from test_data_fetch import deb

from nomax import data
from nomax.cli import main
from nomax.data import fetch, text
from nomax.data.arrays import Job
from nomax.data.text import bible, descriptions, manpages
from nomax.data.text.entries import TEXTS
from nomax.data.text.prepared import split_of
from nomax.data.text.roff import Paragraph, Unreadable, paragraphs


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


def test_verses_come_in_the_order_of_pyswords_index(tmp_path) -> None:
    pytest.importorskip("pysword")
    from pysword.books import BibleStructure

    structure = BibleStructure("nrsva")
    found = bible.read(bible_packages(tmp_path)["sword-text-web"], "nrsva")
    order = [verse for verse, words in found.items() if words]
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


# Manual pages

ENGLISH_PAGE = r""".\" A comment \
.TH OPEN 2 2023-01-22 "Linux man-pages 6.03"
.SH NAME
open \- open a file \" to the end
.SH SYNOPSIS
.nf
.B int open(const char *path);
.fi
.SH DESCRIPTION
The
.BR open ()
call opens
.IR path ", the \(dqfile\(dq" .
It says \[aq]no\[aq] to a\
nything \fIelse\fP; see
.UR https://kernel.org
the kernel
.UE .
.PP
.TP
.B O_RDONLY
Read only.
.TP
.BR "with spaces" " and tag"
Tagged.
.IP \[bu] 3
A point.
.IP "long tag"
A tagged point.
.SS "A part of it"

After an empty line\e0.
.EX
left out
.EE
"""
GERMAN_PAGE = r""".\" Erzeugt
.TH OPEN 2 "22. Januar 2023" "Linux man\-pages 6.03"
.SH BEZEICHNUNG
open \- öffnet eine Datei
.SH ÜBERSICHT
.nf
\fBint open(const char *\fP\fIpath\fP\fB);\fP
.fi
.SH BESCHREIBUNG
Der Aufruf \fBopen\fP() öffnet \fIpath\fP, die »Datei«.
.PP
.TP
\fBO_RDONLY\fP
Nur\ lesen.
.TP
\fBmit Leerzeichen und Marke\fP
Markiert.
.IP \[bu] 3
Ein Punkt.
.IP "lange Marke"
Ein markierter Punkt.
.SS "Ein Teil davon"
Nach einer Leerzeile\e0.
.PP
.SH ÜBERSETZUNG
Die deutsche Übersetzung wurde von jemandem erstellt.
"""


def test_a_page_becomes_plain_paragraphs() -> None:
    assert paragraphs(ENGLISH_PAGE) == [
        Paragraph("SH", "NAME"),
        Paragraph("P", "open - open a file"),
        Paragraph("SH", "SYNOPSIS"),
        Paragraph("SH", "DESCRIPTION"),
        Paragraph(
            "P",
            "The open() call opens path, the \"file\". It says 'no' to anything else; "
            "see the kernel <https://kernel.org>.",
        ),
        Paragraph("tag", "O_RDONLY"),
        Paragraph("body", "Read only."),
        Paragraph("tag", "with spaces and tag"),
        Paragraph("body", "Tagged."),
        Paragraph("IP", "A point."),
        Paragraph("tag", "long tag"),
        Paragraph("IP", "A tagged point."),
        Paragraph("SS", "A part of it"),
        Paragraph("P", "After an empty line\\0."),
    ]


@pytest.mark.parametrize("line", [".if n foo", ".de XX", r"the register \n(xy", r"the \[unheard] character"])
def test_a_page_that_programs_roff_is_not_guessed_at(line: str) -> None:
    with pytest.raises(Unreadable, match="it uses"):
        paragraphs(f".SH NAME\n{line}\n")


def man_packages(folder, pages: dict[str, tuple[str, str]]) -> dict:
    sides = {
        "manpages": {f"./usr/share/man/{name}.gz": ours for name, (ours, _) in pages.items()},
        "manpages-de": {f"./usr/share/man/de/{name}.gz": theirs for name, (_, theirs) in pages.items()},
        "manpages-dev": {"./usr/share/man/man3/untranslated.3.gz": "x"},
        "manpages-de-dev": {},
    }
    for name, files in sides.items():
        packed = {path: gzip.compress(page.encode()) for path, page in files.items()}
        (folder / f"{name}.deb").write_bytes(deb(packed))
    return {name: folder / f"{name}.deb" for name in sides}


def test_pages_with_the_same_paragraphs_are_aligned_and_others_counted(tmp_path) -> None:
    pages = {f"man2/page{letter}.2": (ENGLISH_PAGE, GERMAN_PAGE) for letter in "abcdefghijklmnopqrstuvwxyz"}
    pages |= {f"man2/{letter}page.2": (ENGLISH_PAGE, GERMAN_PAGE) for letter in "abcdefghijklmnopqrstuvwxyz"}
    pages["man2/other.2"] = (ENGLISH_PAGE, GERMAN_PAGE.replace("Nur\\ lesen.\n", ""))
    pages["man7/program.7"] = (".if n x", ".if n x")
    about, documents = prepared(manpages, "manpages-de", man_packages(tmp_path, pages), tmp_path / "out")
    assert about["dropped"]["pages whose translation has other paragraphs"] == 1
    assert about["dropped"]["pages that program roff"] == 1
    assert len(documents) == 52
    split, ours, theirs = documents["man2/pagea.2"]
    assert split == split_of("pagea")
    assert list(zip(ours, theirs, strict=True))[1:4] == [
        (paragraphs(ENGLISH_PAGE)[4].text, "Der Aufruf open() öffnet path, die »Datei«."),
        ("Read only.", "Nur lesen."),  # O_RDONLY is the same in both
        ("with spaces and tag", "mit Leerzeichen und Marke"),
    ]
    assert "NAME" not in ours
    assert not any("Übersetzung" in words for words in theirs)


def test_pages_of_a_series_stay_on_one_side() -> None:
    assert len({manpages._series(f"man7/iso_8859-{number}.7") for number in range(1, 17)}) == 1
    assert manpages._series("man2/open.2") != manpages._series("man2/close.2")


def test_about_one_in_twenty_documents_goes_to_each_held_out_split() -> None:
    splits = [split_of(f"page {number}") for number in range(10_000)]
    assert splits == [split_of(f"page {number}") for number in range(10_000)]
    for split in ("valid", "test"):
        assert 400 < splits.count(split) < 600


# Descriptions


def stanza(package: str, language: str, words: str, checksum: str | None = None) -> str:
    checksum = checksum or hashlib.md5(package.encode()).hexdigest()
    return f"Package: {package}\nDescription-md5: {checksum}\nDescription-{language}: {words}\n"


def index_file(folder, packages: int = 200, name: str = "debian-descriptions-en-de.tar"):
    """Packages number by number: two of every source package, which share a paragraph."""
    about, english, german = [], [], []
    for number in range(packages):
        package = f"lib{number}"
        about.append(f"Package: {package}\nSource: source{number // 2} (1.0)\nVersion: 1\n")
        english.append(
            stanza(
                package,
                "en",
                f"library {number}\n It does {number}\n things.\n .\n Common to all.\n  * fast\n    and big",
            )
        )
        german.append(
            stanza(
                package,
                "de",
                f"Bibliothek {number}\n Sie tut {number} Dinge.\n .\n Allen gemein.\n  - schnell\n und groß",
            )
        )
    english += [stanza("odd", "en", "odd\n One.\n .\n Two."), stanza("twin", "en", "library 0", "ab")]
    german += [stanza("odd", "de", "seltsam\n Eins und zwei."), stanza("only", "de", "nur")]
    contents = {
        "Packages.xz": lzma.compress("\n".join(about).encode()),
        "Translation-en.bz2": bz2.compress("\n".join(english).encode()),
        "Translation-de.bz2": bz2.compress("\n".join(german).encode()),
    }
    with tarfile.open(folder / name, "w") as archive:
        for member, content in contents.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return folder / name, contents


def test_descriptions_are_joined_split_by_source_and_never_repeated(tmp_path) -> None:
    file, _ = index_file(tmp_path)
    about, documents = prepared(descriptions, "descriptions-de", {"en,de": file}, tmp_path / "out")
    for number in range(200):
        split, ours, theirs = documents[f"lib{number}"]
        assert split == split_of(f"source{number // 2}")
        assert (ours[1], theirs[1]) == (f"It does {number} things.", f"Sie tut {number} Dinge.")
    common = [(split, ours, theirs) for split, ours, theirs in documents.values() if "Common to all." in ours]
    assert len(common) == 1
    assert common[0][0] == "test"  # rather than in training too
    assert common[0][1][2:] == ["Common to all.", "fast and big"]
    assert common[0][2][2:] == ["Allen gemein.", "schnell und groß"]
    assert about["dropped"]["descriptions whose translation has other paragraphs"] == 1
    assert not {"odd", "twin", "only"} & set(documents)


APT = """#!/bin/sh
# Stands in for apt-get: `update` fills ./lists, `indextargets` says what is there.
echo "$@" >> {calls}
case "$1" in
update) test -d lists/partial && cp {indices}/* lists/ ;;
indextargets)
    echo "bookworm-updates main main/i18n/Translation-en ./lists/Translation-en.bz2"
    for name in Packages.xz Translation-en.bz2 Translation-de.bz2; do
        echo "{release} main main/any/${{name%.*}} ./lists/$name"
    done ;;
esac
"""


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """An apt-get on the PATH whose indices are those of index_file; call it with the name of the release."""

    def install(release: str = "bookworm") -> None:
        programs, indices = tmp_path / "programs", tmp_path / "indices"
        programs.mkdir(exist_ok=True)
        indices.mkdir(exist_ok=True)
        for name, content in index_file(tmp_path)[1].items():
            (indices / name).write_bytes(content)
        script = programs / "apt-get"
        script.write_text(APT.format(calls=tmp_path / "calls", indices=indices, release=release))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    return install


def test_descriptions_come_from_apts_own_index_in_a_folder_of_their_own(apt, tmp_path, monkeypatch, capsys) -> None:
    apt()
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path / "cache"))
    assert main(["data", "get", "descriptions-de", "--keep"]) == 0
    # The index is another than the registry's, which is said, not refused.
    assert "newer than the registry's" in capsys.readouterr().err.replace("\n", " ")
    calls = (tmp_path / "calls").read_text()
    assert "Dir::State::Lists=./lists" in calls
    assert "Acquire::Languages=en,de" in calls
    corpus = text.load("descriptions-de", "train")
    assert corpus.languages == ("en", "de")
    assert data.meta("descriptions-de")["counts"]["train"] == len(corpus)
    assert (
        len(text.load("descriptions-de", "test", languages=("de", "en")))
        == data.meta("descriptions-de")["counts"]["test"]
    )

    kept = tmp_path / "cache/.descriptions-de.work/packages/debian-descriptions-en-de.tar"
    monkeypatch.setenv("PATH", str(tmp_path))
    again = fetch.get(TEXTS["descriptions-de"], tmp_path / "elsewhere", files=[kept])
    assert (again / "train.jsonl").read_bytes() == (tmp_path / "cache/descriptions-de/train.jsonl").read_bytes()
    assert main(["data", "info", "descriptions-de"]) == 0
    told = capsys.readouterr().out
    assert "by source package" in told
    assert f"{len(corpus):,}" in told
    assert main(["data", "list"]) == 0
    told = capsys.readouterr().out
    assert re.search("descriptions-de .* ready", told)
    assert re.search("manpages-de .* not here", told)


@pytest.mark.parametrize("release", ["trixie", "bookworm-security"])
def test_another_release_serves_but_one_that_changes_daily_does_not(release, apt, tmp_path) -> None:
    apt(release)
    if release == "trixie":
        assert (fetch.get(TEXTS["descriptions-de"], tmp_path / "cache") / "train.jsonl").is_file()
    else:
        with pytest.raises(OSError, match="found no Debian release with Packages, Translation-en, Translation-de"):
            fetch.get(TEXTS["descriptions-de"], tmp_path / "cache")


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
    folder = fetch.get(dataclasses.replace(entry, arrays={}), tmp_path / "cache", files=[*packages.values()])
    (folder / "test.jsonl").write_text("damage")
    with pytest.raises(ValueError, match=r"damaged: .*line 1 is not JSON.*nomax data get bible-en-es"):
        text.load("bible-en-es", "test", root=tmp_path / "cache")
