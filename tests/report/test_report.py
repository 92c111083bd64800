"""nomax report: what the page holds, and what is said when files are missing or damaged."""

import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import study_results
from study_results import HOSTILE

from nomax.cli import main
from nomax.report import charts, page, words
from nomax.report.results import Story, Verdict
from nomax.report.sections import Judged, _phis


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return study_results.results(tmp_path / "results")


class Elements(HTMLParser):
    """The elements of a page, with their attributes; raises if one is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a kind."""
        return [attributes for name, attributes in self.found if name == tag]


def report(*arguments: object) -> int:
    """What `nomax report ARGUMENTS` does."""
    return main(["report", *map(str, arguments)])


def test_the_command_writes_the_page_of_all_results_here(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report() == 0
    out = capsys.readouterr().out
    size = (results / "report.html").stat().st_size
    assert out == f"Written: results/report.html ({size / 1e3:.0f} kB; 2 studies, 3 verdicts), results/report.md\n"
    assert sorted(path.name for path in results.iterdir()) == ["alpha", "gate", "report.html", "report.md"]


def test_the_table_of_verdicts_has_a_row_for_each(results: Path) -> None:
    lines = page.write([results], Path("report.html")).table.read_text().splitlines()
    assert lines[2:4] == ["| claim | verdict | measured | by |", "| --- | --- | --- | --- |"]
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines[4:]]
    assert [row[1] for row in rows] == [f"**{entry['verdict']}**" for entry in study_results.VERDICTS]
    for row, entry in zip(rows, study_results.VERDICTS, strict=True):
        assert len(row) == 4
        assert row[0] == entry["text"].replace("<", "&lt;")
        assert entry["sentence"].startswith(row[2])
        assert row[3].startswith("`nomax study ")


def test_the_page_holds_what_the_folders_hold(results: Path) -> None:
    text = html.unescape(page.write([results], Path("report.html")).path.read_text())
    for entry in study_results.VERDICTS:
        for name in ("claim", "text", "verdict", "sentence", "scale"):
            assert str(entry[name]) in text
    for name in ("alpha", "gate"):
        story = study_results.story(name, "", ["alpha.svg"])
        for part in (story["command"], story["figures"][0]["caption"], "alpha.svg: relu is best at α = 1, with 80 %."):
            assert part in text
    for part in ("fashion-mnist-small", "A processor", "2.13.0", "0123456789abcdef", "2, 4, 7", "Training loss"):
        assert part in text
    assert "strongest at row 2, column 3" in text  # which maps.png says of itself


def test_the_page_begins_with_what_was_found_and_says_each_verdict_once(results: Path) -> None:
    text = html.unescape(page.write([results], Path("report.html")).path.read_text())
    assert "Of 3 claims, 1 was reproduced, 1 was contradicted and 1 is undecided." in text
    assert "at the scale of these runs alone: pico on fashion-mnist-small." in text
    for entry in study_results.VERDICTS:
        assert text.count(entry["sentence"]) == text.count(f"{entry['text']}</span>") == 1
    first, _, rest = text.partition("<h2")
    assert first.index("Of 3 claims") > 0
    assert rest.index("W-h") < rest.index("<img") < rest.index('id="study-alpha"')


def judged(**verdicts: str) -> list[Judged]:
    return [
        Judged(Verdict(claim.replace("_", "-"), verdict), claim, "alpha", "study-alpha", [], "")
        for claim, verdict in verdicts.items()
    ]


def test_the_headline_counts_and_leaves_out_what_there_is_not() -> None:
    assert page.headline([]) == "No verdict has been reached yet."
    assert page.headline(judged(a="contradicted")) == "Of 1 claim, 1 was contradicted."
    found = judged(a="reproduced", b="undecided", c="undecided", d="reproduced")
    assert page.headline(found) == "Of 4 claims, 2 were reproduced and 2 are undecided."


def test_claims_stand_with_their_paper_and_what_was_decided_comes_first() -> None:
    found = judged(W_h="undecided", S_ln="reproduced", W_init="contradicted", mine="undecided", W_alpha="reproduced")
    groups = {group.title: group for group in page.groups(found)}
    assert list(groups) == ["Wortsman et al. 2023", "Shen et al. 2023", "Other claims"]
    vision = groups["Wortsman et al. 2023"]
    assert vision.tally == "1 reproduced, 1 contradicted, 1 undecided"
    assert [one.verdict.claim for one in vision.decided] == ["W-alpha", "W-init"]
    assert [one.verdict.claim for one in vision.undecided] == ["W-h"]


