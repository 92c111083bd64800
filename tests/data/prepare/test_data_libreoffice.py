"""The reader of LibreOffice's help, on packages of a few pages that are made here, and fetching it."""

import dataclasses
import hashlib

import pytest
from test_data_bible import prepared
from test_data_fetch import deb

from nomax.cli import main
from nomax.data import text
from nomax.data.prepare import fetch, libreoffice
from nomax.data.prepare.packages import Job
from nomax.data.registry import HELP_LANGUAGES, HELP_PAIRS, TEXTS, entry


def page(body: str) -> str:
    """A page with everything around its content that the packages' pages have."""
    return (
        '<!DOCTYPE html><html lang="en-US"><head><script>var a = "<p id=\'s\'>";</script></head><body>'
        '<header id="TopLeftHeader"><p id="top">LibreOffice Help</p></header>'
        f'<div id="DisplayArea" itemprop="softwareHelp">{body}</div><div id="SearchFrame"></div>'
        '<footer><div id="DEBUG"><p id="bm_module">Title is: Any</p></div></footer></body></html>'
    )


def package(path, pages: dict[str, str], language: str = "en-US"):
    folder = f"./usr/share/libreoffice/help/{language}"
    files = {f"{folder}/text/{name}.html": page(body).encode() for name, body in pages.items()}
    files[f"{folder}-variant/text/{TRAIN[0]}.html"] = page("<p id='a'>Of a variant</p>").encode()
    files[f"{folder}/noscript.html"] = page("<p id='n'>Not a page of help</p>").encode()
    path.write_bytes(deb(files))
    return path


def paragraphs(**texts: str) -> str:
    return "".join(f'<p id="{key}" class="paragraph">{words}</p>\n' for key, words in texts.items())


def pages_of(split: str, count: int) -> list[str]:
    return [name for name in (f"swriter/{number}" for number in range(1000)) if libreoffice.split_of(name) == split][
        :count
    ]


TRAIN, TEST, VALID = pages_of("train", 3), pages_of("test", 2), pages_of("valid", 2)
GERMAN = {
    TRAIN[0]: paragraphs(a="Öffnet eine Datei.", b="Schließt 3 Dateien.", c="Nur hier", d="=1+2", e="LibreOffice"),
    TRAIN[1]: paragraphs(a="Öffnet eine Datei.", b="Ein Fenster"),
    TRAIN[2]: paragraphs(a="Öffnet eine Datei."),
    TEST[0]: paragraphs(a="Schließt 12 Dateien!", b="Ein Bild", c="Ein Fensterchen", d="Ein Absatz"),
    TEST[1]: paragraphs(z="Etwas"),
    VALID[0]: paragraphs(a="ein bild", b="Eine Zeile"),
    VALID[1]: paragraphs(a="Nur auf Deutsch"),
}
ENGLISH = {
    TRAIN[0]: paragraphs(b="Closes 3 files.", a="Opens a file.", d="=1 + 3", e="LibreOffice"),
    TRAIN[1]: paragraphs(a="Opens a file.", b="A window"),
    TRAIN[2]: paragraphs(a="Opens a file."),
    TEST[0]: paragraphs(a="Shuts 12 files", b="A picture", c="A  window.", d="A paragraph"),
    TEST[1]: paragraphs(z=""),
    VALID[0]: paragraphs(a="An image", b="A line"),
}


def help_packages(folder) -> dict:
    return {
        "libreoffice-help-en-us": package(folder / "en.deb", ENGLISH),
        "libreoffice-help-de": package(folder / "de.deb", GERMAN, "de"),
    }


def test_paragraphs_are_joined_on_page_and_id_and_no_split_repeats_another(tmp_path) -> None:
    about, documents = prepared(libreoffice, "help-de-en", help_packages(tmp_path), tmp_path / "out")
    assert documents == {
        TRAIN[0]: ("train", ["Öffnet eine Datei.", "Schließt 3 Dateien."], ["Opens a file.", "Closes 3 files."]),
        TRAIN[1]: ("train", ["Ein Fenster"], ["A window"]),
        TEST[0]: ("test", ["Ein Bild", "Ein Absatz"], ["A picture", "A paragraph"]),
        VALID[0]: ("valid", ["Eine Zeile"], ["A line"]),
    }
    assert about["counts"] == {"train": 3, "valid": 1, "test": 2}
    assert about["dropped"] == {
        "paragraphs in one language only": 2,
        "paragraphs without words": 1,
        "paragraphs that are equal in both languages": 1,
        "repeated pairs": 2,
        "near-duplicates in test of pairs in other splits": 2,  # by its German, and by its English
        "near-duplicates in valid of pairs in other splits": 1,
    }


def test_the_other_direction_is_the_same_text(tmp_path) -> None:
    _, forth = prepared(libreoffice, "help-de-en", help_packages(tmp_path), tmp_path / "forth")
    _, back = prepared(libreoffice, "help-en-de", help_packages(tmp_path), tmp_path / "back")
    assert forth.keys() == back.keys()
    for name, (split, german, english) in forth.items():
        assert back[name][0] == split
        assert set(zip(german, english, strict=True)) == set(zip(back[name][2], back[name][1], strict=True))


