"""Reading text: the named sets' entries, and the user's own files with what can be wrong with them."""

import importlib
import json
import re
import subprocess
import sys

import pytest

from nomax import data
from nomax.cli import main
from nomax.data import text
from nomax.data.registry import TEXTS
from nomax.data.text import Pair


@pytest.mark.parametrize("entry", TEXTS.values(), ids=TEXTS)
def test_every_entry_is_complete(entry) -> None:
    assert list(entry.counts) == list(entry.documents) == ["train", "valid", "test"]
    assert min(entry.documents.values()) > 20
    module, _, function = entry.reader.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert entry.name.endswith(entry.languages[1])
    assert set(entry.checksums) == {"train.jsonl", "valid.jsonl", "test.jsonl"}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in entry.checksums.values())
    for package in entry.packages:
        assert package.size > 0
        assert re.fullmatch("[0-9a-f]{64}", package.sha256)


def test_no_name_is_both_images_and_text() -> None:
    from nomax.data.registry import IMAGES

    assert not set(IMAGES) & set(TEXTS)


def test_reading_text_imports_no_library_that_it_does_not_need() -> None:
    code = (
        "import sys, nomax, nomax.data.text; "
        "print({'torch', 'sentencepiece', 'pysword', 'sacrebleu', 'rich'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "set()"


def test_a_set_that_is_not_here_says_how_to_get_it(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"7 MB.*nomax data get bible-en-es"):
        text.load("bible-en-es", root=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"did you mean bible-en-es\?"):
        text.load("bible-en-se", root=tmp_path)


def test_text_is_not_taken_for_images() -> None:
    with pytest.raises(ValueError, match=r"bible-en-es is text, not images: nomax\.data\.text\.load"):
        data.load("bible-en-es")


def write_jsonl(path, *documents) -> None:
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8")


RUTH = {"name": "Ruth 1", "en": ["In the days", "They went"], "es": ["En los días", "Y fueron"]}


def test_jsonl_documents_are_read_in_either_direction(tmp_path) -> None:
    write_jsonl(tmp_path / "books.jsonl", RUTH, {"en": ["No  name"], "es": ["Sin nombre"], "year": 1909})
    corpus = text.load(tmp_path / "books.jsonl")
    assert corpus.languages == ("en", "es")
    assert corpus.documents[0].pairs == (Pair("In the days", "En los días"), Pair("They went", "Y fueron"))
    assert corpus.documents[1].pairs == (Pair("No name", "Sin nombre"),)
    turned = text.load(tmp_path / "books.jsonl", languages=("es", "en"))
    assert turned.documents == corpus.turned().documents
    assert (len(corpus), turned.languages) == (3, ("es", "en"))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**RUTH, "es": ["Una"]}, r"line 2 \(Ruth 1\) has 2 segments in en, but 1 segments in es"),
        ({**RUTH, "es": ["Una", " "]}, r"line 2 \(Ruth 1\): segment 2 is empty in es"),
        ({"name": "Ruth 1", "en": ["In"], "fr": ["En"]}, r"unknown language mark 'es'; it has en, fr"),
        ({**RUTH, "es": "Una"}, r"'es' must be a list of strings"),
        ({**RUTH, "en": [], "es": []}, r"has no segments"),
        (["a list"], r"line 2 must be an object"),
        ({**RUTH, "en": ["In", "Half of \ud83d"]}, r"line 2 has \\ud83d, half of a character"),
    ],
)
def test_a_wrong_document_is_named_with_its_line(document, message, tmp_path) -> None:
    write_jsonl(tmp_path / "books.jsonl", RUTH, document)
    with pytest.raises(ValueError, match=message):
        text.load(tmp_path / "books.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"name": ', ""),
        (f'{{"year": {"9" * 5000}, "en": ["a"], "es": ["b"]}}', "Exceeds the limit"),
        ('{"en": ["a"], "en": ["c"], "es": ["b"]}', "'en' occurs twice"),
    ],
)
def test_a_line_that_is_not_json_is_named(line: str, message: str, tmp_path) -> None:
    (tmp_path / "books.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=rf"books\.jsonl, line 1 is not JSON: .*{message}"):
        text.load(tmp_path / "books.jsonl")


def test_one_of_two_text_files_is_told_to_come_with_the_other(tmp_path) -> None:
    (tmp_path / "train.en").write_text("a house\n")
    message = rf"one side of a translation.* as FILE,FILE: {tmp_path}/train\.en,"
    with pytest.raises(ValueError, match=f"{message}FILE$"):
        text.load(tmp_path / "train.en")
    (tmp_path / "train.es").write_text("una casa\n")
    with pytest.raises(ValueError, match=rf"{message}{tmp_path}/train\.es$"):
        text.load(tmp_path / "train.en")
    assert len(text.load(f"{tmp_path}/train.en,{tmp_path}/train.es")) == 1
    (tmp_path / "documents").write_text('\n{"en": ["a house"], "es": ["una casa"]}\n')
    assert len(text.load(tmp_path / "documents")) == 1  # JSONL, whatever it is called
    with pytest.raises(FileNotFoundError, match="come in twos, FILE,FILE"):
        text.load("a,b,c")


def test_a_document_without_a_name_gets_that_of_its_line(tmp_path) -> None:
    write_jsonl(tmp_path / "books.jsonl", {**RUTH, "name": None}, {**RUTH, "name": 7})
    assert [document.name for document in text.load(tmp_path / "books.jsonl").documents] == ["books 1", "7"]


def test_a_character_in_two_halves_is_whole(tmp_path) -> None:
    write_jsonl(tmp_path / "books.jsonl", {"en": ["\U0001f40b"], "es": ["\U0001f40b"]})
    assert "\\ud83d\\udc0b" in (tmp_path / "books.jsonl").read_text()
    assert list(text.load(tmp_path / "books.jsonl").pairs()) == [Pair("\U0001f40b", "\U0001f40b")]


def test_three_languages_need_a_choice(tmp_path) -> None:
    write_jsonl(tmp_path / "books.jsonl", {**RUTH, "fr": ["Aux jours", "Ils allèrent"]})
    with pytest.raises(ValueError, match=r"lists for en, es, fr; there must be two, or --languages .*--language;"):
        text.load(tmp_path / "books.jsonl")
    assert text.load(tmp_path / "books.jsonl", languages=("fr", "en")).documents[0].pairs[0].target == "In the days"


def two_files(folder, source: bytes, target: bytes) -> tuple:
    files = folder / "tale.en", folder / "tale.es"
    for file, content in zip(files, (source, target), strict=True):
        file.write_bytes(content)
    return files


@pytest.mark.parametrize(
    "names",
    ["tale.en,tale.es", "tale.en.txt,tale.es.txt", "a.pt-BR,a.deu", "a.english,a.spanish", "a.src,a.tgt", "a.txt,a.es"],
)
def test_languages_turn_two_files_round(names, tmp_path) -> None:
    files = [tmp_path / name for name in names.split(",")]
    for file, content in zip(files, ("one\n", "uno\n"), strict=True):
        file.write_text(content)
    source, target = (file.name.removesuffix(".txt").rpartition(".")[2] for file in files)
    for given in (files, files[::-1]):
        for languages, pair in (((source, target), Pair("one", "uno")), ((target, source), Pair("uno", "one"))):
            corpus = text.load(given, languages=languages)
            assert (corpus.languages, *corpus.pairs()) == (languages, pair)


def test_languages_that_the_names_of_files_deny_are_refused(tmp_path) -> None:
    files = two_files(tmp_path, b"one\n", b"uno\n")
    for languages, unknown in ((("fr", "de"), "fr"), (("en", "fr"), "fr"), (("es", "EN"), "EN")):
        with pytest.raises(ValueError, match=rf"mark '{unknown}'.*tale\.en is en and .*tale\.es is es.*--languages"):
            text.load(files, languages=languages)


def test_files_whose_names_say_no_language_are_told_theirs(tmp_path) -> None:
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    for file in files:
        file.write_text(f"{file.stem}\n")
    for languages in (("en", "es"), ("es", "en")):
        corpus = text.load(files, languages=languages)
        assert (corpus.languages, *corpus.pairs()) == (languages, Pair("a", "b"))
    with pytest.raises(ValueError, match=r"which languages are a\.txt and b\.txt\?.*--languages en es"):
        text.load(files)


def test_every_reader_puts_single_spaces_in_place_of_others(tmp_path) -> None:
    ours, theirs = " a\u00a0b\tc  d\u2003", "e\u202f f"
    files = two_files(tmp_path, ours.encode(), theirs.encode())
    write_jsonl(tmp_path / "books.jsonl", {"en": [ours], "es": [theirs]})
    for given in (files, tmp_path / "books.jsonl"):
        assert list(text.load(given).pairs()) == [Pair("a b c d", "e f")]


def test_lines_that_are_empty_in_both_files_end_a_document(tmp_path) -> None:
    files = two_files(tmp_path, b"\xef\xbb\xbfone\ntwo\n\n\nthree", b"uno\ndos\r\n\n \ntres\n")
    corpus = text.load(files)
    assert [document.pairs for document in corpus.documents] == [
        (Pair("one", "uno"), Pair("two", "dos")),
        (Pair("three", "tres"),),
    ]
    assert text.load(",".join(map(str, files)), "all") == corpus


def test_a_line_that_is_empty_in_one_file_is_an_error_or_left_out(tmp_path, caplog) -> None:
    files = two_files(tmp_path, b"one\n\nthree\n", b"uno\ndos\ntres\n")
    with pytest.raises(ValueError, match=r"tale\.en, line 2 is empty, but line 2 of .*tale\.es is not.*from both"):
        text.load(files)
    assert list(text.load(files, on_error="skip").pairs()) == [Pair("one", "uno"), Pair("three", "tres")]
    assert "1 pairs" in caplog.text


def test_invalid_utf8_is_named_by_file_line_and_byte(tmp_path) -> None:
    files = two_files(tmp_path, b"one\ntwo\n", b"uno\nd\xf3s\n")
    with pytest.raises(ValueError, match=r"tale\.es, line 2, byte 2 \(0xf3\) is not UTF-8"):
        text.load(files)
    assert list(text.load(files, on_error="skip").pairs()) == [Pair("one", "uno")]
    marked = two_files(tmp_path, b"\xef\xbb\xbfone\n", b"\xef\xbb\xbfd\xf3s\n")
    with pytest.raises(ValueError, match=r"tale\.es, line 1, byte 5 \(0xf3\) is not UTF-8"):
        text.load(marked)


@pytest.mark.parametrize("counts", [(3, 2), (2, 3), (0, 1)])
def test_files_with_different_numbers_of_lines_are_refused_with_both(counts, tmp_path) -> None:
    files = two_files(tmp_path, b"a\n" * counts[0], b"b\n" * counts[1])
    with pytest.raises(ValueError, match=rf"tale\.en has {counts[0]} lines, but .*tale\.es has {counts[1]}:"):
        text.load(files)


def test_a_file_that_is_no_text_does_not_fill_the_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("nomax.data.text.corpus.LONGEST_LINE", 100)
    files = two_files(tmp_path, b"a" * 101, b"b\n")
    with pytest.raises(ValueError, match=r"tale\.en, line 1 has more than 100 bytes"):
        text.load(files)


def test_a_folder_has_splits_of_either_kind(tmp_path) -> None:
    write_jsonl(tmp_path / "test.jsonl", RUTH)
    for mark, content in {"de": "eins\n", "en": "one\n", "fr": "un\n"}.items():
        (tmp_path / f"train.{mark}").write_text(content)
    assert len(text.load(tmp_path, "test")) == 2
    assert list(text.load(tmp_path, languages=("fr", "de")).pairs()) == [Pair("un", "eins")]
    with pytest.raises(ValueError, match=r"unknown language mark 'es'.* has train in de, en, fr"):
        text.load(tmp_path, languages=("en", "es"))
    with pytest.raises(FileNotFoundError, match=r"valid\.jsonl.*none of these"):
        text.load(tmp_path, "valid")
    with pytest.raises(FileNotFoundError, match=r"train\.de, train\.en, train\.fr"):
        text.load(tmp_path)


def test_the_info_command_describes_pairs_of_files_and_folders_of_them(tmp_path, capsys) -> None:
    for split, count in {"train": 3, "valid": 2}.items():
        for mark in ("en", "es"):
            (tmp_path / f"{split}.{mark}").write_text("two words\n" * count)
    assert main(["data", "info", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"train\W+valid", told)
    assert re.search(r"words in en\W+6\W+4", told)
    pair = f"{tmp_path}/valid.en,{tmp_path}/valid.es"
    assert main(["data", "info", pair, "--languages", "es", "en"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"pairs\W+2", told)
    assert told.index("words in es") < told.index("words in en")
    (tmp_path / "valid.es").unlink()
    assert main(["data", "info", pair]) == 2
    assert "valid.es: there is no such file" in capsys.readouterr().err


def test_a_folder_chooses_files_by_their_marks(tmp_path) -> None:
    for mark in ("en.txt", "es.txt"):
        (tmp_path / f"train.{mark}").write_text(f"{mark}\n")
    assert list(text.load(tmp_path).pairs()) == [Pair("en.txt", "es.txt")]
    assert list(text.load(tmp_path, languages=("es", "en")).pairs()) == [Pair("es.txt", "en.txt")]


def test_files_without_splits_do_not_pretend_to_have_them(tmp_path) -> None:
    files = two_files(tmp_path, b"one\n", b"uno\n")
    with pytest.raises(ValueError, match=r"'test'.*has no splits"):
        text.load(files, "test")


@pytest.mark.parametrize("languages", ["en", ("en",), ("en", "en")])
def test_languages_are_two_different_marks(languages, tmp_path) -> None:
    with pytest.raises(ValueError, match="it must be two different marks"):
        text.load("bible-en-es", languages=languages, root=tmp_path)


def test_languages_that_a_named_set_lacks_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"bible-en-es has en and es"):
        text.load("bible-en-es", languages=("en", "de"), root=tmp_path)


def test_a_pair_of_files_is_found_from_every_working_directory(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "tales, old and new"
    folder.mkdir()
    (folder / "a.en").write_text("one\ntwo\n")
    (folder / "a.es").write_text("uno\ndos\n")
    monkeypatch.chdir(folder)
    place = data.located("a.en,a.es")
    assert place == f"{folder}/a.en,{folder}/a.es"
    monkeypatch.chdir(tmp_path)
    assert text.load(place).documents == text.load([folder / "a.en", folder / "a.es"]).documents