def test_the_scale_is_what_the_set_ups_say() -> None:
    setups = [
        {"data": "cifar10", "models": ["S/16", "B/16"]},
        {"data": "cifar10", "models": ["S/16", "L/16"]},
        {"data": "wmt", "dim": 512},
        {},
        {"data": ["odd"], "models": "odd"},
    ]
    stories = [Story(f"study {number}", setup=setup) for number, setup in enumerate(setups)]
    assert page.scale(stories) == "S/16, B/16 and L/16 on cifar10; 512-wide transformers on wmt"


def test_a_verdict_in_short_is_its_first_sentence_without_brackets() -> None:
    assert (
        words.short("It is +0.5 points [−1, +2] (3 seeds (0, 1, 2); more). Then more.") == "It is +0.5 points [−1, +2]."
    )


def test_lines_have_the_colour_of_their_phi_and_those_of_one_phi_are_broken(results: Path) -> None:
    elements = Elements(page.write([results], Path("report.html")).path.read_text())
    lines = [str(path["class"]).split()[1:] for path in elements.of("path") if "line" in str(path["class"]).split()]
    assert {("phi-softmax", "s0"), ("phi-relu", "s0"), ("phi-relu", "s1")} == set(map(tuple, lines))


def test_a_line_is_known_by_the_part_in_which_labels_begin_to_differ() -> None:
    labels = ["softmax, relu × 8 slots, seed 0", "softmax, softmax + LN × 8 slots, seed 0"]
    assert _phis(labels, ["softmax"] * 2) == ["relu", "softmax"]
    assert _phis(["the factor alone, seed 0", "softmax, seed 0"], ["relu", "softmax"]) == ["relu", "softmax"]


def test_what_a_reader_must_know_of_a_study_stands_beside_its_verdicts(results: Path) -> None:
    file = results / "alpha" / "study.json"
    study_results.write(file, {**json.loads(file.read_text()), "note": "preliminary: 3 runs are <missing>"})
    written = page.write([results / "alpha"], Path("report.html"))
    verdicts = len(json.loads((results / "alpha" / "verdicts.json").read_text()))
    assert written.path.read_text().count("preliminary: 3 runs are &lt;missing&gt;") == verdicts + 1
    assert written.table.read_text().count("** (preliminary: 3 runs are &lt;missing>) |") == verdicts


def test_the_same_results_give_the_same_page(results: Path) -> None:
    pages = [page.write([results], Path(name)).path.read_bytes() for name in ("one.html", "two.html")]
    assert pages[0] == pages[1]


def test_nothing_from_a_file_becomes_markup(results: Path) -> None:
    text = page.write([results], Path("report.html")).path.read_text()
    assert HOSTILE not in text
    assert html.escape(HOSTILE, quote=False).split("&gt;")[0] in text
    elements = Elements(text)
    assert len(elements.of("script")) == 1
    assert all(str(image["src"]).startswith("data:image/") for image in elements.of("img"))
    assert not [name for _, found in elements.found for name in found if name.startswith("on") or name == "style"]


def test_the_page_names_no_other_place(results: Path) -> None:
    elements = Elements(page.write([results], Path("report.html")).path.read_text())
    for _, attributes in elements.found:
        for name in ("src", "href"):
            assert re.match(r"data:|#", attributes.get(name) or "#")
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {(link["href"] or "")[1:] for link in elements.of("a")}
    assert targets <= set(ids)
    (policy,) = [meta["content"] for meta in elements.of("meta") if "http-equiv" in meta]
    assert str(policy).startswith("default-src 'none'; img-src data:;")