SWITCH = (
    'Press <span id="sw1" class="switchinline"><span hidden="true" id="MAC1" class="MAC"><b>Command</b></span>\n'
    '<span hidden="true" id="default1"><span class="keycode">Ctrl</span></span></span>+F'
)


@pytest.mark.parametrize(
    ("html", "words"),
    [
        ("One &amp; two&nbsp;&#8230;\n  <b>three</b>four<br>five ", "One & two … threefour five"),
        ('<a name="x"></a><a href="y">See <span class="emph">Tools</span></a>, there', "See Tools, there"),
        ('An <img src="x.png" alt="Icon"> icon &lt;a&gt;', "An icon <a>"),
        (SWITCH, "Press Ctrl+F"),
        (SWITCH.replace('id="default1"', 'id="WIN1" class="WIN"'), "Press Command+F"),  # no default: the first
        ('<span class="bug">[not found]</span>, SUM', ", SUM"),
        ("<script>var x = 1;</script>Plain <!-- never --> text", "Plain text"),
        ("never <span>closed", "never closed"),
        ("closed</span></span> twice", "closed twice"),
        ('<span hidden="true">hidden</span> alone', "hidden alone"),
    ],
)
def test_markup_in_a_paragraph_is_flattened(html: str, words: str) -> None:
    assert libreoffice.paragraphs(page(f'<h2 id="h">Title</h2><p id="a">{html}</p><p id="b">next')) == {
        "h": "Title",
        "a": words,
        "b": "next",
    }


def test_only_content_with_an_id_is_read_once_and_without_code() -> None:
    body = (
        '<p>no id</p><p id="c" class="code">a = 1</p><p id="a">one</p><p id="a">embedded again</p><li id="l">item</li>'
    )
    assert libreoffice.paragraphs(page(body)) == {"a": "one"}
    assert libreoffice.paragraphs("no HTML at all \0 <<< <p id='x'>") == {}


def test_the_path_of_a_page_decides_its_split() -> None:
    splits = [libreoffice.split_of(f"scalc/{number}") for number in range(10_000)]
    expected = {"test": libreoffice.TEST * 100, "valid": libreoffice.VALID * 100}
    for split, count in expected.items():
        # Six standard deviations of a binomial count: one in a billion for a hash that is not skewed.
        assert abs(splits.count(split) - count) < 6 * count**0.5
    assert libreoffice.split_of("swriter/guide/anchor_object") == libreoffice.split_of("swriter/guide/anchor_object")


def test_packages_without_pages_or_with_huge_ones_are_refused(tmp_path, monkeypatch) -> None:
    packages = help_packages(tmp_path)
    package(packages["libreoffice-help-de"], {}, "de")
    with pytest.raises(ValueError, match=r"de\.deb holds no pages of help in de"):
        libreoffice.prepare(Job("help-de-en", packages, tmp_path, tmp_path))
    monkeypatch.setattr(libreoffice, "LARGEST_PAGE", 100)
    with pytest.raises(ValueError, match=r"en\.deb: usr/share/.*html has .* bytes; a page has 100 at most"):
        libreoffice.read(packages["libreoffice-help-en-us"], "en-us")


def test_every_two_languages_are_a_data_set() -> None:
    assert len(HELP_PAIRS) == len(HELP_LANGUAGES) * (len(HELP_LANGUAGES) - 1)
    known = entry("help-pt-br-zh-cn")
    assert known.languages == ("pt-br", "zh-cn")
    assert [each.name for each in known.packages] == ["libreoffice-help-pt-br", "libreoffice-help-zh-cn"]
    assert entry("help-en-gb-en").packages[1].name == "libreoffice-help-en-us"
    assert "help-fr-en" in TEXTS
    assert "help-fr-fr" not in TEXTS
    assert "help-fr-en" not in list(TEXTS)
    with pytest.raises(ValueError, match=r"no data set 'help-de-xx'.* takes two languages of ca, cs, .*zh-tw"):
        entry("help-de-xx")


def test_a_pair_that_is_not_listed_is_fetched_and_loaded_by_its_name(tmp_path, monkeypatch, capsys) -> None:
    files = help_packages(tmp_path)
    known = {}
    for language, file in zip(("en", "de"), files.values(), strict=True):
        known[language] = file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr("nomax.data.registry.HELP_LANGUAGES", known)
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path / "cache"))
    assert main(["data", "get", "help-en-de", "--from", *map(str, files.values())]) == 0
    assert "help-en-de: 3 train + 1 valid + 2 test pairs, 4 documents" in capsys.readouterr().err
    assert main(["data", "info", "help-en-de"]) == 0
    assert "MPL-2.0" in capsys.readouterr().out
    assert [pair.source for pair in text.load("help-en-de", "valid").pairs()] == ["A line"]
    assert text.load("help-en-de", "test", languages=("de", "en")).documents[0].pairs[0].source == "Ein Bild"


def test_a_version_that_the_registry_no_longer_has_says_what_to_do(tmp_path, monkeypatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "apt-get").write_text("#!/bin/sh\necho \"E: Version '1' for 'x' was not found\" >&2; exit 100\n")
    (programs / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    with pytest.raises(
        OSError, match=r"was not found\n.*apt-get update.*get libreoffice-help-de_4.*_all\.deb .*--from"
    ):
        fetch.get(dataclasses.replace(TEXTS["help-de-en"]), tmp_path / "cache")