def test_a_study_shows_what_there_is(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (results / "alpha").iterdir():
        if file.name != "study.json":
            file.unlink()
    study_results.write(results / "gate" / "study.json", {"name": "gate"})
    (results / "gate" / "verdicts.json").unlink()
    assert report("results/alpha", results / "gate") == 0
    captured = capsys.readouterr()
    assert "results/alpha/init.svg is missing; the page shows the rest." in captured.err
    text = (results / "report.html").read_text()
    assert "init.svg is missing from the results folder" in text
    assert "The table behind it" in text
    assert "No verdict has been reached yet" in text


def test_two_studies_of_one_name_have_their_own_places(results: Path, tmp_path: Path) -> None:
    study_results.results(tmp_path / "other")
    text = page.write([results, tmp_path / "other" / "alpha", results / "alpha"], Path("report.html")).path.read_text()
    elements = Elements(text)
    anchors = [str(element["id"]) for element in elements.of("section") if "id" in element]
    assert anchors == ["verdicts", "study-alpha", "study-gate", "study-alpha--2"]
    claims = [str(element["id"]) for element in elements.of("details") if "id" in element]
    assert sorted(claims) == ["claim-w-alpha", "claim-w-alpha--2", "claim-w-gate", "claim-w-h", "claim-w-h--2"]


def test_a_large_drawing_gives_way_to_a_smaller_png(results: Path) -> None:
    drawing = results / "alpha" / "alpha.svg"
    drawing.write_text(study_results.SVG.replace("</svg>", f"<!-- {'x' * 500_000} --></svg>"))
    (results / "alpha" / "maps.png").rename(drawing.with_suffix(".png"))
    elements = Elements(page.write([results], Path("report.html")).path.read_text())
    assert [str(image["src"])[:15] for image in elements.of("img")] == ["data:image/png;", *["data:image/svg+"] * 2]


def damage(name: str, content: str) -> Callable[[Path], None]:
    def damaged(results: Path) -> None:
        (results / "alpha" / name).write_text(content)

    return damaged


def too_much(results: Path) -> None:
    large = study_results.SVG.replace("</svg>", f"<!-- {'x' * 3_000_000} --></svg>")
    (results / "alpha" / "alpha.svg").write_text(large)


def figure_outside(results: Path) -> None:
    (results / "secret.svg").write_text(study_results.SVG)
    study_results.write(results / "alpha" / "study.json", {"name": "a", "figures": [{"file": "../secret.svg"}]})


def uneven_table(results: Path) -> None:
    figure = {"file": "alpha.svg", "table": {"columns": ["a", "b"], "rows": [[1]]}}
    study_results.write(results / "alpha" / "study.json", {"name": "a", "figures": [figure]})


MAYBE = '[{"claim": "W-h", "verdict": "maybe"}]'
MISTAKES: list[tuple[Callable[[Path], None], str]] = [
    (damage("study.json", '{"name": '), "results/alpha/study.json is damaged: Expecting value"),
    (damage("study.json", '{"title": "x"}'), "alpha/study.json is not what a study writes: name: Field required"),
    (damage("verdicts.json", MAYBE), "results/alpha/verdicts.json is not what a study writes: 0.verdict"),
    (damage("runs.json", "{}"), "results/alpha/runs.json is not what a study writes: the file"),
    (damage("curves.json", '[{"label": "x", "steps": [1, 2], "loss": [1]}]'), "'x' has 1 values of loss for 2 steps"),
    (damage("alpha.svg", "<svg"), "results/alpha/alpha.svg is damaged"),
    (damage("alpha.svg", "<html/>"), "results/alpha/alpha.svg is no SVG image but <html>"),
    (damage("maps.png", "<svg/>"), "results/alpha/maps.png is damaged"),
    (figure_outside, "a figure must be a name.svg or name.png beside it: '../secret.svg'"),
    (uneven_table, "a row of the table of alpha.svg has 1 cells for 2 columns"),
    (too_much, "it may take 3. The largest picture is results/alpha/alpha.svg"),
]


@pytest.mark.parametrize(("break_it", "answer"), MISTAKES)
def test_what_is_damaged_is_named_and_the_old_page_stays(
    break_it: Callable[[Path], None], answer: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "report.html").write_text("the old page")
    break_it(results)
    assert report() == 2
    err = capsys.readouterr().err
    assert err.startswith("nomax report: ")
    assert answer in err
    assert err.count("\n") == 1
    assert (results / "report.html").read_text() == "the old page"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ((), "results is no folder. `nomax study NAME` writes such a folder"),
        (("empty",), "empty holds no study.json, nor does a folder in it"),
        (("--out", "empty"), "--out empty is a folder; give the name of a file"),
    ],
)
def test_no_results_are_told_where_they_come_from(
    arguments: tuple[str, ...], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert report(*arguments) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text", "number"),
    [
        (None, "–", None),
        (True, "yes", None),
        (1234567, "1,234,567", 1234567),
        (0.812345, "0.8123", 0.812345),
        (-1.5e-7, "−1.5e−7", -1.5e-7),
        (2.5e12, "2.5e12", 2.5e12),
        (12345.6, "12,346", 12345.6),
        (float("nan"), "–", None),
        ([1, None, "a"], "1, –, a", None),
        ({"a": 1, "b": [2]}, "a: 1, b: 2", None),
        ("71.2 ± 0.4", "71.2 ± 0.4", 71.2),
        ("−3 %", "−3 %", -3.0),
        ("1,234", "1,234", 1234.0),
        ("2026-11-16", "2026-11-16", None),
        ("10-shot", "10-shot", None),
        ("pico/4", "pico/4", None),
    ],
)
def test_a_value_is_said_for_people_and_sorted_by_what_it_is(value: object, text: str, number: float | None) -> None:
    assert words.say(value) == text
    assert words.number(value) == number


def test_a_column_is_numeric_if_all_that_is_known_in_it_is() -> None:
    table = words.sheet(["a", "b", "c"], [[1, "1 %", None], [None, "x", None]])
    assert table.numeric == [True, False, False]
    assert table.rows == [["1", "1 %", "–"], ["–", "x", "–"]]


def test_a_docstring_becomes_paragraphs_lists_and_code() -> None:
    found = words.blocks("Title\n    of it.\n\n        nomax study\n\n    - a\n      b\n    - c\n")
    assert [(block.kind, block.parts) for block in found] == [
        ("p", ["Title of it."]),
        ("pre", ["nomax study"]),
        ("ul", ["a b", "c"]),
    ]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [((0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]), ((0, 145), [0, 50, 100]), ((0.43, 2.71), [0.5, 1, 1.5, 2, 2.5])],
)
def test_ticks_are_round_numbers_inside_the_axis(ends: tuple[float, float], expected: list[float]) -> None:
    assert charts.ticks(*ends) == pytest.approx(expected)


def test_a_chart_goes_from_corner_to_corner_and_says_what_it_shows() -> None:
    drawn = charts.chart("Loss", "step", [("a", [(0, 1.0), (10, 0.0)]), ("b", [(5, 0.5), (6, float("nan"))])])
    assert drawn is not None
    margin = (charts.BOTTOM - charts.TOP) * 0.04 / 1.04
    (start, end) = drawn.lines[0].dots
    assert start == pytest.approx((charts.LEFT, charts.TOP + margin), abs=0.06)
    assert end == (charts.RIGHT, charts.BOTTOM)
    assert len(drawn.lines[1].dots) == 1
    assert drawn.alternative == "Loss by step. a: 1, 0. b: 0.5."
    assert charts.chart("Loss", "step", [("a", [(0, float("nan"))])]) is None


def test_a_run_that_diverges_does_not_flatten_the_others() -> None:
    lines = [(f"run {n}", [(0.0, 2.0), (1.0, 1.0)]) for n in range(4)] + [("lost", [(0.0, 2.0), (1.0, 1e9)])]
    drawn = charts.chart("Loss", "step", lines, roof=True)
    assert drawn is not None
    assert drawn.note.startswith("Values above 3.0")
    assert drawn.lines[4].dots[1][1] == charts.TOP
    assert drawn.lines[0].dots[1][1] - drawn.lines[0].dots[0][1] > 40


def test_json_that_holds_nan_is_read(results: Path) -> None:
    assert "NaN" in (results / "alpha" / "curves.json").read_text()
    assert json.loads((results / "alpha" / "curves.json").read_text())
    assert page.write([results / "alpha"], Path("report.html")).verdicts == 2


def test_labels_of_one_chart_leave_out_what_they_share() -> None:
    labels = ["softmax, pico/4, seed 0", "relu/L, pico/4, seed 0"]
    assert words.without_common_end(labels) == (["softmax", "relu/L"], ["pico/4", "seed 0"])
    assert words.without_common_end(labels[:1]) == (labels[:1], [])
    assert words.without_common_end(["a", "a"]) == (["a", "a"], [])


def test_times_are_told_to_the_minute() -> None:
    assert words.when("2026-11-16T03:12:59+01:00") == "2026-11-16 02:12 UTC"
    assert words.when("yesterday") == "yesterday"


def test_row_statistics_are_drawn_from_zero_and_whole() -> None:
    drawn = charts.chart("Zeros", "layer", [("a", [(1, 0.2), (2, 0.2)]), ("b", [(1, 0.9), (2, 0.8)])], from_zero=True)
    assert drawn is not None
    assert (drawn.y_ticks[0].text, drawn.y_ticks[0].place) == ("0", charts.BOTTOM)
    assert [tick.text for tick in drawn.x_ticks] == ["1", "2"]
    assert drawn.note == ""
    assert drawn.lines[1].dots[0][1] < drawn.lines[1].dots[1][1] < drawn.lines[0].dots[0][1]


def test_a_long_line_is_thinned_but_keeps_its_ends() -> None:
    drawn = charts.chart("Loss", "step", [("a", [(float(x), float(x % 2)) for x in range(1000)])])
    assert drawn is not None
    places = drawn.lines[0].path[1:].split("L")
    assert 50 < len(places) <= charts.MOST + 1
    assert places[0].startswith(f"{charts.LEFT} ")
    assert places[-1].startswith(f"{charts.RIGHT} ")
